"""How a client rank notices that the server is gone where MPI does not tell."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpcfl import store
from hpcfl.base import memfd
from hpcfl.base.errors import RunError

LOOK_SECONDS = 2.0
RARELY_SECONDS = 60.0  # between two looks on a host that is not the server's, where there are many
LEAVE_SECONDS = 60.0  # how long a run that is over waits for its late ranks, and then for their farewell


class LeftBehind(Exception):  # noqa: N818
    """The run is over, its status being `state`, and nobody dismisses this rank, since it was taken for dead.

    So ends a rank whose lane has lost another one where MPI does not tell: it waits in vain for the dead one's part.
    """

    def __init__(self, state: str) -> None:
        super().__init__(f"the run is {state}, and this rank was taken for dead")
        self.state = state


class Noticeboard:
    """What the ranks of one host know of the run's status, so that one of them looks for all.

    When somebody last began to look stands before what was seen, in memory that all of them map; times are those of the
    monotonic clock, which all processes of a host share. Who is suspended, or hangs in a look, is not waited for.
    """

    LAYOUT: ClassVar = np.dtype([("last", "<f8"), ("state", "S16")])

    def __init__(self) -> None:
        self.words = ""
        self._map(bytearray(memfd.START + self.LAYOUT.itemsize))

    def _map(self, memory: mmap.mmap | bytearray) -> None:
        self.facts: NDArray[np.void] = np.frombuffer(memory, self.LAYOUT, 1, memfd.START)

    @classmethod
    def offered(cls) -> Noticeboard:
        """Return a new one, which other processes open by its `words`; "" where the system cannot do that."""
        board = cls()
        with suppress(OSError, AttributeError):
            file, board.words = memfd.created(memfd.START + cls.LAYOUT.itemsize)
            weakref.finalize(board, os.close, file)  # until then others may open it
            board._map(mmap.mmap(file, 0))
        return board

    @classmethod
    def found(cls, words: str) -> Noticeboard:
        """Return the one that another process, or this one, has offered; one of its own where that is out of reach."""
        board = cls()
        with suppress(RunError, OSError, ValueError):
            file = memfd.opened(words, os.O_RDWR)
            weakref.finalize(board, os.close, file)
            board._map(mmap.mmap(file, 0))
        return board

    def claimed(self, now: float, seconds: float, share: float = 0.0) -> bool:
        """Whether the caller is to look, nobody having begun to for so many `seconds`; others are then not to.

        The first look is due after a `share` of these.
        """
        last = self.facts["last"]
        last[0] = last[0] or now - (1 - share) * seconds
        due = bool(now - last[0] >= seconds)
        if due:
            last[0] = now
        return due

    @property
    def state(self) -> str:
        """The first word of the status when it was last seen; "" before."""
        word: bytes = self.facts["state"][0]
        return word.decode(errors="replace")

    @state.setter
    def state(self, state: str) -> None:
        self.facts["state"] = state.encode()


class Watchdog:
    """Looks at the run's status from time to time, or at what another rank of the host has seen of it.

    A server that was killed is noticed on its own host; ranks of other hosts rely on MPI, or on the batch system. These
    look the more rarely the more hosts there are: files are read about once in `LOOK_SECONDS` by all of them together,
    but every `RARELY_SECONDS` by each. After `lost_after` seconds of silence the server takes a rank for dead; None:
    never. `host` of `hosts` is this rank's, the server's being the first.
    """

    def __init__(
        self,
        folder: Path,
        lost_after: float | None = None,
        board: Noticeboard | None = None,
        host: int = 0,
        hosts: int = 1,
    ) -> None:
        self.folder, self.board = folder, board or Noticeboard()
        self.leaving = 2 * min(LEAVE_SECONDS, lost_after or LEAVE_SECONDS) + LOOK_SECONDS
        self.seconds = LOOK_SECONDS if host == 0 else min(RARELY_SECONDS, LOOK_SECONDS * hosts)
        self.share = host / hosts
        self.due = time.monotonic() + LOOK_SECONDS
        self.over: float | None = None

    def look(self) -> None:
        """Raise RunError if the server is gone, and LeftBehind if the run is over without this rank."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + LOOK_SECONDS
        if self.board.claimed(now, self.seconds, self.share):
            self.board.state = store.read_status(self.folder).state
        state = self.board.state or "running"  # nobody has looked yet
        if state in ("killed", "failed"):
            raise RunError("the server (rank 0) is no more" if state == "killed" else "the run has failed")
        self.over = (self.over or now) if state != "running" else None
        if self.over is not None and now - self.over > self.leaving:
            raise LeftBehind(state)
