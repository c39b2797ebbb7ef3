"""FedAvg whose visits are not finite that a client begins with a state with which it has begun one before."""

from __future__ import annotations

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.wrapped import changed


class Again(FedAvg):
    def client(self, task, shared, personal, visits):
        def spoilt(message):
            return {name: (value * float("nan"), weight) for name, (value, weight) in message.items()}

        work = super().client(task, shared, personal, visits)
        return (yield from changed(work, spoilt if visits.number == 1 else dict))
