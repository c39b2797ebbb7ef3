"""Ditto (Li, Hu, Beirami & Smith, ICML 2021): a model of its own for each client, near the one that all train."""

from pydantic import Field

from hpcfl import Algorithm


class Ditto(Algorithm):
    """FedAvg, beside which each client trains a personal model that is pulled to the shared one."""

    lr: float = Field(0.1, gt=0)
    """Step size of both models."""
    pull: float = Field(0.5, ge=0)
    """The paper's lambda: 0 is local training, large values the shared model."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the personal model's steps, kept from visit to visit."""
    batch: int = Field(10, ge=0)
    """Samples of a local step."""
    epochs: int = Field(1, ge=1)
    """Local passes over a client's data."""

    def init_client(self, task, client):
        model = task.initial(client)
        return {**model, **{"velocity." + name: 0 * value for name, value in model.items()}}

    def client(self, task, shared, personal, visits):
        start = task.replicate(shared, visits)
        params = {name: value.clone() for name, value in start.items()}
        total, steps = 0, 0
        for batch in task.batches(visits, self.batch, epochs=self.epochs):
            own, _ = task.gradients({name: personal[name] for name in params}, batch)
            gradients, loss = task.gradients(params, batch)
            total, steps = total + loss, steps + 1
            for name in params:
                velocity = personal["velocity." + name]
                velocity *= self.momentum
                velocity += own[name] + self.pull * (personal[name] - start[name])
                personal[name] -= self.lr * velocity
                params[name] -= self.lr * gradients[name]
        yield {"loss": (total / steps, visits.weights("samples"))}
        for names in reversed(task.layer_names()):
            yield {name: (params[name] - start[name], visits.weights("samples")) for name in names}
        return personal

    @property
    def evaluates_shared(self):
        return False

    def model(self, task, shared, personal, visits):
        return {name: personal[name] for name in shared}
