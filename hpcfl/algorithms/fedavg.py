"""FedAvg: local SGD, then the mean of the models (McMahan et al., AISTATS 2017).

With ``participation.partial = "discard"`` and rounds that close by time this is drop-stragglers FedAvg (SALF, eq. 4).

With ``epochs = 0``, ``steps = b``, ``batch = 1``, ``weights = "uniform"``, ``lr = 4/μ`` and ``decay = b`` this is
FedPAQ without quantisation (Reisizadeh et al., AISTATS 2020), with its step size η_k = 4/(μ(kb + 1)) in round k of b
local steps. FedLRGD's authors compare themselves with it by the name FedAve (Jadbabaie, Makur & Shah, Theorem 3).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import State, Task
from hpcfl.algorithms.local_sgd import LocalSgd, last, some


class FedAvg(LocalSgd):
    """Federated averaging."""

    name: Literal["fedavg"] = "fedavg"
    persist_optimizer: bool = False
    """Keep a client's momentum or moments from visit to visit (the SALF authors' code, DiLoCo), or start them anew."""
    evaluation: Literal["shared", "fine-tune"] = "shared"
    """What a client is tested with: the shared model, or one whose last layers have learned for `tune_epochs` on the
    client's training data (FedAvg-FT)."""
    tune_layers: int = Field(1, ge=1)
    """Layers that learn in `tune_epochs`: the last so many."""

    def tuned_layers(self, layers: int) -> range:
        return last("tune_layers", self.tune_layers, layers)

    def init_client(self, task: Task, client: int) -> State:
        if not self.persist_optimizer:
            return {}
        alone = {name: value[None] for name, value in task.initial().items()}
        return {name: value[0] for name, value in self.optimiser.init(alone).items()}

    def kept(self, params: State, memory: State) -> tuple[State, State]:
        if not self.persist_optimizer:
            return {}, memory
        moments = some(memory, self.optimiser.init({name: value[:1] for name, value in params.items()}).keys())
        return moments, some(memory, memory.keys() - moments.keys())
