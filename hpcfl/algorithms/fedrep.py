"""FedRep: a shared representation and personal heads, trained in turns (Collins et al., ICML 2021).

With ``participation.close = "first"`` and ``[doubling]`` this is FedRep-SRPFL (Tziotis et al., Algorithm 1).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.algorithms.base import State, Task, Visits
from hpcfl.algorithms.local_sgd import PartlyPersonal, last, passed
from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import Tensor, torch


class FedRep(PartlyPersonal):
    """A shared representation and personal heads, in turns; `epochs` and `steps` count the former's, per block."""

    name: Literal["fedrep"] = "fedrep"
    snapshots: ClassVar[bool] = False
    head_epochs: int = Field(10, ge=1)
    """Passes per block in which the head learns first, the representation being fixed."""
    blocks: int = Field(1, ge=1)
    """How often head and representation take turns in a visit (the SRPFL authors' code: 1 on CIFAR-10, else 5)."""
    head_layers: int = Field(1, ge=0)
    """The last so many layers are the head; 0: all is shared, as in FedAvg."""

    def personal_layers(self, layers: int) -> range:
        return last("head_layers", self.head_layers, layers, least=0, most=layers - 1)

    def visit_steps(self, samples: int) -> tuple[int, int]:
        """Return the steps of heads and representation; what is shared has changed after its first one only."""
        head, (body, _) = self._head_steps(samples), super().visit_steps(samples)
        return self.blocks * (head + body), head + 1

    def samples_per_step(self, samples: int) -> int:
        return min(self.batch or samples, samples) if self.plain(FedRep) else 0

    def _head_steps(self, samples: int) -> int:
        return self.head_epochs * passed(samples, self.batch) if self.head_layers else 0

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        optimiser, own = self.optimiser_in(visits.round), self.personal(task)
        memory = optimiser.init(params)
        samples = visits.samples.tolist()
        head = np.array([self._head_steps(held) for held in samples])
        body = np.array([super(FedRep, self).visit_steps(held)[0] for held in samples])
        losses, left = [], visits
        for block in range(self.blocks):
            if own:
                upper = task.freeze_below(params, left, own)
                alone = upper.batches(left, self.batch, self.head_epochs, phase=2 * block + 1)
                optimiser.train(upper, params, alone, memory, own)
                left = left.after(head)
            batches = self.local_steps(task, left, phase=2 * block)
            losses.append(optimiser.train(task, params, batches, memory, params.keys() - own))
            left = left.after(body)
        begun = self.taken(visits) > (head + body) * np.arange(self.blocks)[:, None] + head
        counted = on_device(torch.from_numpy(begun).to(task.dtype), task.device)
        return (torch.stack(losses) * counted).sum(0) / counted.sum(0)
