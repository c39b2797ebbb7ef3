"""FLIC (Rakotomamonjy et al., Algorithms 1 and S2): φ_i and β_i personal, α shared, anchors ``N(v_c, L_c L_cᵀ)``.

All terms are means over samples, and a sum over the classes that a client holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from judges.plain import Client, Params, mean
from judges.server import Server, move
from judges.steps import Adam, Loss, Sgd, graded, gradient, mlp

MEANS, FACTORS, OWN = "anchor.means", "anchor.factors", "own."
"""Names of the anchors; what begins the name of a client's own copy of a tensor that is shared too."""
SHARED, LOCAL, ANCHORING, PRETRAINING, REALIGNING, REALIGNING_AGAIN, MOVING = range(7)
"""Which of a visit's orders of samples, and of its random numbers."""
TEST = 2**20
"""What is added to those before a test."""
Key = tuple[int, int, int, int]
"""Round, client, which of its orders, step."""


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
    samples of each anchor that a client holds, and with ``J < 0`` those of as many for its distance. A tensor of both
    α and β_i, there with `OWN` before its name, counts as ``ω α + (1 − ω) β_i``, ω being `mix`.
    """

    data: Sequence[Client]
    own: list[Params]
    shared: Params
    batches: Callable[[int, int, int, int, int], list[Tensor]]
    noise: Callable[[int, int, int, int, int], Tensor]
    optimiser: Callable[[float], Sgd | Adam]
    meta: Sequence[int]
    batch: int
    epochs: int
    lambda1: float
    lambda2: float
    weights: dict[int, float]
    lr: float
    anchor_lr: float
    anchor_steps: int = 1
    anchor_persist: bool = False
    covariances: str = "fixed"
    average: str = "active"
    mix: float = 0.5
    draws: int = 0
    local_step: str = "alternating"
    weight_decay: float = 0.0
    pretrain: int = 0
    pretrain_batch: int = 10
    realign: int = 0
    realign_who: str = "visited"
    shared_from: int = 0
    shared_epoch: str = "after"
    evaluation: str = "stored"
    tune_epochs: int = 1
    move: Server = move
    aligned: set[int] = field(default_factory=set)
    movers: dict[int, Sgd | Adam] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun = some(self.shared, "anchor")
        self.alpha = [name for name in self.shared if name not in self.begun]
        self.beta = [name for name in self.own[0] if not name.startswith("embed")]

    def anchor_of(self, y: Tensor) -> Tensor:
        return torch.tensor(self.meta)[y]

    def embed(self, w: Params, x: Tensor) -> Tensor:
        return mlp(some(w, "embed"), x)

    def above(self, w: Params, z: Tensor) -> Tensor:
        upper = {
            name: self.mix * value + (1 - self.mix) * w[OWN + name] if OWN + name in w else value
            for name, value in (some(w, "hidden") | some(w, "head")).items()
        }
        return mlp(upper, z, slope=0.01)

    def near(self, w: Params, rows: Tensor, key: Key) -> Tensor:
        """``Σ_c W2²`` of the embedded samples of a batch to the anchors of their classes."""
        x, y = self.data[key[1]]
        z, a = self.embed(w, x[rows]), self.anchor_of(y[rows])
        return torch.stack([w2(w[MEANS][c], w[FACTORS][c], z[a == c]) for c in a.unique()]).sum()

    def drawn(self, w: Params, i: int, xi: Tensor) -> Tensor:
        """``Σ_c 1/J Σ_j ℓ(c, g(Z_c^(j)))`` over the anchors that a client holds; of several classes, ℓ of any."""
        held = self.anchor_of(self.data[i][1]).unique()
        chances = F.softmax(self.above(w, w[MEANS][held, None] + xi @ w[FACTORS][held].mT), 2)
        inside = torch.tensor(self.meta) == held[:, None, None]
        return -(chances * inside).sum(2).log().mean(1).sum()

    def loss(self, w: Params, rows: Tensor, i: int) -> Tensor:
        x, y = self.data[i]
        return F.cross_entropy(self.above(w, self.embed(w, x[rows])), y[rows])

    def objective(self, key: Key, rows: Tensor, xi: Tensor | None = None, loss: float = 1.0, near: float = 0.0) -> Loss:
        """``F_i`` on a batch, or some of its terms: λ2's where there are samples ξ of the anchors."""

        def of(w: Params) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            total = total + loss * self.loss(w, rows, key[1]) if loss else total
            total = total + near * self.near(w, rows, key) if near else total
            return total if xi is None else total + self.lambda2 * self.drawn(w, key[1], xi)

        return of

    def align(self, w: Params, t: int, i: int, phase: int, epochs: int, size: int) -> Params:
        how = self.optimiser(self.lr)
        for step, rows in enumerate(self.batches(t, i, phase, epochs, size)):
            distance = self.objective((t, i, phase, step), rows, loss=0.0, near=1.0)
            w = how.step(w, gradient(distance, w, some(w, "embed")))
        return w

    def pretrained(self, w: Params, t: int, i: int, test: int = 0) -> Params:
        """What was never visited aligns to the first anchors."""
        if i in self.aligned or not self.pretrain:
            return w
        aligned = self.align(w | self.begun, t, i, test + PRETRAINING, self.pretrain, self.pretrain_batch)
        return w | some(aligned, "embed")

    def realigned(self, w: Params, t: int, i: int, phase: int = REALIGNING) -> Params:
        return self.align(w, t, i, phase, self.realign, self.batch)

    def local(self, w: Params, t: int, i: int, phase: int, epochs: int, embed: bool = True) -> tuple[Params, float]:
        """φ, then β, on each batch, or both at once; without β all of α."""
        below, upper = [*some(w, "embed")] if embed else [], self.beta or self.alpha
        turns = [(below, self.lambda1, False)] * embed + [(upper, 0.0, True)]
        if self.local_step == "joint":
            turns = [(below + upper, self.lambda1 * embed, True)]
        return self.learn(w, t, i, phase, epochs, turns)

    def learn(
        self, w: Params, t: int, i: int, phase: int, epochs: int, turns: Sequence[tuple[list[str], float, bool]]
    ) -> tuple[Params, float]:
        """Let tensors learn in turns on each batch, by the loss and its terms; also return the last turn's mean."""
        hows, seen = [self.optimiser(self.lr) for _ in turns], []
        for step, rows in enumerate(self.batches(t, i, phase, epochs, self.batch)):
            key, xi = (t, i, phase, step), self.noise(t, i, phase, step, self.draws or self.batch)
            for how, (names, near, drawn) in zip(hows, turns):
                loss, g = graded(self.objective(key, rows, xi if drawn else None, near=near), w, names)
                decays = [name for name in g if name.endswith("weight") and not name.startswith("embed")]
                w = how.step(w, g | {name: g[name] + self.weight_decay * w[name] for name in decays})
            seen.append(loss)
            self.after_batch(w, rows, key)
        return w, sum(seen) / len(seen)

    def after_batch(self, w: Params, rows: Tensor, key: Key) -> None:
        """Nothing in the paper."""

    def begin(self, w: Params, t: int, i: int) -> Params:
        return self.realigned(self.pretrained(w, t, i), t, i)

    def anchors(self, w: Params, t: int, i: int) -> Params:
        """Let those whose classes the client holds take steps on all samples."""
        mover, moves = self.optimiser(self.anchor_lr), [MEANS] + [FACTORS] * (self.covariances != "fixed")
        mover = self.movers.setdefault(i, mover) if self.anchor_persist else mover
        for step in range(self.anchor_steps):
            key = (t, i, ANCHORING, step)
            xi, rows = self.noise(*key, self.draws or self.batch), torch.arange(len(self.data[i][1]))
            w = mover.step(w, gradient(self.objective(key, rows, xi, loss=0.0, near=self.lambda1), w, moves))
        return w

    def visit(self, t: int, i: int) -> tuple[Params, float]:
        """φ and β, or α for want of β; else an epoch of α; the anchors. Return what is sent, and the mean loss."""
        w = self.begin(self.shared | self.own[i], t, i)
        self.aligned.add(i)
        sharing = bool(self.alpha and self.beta) and t >= self.shared_from
        w, loss = self.local(w, t, i, LOCAL, self.epochs - (sharing and self.shared_epoch == "last"))
        if sharing:
            w, loss = self.learn(w, t, i, SHARED, 1, [(self.alpha, 0.0, True)])
        w = self.anchors(w, t, i)
        self.own[i] = {name: w[name] for name in self.own[i]}
        return {name: w[name] for name in self.shared}, loss

    def round(self, t: int, active: Sequence[int]) -> float:
        """Return the mean loss of those who are visited."""
        visits, losses = {}, {}
        for i in active:
            visits[i], losses[i] = self.visit(t, i)
        served = self.shared
        means = {name: mean({i: w[name] for i, w in visits.items()}, self.weights) for name in self.alpha}
        self.shared = self.move(served, {name: value - served[name] for name, value in means.items()})
        self.shared |= {name: value.clone() for name, value in some(served, "anchor").items()}
        for c in range(len(served[MEANS])):
            who = [i for i in active if self.average == "active" or (self.anchor_of(self.data[i][1]) == c).any()]
            by = [self.weights[i] for i in who]
            for name in some(served, "anchor") if who else ():
                new = [visits[i][name][c] for i in who]
                if name == FACTORS and self.covariances == "bures":
                    self.shared[name][c] = power(barycenter([L @ L.T for L in new], by), 0.5)
                else:
                    self.shared[name][c] = sum(p * value for p, value in zip(by, new)) / sum(by)
        return mean(losses, self.weights)

    def tested(self, t: int, i: int) -> float:
        """The loss on a client's first two samples, after so many rounds, of the model that it is tested with."""
        w, embed = self.shared | self.own[i], self.evaluation != "head"
        first = embed or self.realign_who == "all"
        if self.evaluation != "stored":
            w = self.pretrained(w, t, i, TEST)
            w = self.realigned(w, t, i, TEST + REALIGNING) if first else w
            w, _ = self.local(w, t, i, TEST + LOCAL, self.tune_epochs, embed)
        if self.evaluation in ("head", "round"):
            w = self.realigned(w, t, i, TEST + (REALIGNING_AGAIN if first else REALIGNING))
        return float(self.loss(w, torch.arange(len(self.data[i][1]))[:2], i))


def some(w: Params, prefix: str) -> Params:
    return {name: value for name, value in w.items() if name.startswith(prefix)}


@dataclass
class Targets(Flic):
    """Labels y are real numbers: anchors ``N(y a + (1 − y) b, I)`` (section 3), squared errors.

    No two samples need have one label: distances are averaged, and λ2's are of J uniform y, the first column of ξ.
    """

    def between(self, w: Params, y: Tensor) -> Tensor:
        a, b = w[MEANS]
        return y[:, None] * a + (1 - y[:, None]) * b

    def near(self, w: Params, rows: Tensor, key: Key) -> Tensor:
        """``W2²`` of N(v, I) and a point z is ``|v − z|² + k``."""
        x, y = self.data[key[1]]
        apart = self.between(w, y[rows]) - self.embed(w, x[rows])
        return apart.square().sum(1).mean() + apart.shape[1]

    def drawn(self, w: Params, i: int, xi: Tensor) -> Tensor:
        y, noise = xi[:, 0], xi[:, 1:]
        return F.mse_loss(self.above(w, self.between(w, y) + noise)[:, 0], y)

    def loss(self, w: Params, rows: Tensor, i: int) -> Tensor:
        x, y = self.data[i]
        return F.mse_loss(self.above(w, self.embed(w, x[rows]))[:, 0], y[rows])


@dataclass
class Released(Flic):
    """As the authors' released code has it, which differs from the paper.

    φ and β take one step of all terms; the distance is to as many samples of an anchor as the batch has of its class; a
    copy of all anchors' means moves after each batch, by the distance and by the loss of the means themselves; the last
    local epoch is α's; and after each round all clients align anew.
    """

    def near(self, w: Params, rows: Tensor, key: Key) -> Tensor:
        """``Σ_c W2²`` to samples, whose numbers are drawn by round, client, phase and step."""
        x, y = self.data[key[1]]
        z, held = self.embed(w, x[rows]), y.unique()
        counts = [int((y[rows] == c).sum()) for c in held]
        drawn = zip(held, counts, self.noise(*key, -max(counts)))
        each = [w2(w[MEANS][c], w[FACTORS][c], z[y[rows] == c], xi[:n]) for c, n, xi in drawn if n]
        return torch.stack(each).sum()

    def begin(self, w: Params, t: int, i: int) -> Params:
        self.copy, self.mover = self.shared[MEANS], self.optimiser(self.anchor_lr)
        return w

    def after_batch(self, w: Params, rows: Tensor, key: Key) -> None:
        t, i, phase, step = key
        for number in range(self.anchor_steps if phase < TEST else 0):
            moving = (t, i, MOVING + phase + 2 * number, step)

            def of(w: Params, moving: Key = moving) -> Tensor:
                return self.near(w, rows, moving) + F.cross_entropy(self.above(w, w[MEANS]), torch.tensor(self.meta))

            copy = w | {MEANS: self.copy}
            self.copy = self.mover.step(copy, gradient(of, copy, [MEANS]))[MEANS]

    def anchors(self, w: Params, t: int, i: int) -> Params:
        return w | {MEANS: self.copy}

    def round(self, t: int, active: Sequence[int]) -> float:
        for i in range(len(self.data)) if t else active:
            w = self.pretrained(self.own[i] | self.shared, t, i)
            self.aligned.add(i)
            self.own[i] |= some(self.realigned(w, t, i) if t else w, "embed")
        return super().round(t, active)
