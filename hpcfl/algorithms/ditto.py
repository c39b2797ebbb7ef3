"""Ditto: a model of its own for each client, near the one that all train (Li, Hu, Beirami & Smith, ICML 2021).

The shared model w is FedAvg's, to the bit. Beside it client i keeps v_i, by which it is tested. On each batch, before
the step of the model that it sends, it takes one along ``∇F_i(v_i) + λ (v_i − w)``, w as it was served. A visit that
did not count leaves v_i. The authors draw clients by their samples and take plain means; here means are weighted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Batch, State, Task, Visits
from hpcfl.algorithms.local_sgd import LocalSgd
from hpcfl.base.lazy import Tensor


class Ditto(LocalSgd):
    """FedAvg, beside which each client trains a personal model, pulled towards the shared one."""

    name: Literal["ditto"] = "ditto"
    pull: float = Field(1.0, ge=0)
    """λ: 0 is local training, large values the shared model."""
    evaluation: Literal["stored"] = "stored"
    """A client is tested with its own model."""

    @property
    def evaluates_shared(self) -> bool:
        return False

    @property
    def adapt_epochs(self) -> int:
        return 0

    def init_client(self, task: Task, client: int) -> State:
        return task.initial()

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        served, optimiser = task.replicate(shared, visits), self.optimiser_in(visits.round)

        def pulled(own: State, batch: Batch) -> Tensor:
            apart = sum((value - served[name]).flatten(1).square().sum(1) for name, value in own.items())
            return task.losses(own, batch) + self.pull / 2 * apart

        def steps(moments: State) -> Iterator[Batch]:
            for batch in task.batches(visits, self.batch, self.epochs, self.steps).padded():
                buffers = {} if task.whole is None else task.whole.now(visits.clients)
                optimiser.step(task, memory, memory, moments, batch, pulled)
                if task.whole is not None:  # running statistics are the shared model's alone
                    task.whole.begin(visits.clients.tolist(), buffers)
                yield batch

        return optimiser.train(task, params, steps(optimiser.init(memory)))

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return personal
