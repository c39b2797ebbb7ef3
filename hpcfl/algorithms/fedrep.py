"""FedRep: a shared representation and personal heads, trained in turns (Collins et al., ICML 2021).

With ``participation.close = "first"`` and ``[doubling]`` this is FedRep-SRPFL (Tziotis et al., Algorithm 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.algorithms.local_sgd import PartlyPersonal, last

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.base.types import State
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task


class FedRep(PartlyPersonal):
    """A shared representation and personal heads, in turns; `epochs` and `steps` count the former's, per block."""

    name: Literal["fedrep"] = "fedrep"
    head_epochs: int = Field(10, ge=1)
    """Passes per block in which the head learns first, the representation being fixed."""
    blocks: int = Field(1, ge=1)
    """How often head and representation take turns in a visit (the SRPFL authors' code: 1 on CIFAR-10, else 5)."""
    head_layers: int = Field(1, ge=0)
    """The last so many layers are the head; 0: all is shared, as in FedAvg."""

    def personal_layers(self, layers: int) -> range:
        return last("head_layers", self.head_layers, layers, least=0, most=layers - 1)

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        import torch

        optimiser, own = self.optimiser_in(visits.round), self.personal(task)
        memory = optimiser.init(params)
        losses = []
        for block in range(self.blocks):
            if own:
                upper = task.freeze_below(params, visits, own)
                batches = upper.batches(visits, self.batch, self.head_epochs, phase=2 * block + 1)
                optimiser.train(upper, params, batches, memory, own)
            batches = self.local_steps(task, visits, phase=2 * block)
            losses.append(optimiser.train(task, params, batches, memory, params.keys() - own))
        return torch.stack(losses).mean(0)
