"""pFedMe (Dinh, Tran & Nguyen, NeurIPS 2020): personal models as proximal points of the one that is shared."""

from pydantic import Field

import hpcfl


class PFedMe(hpcfl.Algorithm):
    """Moreau envelopes for personalised federated learning, as in the paper's Algorithm 1."""

    lr: float = Field(0.09, gt=0)
    """Step size towards the proximal point."""
    eta: float = Field(0.005, gt=0)
    """Step size of the local model, along its distance from the proximal point."""
    pull: float = Field(15.0, gt=0)
    """The paper's lambda."""
    beta: float = Field(1.0, gt=0)
    """Step size of the server."""
    inner: int = Field(5, ge=1)
    """Steps towards the proximal point on each batch, the paper's K."""
    batch: int = Field(20, ge=0)
    """Samples of a batch; 0 for all that a client has."""
    epochs: int = Field(1, ge=1)
    """Local passes over a client's data: their batches are the paper's R."""

    def init_client(self, task, client):
        return task.initial()

    def client(self, task, shared, personal, visits):
        start = task.replicate(shared, visits)  # {name: [c, …]}: c clients at a time
        local, near, losses = dict(start), dict(start), []
        for batch in task.batches(visits, self.batch, epochs=self.epochs):
            for _ in range(self.inner):
                slope, loss = task.gradients(near, batch)
                near = {name: t - self.lr * (slope[name] + self.pull * (t - local[name])) for name, t in near.items()}
            local = {name: w - self.eta * self.pull * (w - near[name]) for name, w in local.items()}
            losses.append(loss)
        weight = visits.weights("uniform")
        yield {"loss": (sum(losses) / len(losses), weight)}
        for names in reversed(task.layer_names()):
            yield {name: (self.beta * (local[name] - start[name]), weight) for name in names}
        return near

    @property
    def evaluates_shared(self):
        return False

    def model(self, task, shared, personal, visits):
        return personal
