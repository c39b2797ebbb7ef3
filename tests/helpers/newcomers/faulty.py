"""Methods with one fault each, of those that are easily made."""

import random
from typing import ClassVar

import numpy as np
import torch

from hpcfl import Algorithm, FedAvg


class Sound(Algorithm):
    """FedSGD on batches, right; the others do one thing otherwise."""

    lr: float = 0.1

    def client(self, task, shared, personal, visits):
        start = task.replicate(shared, visits)
        params = {name: value.clone() for name, value in start.items()}
        for batch in task.batches(visits, 20, epochs=2):
            gradients, losses = task.gradients(params, batch)
            for name in params:
                params[name] -= self.lr * gradients[name]
        weight = visits.weights("samples")
        yield {"loss": (losses, weight)}
        for names in reversed(task.layer_names()):
            yield {name: self.sent(params[name] - start[name], weight) for name in names}
        return personal

    def sent(self, change, weight):
        return change, weight


class Mixing(Sound):
    """Takes a mean over the clients of a chunk."""

    def sent(self, change, weight):
        return change - 0.1 * change.mean(0), weight


class PaddedClasses(FedAvg):
    """Weighs classes by how many samples a batch has of each, those that only pad it among them."""

    def minimised(self, task, shared, personal, visits):
        def balanced(params, batch):
            each = task.loss.each(task.forward(params, batch.x), batch.y)
            counts = torch.nn.functional.one_hot(batch.y, task.federation.classes).sum(1)
            return (each / counts.gather(1, batch.y)).mean(1)

        return balanced


class AbsentClasses(Sound):
    """Divides by how many samples a client has of each class."""

    def client(self, task, shared, personal, visits):
        labels = [task.samples(client).y for client in visits.clients.tolist()]
        shares = torch.stack([1 / torch.bincount(y, minlength=task.federation.classes) for y in labels])
        for message in Sound.client(self, task, shared, personal, visits):
            yield {name: (value * self.rarest(shares, value), weight) for name, (value, weight) in message.items()}
        return personal

    def rarest(self, shares, value):
        return shares.amax(1).view(-1, *[1] * (value.dim() - 1))


class ChangingShared(Sound):
    """Trains in what the server holds."""

    def client(self, task, shared, personal, visits):
        for value in shared.values():
            value *= 0.9
        return (yield from Sound.client(self, task, shared, personal, visits))


class ChangingServer(Sound):
    """Moves the server's tensors in place."""

    def server(self, task, shared, sums):
        return {name: value.add_(sums.mean(name)) for name, value in shared.items()}


class ChangingInTests(Sound):
    """Lets a client's own state age with each test."""

    def init_client(self, task, client):
        return {"age": torch.zeros(1)}

    def model(self, task, shared, personal, visits):
        personal["age"] += 1
        return task.replicate(shared, visits)


class Remembering(Sound):
    """Keeps the last change in its class."""

    kept: ClassVar[dict] = {}

    def sent(self, change, weight):
        before = self.kept.get(change.shape, 0)
        self.kept[change.shape] = change.clone()
        return change + 0.1 * before, weight


class DrawingFromTorch(Sound):
    """Adds noise from torch's global generator."""

    def sent(self, change, weight):
        return change + 0.01 * torch.randn_like(change), weight


class DrawingFromNumpy(Sound):
    """Adds noise from NumPy's global generator."""

    def sent(self, change, weight):
        return change + 0.01 * np.random.rand(), weight


class DrawingFromPython(Sound):
    """Adds noise from Python's global generator."""

    def sent(self, change, weight):
        return change + 0.01 * random.random(), weight


class DrawingFromTheSystem(Sound):
    """Adds noise that no seed gives again."""

    def sent(self, change, weight):
        return change + 0.01 * np.random.default_rng().random(), weight


class SendingDoubles(Sound):
    """Sends double precision where the layout has single."""

    def sent(self, change, weight):
        return change.double(), weight


class SendingSums(Sound):
    """Sends the sum over its chunk, without a client axis."""

    def sent(self, change, weight):
        return change.sum(0), weight


class SendingMore(Sound):
    """Sends a block that its layout does not have."""

    def client(self, task, shared, personal, visits):
        yield {"norm": (torch.ones(len(visits.clients)), visits.weights("samples"))}
        return (yield from Sound.client(self, task, shared, personal, visits))


class KeepingDoubles(Sound):
    """Returns its state in another type than it began with."""

    def init_client(self, task, client):
        return {"visits": torch.zeros(1)}

    def client(self, task, shared, personal, visits):
        yield from Sound.client(self, task, shared, personal, visits)
        return {"visits": personal["visits"].double() + 1}


class ServingLess(Sound):
    """Forgets a tensor in the server's step."""

    def server(self, task, shared, sums):
        _, *others = shared
        return {name: sums.moved(name, shared[name]) for name in others}
