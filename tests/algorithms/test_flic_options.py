"""FLIC's choices: what is shared above the embedding, what a client is tested with, keys that would do nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.latents import changed, copied, everybody, flic, latent_task
from helpers.toys import Rounds, planned, same_bits, visits_of
from hpcfl.algorithms.flic.algorithm import Flic
from hpcfl.algorithms.flic.config import FACTORS, MEANS
from hpcfl.algorithms.flic.phases import OWN, PRETRAINING, REALIGNING, Learner
from hpcfl.base.errors import UsageError
from hpcfl.base.types import State
from hpcfl.data import Header
from hpcfl.engine.job import stacked
from hpcfl.learning.optim import FINE_TUNING
from hpcfl.models.latent import Latent
from hpcfl.models.mlp import Mlp
from hpcfl.schedule.participation import Participation

SIZES, WIDTHS = (9, 3, 6, 5), (5, 6, 5, 7)
HIDDEN, HEAD = {"hidden1.weight", "hidden1.bias"}, {"head.weight", "head.bias"}
EMBEDDING = {f"embed{layer}.{kind}" for layer in (1, 2) for kind in ("weight", "bias")}


def played(keys: Flic, hidden: tuple[int, ...] = (4,), rounds: int = 2) -> Rounds:
    """Return rounds with everybody, clients of three widths."""
    found = Rounds(keys, latent_task(SIZES, WIDTHS, hidden))
    for round_ in range(rounds):
        found.step(planned([1] * 4, 1, round_))
    return found


def models(rounds: Rounds, keys: Flic | None = None, clients: tuple[int, ...] = (0, 2)) -> State:
    """Return what some clients of one width predict with."""
    job, own = rounds.job, everybody(rounds)
    personal = stacked([own[client] for client in clients])
    seen = visits_of(job.task, clients, round_=rounds.now.round)
    found = (keys or job.algorithm).model(job.task, rounds.state, personal, seen)
    return {name: found[name] for name in job.task.initial()}


# ---- whose is what


@pytest.mark.parametrize(
    ("inside", "hidden", "shared", "personal"),
    [
        ("fedrep", (), set(), HEAD),
        ("fedrep", (4,), HIDDEN, HEAD),
        ("fedavg-ft", (4,), HIDDEN | HEAD, set()),
        ("l2gd", (4,), HIDDEN | HEAD, {OWN + name for name in HIDDEN | HEAD}),
    ],
)
def test_what_is_shared_and_what_is_personal(inside: str, hidden: tuple[int, ...], shared: set, personal: set) -> None:
    keys = flic(inside=inside, covariances="mean")
    rounds = played(keys, hidden)
    assert rounds.state.keys() == {*shared, MEANS, FACTORS}
    first = keys.init_server(rounds.job.task)
    assert changed(first, rounds.state) == first.keys()
    for client, own in everybody(rounds).items():
        assert own.keys() == EMBEDDING | personal
        begun = keys.init_client(rounds.job.task, client)
        assert begun["embed1.weight"].shape == (4, WIDTHS[client])
        assert changed(begun, own) == own.keys()
    for values in models(rounds).values():
        assert values.isfinite().all()


def test_all_of_l2gd_is_shared_where_mix_is_1() -> None:
    """The personal copies learn nothing, and are not predicted with."""
    rounds = played(flic(inside="l2gd", mix=1.0))
    task = rounds.job.task
    for client, own in everybody(rounds).items():
        begun = rounds.job.algorithm.init_client(task, client)
        assert changed(begun, own) == EMBEDDING
    found = models(rounds)
    for name in HIDDEN | HEAD:
        assert torch.equal(found[name], rounds.state[name].expand(2, *rounds.state[name].shape))


def test_nothing_of_l2gd_is_shared_where_mix_is_0() -> None:
    rounds = played(flic(inside="l2gd", mix=0.0))
    first = rounds.job.algorithm.init_server(rounds.job.task)
    assert changed(first, rounds.state) == {MEANS}
    found, own = models(rounds), everybody(rounds)
    for name in HIDDEN | HEAD:
        assert torch.equal(found[name], torch.stack([own[client][OWN + name] for client in (0, 2)]))


def test_l2gd_predicts_with_the_mean_that_mix_says() -> None:
    rounds = played(flic(inside="l2gd", mix=0.25))
    found, own = models(rounds), everybody(rounds)
    for name in HIDDEN | HEAD:
        wanted = 0.25 * rounds.state[name] + 0.75 * own[2][OWN + name]
        torch.testing.assert_close(found[name][1], wanted, rtol=1e-6, atol=1e-7)


# ---- before a test


MOVED = {"stored": set(), "tuned": EMBEDDING | HEAD, "head": EMBEDDING | HEAD}


@pytest.mark.parametrize("evaluation", MOVED)
def test_what_is_tested_is_not_what_is_kept(evaluation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a test embeddings align as before a visit, unless the model is tested as it is stored."""
    rounds = played(flic(pretrain=1, realign=1))
    task, shared = rounds.job.task, copied(rounds.state)
    kept = {client: copied(own) for client, own in everybody(rounds).items()}
    phases: list[int] = []
    align = Learner._align
    monkeypatch.setattr(
        Learner,
        "_align",
        lambda own, epochs, batch, phase: (phases.append(own.offset + phase), align(own, epochs, batch, phase)),
    )
    keys = flic(pretrain=1, realign=1, evaluation=evaluation, tune_epochs=2)
    found = models(rounds, keys)
    stored = stacked([kept[client] for client in (0, 2)]) | task.replicate(shared, visits_of(task, (0, 2)))
    assert changed(found, stored) == MOVED[evaluation]
    assert phases == ([] if evaluation == "stored" else [FINE_TUNING + REALIGNING])
    assert same_bits(shared, rounds.state)
    assert all(same_bits(kept[client], own) for client, own in everybody(rounds).items())


@pytest.mark.parametrize("evaluation", ["stored", "tuned", "head"])
def test_who_was_never_visited_aligns_for_its_test_alone(evaluation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = flic(pretrain=1, evaluation=evaluation, tune_epochs=1)
    rounds = played(keys, rounds=0)
    phases: list[int] = []
    monkeypatch.setattr(Learner, "_align", lambda own, epochs, batch, phase: phases.append(own.offset + phase))
    for _ in range(2):
        models(rounds)
    assert phases == ([] if evaluation == "stored" else [FINE_TUNING + PRETRAINING] * 2)
    assert all(float(own["pretrained"]) == 0 for own in everybody(rounds).values())


def test_without_an_alignment_the_head_alone_is_tuned() -> None:
    rounds = played(flic())
    found = models(rounds, flic(evaluation="head", tune_epochs=1))
    assert changed(found, models(rounds)) == HEAD


@pytest.mark.parametrize(
    ("inside", "own"), [("fedrep", EMBEDDING | HEAD), ("fedavg-ft", EMBEDDING), ("l2gd", EMBEDDING | HIDDEN | HEAD)]
)
def test_a_newcomer_learns_its_own_parts_alone(inside: str, own: set[str]) -> None:
    """What is shared stays; with no epoch there are its initial values. The state of the run is not touched."""
    keys = flic(inside=inside, pretrain=1, lambda1=0.01)
    rounds = played(keys)
    task, shared, seen = rounds.job.task, copied(rounds.state), visits_of(rounds.job.task, (0, 2))
    begun = stacked([keys.init_client(task, client) for client in (0, 2)])
    params = task.replicate(shared, seen) | begun
    before, after = (keys.adapted(task, shared, seen, epochs) for epochs in (0, 8))
    wanted = keys.parts(task).mixed(params)
    assert all(torch.equal(before[name], wanted[name]) for name in task.initial())
    names = [*task.initial(), MEANS]
    assert changed({name: before[name] for name in names}, after) == own
    assert same_bits(shared, rounds.state)
    with torch.no_grad():
        losses = [task.losses(found, next(task.batches(seen, 0, 1))) for found in (before, after)]
    assert (losses[1] < losses[0]).all()


@pytest.mark.parametrize("aligning", [{"pretrain": 60, "pretrain_batch": 0}, {"realign": 60}])
def test_a_newcomer_aligns_to_the_anchors_as_they_are_served(aligning: dict[str, int]) -> None:
    """Not to the first ones, which it never saw; nothing else here depends on any anchor."""
    keys = flic(lambda1=0.0, lambda2=0.0, **aligning)
    task = latent_task(SIZES, WIDTHS)
    seen, first = visits_of(task, (0, 2)), keys.init_server(task)
    served = first | {MEANS: first[MEANS] + 3.0}
    task.oracle_calls[:] = 0
    found = keys.adapted(task, served, seen, 1)
    calls = task.oracle_calls.copy()
    anchors, batch = keys._learner(task, served, {}, seen).terms.anchors, next(task.batches(seen, 0, steps=1))
    z = task.forward(found, batch.x, last=keys.parts(task).above)
    apart = [anchors.distances({MEANS: state[MEANS].expand(2, 4, 3)}, z, batch) for state in (served, first)]
    assert (apart[0] < 0.2 * apart[1]).all()
    without = flic(lambda1=0.0, lambda2=0.0)
    task.oracle_calls[:] = 0
    without.adapted(task, served, seen, 1)
    for client in (0, 2):  # what the alignment computes is counted
        assert calls[client] - task.oracle_calls[client] == 60 * SIZES[client]


# ---- bad input


RELEASED = {"anchor_loss": "means"}
NOTHING = {"lambda1": 0.0, "lambda2": 0.0}
IDLE: list[tuple[dict[str, Any], str]] = [
    ({"mix": 0.25}, "mix = 0.25 has no meaning without algorithm.inside = 'l2gd'"),
    ({"inside": "fedavg-ft", "shared_from": 2}, "shared_from = 2 .* algorithm.inside = 'fedrep'"),
    ({"tolerance": 1e-6}, "tolerance = 1e-06 .* algorithm.covariances = 'bures'"),
    ({"iterations": 5}, "iterations = 5 .* algorithm.covariances = 'bures'"),
    ({"pretrain_batch": 5}, "pretrain_batch = 5 .* algorithm.pretrain above 0"),
    ({"draws": 5, "lambda2": 0.0}, "draws = 5 .* algorithm.lambda2 above 0"),
    ({"batch": 0}, "draws: expected at least 1 with algorithm.batch = 0, got 0; did you mean 100"),
    *[
        ({**RELEASED, key: value}, f"{key} = .* algorithm.anchor_loss = 'held'")
        for key, value in {"covariances": "mean", "meta": (0, 1), "average": "holders"}.items()
    ],
    *[
        ({**NOTHING, key: value}, f"{key} = .* algorithm.lambda1 above 0")
        for key, value in {
            **{"covariances": "mean", "anchor_lr": 0.1, "average": "holders", "distance": "samples"},
            **{"spread": 2.0, "deviation": 2.0, "meta": (0, 1)},
            **{"anchor_optimizer": "sgd", "anchor_steps": 2, "anchor_every": "batch", "anchor_persist": True},
        }.items()
    ],
    ({"inside": "fedavg-ft", "shared_epoch": "last"}, "shared_epoch = 'last' .* algorithm.inside = 'fedrep'"),
    ({"shared_epoch": "last", "epochs": 1}, "epochs: expected at least 2 with algorithm.shared_epoch = 'last', got 1"),
    ({"anchor_persist": True, "optimizer": "sgd"}, "anchor_persist = True .* algorithm.anchor_optimizer = 'adam'"),
    ({"realign_who": "all"}, "realign_who = 'all' .* algorithm.realign above 0"),
    ({"evaluation": "round"}, "evaluation = 'round' .* algorithm.realign above 0"),
]


@pytest.mark.parametrize(
    ("keys", "line"), IDLE, ids=[f"{number} {[*keys][-1]}" for number, (keys, _) in enumerate(IDLE)]
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=rf"^algorithm\.{line}") as refused:
        Flic(**keys).check(Participation())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"inside": "l2gd", "mix": 0.0, "shared_from": 3},
        {"covariances": "bures", "tolerance": 1e-6, "average": "holders"},
        {**NOTHING, "pretrain": 1, "pretrain_batch": 5, "distance": "samples", "spread": 2.0},
        {**NOTHING, **RELEASED, "anchor_lr": 0.1, "distance": "samples"},
        {"spread": 2.0},
        {"batch": 0, "draws": 5},
        {"batch": 0, "lambda2": 0.0},
        {"anchor_persist": True, "anchor_steps": 3, "anchor_every": "batch", "deviation": 2.0},
        {"anchor_persist": True, "optimizer": "sgd", "anchor_optimizer": "adam"},
        {"realign": 1, "realign_who": "all", "evaluation": "round", "shared_epoch": "last"},
    ],
)
def test_keys_that_do_something_are_not(keys: dict[str, Any]) -> None:
    Flic(**keys).check(Participation())


HEADER = Header(None, 80, 20, ((5,),), 3)


@pytest.mark.parametrize(
    ("keys", "model", "line"),
    [
        ({}, Mlp(), r"model\.name: .* with an embedding, .* got 'mlp'; did you mean 'latent'"),
        ({"meta": (0, 1)}, Latent(), r"algorithm\.meta: expected 3 numbers .*, got \[0, 1\]"),
        ({"meta": (0, 2, 2)}, Latent(), r"algorithm\.meta: expected 3 numbers .* without gaps, got \[0, 2, 2\]"),
        ({"meta": (0, -1, 1)}, Latent(), r"algorithm\.meta: expected 3 numbers .* from 0 on"),
        ({"shared_from": 2}, Latent(), r"algorithm\.shared_from = 2 .* without layers in model\.hidden"),
        ({"shared_epoch": "last"}, Latent(), r"algorithm\.shared_epoch = 'last' .* without layers in model\.hidden"),
        (
            {"local_step": "joint"},
            Latent(embedding="identity"),
            r"algorithm\.local_step = 'joint' .* model\.embedding = 'dense'",
        ),
        ({"pretrain": 1}, Latent(embedding="identity"), r"algorithm\.pretrain = 1 .* model\.embedding = 'dense'"),
        ({"realign": 1}, Latent(embedding="identity"), r"algorithm\.realign = 1 .* model\.embedding = 'dense'"),
    ],
)
def test_keys_that_do_not_go_with_the_model(keys: dict[str, Any], model: Any, line: str) -> None:
    with pytest.raises(UsageError, match=f"^{line}"):
        Flic(**keys).check_model(model, HEADER)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *{"covariances": "mean", "meta": (0, 1), "distance": "samples", "average": "holders", "deviation": 2.0}.items(),
        *RELEASED.items(),
    ],
)
def test_keys_of_classes_where_labels_are_real_numbers(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^algorithm\.{key} = .* without labels that are classes"):
        Flic(**{key: value}).check_model(Latent(), replace(HEADER, targets=True))
    Flic().check_model(Latent(), replace(HEADER, targets=True))
