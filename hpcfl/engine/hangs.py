"""Words for a run that does not move: which rank, in which visit, and on which line of whose file.

The thread that computes notes what it begins, see `Moves`; another one of each rank looks, and speaks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType

from hpcfl.base.errors import listed
from hpcfl.base.loaded import is_installed
from hpcfl.base.terminal import say
from hpcfl.base.types import Ints

TIMES = 10
"""So many median rounds may pass without a move; before the first round has ended, so many times the patience."""
AGAIN_SECONDS = 300.0
LOOKS = 20  # in the seconds that must pass
WAITS = ("hpcfl.mpi", "mpi4py")  # modules in which a rank waits for others


@dataclass
class Moves:
    """What a rank has begun last: a round, or in it the visits of some `clients`."""

    round: int = -1
    """-1: it is put together."""
    clients: Ints | None = None
    since: float = field(default_factory=time.monotonic)
    begun: float = field(default_factory=time.monotonic)
    lasted: deque[float] = field(default_factory=lambda: deque(maxlen=25))
    """Seconds of the last rounds."""

    def to(self, round: int, clients: Ints | None = None) -> None:
        """Note what begins now."""
        now = time.monotonic()
        if round != self.round:
            if self.round >= 0:
                self.lasted.append(now - self.begun)
            self.begun = now
        self.round, self.clients, self.since = round, clients, now


@contextmanager
def watched(
    moves: Moves, patience: float, rank: int = 0, ranks: int = 1, waits_in_words: bool = False
) -> Iterator[None]:
    """Say within the block on stderr where this rank stands, when it has not moved for long; again every 5 minutes.

    Of a rank that waits for others that is said only if it is the first, and does not say so by itself.
    """
    over, thread = threading.Event(), threading.get_ident()

    def look() -> None:
        told = 0.0
        while not over.wait(patience / LOOKS):
            since, now = moves.since, time.monotonic()
            most = max(patience, TIMES * (median(moves.lasted) if moves.lasted else patience))
            if now < (told + AGAIN_SECONDS if told > since else since + most):
                continue
            place, waits = standing(thread)
            if not waits or (rank == 0 and not waits_in_words):
                told = now
                who = f"rank {rank} of {ranks}: " if ranks > 1 else ""
                when = "before the first round" if moves.round < 0 else f"in round {moves.round}"
                clients = [] if moves.clients is None or waits else moves.clients.tolist()
                whose = f", client{'s' * (len(clients) > 1)} {listed(clients)}" if clients else ""
                what = "it waits for other ranks; those that compute say where" if waits else place
                say(f"{who}nothing has moved for {now - since:.1f} s {when}{whose}: {what}")

    watch = threading.Thread(target=look, name="hpcfl watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def standing(thread: int) -> tuple[str, bool]:
    """Return where a thread is, by file, line and function, and whether it waits there for other ranks.

    If code of the user's runs, in this thread or in the worker's, it is the innermost line of that.
    """

    def stack(frame: FrameType | None) -> Iterator[FrameType]:
        """Yield frames from the innermost one up to what has started the run."""
        while frame is not None and frame.f_globals.get("__name__") != "hpcfl.launch.run":
            yield frame
            frame = frame.f_back

    frames = sys._current_frames()
    workers = [each.ident for each in threading.enumerate() if each.name == "hpcfl worker"]
    stacks = [list(stack(frames[each])) for each in (thread, *workers) if each in frames]
    for frame in (frame for stack in stacks for frame in stack):
        if not is_installed(Path(frame.f_code.co_filename).resolve()) and Path(frame.f_code.co_filename).exists():
            return _named(frame), False
    if not stacks:
        return "the thread that computes is no more", False
    own = stacks[0]
    waits = any(frame.f_globals.get("__name__", "").startswith(WAITS) for frame in own)
    return _named(own[0]), waits


def _named(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"
