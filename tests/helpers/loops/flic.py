"""FLIC-Class as released: φ and head learn together, anchors after each batch, all clients align anew after a round."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.loops import Adam, Client, Params, dense, leaves, passes, slopes
from hpcfl.base.rng import keyed

PHI, HEAD, PHASE = ["embed1", "embed2"], ["head"], 2**32  # more steps than a phase has
LOCAL, PRETRAINING, ALIGNING, MOVING = 1, 3, 4, 6  # each phase draws by numbers of its own


@dataclass
class Flic:
    """The clients' data, their φ and heads, the anchors' means [C, k]; `round` changes the latter two."""

    data: list[Client]
    personal: list[Params]
    anchors: Tensor
    seed: int
    lr: float
    batch: int
    epochs: int
    lambda1: float
    lambda2: float
    pretrain: int
    pretrain_batch: int
    weight_decay: float = 1e-3
    deviation: float = 2.718281828459045**0.5  # covariance e·I
    aligned: set[int] = field(default_factory=set)

    def noise(self, purpose: str, key: tuple[int, int, int], count: int) -> Tensor:
        """Return what is added to the means of the classes that a client holds, [classes, count, k]."""
        shape = len(self.data[key[1]][1].unique()), count, self.anchors.shape[1]
        drawn = keyed(self.seed, purpose, *key).standard_normal(shape, dtype="float32")
        return self.deviation * torch.from_numpy(drawn).double()

    def distance(self, z: Tensor, y: Tensor, anchors: Tensor, key: tuple[int, int, int]) -> Tensor:
        """Return Σ_c W2² of embedded samples to as many samples of their classes' anchors."""
        held, total = self.data[key[1]][1].unique().tolist(), torch.zeros(())
        noise = self.noise("samples of anchors", key, max(int((y == c).sum()) for c in held))
        for c, xi in zip(held, noise):
            points, drawn = z[y == c], anchors[c] + xi[: int((y == c).sum())]
            # tr (A^½ B A^½)^½ is a nuclear norm of rank k at most
            a, b = (part - part.mean(0) for part in (drawn, points))
            cross = torch.linalg.svdvals(a @ b.T)[: z.shape[1]].sum()
            covariances = (a.square().sum() + b.square().sum() - 2 * cross) / (len(points) - 1)
            total = total + (drawn.mean(0) - points.mean(0)).square().sum() + covariances
        return total

    def align(self, client: int, anchors: Tensor, round_: int, phase: int, size: int, epochs: int) -> None:
        params, (x, y) = leaves(self.personal[client]), self.data[client]
        adam, phi = Adam(self.lr), {name: value for name, value in params.items() if name.startswith("embed")}
        for step, rows in enumerate(passes(self.seed, round_, client, phase, len(y), size, epochs)):
            key = round_, client, step + PHASE * phase
            adam.step(phi, slopes(self.distance(dense(params, x[rows], PHI), y[rows], anchors, key), phi))
        self.personal[client] = {name: value.detach() for name, value in params.items()}

    def visit(self, client: int, round_: int) -> Tensor:
        """Train φ and head; return the client's copy of the anchors, which learns meanwhile and is not looked at."""
        (x, y), params, moving = self.data[client], leaves(self.personal[client]), leaves({"": self.anchors})
        adam, mover, held = Adam(self.lr), Adam(self.lr), y.unique()
        for step, rows in enumerate(passes(self.seed, round_, client, LOCAL, len(y), self.batch, self.epochs)):
            key, z = (round_, client, step + PHASE * LOCAL), dense(params, x[rows], PHI)
            drawn = (self.anchors[held, None] + self.noise("draws of anchors", key, self.batch)).flatten(0, 1)
            each = F.cross_entropy(dense(params, drawn, HEAD), held.repeat_interleave(self.batch)) * len(held)
            loss = F.cross_entropy(dense(params, z, HEAD), y[rows])
            loss = loss + self.lambda1 * self.distance(z, y[rows], self.anchors, key) + self.lambda2 * each
            adam.step(params, slopes(loss, params, self.weight_decay, decayed="head.weight"))
            z, key = dense(params, x[rows], PHI).detach(), (round_, client, step + PHASE * (LOCAL + MOVING))
            apart = self.distance(z, y[rows], moving[""], key)
            means = F.cross_entropy(dense(params, moving[""], HEAD), torch.arange(len(self.anchors)))
            mover.step(moving, slopes(apart + means, moving))
        self.personal[client] = {name: value.detach() for name, value in params.items()}
        return moving[""].detach()

    def round(self, round_: int, active: list[int], first: Tensor) -> None:
        """Before round 1 all have aligned to the `first` anchors; after each round all align to those that it left."""
        for client in range(len(self.data)) if round_ else active:
            if client not in self.aligned:
                self.align(client, first, round_, PRETRAINING, self.pretrain_batch, self.pretrain)
                self.aligned.add(client)
            if round_:
                self.align(client, self.anchors, round_, ALIGNING, self.batch, 1)
        self.anchors = torch.stack([self.visit(client, round_) for client in active]).mean(0)
