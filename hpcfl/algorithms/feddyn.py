"""FedDyn: each client's loss is bent until all agree on one stationary point (Acar et al., ICLR 2021, Algorithm 1).

Client i minimises ``F_i(y) + α_i (⟨h_i, y⟩ + |y − w|²/2)`` and keeps ``h_i ← h_i + Δ_i``, Δ_i = y − w. The server keeps
h, the mean of the h_i of all clients, ``h ← h + Σ_S Δ_i/N``, and takes ``w ← w + mean_S Δ_i + h``. All begin with 0.
The paper's gradients are −α h_i. A visit that did not count leaves h_i; a round in which nobody came moves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Extras, ServerState, State, Sums, Task
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning.optim import zeros
from hpcfl.learning.task import ClientBatch


class FedDyn(FedAvg):
    """FedAvg of losses that are regularised by what each client has moved before."""

    keeps_sent: ClassVar[bool] = True
    own_step: ClassVar[bool] = True
    sums_kept: ClassVar[Literal["", "sum", "mean"]] = "mean"
    needs_members: ClassVar[str] = "h is the mean over all"
    needs_rounds: ClassVar[str] = "what the server keeps must be the mean of what clients keep"
    name: Literal["feddyn"] = "feddyn"  # type: ignore[assignment]
    alpha: float = Field(0.01, gt=0)
    """Strength α of the regulariser."""
    alpha_by: Literal["clients", "samples"] = "clients"
    """``clients``: all have the same α (the paper). ``samples``: α times the mean number of training samples over the
    client's (the authors' code)."""
    weights: Literal["uniform"] = "uniform"
    """Means over clients are plain ones."""
    persist_optimizer: Literal[False] = False
    """The optimiser's memory starts anew with each visit."""

    def init_client(self, task: Task, client: int) -> State:
        share = task.federation.train_sizes / task.federation.train_sizes.mean()
        alpha = self.alpha / (float(share[client]) if self.alpha_by == "samples" else 1.0)
        return {"alpha:": torch.tensor(alpha, dtype=task.dtype).to(task.device), **zeros(task.initial())}

    def objective(self, params: State, batch: ClientBatch, shared: State, personal: State) -> Tensor:
        apart = {name: value - shared[name] for name, value in params.items()}
        bent = sum((params[name] * personal[name] + value.square() / 2).sum() for name, value in apart.items())
        return batch.loss(params) + personal["alpha:"] * bent

    def after(self, params: State, shared: State, personal: State) -> State:
        return {**personal, **{name: personal[name] + value - shared[name] for name, value in params.items()}}

    def init_extras(self, task: Task) -> Extras:
        return zeros(task.initial())  # h

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        h, shared = dict(state.extras), dict(state.shared)
        for name, value in state.shared.items() if sums.weight("loss") else ():
            h[name] = h[name] + sums.over(name, task.federation.clients).to(value)
            shared[name] = sums.moved(name, value) + h[name]
        return replace(state, shared=shared, extras=h)
