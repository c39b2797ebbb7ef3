"""FedAvg some of whose visits are not finite."""

from __future__ import annotations

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.wrapped import changed


class Again(FedAvg):
    """Those that a client begins with a state with which it has begun one before."""

    def spoils(self, visits):
        return visits.number == 1

    def client(self, task, shared, personal, visits):
        def spoilt(message):
            return {name: (value * float("nan"), weight) for name, (value, weight) in message.items()}

        work = super().client(task, shared, personal, visits)
        return (yield from changed(work, spoilt if self.spoils(visits) else dict))


class Third(Again):
    """Those that begin with the state of every third round, the second one first."""

    def spoils(self, visits):
        return visits.round % 3 == 1
