"""FLIC (Rakotomamonjy et al., Algorithms 1 and S2): φ_i and β_i personal, α shared, anchors ``N(v_c, L_c L_cᵀ)``.

All terms are means over samples, and a sum over the classes that a client holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from judges.plain import Client, Params, mean
from judges.steps import Adam, Loss, Sgd, gradient, mlp

MEANS, FACTORS = "anchor.means", "anchor.factors"
SHARED, LOCAL, ANCHORING, PRETRAINING, REALIGNING, MOVING = 0, 1, 2, 3, 4, 6
"""Which of a visit's orders of samples, and of its random numbers."""


def w2(v: Tensor, L: Tensor, z: Tensor, xi: Tensor | None = None) -> Tensor:
    """``W2²`` of N(v, L Lᵀ) and the points [n, k]; with ξ [n, k] of as many samples ``v + L ξ`` and the points.

    ``𝔅²(L Lᵀ, CᵀC/n) = |L|² + |C|²/n − 2 |C L|_*/√n``, C the points less their mean.
    """
    C, n = z - z.mean(0), len(z)
    if xi is None:
        covariances = L.square().sum() + C.square().sum() / n - 2 * torch.linalg.svdvals(C @ L).sum() / sqrt(n)
        return (v - z.mean(0)).square().sum() + covariances
    drawn = v + xi @ L.T
    D = drawn - drawn.mean(0)
    cross = torch.linalg.svdvals(D @ C.T)[: z.shape[1]].sum()
    return (drawn.mean(0) - z.mean(0)).square().sum() + (D.square().sum() + C.square().sum() - 2 * cross) / max(
        n - 1, 1
    )


def barycenter(covariances: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``S ← S^-½ (Σ ω_i (S^½ Σ_i S^½)^½)² S^-½`` until it moves no more; ω_i are weights over their sum."""
    total, S = sum(weights), sum(w * c for w, c in zip(weights, covariances)) / sum(weights)
    for _ in range(40):
        root = power(S, 0.5)
        inner = sum(w / total * power(root @ c @ root, 0.5) for w, c in zip(weights, covariances))
        S = power(S, -0.5) @ inner @ inner @ power(S, -0.5)
    return S


def power(A: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((A + A.T) / 2)
    return (vectors * values**exponent) @ vectors.T


@dataclass
class Flic:
    """Clients' data, what each keeps (φ_i and β_i), what is shared (α and the anchors); `round` changes the latter two.

    ``batches(t, i, phase, epochs, size)`` are the samples of each step, ``noise(t, i, phase, step, J)`` the ξ of J
    samples of the anchor of each class that a client holds, and with ``J < 0`` those of as many for its distance.
    """

    data: Sequence[Client]
    own: list[Params]
    shared: Params
    batches: Callable[[int, int, int, int, int], list[Tensor]]
    noise: Callable[[int, int, int, int, int], Tensor]
    optimiser: Callable[[float], Sgd | Adam]
    batch: int
    epochs: int
    lambda1: float
    lambda2: float
    weights: dict[int, float]
    lr: float = 0.0
    anchor_lr: float = 0.0
    anchor_steps: int = 1
    covariances: str = "fixed"
    holders: bool = False
    pretrain: int = 0
    pretrain_batch: int = 0
    realign: int = 0
    shared_from: int = 0
    aligned: set[int] = field(default_factory=set)

    def embed(self, w: Params, x: Tensor) -> Tensor:
        return mlp(some(w, "embed"), x)

    def above(self, w: Params, z: Tensor) -> Tensor:
        return mlp(some(w, "hidden") | some(w, "head"), z, slope=0.01)

    def near(self, w: Params, rows: Tensor, i: int) -> Tensor:
        """``Σ_c W2²`` of the embedded samples of a batch to the anchors of their classes."""
        z, y = self.embed(w, self.data[i][0][rows]), self.data[i][1][rows]
        return torch.stack([w2(w[MEANS][c], w[FACTORS][c], z[y == c]) for c in y.unique()]).sum()

    def drawn(self, w: Params, i: int, xi: Tensor) -> Tensor:
        """``Σ_c 1/J Σ_j ℓ(c, g(Z_c^(j)))`` over the classes that a client holds."""
        held = self.data[i][1].unique()
        each = [
            F.cross_entropy(self.above(w, w[MEANS][c] + noise @ w[FACTORS][c].T), c.repeat(len(noise)))
            for c, noise in zip(held, xi)
        ]
        return torch.stack(each).sum()

    def loss(self, w: Params, rows: Tensor, i: int) -> Tensor:
        x, y = self.data[i]
        return F.cross_entropy(self.above(w, self.embed(w, x[rows])), y[rows])

    def objective(self, i: int, rows: Tensor, xi: Tensor | None = None, loss: float = 1.0, near: float = 0.0) -> Loss:
        """``F_i`` on a batch, or some of its terms: λ2's where there are samples ξ of the anchors."""

        def of(w: Params) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            total = total + loss * self.loss(w, rows, i) if loss else total
            total = total + near * self.near(w, rows, i) if near else total
            return total if xi is None else total + self.lambda2 * self.drawn(w, i, xi)

        return of

    def align(self, w: Params, t: int, i: int, phase: int, epochs: int, size: int) -> Params:
        how = self.optimiser(self.lr)
        for rows in self.batches(t, i, phase, epochs, size):
            w = how.step(w, gradient(self.objective(i, rows, loss=0.0, near=1.0), w, some(w, "embed")))
        return w

    def visit(self, t: int, i: int) -> Params:
        """φ, then β, on each batch; α; the anchors whose classes the client holds, on all samples."""
        w, everything, J = self.shared | self.own[i], torch.arange(len(self.data[i][1])), self.batch
        if self.pretrain and i not in self.aligned:
            aligned = self.align(w | self.begun, t, i, PRETRAINING, self.pretrain, self.pretrain_batch)
            w = w | some(aligned, "embed")
            self.aligned.add(i)
        if self.realign:
            w = self.align(w, t, i, REALIGNING, self.realign, self.batch)
        below, upper, alpha = (self.optimiser(self.lr) for _ in range(3))
        for step, rows in enumerate(self.batches(t, i, LOCAL, self.epochs, self.batch)):
            w = below.step(w, gradient(self.objective(i, rows, near=self.lambda1), w, some(w, "embed")))
            xi = self.noise(t, i, LOCAL, step, J)
            w = upper.step(w, gradient(self.objective(i, rows, xi), w, some(w, "head")))
        for step, rows in enumerate(self.batches(t, i, SHARED, 1, self.batch) if t >= self.shared_from else ()):
            xi = self.noise(t, i, SHARED, step, J)
            w = alpha.step(w, gradient(self.objective(i, rows, xi), w, some(w, "hidden")))
        mover, moves = self.optimiser(self.anchor_lr), [MEANS] + [FACTORS] * (self.covariances != "fixed")
        for step in range(self.anchor_steps):
            xi = self.noise(t, i, ANCHORING, step, J)
            w = mover.step(w, gradient(self.objective(i, everything, xi, loss=0.0, near=self.lambda1), w, moves))
        self.own[i] = {name: w[name] for name in self.own[i]}
        return {name: w[name] for name in self.shared}

    def round(self, t: int, active: Sequence[int]) -> None:
        sent, ws = [self.visit(t, i) for i in active], [self.weights[i] for i in active]
        served = self.shared
        visits, by = dict(zip(active, sent)), dict(zip(active, ws))
        self.shared = {name: mean({i: w[name] for i, w in visits.items()}, by) for name in served}
        for c in range(len(served[MEANS])):
            who = [n for n, i in enumerate(active) if not self.holders or bool((self.data[i][1] == c).any())]
            for name in (MEANS, FACTORS):
                new, by = [sent[n][name][c] for n in who], [ws[n] for n in who]
                if not who:
                    self.shared[name][c] = served[name][c]
                elif name == FACTORS and self.covariances == "bures":
                    self.shared[name][c] = power(barycenter([L @ L.T for L in new], by), 0.5)
                else:
                    self.shared[name][c] = sum(p * value for p, value in zip(by, new)) / sum(by)

    def __post_init__(self) -> None:
        self.begun = {name: self.shared[name] for name in (MEANS, FACTORS)}


def some(w: Params, prefix: str) -> Params:
    return {name: value for name, value in w.items() if name.startswith(prefix)}


@dataclass
class Released(Flic):
    """As the authors' released code has it, which differs from the paper.

    φ and β take one step of all terms; the distance is to as many samples of an anchor as the batch has of its class; a
    copy of all anchors' means moves after each batch, by the distance and by the loss of the means themselves; the last
    local epoch is α's; and after each round all clients align anew.
    """

    decay: float = 0.0

    def apart(self, w: Params, rows: Tensor, key: tuple[int, int, int, int]) -> Tensor:
        """``Σ_c W2²`` to samples, whose numbers are drawn by round, client, phase and step."""
        i = key[1]
        z, y = self.embed(w, self.data[i][0][rows]), self.data[i][1][rows]
        held = self.data[i][1].unique()
        counts = [int((y == c).sum()) for c in held]
        drawn = zip(held, counts, self.noise(*key, -max(counts)))
        each = [w2(w[MEANS][c], w[FACTORS][c], z[y == c], xi[:n]) for c, n, xi in drawn if n]
        return torch.stack(each).sum()

    def align(self, w: Params, t: int, i: int, phase: int, epochs: int, size: int) -> Params:
        how = self.optimiser(self.lr)
        for step, rows in enumerate(self.batches(t, i, phase, epochs, size)):
            distance = partial(self.apart, rows=rows, key=(t, i, phase, step))
            w = how.step(w, gradient(distance, w, some(w, "embed")))
        return w

    def fit(self, w: Params, rows: Tensor, xi: Tensor, key: tuple[int, int, int, int], near: float) -> Tensor:
        loss = self.loss(w, rows, key[1]) + self.lambda2 * self.drawn(w, key[1], xi)
        return loss + near * self.apart(w, rows, key) if near else loss

    def means(self, w: Params, rows: Tensor, key: tuple[int, int, int, int]) -> Tensor:
        return self.apart(w, rows, key) + F.cross_entropy(self.above(w, w[MEANS]), torch.arange(len(w[MEANS])))

    def visit(self, t: int, i: int) -> Params:
        w, moved, mover = self.shared | self.own[i], self.shared[MEANS], self.optimiser(self.anchor_lr)
        sharing = t >= self.shared_from
        turns = [(LOCAL, self.epochs - sharing, ("embed", "head"), self.lambda1)]
        turns += [(SHARED, 1, ("hidden",), 0.0)] if sharing else []
        for phase, epochs, layers, near in turns:
            how, learning = self.optimiser(self.lr), [name for name in w if name.startswith(layers)]
            for step, rows in enumerate(self.batches(t, i, phase, epochs, self.batch)):
                objective = partial(
                    self.fit,
                    rows=rows,
                    xi=self.noise(t, i, phase, step, self.batch),
                    key=(t, i, phase, step),
                    near=near,
                )
                g = gradient(objective, w, learning)
                for name in ("head.weight", "hidden1.weight"):
                    g |= {name: g[name] + self.decay * w[name]} if name in g else {}
                w = how.step(w, g)
                copy, moving = w | {MEANS: moved}, partial(self.means, rows=rows, key=(t, i, MOVING + phase, step))
                moved = mover.step(copy, gradient(moving, copy, [MEANS]))[MEANS]
        self.own[i] = {name: w[name] for name in self.own[i]}
        return {name: w[name] for name in self.shared} | {MEANS: moved}

    def round(self, t: int, active: Sequence[int]) -> None:
        for i in range(len(self.data)) if t else active:
            if i not in self.aligned:
                begins = self.own[i] | self.shared | self.begun
                self.own[i] |= some(self.align(begins, t, i, PRETRAINING, self.pretrain, self.pretrain_batch), "embed")
                self.aligned.add(i)
            if t:
                self.own[i] |= some(
                    self.align(self.own[i] | self.shared, t, i, REALIGNING, self.realign, self.batch), "embed"
                )
        super().round(t, active)
