"""What an author writes of one client, computed for all of a chunk: by `torch.func.vmap` where it can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning.batches import Batch

if TYPE_CHECKING:
    from hpcfl.base.rng import StepKey
    from hpcfl.base.types import State
    from hpcfl.learning.task import Objective, Task

    OfOne = Callable[[State, "ClientBatch", State, State], Tensor]


@dataclass(frozen=True)
class ClientBatch:
    """One step's samples of one client.

    Attributes
    ----------
    x, y : Tensor [B, …], [B] or [B, …]
        Features, and classes (int64) or other targets; all of them are real.
    """

    x: Tensor
    y: Tensor
    task: Task
    key: StepKey

    def outputs(self, params: State) -> Tensor:
        """Return what the model makes of the samples by parameters ``{name: […]}``, ``[B, …]``; with dropout."""
        return self.task.forward(_alone(params), self.x[None], self.key)[0]

    def latent(self, params: State) -> Tensor:
        """Return what the layers below the last one, or `task.embedding`, make of them, ``[B, k]``."""
        return self.task.represented(_alone(params), self.x[None], self.key)[0]

    def loss(self, params: State) -> Tensor:
        """Return the mean loss of the samples with the model's penalty, a number."""
        return self.task.losses(_alone(params), Batch(self.x[None], self.y[None], None, self.key))[0]


def objective_of(task: Task, function: OfOne, shared: State, personal: State) -> Objective:
    """Return the objective of a chunk, of which `function` says one client's; `personal` is ``{name: [c, …]}``."""

    def whole(params: State, batch: Batch) -> Tensor:
        alike = task.whole is None and task.loss.ours  # all clients of a step take the same operations
        if alike and batch.valid is None and len(batch.x) > 1 and not any(layer.random for layer in task.layers):
            return torch.func.vmap(
                lambda own, x, y, kept: function(own, ClientBatch(x, y, task, batch.key), shared, kept)
            )(params, batch.x, batch.y, personal)
        found = []
        for row, size in enumerate(batch.sample_counts()):
            key = batch.key._replace(clients=batch.key.clients[row : row + 1])
            one = ClientBatch(batch.x[row, :size], batch.y[row, :size], task, key)
            own, kept = ({name: value[row] for name, value in state.items()} for state in (params, personal))
            found.append(function(own, one, shared, kept) if size else batch.x.new_zeros(()))
        return torch.stack(found)

    return whole


def _alone(params: State) -> State:
    return {name: value[None] for name, value in params.items()}
