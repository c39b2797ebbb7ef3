"""Scaffnew (Mishchenko et al., ICML 2022, Algorithm 2), a communication after every `steps` = 1/p local steps."""

from typing import Literal

from pydantic import Field

import hpcfl


class Scaffnew(hpcfl.FedAvg):
    """Local steps by gradients that a client's own control variate h corrects."""

    steps: int = Field(10, ge=1)
    """Local steps from one communication to the next, 1/p."""
    epochs: Literal[0] = 0
    weights: Literal["uniform"] = "uniform"

    def init_client(self, task, client):
        first = task.initial()
        return {f"h:{n}": v for n, v in hpcfl.zeros(first).items()} | {f"x:{n}": v for n, v in first.items()}

    def variate(self, name, shared, personal):
        """h once `shared`, the mean of the last communication, is known."""
        return personal[f"h:{name}"] + (shared[name] - personal[f"x:{name}"]) / (self.steps * self.lr)

    def objective(self, params, batch, shared, personal):
        return batch.loss(params) - sum((v * self.variate(n, shared, personal)).sum() for n, v in params.items())

    def after(self, params, shared, personal):
        h = {f"h:{n}": self.variate(n, shared, personal) for n in params}
        return h | {f"x:{n}": v for n, v in params.items()}
