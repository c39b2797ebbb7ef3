"""FOCUS: exact convergence whoever takes part how often (Ying, Li & Yang, NeurIPS 2025, arXiv 2503.20117).

A client keeps the last gradient that it has told the server of, g (at first 0). In a visit ``u = w`` and ``y = 0``; K
times ``y ← y + ∇f_i(u) − g, g ← ∇f_i(u)``, with ``u ← u − η y`` in between. It sends y. The server keeps
``Y ← Y + Σ_S y_i``, a sum and no mean, and takes ``w ← w − η Y``: Y is the sum over all clients of their last
gradients, so that η is a share 1/N of FedAvg's. The linear rate to the exact optimum is proven for full gradients of
strongly convex or PL losses; those of batches leave noise of the size of η. A visit that did not count leaves g; in a
round in which nobody came nothing moves, as in the authors' code. A visit may end after any of its steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Client, Extras, ServerState, State, Sums, Task, Visits
from hpcfl.learning.optim import zeros
from hpcfl.sums.message import moved


class Focus(Algorithm):
    """Clients tell how their gradients have changed; the server steps along the sum of all clients' last ones."""

    keeps_sent: ClassVar[bool] = True
    own_step: ClassVar[bool] = True
    sums_kept: ClassVar[Literal["", "sum", "mean"]] = "sum"
    name: Literal["focus"] = "focus"
    lr: float = Field(0.005, gt=0)
    """Step size η of clients and server, along a sum over clients."""
    batch: int = Field(128, ge=0)
    """Samples per local step; 0 for all that a client has."""
    steps: int = Field(3, ge=1)
    """Local gradients of a visit, K."""

    def init_client(self, task: Task, client: int) -> State:
        return zeros(task.initial())

    def init_extras(self, task: Task) -> Extras:
        return zeros(task.initial())  # Y

    def visit_steps(self, samples: int) -> tuple[int, int]:
        return self.steps, 1

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        u, g, losses = task.replicate(shared, visits), personal, []
        y = zeros(personal)
        for batch in task.batches(visits, self.batch, steps=self.steps):
            u = {name: value - self.lr * y[name] for name, value in u.items()}
            slopes, loss = task.gradients(u, batch)
            y, g = {name: y[name] + slope - g[name] for name, slope in slopes.items()}, slopes
            losses.append(loss)
        one = visits.ones(len(visits.clients))
        yield {"loss": (sum(losses[1:], losses[0]) / len(losses), one)}
        for names in reversed(task.layer_names()):
            yield {name: (y[name], one) for name in names}
        return g

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        y, shared = dict(state.extras), dict(state.shared)
        for name, value in state.shared.items() if sums.weight("loss") else ():
            y[name] = moved(y[name], sums.over(name, 1))
            shared[name] = moved(value, -self.lr * y[name].double())
        return replace(state, shared=shared, extras=y)
