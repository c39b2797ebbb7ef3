"""FedProx: FedAvg with a proximal term (Li et al., MLSys 2020); how much work clients do is said by participation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Batch, Objective, State, Task, Visits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.lazy import Tensor


class FedProx(FedAvg):
    """Averages models that minimise ``F_i(w) + μ/2 |w − w_t|²``, w_t the shared one; the recorded loss has the term."""

    name: Literal["fedprox"] = "fedprox"  # type: ignore[assignment]
    mu: float = Field(0.01, ge=0)
    """μ, which the authors tune for each problem; 0: FedAvg."""

    def minimised(self, task: Task, shared: State, personal: State, visits: Visits) -> Objective | None:
        if not self.mu:
            return None
        served = task.replicate(shared, visits)

        def proximal(params: State, batch: Batch) -> Tensor:
            apart = sum((params[name] - start).flatten(1).square().sum(1) for name, start in served.items())
            return task.losses(params, batch) + self.mu / 2 * apart

        return proximal
