"""Several local steps with a proximal term whose layers count one by one, as SALF's section III-C has in mind.

A method of its own: ``algorithm.name = "salf_proximal:LayeredProx"``, used by jobs/papers/salf.toml. A client minimises
``F_i(w) + μ/2 |w − w_t|²`` by SGD, as in FedProx. The layers of its last step leave as backpropagation reaches them,
each with all that its steps have changed of it; the server's mean of a layer is over those who have reached it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Client, State, Task, Visits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.learning.optim import Sgd, layer_by_layer


class LayeredProx(FedAvg):
    """FedProx by layers: the mean of each over those who have reached it."""

    layerwise: ClassVar[bool] = True
    mu: float = Field(0.1, ge=0)
    """μ."""
    epochs: Literal[0] = 0
    """Visits are of `steps` steps."""
    steps: int = Field(5, ge=1)
    """Local steps of a visit."""

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        start = params = task.replicate(shared, visits)
        level = {name: number for number, names in enumerate(self.layers(task), start=1) for name in names}
        lr, weight = self.learning_rate(visits.round), visits.weights(self.weights)
        *earlier, last = task.batches(visits, self.batch, steps=self.steps)
        for batch in earlier:
            slope, _ = task.gradients(params, batch)
            params = {
                name: value - lr * (slope[name] + self.mu * (value - start[name])) for name, value in params.items()
            }
        for name, value in layer_by_layer(task, params, last, level, Sgd(lr), {}, visits):
            count = len(value)
            if name != "loss":
                before, served = params[name][:count], start[name][:count]
                value = value - lr * self.mu * (before - served) - served
            yield {name: (value, weight[:count])}
        return personal
