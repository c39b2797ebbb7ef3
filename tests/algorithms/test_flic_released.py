"""FLIC's choices of the released code, each by itself: what it equals, by hand where a hand can reckon it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.test_flic_runs import CLIENTS, equal, job, states, table
from helpers.latents import changed, copied, everybody, flic, latent_task, learner
from helpers.toys import Rounds, planned
from hpcfl import store
from hpcfl.algorithms.flic.config import FACTORS, MEANS
from hpcfl.base.errors import UsageError
from hpcfl.base.types import State
from hpcfl.config import from_table, load
from hpcfl.engine.job import stacked
from hpcfl.learning.batches import Visits
from hpcfl.testing.runs import play, resume, same

SIZES, WIDTHS = (9, 3, 6, 5), (5, 6, 5, 7)
STILL = {"lr": 1e-12, "lambda2": 0.0}
"""Embeddings that do not move, and anchors that learn by the distance alone: their gradient is 2 λ1 (v − m̂)."""
RELEASED = {"local_step": "joint", "anchor_every": "batch", "anchor_loss": "means", "distance": "samples"}


def after(keys: Any, rounds: int = 1, sizes: tuple[int, ...] = SIZES[:1]) -> Rounds:
    """Return rounds with everybody."""
    found = Rounds(keys, latent_task(sizes, WIDTHS[: len(sizes)]))
    for round_ in range(rounds):
        found.step(planned([1] * len(sizes), 1, round_))
    return found


def means(rounds: Rounds) -> torch.Tensor:
    """Return the means of a first client's classes 0 and 1, ``[2, k]``, as it embeds all its samples."""
    task = rounds.job.task
    batch = next(task.batches(Visits.for_test(0, np.array([0])), 0, steps=1))
    own = {name: value.unsqueeze(0) for name, value in everybody(rounds)[0].items()}
    z = task.forward(own | {name: value.unsqueeze(0) for name, value in rounds.state.items()}, batch.x, last=2)[0]
    return torch.stack([z[batch.y[0] == label].mean(0) for label in (0, 1)])


# ---- the joint step


def stepped(embedding: bool = True, **keys: Any) -> tuple[State, State]:
    """Return φ and β of two clients after one step on all that they have."""
    own = learner(flic(batch=0, **keys), latent_task(SIZES, [5] * 4, ()), (0, 2))
    own.local(1, own.terms.parts.personal, embedding=embedding)
    parts = own.terms.parts
    return tuple({name: own.params[name] for name in names} for names in (parts.embedding, parts.personal))


def test_a_joint_step_is_both_steps_from_one_point() -> None:
    """φ moves as it does before β has, and β as it does where φ stays."""
    joint, turns = stepped(local_step="joint"), stepped(local_step="alternating")
    fixed = stepped(embedding=False)
    torch.testing.assert_close(joint[0], turns[0])
    torch.testing.assert_close(joint[1], fixed[1])
    assert changed(joint[1], turns[1]) == turns[1].keys()
    assert not torch.allclose(joint[1]["head.weight"], turns[1]["head.weight"])


@pytest.mark.parametrize("local_step", ["joint", "alternating"])
def test_weights_above_the_embedding_alone_decay(local_step: str) -> None:
    """One step of plain descent takes ``lr · λ · w`` more."""
    start = learner(flic(batch=0), latent_task(SIZES, [5] * 4, ()), (0, 2)).params
    plain, decayed = (stepped(local_step=local_step, weight_decay=decay) for decay in (0.0, 0.5))
    torch.testing.assert_close(plain[0], decayed[0], rtol=0, atol=0)
    torch.testing.assert_close(plain[1]["head.weight"] - decayed[1]["head.weight"], 0.05 * start["head.weight"])
    assert torch.equal(plain[1]["head.bias"], decayed[1]["head.bias"])


# ---- the shared layer's epoch


def test_the_shared_epoch_is_the_last_local_one_once_alpha_learns() -> None:
    """``last`` after 3 epochs is ``after`` after 2, from its round on; before, all are φ's and β's."""
    last, after_ = {"epochs": 3, "shared_epoch": "last"}, {"epochs": 2}
    one, other = after(flic(**last)), after(flic(**after_))
    assert changed(one.state, other.state) == set()
    assert equal(everybody(one)[0], everybody(other)[0])
    one, other = after(flic(**last, shared_from=1)), after(flic(epochs=3, shared_from=1))
    assert changed(one.state, other.state) == set()
    assert equal(everybody(one)[0], everybody(other)[0])


# ---- the anchors' steps


@pytest.mark.parametrize(("keys", "count"), [({"anchor_steps": 4}, 4), ({"anchor_every": "batch", "epochs": 3}, 3 + 1)])
def test_steps_of_the_anchors_are_counted(keys: dict[str, Any], count: int) -> None:
    """Each brings v closer to m̂ by ``1 − 2 η λ1``, on all that the client has; α's epoch has a batch too."""
    found = after(flic(**STILL, batch=0, draws=1, anchor_lr=0.5, **keys))
    begun, target = Rounds(flic(), found.job.task).state[MEANS][:2], means(found)
    torch.testing.assert_close(found.state[MEANS][:2], target + 0.7**count * (begun - target), rtol=1e-4, atol=1e-5)


def test_one_step_after_the_only_batch_is_one_at_the_end_of_the_visit() -> None:
    keys = {"batch": 0, "draws": 3, "lambda2": 0.0, "covariances": "mean", "anchor_lr": 0.1}
    visit, batch = (after(flic(**keys, anchor_every=every), 2, SIZES) for every in ("visit", "batch"))
    assert not torch.equal(visit.state[FACTORS], torch.eye(3).expand(4, 3, 3))
    hidden = {"hidden1.weight", "hidden1.bias"}
    # with α's epoch there are two batches: the anchors take two steps
    assert changed(visit.state, batch.state) == {MEANS, FACTORS, *hidden}
    visit, batch = (after(flic(**keys, anchor_every=every, shared_from=9), 2, SIZES) for every in ("visit", "batch"))
    for name, value in visit.state.items():
        torch.testing.assert_close(batch.state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [{}, RELEASED])
def test_all_else_sees_the_anchors_as_they_were_served(keys: dict[str, Any]) -> None:
    keys = {"anchor_every": "batch", "epochs": 3, **keys}
    moved, still = (after(flic(**keys, anchor_lr=lr), 1, SIZES) for lr in (1.0, 1e-12))
    assert not torch.allclose(moved.state[MEANS], still.state[MEANS])
    assert all(equal(own, everybody(still)[client]) for client, own in everybody(moved).items())


@pytest.mark.parametrize("persist", [True, False])
def test_the_memory_of_the_anchors_adam_outlasts_visits(persist: bool) -> None:
    """Against torch's Adam on ``λ1 |v − m̂|²``: three visits of two steps each, forgotten or not."""
    keys = flic(**STILL, anchor_lr=0.2, anchor_optimizer="adam", anchor_steps=2, anchor_persist=persist)
    found = after(keys, 3)
    target, v = means(found), Rounds(keys, found.job.task).state[MEANS][:2].clone().requires_grad_()
    adam = torch.optim.Adam([v], 0.2)
    for step in range(6):
        if step % 2 == 0 and not persist:
            adam = torch.optim.Adam([v], 0.2)
        adam.zero_grad()
        (0.3 * (v - target).square().sum()).backward()
        adam.step()
    torch.testing.assert_close(found.state[MEANS][:2], v.detach(), rtol=1e-4, atol=1e-5)
    kept = {name for name in everybody(found)[0] if name.startswith("memory ")}
    assert kept == ({f"memory {kind} {MEANS}" for kind in "mv"} | {"memory steps"} if persist else set())


def test_who_was_late_keeps_its_memory() -> None:
    rounds = Rounds(flic(anchor_optimizer="adam", anchor_persist=True), latent_task(SIZES, WIDTHS))
    rounds.step(planned([1, 1, 1, 2], 1))
    assert [float(own["memory steps"]) for own in everybody(rounds).values()] == [1, 1, 1, 0]


def test_the_deviation_is_that_of_the_anchors() -> None:
    """𝔅²(σ²I, 0) = k σ² where a class has one sample; factors begin at σI; samples are σξ off."""
    task = latent_task((2, 2), (5, 5))
    one, two = (learner(flic(deviation=sigma, lambda2=0.0), task, (0,), moved=False) for sigma in (1.0, 2.0))
    batch = next(task.batches(one.visits, 0, steps=1))
    less = two.terms.alignment(two.params, batch) - one.terms.alignment(one.params, batch)
    torch.testing.assert_close(less, torch.tensor([2 * 3 * (4.0 - 1.0)]))
    drawn = [own.terms.anchors.drawn(own.params, batch.key, 5).points for own in (one, two)]
    at = one.params[MEANS][0, one.terms.anchors.slots[0]].repeat_interleave(5, 0)
    torch.testing.assert_close(drawn[1][0] - at, 2 * (drawn[0][0] - at))
    assert torch.equal(flic(deviation=2.0, covariances="mean").first_anchors(task)[FACTORS][1], 2 * torch.eye(3))


# ---- alignment of all


ALL = {"realign": 2, "realign_who": "all", "pretrain": 1, **RELEASED}
FEW = {"participation": {"invite": "uniform", "size": 2, "hold_out": 1}}


def test_all_clients_align_after_each_round(solo: Any, tmp_path: Path) -> None:
    """Also those that no round has invited, to the anchors of the round before; but nobody who is held out."""
    values = table(ALL, rounds=3, **FEW)
    run, own = play(solo, values, tmp_path / "run", None), job(values)
    counted, found = store.open_run(run)["arrived"].values == 1, states(run)
    assert not counted[:2, : CLIENTS - 1].any(0).all()
    for round_ in (1, 2):
        shared = {name: torch.from_numpy(value) for name, value in found[round_ - 1][0].items()}
        for chunk in own.chunks:
            clients = np.array([client for client in chunk.clients if client != CLIENTS - 1])
            held = [found[round_ - 1][1].get(client) or _entered(own, client) for client in clients.tolist()]
            personal = {name: torch.stack([torch.as_tensor(state[name]) for state in held]) for name in held[0]}
            aligned = own.algorithm.between(own.task, shared, personal, Visits.for_test(round_, clients))
            assert {"embed1.weight", "embed2.weight"} <= changed(personal, aligned)
            for row in np.flatnonzero(~counted[round_, clients]):
                now = {name: value[row].numpy() for name, value in aligned.items()}
                assert equal(now, found[round_][1][clients[row]])
    assert equal(found[2][1][CLIENTS - 1], _entered(own, CLIENTS - 1))


def _entered(own: Any, client: int) -> dict[str, Any]:
    return {name: value.numpy() for name, value in own.algorithm.init_client(own.task, client).items()}


def test_a_visit_begins_with_an_alignment_unless_all_align_before() -> None:
    """In the first round nobody does: what was learned before is alignment to the same anchors."""
    visited, never = after(flic(realign=1)), after(flic())
    all_ = after(flic(realign=1, realign_who="all"))
    assert equal(everybody(all_)[0], everybody(never)[0])
    assert not equal(everybody(visited)[0], everybody(never)[0])


def test_real_time_cannot_reach_all() -> None:
    values = table(ALL, clock="wall", speed={"model": "none"}, batch_clients="auto")
    with pytest.raises(
        UsageError, match=r"^clock: algorithm\.realign_who = 'all' .* expected 'simulated', got 'wall'$"
    ):
        from_table(values).check(None)


@pytest.mark.mpi
def test_the_same_on_any_number_of_ranks_and_going_on(world: Any, shared_dir: Path) -> None:
    keys = {**ALL, "anchor_persist": True, "evaluation": "round", "tune_epochs": 1}
    values = table(keys, rounds=4, **FEW)
    together, single = (play(world, values, shared_dir / name, comm) for name, comm in (("n", world.comm), ("1", None)))
    if world.rank == 0:
        same(together, single)
    resume(world, together, 2, world.comm)
    if world.rank == 0:
        same(together, single)
        assert len(states(together)[-1][1]) == CLIENTS


# ---- the overlay


def test_the_overlay_says_what_the_released_code_does() -> None:
    config = load("flic-toy-nf-small", (), ["flic-released"])
    config.check_values()
    config = load("flic-toy-nf-small", (), ["flic-released", "flic-hl-released"])
    config.check(None)
    assert config.algorithm.model_dump()["deviation"] ** 2 == pytest.approx(np.e)


def test_a_test_after_one_more_round_aligns_at_the_end() -> None:
    """Then an embedding is closer to the anchors than where nothing aligns after the local epochs."""
    task = latent_task(SIZES, [5] * 4)
    seen, distances = Visits.for_test(1, np.array([0, 2])), []
    for evaluation in ("tuned", "round"):
        keys = flic(realign=20, evaluation=evaluation, tune_epochs=5, lambda1=0.0, lambda2=0.0, lr=0.05)
        personal = stacked([keys.init_client(task, client) for client in (0, 2)])
        params = keys.model(task, keys.init_server(task), personal, seen)
        own = keys._learner(task, keys.init_server(task), personal, seen)
        distances.append(own.terms.alignment(params, next(task.batches(seen, 0, steps=1))))
    assert (distances[1] < distances[0]).all()
    assert copied(params).keys() == params.keys()
