"""FedDyn (Acar et al., ICLR 2021): every client's loss is bent until all agree on one stationary point."""

from dataclasses import replace

from pydantic import Field

from hpcfl import Algorithm


class FedDyn(Algorithm):
    """Federated learning with dynamic regularisation, as in the paper's Algorithm 1."""

    lr: float = Field(0.1, gt=0)
    """Local step size."""
    alpha: float = Field(0.1, gt=0)
    """Strength of the regulariser."""
    batch: int = Field(10, ge=0)
    """Samples of a local step."""
    epochs: int = Field(1, ge=1)
    """Local passes over a client's data."""

    def init_client(self, task, client):
        return {"slope." + name: 0 * value for name, value in task.initial().items()}

    def init_extras(self, task):
        return {"h." + name: 0 * value for name, value in task.initial().items()}

    def client(self, task, shared, personal, visits):
        start = task.replicate(shared, visits)
        params = {name: value.clone() for name, value in start.items()}
        slope, losses = dict(personal), []
        for batch in task.batches(visits, self.batch, epochs=self.epochs):
            gradients, loss = task.gradients(params, batch)
            losses.append(loss)
            for name in params:
                pull = self.alpha * (params[name] - start[name])
                params[name] -= self.lr * (gradients[name] - slope["slope." + name] + pull)
        for name in params:
            slope["slope." + name] = slope["slope." + name] - self.alpha * (params[name] - start[name])
        weight = visits.weights("uniform")
        yield {"loss": (sum(losses) / len(losses), weight)}
        for names in reversed(task.layer_names()):
            yield {name: (params[name] - start[name], weight) for name in names}
        return slope

    def step(self, task, state, sums):
        shared, extras = dict(state.shared), dict(state.extras)
        for name, value in state.shared.items() if sums.weight("loss") else ():
            h = extras["h." + name] - self.alpha * sums.over(name, task.federation.clients).to(value)
            shared[name], extras["h." + name] = sums.moved(name, value) - h / self.alpha, h
        return replace(state, shared=shared, extras=extras)
