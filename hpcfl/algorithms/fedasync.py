"""FedAsync: the server mixes each model that arrives into its own (Xie, Koyejo & Gupta, arXiv 1903.03934).

``w ← (1 − α_t) w + α_t w_i``, ``α_t = α s(x)``, where the client began with version w_v and minimised
``F_i(y) + ρ/2 |y − w_v|²``. s is that of ``[staleness]``, with x = 0 for who began with the newest version; the paper's
indices can be read one higher. Clients send changes, so the server forms w_i again:
``w + α (s Δ_i + s (w_v − w))``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Participation, State, Sums, Task
from hpcfl.algorithms.fedprox import FedProx
from hpcfl.algorithms.local_sgd import check_alone
from hpcfl.base.lazy import Tensor
from hpcfl.sums.message import moved


class FedAsync(FedProx):
    """Mixes each model that arrives into the server's, the less the older the state is that it began with."""

    steps_alone: ClassVar[bool] = True
    name: Literal["fedasync"] = "fedasync"  # type: ignore[assignment]
    alpha: float = Field(0.6, gt=0, le=1)
    """α, what a fresh model counts beside the server's, which has 1 − α."""
    mu: float = Field(0.005, ge=0)
    """Strength ρ of the proximal term; 0: none."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        check_alone(self.name, participation)

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        return {name: _mixed(self.alpha, name, value, sums) for name, value in shared.items()}

    def buffer_after(self, name: str, value: Tensor, sums: Sums) -> Tensor:
        return _mixed(self.alpha, name, value, sums, aged=False)


def _mixed(alpha: float, name: str, value: Tensor, sums: Sums, aged: bool = True) -> Tensor:
    """Return ``(1 − α s) value + α s w_i`` of one tensor; `aged`: the change that came is multiplied by s already."""
    assert sums.arrived is not None
    if name not in sums or not sums.weight(name):  # a deadline ended the round, or it was rejected or not there in time
        return value
    begun, factor = sums.arrived.states[int(sums.arrived.versions[0])], float(sums.arrived.factors[0])
    change = sums.mean(name) * (1.0 if aged else factor)
    return moved(value, alpha * (change + factor * (begun[name].double() - value.double())))
