"""Where the time goes on one rank: every moment of its rounds belongs to one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from hpcfl.base.types import Floats

PHASES = ("compute", "waiting", "broadcast", "reduction", "server", "evaluation", "store", "other")
UNMEASURED = nullcontext()


class Phases:
    """The phases of one rank's rounds, which nobody measures."""

    def begin(self) -> None:
        """Begin a round; what was before the first one belongs to none."""

    def end(self) -> None:
        """End the last round; what comes now belongs to none."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """One of `PHASES`, without those within it."""
        return UNMEASURED

    def was(self, name: str) -> None:
        """Say that the time since a phase last began or ended belongs to this one."""

    def figures(self) -> Floats:
        """Return how many rounds there were; seconds, of all phases and of each; their medians over rounds; [19]."""
        return np.zeros(3 + 2 * len(PHASES))


class Profile(Phases):
    """Measures the phases.

    Attributes
    ----------
    rounds : list of dict of str to float
        Seconds by phase, for each round.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._measured: dict[str, float] | None = None
        self._now, self._since = "other", 0.0

    def begin(self) -> None:
        self._enter(self._now)
        self._measured = dict.fromkeys(PHASES, 0.0)
        self.rounds.append(self._measured)

    def end(self) -> None:
        self._enter(self._now)
        self._measured = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._now
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def was(self, name: str) -> None:
        now, self._now = self._now, name
        self._enter(now)

    def _enter(self, name: str) -> None:
        now = time.perf_counter()
        if self._measured is not None:
            self._measured[self._now] += now - self._since
        self._now, self._since = name, now

    def figures(self) -> Floats:
        seconds = np.array([[*each.values()] for each in self.rounds]).reshape(-1, len(PHASES))
        seconds = np.column_stack([seconds.sum(1), seconds])
        medians = np.median(seconds, axis=0) if len(seconds) else np.zeros(1 + len(PHASES))
        return np.concatenate([[len(seconds)], seconds.sum(0), medians])
