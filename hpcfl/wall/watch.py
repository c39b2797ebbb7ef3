"""How a client rank notices that the server is gone where MPI does not tell."""

from __future__ import annotations

import time
from pathlib import Path

from hpcfl import store
from hpcfl.errors import RunError

LOOK_SECONDS = 2.0
PARTING_SECONDS = 120.0  # a run that is over dismisses its ranks; one that was given up as dead is not dismissed


class Watch:
    """Looks at the run's status from time to time.

    A server that was killed is noticed on its own host; ranks of other hosts rely on MPI, or on the batch system.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.due = time.monotonic() + LOOK_SECONDS
        self.over: float | None = None

    def look(self) -> None:
        """Raise RunError if the server is gone."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + LOOK_SECONDS
        state = store.read_status(self.folder).state
        if state == "killed":
            raise RunError("the server (rank 0) is no more")
        self.over = (self.over or now) if state != "running" else None
        if self.over is not None and now - self.over > PARTING_SECONDS:
            raise RunError(f"the run is {state}, and this rank was taken for dead")
