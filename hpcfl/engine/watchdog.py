"""How a client rank notices that the server is gone where MPI does not tell."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcfl import store
from hpcfl.base.errors import RunError, TakenOver
from hpcfl.mpi.launcher import end_launcher
from hpcfl.store.status import Status

LOOK_SECONDS = 2.0
RARELY_SECONDS = 60.0  # between two looks of one rank, where there are many
LEAVE_SECONDS = 60.0  # how long a run that is over waits for its late ranks, and then for their farewell
BEAT_SECONDS = 10.0  # how often the server says in the run folder that it is there
SILENT_SECONDS = 180.0  # without such a word, until it counts as gone: file systems may tell of it a minute later


class LeftBehind(Exception):  # noqa: N818
    """The run is over, its status being `state`, and nobody dismisses this rank, since it was taken for dead.

    So ends a rank whose lane has lost another one where MPI does not tell: it waits in vain for the dead one's part.
    """

    def __init__(self, state: str) -> None:
        super().__init__(f"the run is {state}, and this rank was taken for dead")
        self.state = state


@contextmanager
def beating(folder: Path) -> Iterator[None]:
    """Let other hosts see within the block that this process lives: a thread touches the run's status."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(folder / "status")

    threading.Thread(target=beat, name="hpcfl heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Watchdog:
    """Looks at the run's status from time to time.

    Whoever finds the server gone ends the job, so the ranks take turns: of those on the server's host, who see that its
    process has ended, somebody looks every `LOOK_SECONDS`, and of all others, who see that it is silent; each at least
    once in `RARELY_SECONDS`. Who cannot see the folder notices nothing. After `lost_after` seconds of silence the
    server takes a rank for dead; None: never. `rank` is this one's, and `hosts` has each rank's host, the server's
    being the first.
    """

    def __init__(self, folder: Path, lost_after: float | None = None, rank: int = 0, hosts: Sequence[str] = "") -> None:
        self.folder, hosts = folder, hosts or [""]
        self.leaving = 2 * min(LEAVE_SECONDS, lost_after or LEAVE_SECONDS) + LOOK_SECONDS
        peers = [p for p in range(1, len(hosts)) if (hosts[p] == hosts[0]) == (hosts[rank] == hosts[0])] or [rank]
        self.seconds = min(RARELY_SECONDS, LOOK_SECONDS * len(peers))
        self.looked = time.monotonic()
        self.due = self.looked + LOOK_SECONDS + self.seconds * sum(peer < rank for peer in peers) / len(peers)
        self.over: float | None = None
        self.server: Status | None = None
        self.beat, self.silent = 0, 0.0  # when the server said that it is there, and seconds since that was seen first

    def look(self) -> None:
        """Raise RunError if the server is gone, and LeftBehind if the run is over without this rank."""
        now = time.monotonic()
        if now < self.due:
            return
        lasted, self.looked = min(now - self.looked, 2 * self.seconds), now  # this rank may have been suspended itself
        status = store.read_status(self.folder)
        if status.state in ("killed", "failed"):
            raise RunError("the server (rank 0) is no more" if status.state == "killed" else "the run has failed")
        if status.state == "running":
            self.server = self.server or status
            if (status.host, status.pid) != (self.server.host, self.server.pid):
                raise TakenOver(f"the run has been taken over by process {status.pid} on {status.host}")
            with suppress(OSError):
                beat = (self.folder / "status").stat().st_mtime_ns
                self.silent, self.beat = (self.silent + lasted if beat == self.beat else 0.0), beat
            # in good time: when another rank ends, MPI may end this one without a word
            if self.silent > SILENT_SECONDS / 2 >= self.silent - lasted:
                end_launcher([os.getpid()])
            if self.silent > SILENT_SECONDS:
                raise RunError(f"the server (rank 0) has been silent for {self.silent:.0f} s: its host may be gone")
        self.over = (self.over or now) if status.state in (*store.DONE, "stopped", "diverged") else None
        self.due = now + (self.seconds if self.over is None else LOOK_SECONDS)
        if self.over is not None and now - self.over > self.leaving:
            raise LeftBehind(status.state)
