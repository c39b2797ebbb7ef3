"""How a client rank notices that the server is gone where MPI does not tell."""

from __future__ import annotations

import time
from pathlib import Path

from hpcfl import store
from hpcfl.base.errors import RunError

LOOK_SECONDS = 2.0
LEAVE_SECONDS = 60.0  # how long a run that is over waits for its late ranks, and then for their farewell


class LeftBehind(Exception):  # noqa: N818
    """The run is over, its status being `state`, and nobody dismisses this rank, since it was taken for dead.

    So ends a rank whose lane has lost another one where MPI does not tell: it waits in vain for the dead one's part.
    """

    def __init__(self, state: str) -> None:
        super().__init__(f"the run is {state}, and this rank was taken for dead")
        self.state = state


class Watchdog:
    """Looks at the run's status from time to time.

    A server that was killed is noticed on its own host; ranks of other hosts rely on MPI, or on the batch system.
    After `lost_after` seconds of silence the server takes a rank for dead; None: never.
    """

    def __init__(self, folder: Path, lost_after: float | None = None) -> None:
        self.folder = folder
        self.leaving = 2 * min(LEAVE_SECONDS, lost_after or LEAVE_SECONDS) + LOOK_SECONDS
        self.due = time.monotonic() + LOOK_SECONDS
        self.over: float | None = None

    def look(self) -> None:
        """Raise RunError if the server is gone, and LeftBehind if the run is over without this rank."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + LOOK_SECONDS
        state = store.read_status(self.folder).state
        if state in ("killed", "failed"):
            raise RunError("the server (rank 0) is no more" if state == "killed" else "the run has failed")
        self.over = (self.over or now) if state != "running" else None
        if self.over is not None and now - self.over > self.leaving:
            raise LeftBehind(state)
