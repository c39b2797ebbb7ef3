"""What the round loop asks of whatever carries out the rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from hpcfl.base.types import Floats, Ints
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.profile import Phases
from hpcfl.engine.record import Record
from hpcfl.mpi.transport import Saved
from hpcfl.mpi.waiting import idle
from hpcfl.schedule.plan import Plan
from hpcfl.sums.message import Sums


class Rounds(ABC):
    """How rounds are carried out: in simulated time (`hpcfl.engine.simulated`) or in real time (`hpcfl.realtime`).

    Attributes
    ----------
    serves : bool
        Whether this rank is the server; what is returned elsewhere has no meaning.
    stale : dict of int to int
        Clients whose state `personal` had to take from an earlier checkpoint, since it did not come in time, and the
        rounds after which it was theirs. Known once the iterator is exhausted.
    phases : Phases
        Told where this rank's time goes.
    settle : callable
        Waits until ``now.saved`` is visible, for it may still be written.
    """

    job: Job
    serves: bool
    stale: Mapping[int, int] = MappingProxyType({})
    phases = Phases()
    settle: Callable[[], None] = staticmethod(idle)

    @abstractmethod
    def release(self, now: Progress, record: Record) -> bool:
        """Let the clients' ranks go where clients are needed no more; return whether this rank's rounds are over so.

        Asked before each round. From then on the server runs the rounds by itself.
        """

    @abstractmethod
    def exchange(self, now: Progress, record: Record) -> tuple[Plan, Sums]:
        """Carry out the next round up to its closing; return who counted and how far, and the sums.

        Raises
        ------
        Interrupted
            In real time, if the run is to stop before the round has closed.
        """

    @abstractmethod
    def scores(self, now: Progress) -> Floats:
        """Return the clients' scores, ``[scores, clients]``, see `Job.scores`; NaN: not known."""

    @abstractmethod
    def together(self, record: Record, reason: str) -> str:
        """Bring the ranks' figures together in `record`; return why the run is to stop, "" where it is not."""

    @abstractmethod
    def personal(self, now: Progress) -> Iterator[Saved]:
        """Yield the personal state that this rank writes; every rank that takes part must exhaust the iterator."""

    @property
    def homes(self) -> Ints:
        """The ranks that write personal state to the checkpoint that is begun, each client's, int64 [clients].

        Known once what `personal` yields is exhausted.
        """
        return np.zeros(self.job.config.clients, dtype=np.int64)
