"""FLIC: rounds that are FedRep's where nothing aligns, anchors that nobody holds, and what alignment is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.latents import HELD, changed, copied, everybody, federation, flic, latent_task
from helpers.toys import Rounds, planned, same_bits, visits_of
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.flic.algorithm import Flic
from hpcfl.algorithms.flic.config import FACTORS, MEANS
from hpcfl.algorithms.flic.phases import PRETRAINING, REALIGNING, Learner
from hpcfl.base.types import State
from hpcfl.data.gaussians import LinearMapping
from hpcfl.learning.task import Task
from hpcfl.models.latent import Latent

SIZES, WIDTHS = (9, 3, 6, 5), (5, 6, 5, 7)
LATE = 2  # a depth that is not in time


# ---- equalities


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_without_its_terms_it_is_fedrep(weights: Any) -> None:
    """To the bit, also where some are late, and the loss that is recorded."""
    task = Task(
        Latent(embedding="identity", dimension=5, hidden=(4,)), federation(SIZES, [5] * 4), 0, computing="vmapped"
    )
    same: dict[str, Any] = {"lr": 0.2, "batch": 4, "optimizer": "sgd", "weights": weights, "weight_decay": 0.1}
    one = Rounds(Flic(**same, epochs=2, lambda1=0, lambda2=0), task, 3)
    other = Rounds(FedRep(**same, head_epochs=2, epochs=1), task, 3)
    for round_, depth in enumerate(([1, 1, 1, 1], [1, LATE, 1, LATE], [LATE, 1, 1, 1])):
        left, right = one.step(planned(depth, 1, round_)), other.step(planned(depth, 1, round_))
        assert torch.equal(left.mean("loss"), right.mean("loss"))
        for name, value in other.state.items():
            assert torch.equal(one.state[name], value)
    for client, own in everybody(one).items():
        assert same_bits(own, everybody(other)[client])
    assert not torch.equal(one.state["hidden1.weight"], task.initial()["hidden1.weight"])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_results_do_not_depend_on_the_chunk(optimizer: str) -> None:
    keys = {"lr": 0.02, "epochs": 2, "distance": "samples", "covariances": "mean", "pretrain": 1, "realign": 1}
    sizes, widths = (9, 3, 6, 5, 7), (5, 5, 6, 5, 6)
    runs = [Rounds(flic(optimizer=optimizer, **keys), latent_task(sizes, widths), chunk) for chunk in (1, 2, None)]
    for round_ in range(2):
        losses = [float(rounds.step(planned([1] * 5, 1, round_)).mean("loss")) for rounds in runs]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for rounds in runs[1:]:
        for name, value in runs[0].state.items():
            torch.testing.assert_close(rounds.state[name], value, rtol=1e-5, atol=1e-5)
        for client, own in everybody(runs[0]).items():
            for name, value in own.items():
                torch.testing.assert_close(everybody(rounds)[client][name], value, rtol=1e-5, atol=1e-5)


# ---- anchors


def anchors(state: State) -> State:
    return {name: state[name] for name in (MEANS, FACTORS)}


@pytest.mark.parametrize("reduction", ["mean", "bures"])
@pytest.mark.parametrize("average", ["active", "holders"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_class_that_no_visited_client_holds_keeps_its_anchor(reduction: str, average: str, optimizer: str) -> None:
    """Class 3 is nobody's; in the second round only client 1 is visited, which holds 1 and 2."""
    keys = flic(covariances=reduction, average=average, optimizer=optimizer)
    rounds = Rounds(keys, latent_task(SIZES, WIDTHS))
    for round_, (depth, kept) in enumerate((([1, 1, 1, 1], {3}), ([LATE, 1, LATE, LATE], {0, 3}))):
        before = copied(rounds.state)
        rounds.step(planned(depth, 1, round_))
        for kind in (MEANS, FACTORS):
            same = {number for number in range(4) if torch.equal(before[kind][number], rounds.state[kind][number])}
            assert same == kept


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("average", ["active", "holders"])
def test_an_anchor_is_the_mean_over_those_who_count(average: str, weights: str) -> None:
    task = latent_task(SIZES, WIDTHS)
    keys = flic(covariances="mean", average=average, weights=weights)
    first, own = anchors(keys.init_server(task)), []
    for client in range(3):  # the fourth is late
        rounds = Rounds(keys, task)
        rounds.step(planned([1 if other == client else LATE for other in range(4)], 1))
        own.append(anchors(rounds.state))
    together = Rounds(keys, task)
    together.step(planned([1, 1, 1, LATE], 1))
    sizes = np.array(SIZES[:3]) if weights == "samples" else np.ones(3)
    for anchor in range(3):
        counts = [average == "active" or anchor in HELD[client] for client in range(3)]
        total = float(sizes[counts].sum())
        for kind in (MEANS, FACTORS):
            moves = [
                size / total * (alone[kind][anchor] - first[kind][anchor])
                for size, alone, count in zip(sizes.tolist(), own, counts)
                if count
            ]
            wanted = first[kind][anchor] + torch.stack(moves).sum(0)
            torch.testing.assert_close(together.state[kind][anchor], wanted, rtol=0, atol=1e-6)
            assert not torch.equal(wanted, first[kind][anchor])


def test_an_anchor_moves_by_the_moments_under_the_final_embedding() -> None:
    """With one client: ``v ← v − η 2 λ1 (v − m̂)``, m̂ of all its samples as it embeds them after the visit."""
    task = latent_task(SIZES[:1], WIDTHS[:1])
    rounds = Rounds(flic(lambda2=0.0, anchor_lr=0.5, epochs=3), task)
    before = rounds.state[MEANS]
    rounds.step(planned([1], 1))
    data = task.federation.client(0)
    personal = {name: value.unsqueeze(0) for name, value in everybody(rounds)[0].items()}
    x = torch.from_numpy(data.train_features).unsqueeze(0)
    z = task.forward(personal | task.replicate(rounds.state, visits_of(task, [0])), x, last=2)[0]
    for label in HELD[0]:
        mean = z[torch.from_numpy(data.train_labels) == label].mean(0)
        wanted = before[label] - 0.5 * 2 * 0.3 * (before[label] - mean)
        torch.testing.assert_close(rounds.state[MEANS][label], wanted, rtol=1e-5, atol=1e-6)


def test_the_shared_layers_learn_from_their_round_on() -> None:
    task = latent_task(SIZES, WIDTHS)
    rounds, shared = Rounds(flic(shared_from=2), task), {"hidden1.weight", "hidden1.bias"}
    for round_ in range(4):
        before = copied(rounds.state)
        rounds.step(planned([1] * 4, 1, round_))
        assert changed(before, rounds.state) & shared == (shared if round_ >= 2 else set())


# ---- what aligns, and when


@pytest.fixture
def aligned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int], torch.Tensor]]:
    """Note phase, round, clients and means of every alignment."""
    seen, align = [], Learner._align

    def noted(own: Learner, epochs: int, batch: int, phase: int) -> None:
        seen.append((phase, own.visits.round, own.visits.clients.tolist(), own.params[MEANS].clone()))
        align(own, epochs, batch, phase)

    monkeypatch.setattr(Learner, "_align", noted)
    return seen


def test_a_client_aligns_to_the_first_anchors_before_its_first_visit(aligned: list[Any]) -> None:
    """Once, whenever that is, and whatever has become of the anchors; to those of the round, in every visit."""
    keys, task = flic(pretrain=2, realign=1, pretrain_batch=2), latent_task(SIZES, [5] * 4)
    rounds = Rounds(keys, task)
    first, served = keys.init_server(task)[MEANS], []
    depths = [1, LATE, 1, LATE], [1, 1, LATE, LATE], [1, 1, 1, LATE]
    for round_, depth in enumerate(depths):
        served.append(rounds.state[MEANS])
        rounds.step(planned(depth, 1, round_))
    assert not torch.equal(served[1], first)
    begun = [entry for entry in aligned if entry[0] == PRETRAINING]
    assert [entry[1:3] for entry in begun] == [(0, [0, 2]), (1, [1])]
    assert all(torch.equal(means, first.expand_as(means)) for *_, means in begun)
    again = [entry for entry in aligned if entry[0] == REALIGNING]
    assert [entry[1:3] for entry in again] == [(0, [0, 2]), (1, [0, 1]), (2, [0, 1, 2])]
    assert all(torch.equal(means, served[round_].expand_as(means)) for _, round_, _, means in again)
    assert [int(own["pretrained"]) for own in everybody(rounds).values()] == [1, 1, 1, 0]


def test_alignment_brings_samples_closer_to_the_first_anchors() -> None:
    """Also in a chunk where others aligned before."""
    keys, task = flic(pretrain=20), latent_task(SIZES, [5] * 4)
    personal = {
        name: torch.stack([keys.init_client(task, i)[name] for i in range(4)]) for name in keys.init_client(task, 0)
    }
    personal["pretrained"][1] = 1.0
    own = keys._learner(task, keys.init_server(task), personal, visits_of(task, range(4)))
    batch = next(task.batches(own.visits, 0, steps=1))
    before, params = own.terms.alignment(own.params, batch), copied(own.params)
    own.pretrain(keys.first_anchors(task))
    ratio = own.terms.alignment(own.params, batch) / before
    assert (ratio[[0, 2, 3]] < 0.8).all()
    assert all(torch.equal(params[name][1], own.params[name][1]) for name in params)


# ---- what it is for


def embedded_means(lambda1: float) -> np.ndarray:
    """Return the means of the classes, ``[clients, classes, k]``, as two clients of 4 and 9 features embed them."""
    source = LinearMapping(
        labels=3, classes=3, informative=3, spread=2.0, least=4, most=9, samples_per_class=80, thinning=False
    )
    task = Task(Latent(widths=(16,), dimension=3), source.federate(2, 8, None), 8)
    assert len(set(task.federation.shapes)) == 2
    keys = flic(optimizer="adam", lr=0.02, batch=20, epochs=2, lambda1=lambda1, lambda2=0.0)
    rounds, found = Rounds(keys, task), []
    for round_ in range(6):
        rounds.step(planned([1, 1], 1, round_))
    for client, own in everybody(rounds).items():
        data = task.federation.client(client)
        params = {name: value.unsqueeze(0) for name, value in own.items()}
        z = task.forward(params, torch.from_numpy(data.train_features).unsqueeze(0), last=2)[0].numpy()
        found.append([z[data.train_labels == label].mean(0) for label in range(3)])
    return np.array(found)


def apart(means: np.ndarray) -> float:
    """Return how far a class of one client is from the same of the other, over how far it is from the nearest else."""
    far = np.linalg.norm(means[0][:, None] - means[1][None], axis=-1)
    return float(np.max(far.diagonal() / (far + np.diag([np.inf] * 3)).min(1)))


def test_clients_of_different_widths_come_to_embed_a_class_alike() -> None:
    assert apart(embedded_means(1.0)) < 0.5
    assert apart(embedded_means(0.0)) > 1.0
