"""What FLIC minimises, against loops over clients and classes in float64; what learns in each phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from helpers.gaussians import transport_map, w2_squared
from helpers.latents import changed, copied, flic, halves, latent_task, learner, real
from hpcfl.algorithms.flic.config import FACTORS, MEANS
from hpcfl.algorithms.flic.phases import ANCHORING, LOCAL, SHARED, Learner
from hpcfl.base.rng import keyed
from hpcfl.base.types import State
from hpcfl.learning.batches import PHASE_STEPS, Batch

SIZES = (9, 3, 6, 5)  # with four at a time: batches that are not full, and clients that rest
DRAWS = 3


def covariance(points: Tensor, ddof: int) -> Tensor:
    """Return the empirical covariance; zero where there are too few points for one."""
    centred = points - points.mean(0)
    return centred.mT @ centred / max(len(points) - ddof, 1)


def noise(purpose: str, batch: Batch, row: int, *shape: int) -> Tensor:
    seed, round_, clients, step = batch.key[:4]
    drawn = keyed(seed, purpose, round_, clients[row], step).standard_normal(shape, dtype="float32")
    return torch.from_numpy(drawn).double()


class Plain:
    """The terms of one client, class by class."""

    def __init__(self, own: Learner, batch: Batch, row: int) -> None:
        self.own, self.batch, self.row = own, batch, row
        client = int(own.visits.clients[row])
        groups = np.array(own.keys.meta or range(own.task.federation.classes))
        self.held = np.unique(groups[own.task.samples(client).y.numpy()])
        self.groups = torch.from_numpy(groups)
        self.embed, self.above = halves(own, row)
        self.x, self.y = real(batch, row)
        self.means = own.params[MEANS][row].double()
        eye = torch.eye(3, dtype=torch.float64)
        self.factors = own.params[FACTORS][row].double() if FACTORS in own.params else eye.repeat(len(self.means), 1, 1)

    def loss(self) -> Tensor:
        return cross_entropy(self.above(self.embed(self.x)), self.y)

    def distance(self) -> Tensor:
        labels, total = self.groups[self.y], torch.zeros((), dtype=torch.float64)
        ddof, z = int(self.own.keys.distance == "samples"), self.embed(self.x)
        most = int(torch.bincount(labels).max())
        drawn = noise("samples of anchors", self.batch, self.row, len(self.held), most, 3)
        for anchor in torch.unique(labels).tolist():
            mine = z[labels == anchor]
            mean, cov = self.means[anchor], self.factors[anchor] @ self.factors[anchor].mT
            if self.own.keys.distance == "samples":
                points = mean + drawn[self.held.tolist().index(anchor), : len(mine)] @ self.factors[anchor].mT
                mean, cov = points.mean(0), covariance(points, ddof)
            total = total + w2_squared(mean, cov, mine.mean(0), covariance(mine, ddof))
        return total

    def misread(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        drawn = noise("draws of anchors", self.batch, self.row, len(self.held), DRAWS, 3)
        for anchor, xi in zip(self.held.tolist(), drawn):
            chances = self.above(self.means[anchor] + xi @ self.factors[anchor].mT).softmax(-1)
            total = total - chances[:, self.groups == anchor].sum(-1).log().mean()
        return total


OPTIONS: dict[str, dict[str, Any]] = {
    "text": {},
    "factors": {"covariances": "mean"},
    "samples": {"distance": "samples"},
    "samples of factors": {"distance": "samples", "covariances": "mean"},
    "groups": {"meta": (0, 1, 0, 1), "covariances": "mean"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_objectives_are_the_sums_of_their_terms(options: dict[str, Any]) -> None:
    own = learner(flic(**options), latent_task(SIZES, [5] * 4), range(4))
    seen = set()
    for batch in own.task.batches(own.visits, 4, 1, phase=7).padded():
        active = torch.tensor(batch.sample_counts()) > 0
        terms = [
            getattr(own.terms, name)(own.params, batch) for name in ("embedding", "alignment", "above", "anchoring")
        ]
        for row in torch.nonzero(active).flatten().tolist():
            plain = Plain(own, batch, row)
            loss, distance, misread = plain.loss(), plain.distance(), plain.misread()
            wanted = loss + 0.3 * distance, distance, loss + 0.2 * misread, 0.3 * distance + 0.2 * misread
            for term, value in zip(terms, wanted):
                assert float(term[row]) == pytest.approx(float(value), rel=2e-6)
        seen |= {*active.tolist(), batch.valid is None}
    assert seen == {True, False}


def test_the_released_codes_anchors_learn_by_their_means() -> None:
    """All distances with weight 1, and the mean over all classes of the loss of their means."""
    own = learner(flic(anchor_loss="means"), latent_task(SIZES, [5] * 4), range(4))
    batch = next(own.task.batches(own.visits, 0, steps=1))
    found = own.terms.released(own.params, batch)
    for row in range(4):
        plain = Plain(own, batch, row)
        wanted = plain.distance() + cross_entropy(plain.above(plain.means), torch.arange(4))
        assert float(found[row]) == pytest.approx(float(wanted), rel=2e-6)


def test_targets_have_anchors_between_two_vectors() -> None:
    own = learner(flic(), latent_task(SIZES, [5] * 4, targets=True), range(4))
    for batch in own.task.batches(own.visits, 4, 1).padded():
        found = {name: getattr(own.terms, name)(own.params, batch) for name in ("embedding", "alignment", "above")}
        for row in np.flatnonzero(batch.sample_counts()).tolist():
            embed, above = halves(own, row)
            x, y = real(batch, row)
            a, b = own.params[MEANS][row].double()
            loss = (above(embed(x)).squeeze(-1) - y).square().mean()
            points = [w2_squared(t * a + (1 - t) * b, torch.eye(3), z, torch.zeros(3, 3)) for t, z in zip(y, embed(x))]
            distance = torch.stack(points).mean()
            seed, round_, clients, step = batch.key[:4]
            rng = keyed(seed, "draws of anchors", round_, clients[row], step)
            t = torch.from_numpy(rng.random(DRAWS, dtype="float32")).double()
            xi = torch.from_numpy(rng.standard_normal((DRAWS, 3), dtype="float32")).double()
            drawn = t[:, None] * a + (1 - t[:, None]) * b + xi
            misread = (above(drawn).squeeze(-1) - t).square().mean()
            wanted = loss + 0.3 * distance, distance, loss + 0.2 * misread
            for name, value in zip(found, wanted):
                assert float(found[name][row]) == pytest.approx(float(value), rel=2e-6)


@pytest.mark.parametrize("distance", ["closed", "samples"])
def test_what_is_drawn_does_not_depend_on_who_is_in_the_chunk(distance: str) -> None:
    keys, task = flic(distance=distance, covariances="mean"), latent_task(SIZES, [5] * 4)
    together = learner(keys, task, range(4), moved=False)
    whole = list(task.batches(together.visits, 4, 1).padded())
    for client in range(4):
        alone = learner(keys, task, [client], moved=False)
        for batch, single in zip(whole, task.batches(alone.visits, 4, 1)):
            many = together.terms.anchors.drawn(together.params, batch.key, DRAWS)
            one = alone.terms.anchors.drawn(alone.params, single.key, DRAWS)
            kept = many.weights[client] > 0
            assert torch.equal(many.points[client][kept], one.points[0])
            assert torch.equal(many.anchors[client][kept], one.anchors[0])
            far = [own.terms.alignment(own.params, own_) for own, own_ in ((together, batch), (alone, single))]
            assert float(far[0][client]) == pytest.approx(float(far[1][0]), rel=1e-6)


# ---- steps


def gradients(own: Learner, params: State, names: Any, objective: Any, phase: int) -> State:
    """Return the gradients of the first step of a phase, on all samples."""
    batch = next(own.task.batches(own.visits, 0, 1, phase=phase))
    return own.task.gradients(params, batch, names, objective)[0]


@pytest.mark.parametrize("hidden", [(), (4,)])
def test_the_embedding_moves_first_then_the_head_then_what_is_shared(hidden: tuple[int, ...]) -> None:
    own = learner(flic(batch=0), latent_task(SIZES, [5] * 4, hidden), range(4))
    parts, wanted = own.terms.parts, copied(own.params)
    turns = [
        (parts.embedding, own.terms.embedding, LOCAL),
        (parts.personal, own.terms.above, LOCAL),
        (parts.shared, own.terms.above, SHARED),
    ]
    for names, objective, phase in turns[: 2 + bool(hidden)]:
        for name, value in gradients(own, wanted, names, objective, phase).items():
            wanted[name] = wanted[name] - 0.1 * value
    own.local(1, parts.personal)
    own.shared(parts.shared)
    for name, value in wanted.items():
        torch.testing.assert_close(own.params[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("lambda2", [0.0, 0.2])
def test_an_anchor_takes_one_step_to_the_moments_of_all_samples(lambda2: float) -> None:
    """``v ← v − η (2 λ1 (v − m̂) + λ2 ∇)`` and ``L ← L − η (2 λ1 (I − T) L + λ2 ∇)``, over the classes held."""
    keys = flic(covariances="mean", lambda2=lambda2, anchor_lr=0.05, batch=2)
    own = learner(keys, latent_task(SIZES, [5] * 4), range(4))
    batch = next(own.task.batches(own.visits, 0, steps=1, phase=ANCHORING))
    before = copied(own.params)
    own.anchors()
    assert changed(before, own.params) == {MEANS, FACTORS}
    after = {name: own.params[name].double() for name in (MEANS, FACTORS)}
    own.params.update(before)
    for row in range(4):
        plain = Plain(own, batch, row)
        z = plain.embed(plain.x).detach()
        leaves = [value.clone().requires_grad_() for value in (plain.means, plain.factors)]
        plain.means, plain.factors = leaves
        slopes = torch.autograd.grad(plain.misread(), leaves)
        for anchor in range(4):
            mean, factor = (leaf[anchor].detach() for leaf in leaves)
            if anchor in plain.held:
                mine = z[plain.y == anchor]
                map_ = transport_map(factor @ factor.mT, covariance(mine, 0))
                moved = 2 * 0.3 * (mean - mine.mean(0)), 2 * 0.3 * (torch.eye(3) - map_) @ factor
                mean, factor = (
                    own_ - 0.05 * (step + lambda2 * slope[anchor])
                    for own_, step, slope in zip((mean, factor), moved, slopes)
                )
            torch.testing.assert_close(after[MEANS][row, anchor], mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(after[FACTORS][row, anchor], factor, rtol=1e-5, atol=1e-6)


PHASES = {
    "realign": {"embedding"},
    "pretrain": {"embedding", "flag"},
    "local": {"embedding", "personal"},
    "head": {"personal"},
    "shared": {"shared"},
    "anchors": {"anchors"},
}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("inside", ["fedrep", "fedavg-ft", "l2gd"])
def test_each_phase_moves_its_own_parameters_alone(inside: str, optimizer: str) -> None:
    keys = flic(inside=inside, optimizer=optimizer, pretrain=1, realign=1, covariances="mean", weight_decay=0.1)
    own = learner(keys, task := latent_task(SIZES, [5] * 4), range(4))
    parts = own.terms.parts
    above = parts.personal or parts.shared
    names = {
        **{"embedding": {*parts.embedding}, "personal": {*above}, "shared": {*parts.shared}},
        **{"anchors": {MEANS, FACTORS}, "flag": {"pretrained"}},
    }
    for phase, kinds in PHASES.items():
        before = copied(own.params)
        arguments = {
            **{"local": (1, above), "head": (1, above, False), "shared": (parts.shared,)},
            "pretrain": (keys.first_anchors(task),),
        }
        getattr(own, {"head": "local"}.get(phase, phase))(*arguments.get(phase, ()))
        assert changed(before, own.params) == set.union(*(names[kind] for kind in kinds)), phase


def test_draws_pass_the_hidden_layers_also_where_the_head_alone_learns() -> None:
    """The layers below the head are fixed then, but draws begin in the latent space."""
    own = learner(flic(batch=0), latent_task(SIZES, [5] * 4, (6,)), range(4))
    head = own.terms.parts.personal
    wanted = gradients(own, own.params, head, own.terms.above, LOCAL)
    before = copied(own.params)
    own.local(1, head, embedding=False)
    for name in head:
        torch.testing.assert_close(own.params[name], before[name] - 0.1 * wanted[name], rtol=1e-5, atol=1e-6)


def test_no_phase_has_the_random_numbers_of_another() -> None:
    own = learner(flic(), latent_task(SIZES, [5] * 4), range(4))
    steps = [next(own.task.batches(own.visits, 4, 1, phase=phase).padded()).key.step for phase in range(5)]
    assert steps == [PHASE_STEPS * phase for phase in range(5)]
