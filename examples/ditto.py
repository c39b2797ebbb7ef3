"""Ditto (Li, Hu, Beirami & Smith, ICML 2021): a model of its own for each client, near the one that all train."""

from pydantic import Field

import hpcfl


class Ditto(hpcfl.Algorithm):
    """FedAvg, beside which each client trains a personal model, as in the paper's Algorithm 1."""

    lr: float = Field(0.05, gt=0)
    """Step size of both models."""
    pull: float = Field(1.0, ge=0)
    """The paper's lambda: 0 is local training, large values the shared model."""
    batch: int = Field(16, ge=0)
    """Samples of a local step; 0 for all that a client has."""
    epochs: int = Field(1, ge=1)
    """Local passes over a client's data."""

    def init_client(self, task, client):
        return task.initial(client)

    def client(self, task, shared, personal, visits):
        start = task.replicate(shared, visits)  # {name: [c, …]}: c clients at a time
        params, own, losses = dict(start), dict(personal), []
        for batch in task.batches(visits, self.batch, epochs=self.epochs):
            theirs, _ = task.gradients(own, batch)
            ours, loss = task.gradients(params, batch)
            own = {name: v - self.lr * (theirs[name] + self.pull * (v - start[name])) for name, v in own.items()}
            params = {name: value - self.lr * ours[name] for name, value in params.items()}
            losses.append(loss)
        weight = visits.weights("samples")
        yield {"loss": (sum(losses) / len(losses), weight)}
        for names in reversed(task.layer_names()):
            yield {name: (params[name] - start[name], weight) for name in names}
        return own

    @property
    def evaluates_shared(self):
        return False

    def model(self, task, shared, personal, visits):
        return personal
