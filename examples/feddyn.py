"""FedDyn (Acar et al., ICLR 2021): every client's loss is bent until all agree on one stationary point."""

from dataclasses import replace

from pydantic import Field

import hpcfl


class FedDyn(hpcfl.FedAvg):
    """Federated learning with dynamic regularisation, as in the paper's Algorithm 1."""

    alpha: float = Field(0.1, gt=0)
    """Strength of the regulariser."""
    weights: str = "uniform"

    def init_client(self, task, client):
        return hpcfl.zeros(task.initial())  # the gradient of its loss where its last visit has ended

    def objective(self, params, batch, shared, personal):
        bent = sum((value * personal[name]).sum() for name, value in params.items())
        apart = sum((value - shared[name]).square().sum() for name, value in params.items())
        return batch.loss(params) - bent + self.alpha / 2 * apart

    def after(self, params, shared, personal):
        return {name: personal[name] - self.alpha * (params[name] - shared[name]) for name in personal}

    def init_extras(self, task):
        return hpcfl.zeros(task.initial())  # the paper's h

    def step(self, task, state, sums):
        h, shared = dict(state.extras), dict(state.shared)
        for name, value in shared.items() if sums.weight("loss") else ():
            h[name] = h[name] - self.alpha * sums.over(name, task.federation.clients).to(value)
            shared[name] = sums.moved(name, value) - h[name] / self.alpha
        return replace(state, shared=shared, extras=h)
