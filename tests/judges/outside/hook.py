"""FedAvg, FedAsync and FLIC that note what their clients send, and what the server makes of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hpcfl.algorithms.fedasync import FedAsync
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.flic import Flic
from hpcfl.algorithms.wrapped import changed

SENT: dict[tuple[int, int, int], dict[str, tuple[Tensor, float]]] = {}
"""Each block's change and its weight, by client, the version that it began with, and how many began so before."""
STATES: list[dict[str, Tensor]] = []
"""What is shared, before the first step and after each."""


class Noting:
    """Stands before a method; what stands around both, such as a server optimiser, has taken its step in `metrics`."""

    def client(self, task: Any, shared: Any, personal: Any, visits: Any) -> Any:
        if not STATES:
            STATES.append(dict(shared))

        def note(message: Any) -> Any:
            for name, (value, weight) in message.items():
                for client, row, counted in zip(visits.clients.tolist(), value, weight.tolist()):
                    SENT.setdefault((client, visits.round, visits.number), {})[name] = row.clone(), counted
            return message

        return (yield from changed(super().client(task, shared, personal, visits), note))

    def metrics(self, task: Any, state: Any) -> dict[str, float]:
        STATES.append(dict(state.shared))
        return super().metrics(task, state)


class Averaging(Noting, FedAvg):
    """FedAvg, and with other rounds FedBuff, FedCompass and FedQueue."""


class Mixing(Noting, FedAsync):
    """FedAsync."""


class Aligning(Noting, Flic):
    """FLIC."""
