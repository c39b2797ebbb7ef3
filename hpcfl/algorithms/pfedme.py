"""pFedMe: personal models as proximal points of the one that is shared (Dinh, Tran & Nguyen, NeurIPS 2020).

A client begins with ``w_i = w``. On each batch θ takes K steps along ``∇f(θ) + λ (θ − w_i)``, then
``w_i ← w_i − ηλ (w_i − θ)``. It sends w_i and keeps θ, by which it is tested; θ goes on from the last batch's, and
begins with w at each visit. The server takes ``w ← (1 − β) w + β mean_S w_i``, a plain mean as in Algorithm 1; the
authors' code weighs by samples and shrinks θ a little besides.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, By, Client, State, Task, Visits
from hpcfl.algorithms.local_sgd import passed


class PFedMe(Algorithm):
    """Moreau envelopes for personalised federated learning, as in the paper's Algorithm 1."""

    name: Literal["pfedme"] = "pfedme"
    lr: float = Field(0.09, gt=0)
    """Step size towards the proximal point."""
    eta: float = Field(0.005, gt=0)
    """Step size η of the local model, along its distance from the proximal point."""
    pull: float = Field(15.0, gt=0)
    """λ."""
    beta: float = Field(1.0, gt=0)
    """Step size β of the server."""
    inner: int = Field(5, ge=1)
    """Steps towards the proximal point on each batch, K."""
    batch: int = Field(20, ge=0)
    """Samples per local step; 0 for all that a client has."""
    epochs: int = Field(1, ge=1)
    """Local passes over a client's data: their batches are the paper's R."""
    weights: Literal["samples", "uniform"] = "uniform"
    """Weight of a client in means over clients. ``samples``: its number of training samples. ``uniform``: 1."""

    def init_client(self, task: Task, client: int) -> State:
        return task.initial()

    def mean_weights(self) -> By:
        return self.weights

    def visit_steps(self, samples: int) -> tuple[int, int]:
        return self.epochs * passed(samples, self.batch), 1

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        start = task.replicate(shared, visits)  # {name: [c, …]}: c clients at a time
        local, near, losses = dict(start), dict(start), []
        for batch in task.batches(visits, self.batch, epochs=self.epochs):
            for _ in range(self.inner):
                slope, loss = task.gradients(near, batch)
                near = {name: t - self.lr * (slope[name] + self.pull * (t - local[name])) for name, t in near.items()}
            local = {name: w - self.eta * self.pull * (w - near[name]) for name, w in local.items()}
            losses.append(loss)
        weight = visits.weights(self.weights)
        yield {"loss": (sum(losses[1:], losses[0]) / len(losses), weight)}
        for names in reversed(task.layer_names()):
            yield {name: (self.beta * (local[name] - start[name]), weight) for name in names}
        return near

    @property
    def evaluates_shared(self) -> bool:
        return False

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return personal
