"""Means corrected for those who did not arrive: toys by hand, unbiased sums, and the same on any number of ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.checkpoints import save
from helpers.toys import Rounds, Toy, W, full_batch, mlp_task, planned, quadratics, same_bits
from hpcfl import store
from hpcfl.algorithms import Algorithm, algorithm_class
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fednova import FedNova
from hpcfl.algorithms.heterofl import HeteroFl
from hpcfl.algorithms.salf import Salf
from hpcfl.algorithms.weighting import Weighting, intervals, with_correction
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.data import ClientData
from hpcfl.data.bundled import loaded
from hpcfl.engine.job import Job
from hpcfl.launch import host
from hpcfl.learning.task import Task
from hpcfl.models.mlp import Mlp
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.drawn import Exponential
from hpcfl.sums.message import Block
from hpcfl.testing import fake_device
from hpcfl.testing.runs import alike, play, resume, same, table

L, LR = 3, 0.5
SIZES = [3, 9, 5, 12]
DEADLINE = Participation(close="deadline")
UNEQUAL = Exponential(kind="dynamic-rate")
LATE = 3  # a depth: nothing of a toy's two layers


class Given(Algorithm):
    """Clients send what is written down: `changes[round][client]`, for both of its layers."""

    name: Literal["given"] = "given"
    changes: tuple[tuple[float, ...], ...] = ()
    rates: tuple[float, ...] = (1.0,) * 9
    by: Literal["samples", "uniform"] = "uniform"
    layerwise: ClassVar[bool] = True

    def mean_weights(self):
        return self.by

    def learning_rate(self, round):
        return self.rates[round]

    def layers(self, task):
        return (("low",), ("high",))

    def layout(self, task):
        one = Block((1,), torch.float64)
        return ({"loss": Block(())}, {"high": one}, {"low": one})

    def init_server(self, task):
        return {name: torch.zeros(1, dtype=torch.float64) for name in ("low", "high")}

    def client(self, task, shared, personal, visits):
        assert not personal
        value = torch.tensor([[self.changes[visits.round][client]] for client in visits.clients], dtype=torch.float64)
        weight = visits.weights(self.by)
        yield {"loss": (value[:, 0], weight)}
        for name, layer in (("high", 2), ("low", 1)):
            count = visits.in_time(layer)
            yield {name: (value[:count], weight[:count])}
        return {}


def rounds_of(method, task, per_chunk=None, by_steps=False, **keys):
    clients = np.arange(task.federation.clients)
    return Rounds(with_correction(method, Weighting(**keys), clients, by_steps), task, per_chunk)


def path(depths, changes, sizes=(1, 1), rates=(1.0,) * 9, by="uniform", **keys):
    """The shared state after each round, ``{name: [rounds]}``, and the rounds as they were played."""
    changes = tuple(tuple(float(each) for each in row) for row in changes)
    rounds = rounds_of(Given(changes=changes, rates=tuple(rates), by=by), mlp_task(list(sizes)), **keys)
    found = []
    for number, depth in enumerate(depths):
        rounds.step(planned(depth, 2, number))
        found.append({name: float(value) for name, value in rounds.state.items()})
    return {name: [each[name] for each in found] for name in ("low", "high")}, rounds


# --- by hand --------------------------------------------------------------------------------------------------

ONE, TWO, BOTH, NOBODY = [1, LATE], [LATE, 1], [1, 1], [LATE, LATE]
ARRIVALS = [ONE, TWO, ONE], [[2, 0], [0, 4], [1, 0]]


def test_fedvarps_three_rounds():
    found, rounds = path(*ARRIVALS, correct="remembered")
    assert found["low"] == found["high"] == [2, 7, 9]
    assert rounds.now.personal[0]["remembered:low"].flatten().tolist() == [1, 4]
    assert rounds.now.extras["remembered:low"].tolist() == [2.5]


def test_mifas_three_rounds():
    found, _ = path(*ARRIVALS, correct="remembered", mean="all")
    assert found["low"] == [1, 4, 6.5]


def test_mifa_remembers_gradients_where_the_step_size_falls():
    found, _ = path([BOTH, ONE], [[0.2, 0.4], [0.3, 0]], rates=[0.2, 0.1], correct="remembered", mean="all")
    np.testing.assert_allclose(found["low"], [0.3, 0.55], rtol=1e-14)


@pytest.mark.parametrize("mean", ["arrived", "all"])
def test_a_round_with_nobody_moves_along_what_is_remembered(mean):
    found, rounds = path([BOTH, NOBODY], [[2, 4], [0, 0]], correct="remembered", mean=mean)
    assert found["low"] == [3, 6]
    assert rounds.now.personal[0]["remembered:low"].flatten().tolist() == [2, 4]


def test_a_layer_that_was_late_keeps_its_memory():
    """Of the second round client 1's last layer arrives: y is (2, 1) of it, (2, 4) of the first layer."""
    found, rounds = path([BOTH, [LATE, 2], [LATE, 1]], [[2, 4], [0, 1], [0, 9]], correct="remembered")
    kept = {name: value.flatten().tolist() for name, value in rounds.now.personal[0].items()}
    assert kept == {"remembered:low": [2, 9], "remembered:high": [2, 9]}
    assert found == {"low": [3, 6, 6 + 5 + 3], "high": [3, 3 - 3 + 3, 3 + 8 + 1.5]}


def test_what_is_remembered_is_weighted_as_the_means_are():
    found, _ = path(*ARRIVALS, sizes=(1, 3), by="samples", correct="remembered")
    assert found["low"] == [2, 2 + 4 + 0.5, 6.5 - 1 + 3.5]


PRESENT = [0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(("cutoff", "weights"), [(0, [1, 3, 2.5]), (2, [2, 1.5, 5 / 3]), (1, [1, 1, 1])])
def test_fedaus_weights(cutoff, weights):
    """Client 0 comes as in the spec, client 1 never: the mean is over both."""
    found, rounds = path(
        [ONE if here else NOBODY for here in PRESENT], [[2, 0]] * 6, correct="estimated", cutoff=cutoff
    )
    moves = np.diff([0, *found["low"]])
    np.testing.assert_allclose(moves[np.flatnonzero(PRESENT)], weights, rtol=1e-14)  # 2 ω / N
    assert not moves[np.flatnonzero(np.logical_not(PRESENT))].any()
    last, total, number = rounds.now.personal[0]["intervals:low"][0].tolist()
    assert (last, total / number) == (5, {0: 2, 2: 1.5, 1: 1}[cutoff])
    assert rounds.now.personal[0]["intervals:low"][1].tolist() == [-1, 0, 0]


SELDOM = [158, 159, 160, 178, 195]
"""When client 0 of ten comes in time first: rounds of the fourth of the training jobs measured in Alibaba's PAI cluster
(cluster-trace-gpu-v2020) with a deadline of .15 s. Clients 5 to 8 reach the last layer alone, as it does else."""


def digit_per_client() -> Task:
    images, labels, *_ = loaded("digits", 0)
    own = [(images[labels == digit][:20].reshape(20, 64) / 16).astype(np.float32) for digit in range(10)]
    held = [ClientData(x, np.full(20, digit), x[:0], labels[:0]) for digit, x in enumerate(own)]
    toy = Toy(10, np.full(10, 20), np.zeros(10, dtype=np.int64), [(64,)] * 10, held)
    return Task(Mlp(hidden=(16,)), toy, 1)


@pytest.mark.parametrize(
    ("keys", "weights"), [({}, [50, 159 / 4, 32, 161 / 6, 179 / 7]), ({"cutoff": 0}, [1, 159, 80, 161 / 3, 44.75])]
)
def test_who_comes_first_after_158_rounds_ends_no_training(keys: dict[str, int], weights: list[float]) -> None:
    task = digit_per_client()
    rounds = rounds_of(Salf(lr=0.2, batch=0, missing="none"), task, correct="estimated", **keys)
    x, y = (torch.cat([full_batch(task, client)[part] for client in range(10)]) for part in (0, 1))
    losses, used = [], []
    for number in [*range(20), *SELDOM, *range(196, 216)]:
        here = number in SELDOM
        if here:
            kept = rounds.now.personal[0]["intervals:fc1.weight"][:1]
            used.append(float(intervals(kept, number, rounds.job.algorithm.weighting.cutoff)[0]))
        rounds.step(planned([1 if here else 2, 1, 1, 1, 1, 2, 2, 2, 2, 1], 2, number))
        outputs = task.forward({name: value[None] for name, value in rounds.state.items()}, x[None], None)[0]
        losses.append(float(F.cross_entropy(outputs, y)))
    np.testing.assert_allclose(used, weights)
    if keys:
        assert max(losses) > 20
    else:
        assert max(losses) < 6
        assert float((outputs.argmax(1) == y).float().mean()) > 0.5


def test_fedaus_weights_of_layers_are_their_own():
    depths = [[2, LATE], [1, LATE], NOBODY, [1, LATE]]
    found, _ = path(depths, [[2, 0]] * 4, correct="estimated")
    np.testing.assert_allclose(np.diff([0, *found["high"]]), [1, 1, 0, 1])  # intervals 1, 1, then 2
    np.testing.assert_allclose(np.diff([0, *found["low"]]), [0, 1, 0, 2])  # an interval of 2, then of 2


def test_who_always_comes_has_weight_1():
    kept = torch.tensor([[-1.0, 0, 0]], dtype=torch.float64)
    for round_ in range(5):
        weight, kept = intervals(kept, round_)
        assert weight.tolist() == [1]


# --- unbiased: the method's own steps are in `test_unbiased` -------------------------------------------------------

LAYERS = Salf(lr=LR, batch=0, missing="none")
WHOLE = {by: FedAvg(lr=LR, batch=0, epochs=0, steps=1, weights=by) for by in ("samples", "uniform")}
PARTLY = [(LAYERS, "uniform"), *((method, by) for by, method in WHOLE.items())]
IDS = ["layers", *WHOLE]


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_steps_over_their_chances_by_hand(per_chunk):
    """½w² from 1, two steps of .1: −.1 and −.09, of chances ½ and ¼; of a second client both are certain."""
    task = quadratics([0.0, 0.0], start=1.0)
    method = FedAvg(lr=0.1, batch=0, epochs=0, steps=2, weights="uniform")
    chances = np.array([[0.5, 0.25], [1.0, 1.0]])
    sent = {}
    for done in (0, 1, 2):
        known = rounds_of(method, task, per_chunk, correct="known", by_steps=True)
        known.now.round = 0
        depth = [2 if done == 0 else 1, 1]
        plan = replace(planned(depth, 1, 0), steps=np.array([done, 2]), step_chances=chances)
        known.step(plan)
        sent[done] = 2 * (float(known.state[W]) - 1.0) + 0.19
    assert sent == pytest.approx({0: 0.0, 1: -0.2, 2: -0.56}, abs=1e-12)
    assert 0.5 * sent[0] + 0.25 * sent[1] + 0.25 * sent[2] == pytest.approx(-0.19, abs=1e-12)
    ways = {
        "each step": [sent[0], sent[1], sent[2]],
        "over its chance": [0.0, -0.2, -0.38],
        "first order": [0.0, -0.1 * 2 / 0.75, -0.19 * 2 / 0.75],
        "fednova": [0.0, -0.2 / 0.5, -0.19 / 0.5],  # T Δ/τ over the chance
    }
    chances = np.array([0.5, 0.25, 0.25])
    exact = {name: float(chances @ way) for name, way in ways.items()}
    assert exact == pytest.approx(
        {"each step": -0.19, "over its chance": -0.145, "first order": -0.58 / 3, "fednova": -0.195}
    )
    spread = {name: float(chances @ np.square(way)) - exact[name] ** 2 for name, way in ways.items()}
    assert (spread["each step"], spread["over its chance"]) == pytest.approx((0.0523, 0.025075))
    drawn = np.random.default_rng(0).choice(3, 100_000, p=chances)
    means = {name: np.choose(drawn, way) for name, way in ways.items()}
    off = {name: abs(each.mean() + 0.19) / (each.std() / 100_000**0.5) for name, each in means.items()}
    assert off["each step"] < 3
    assert off["over its chance"] > 20
    assert off["first order"] > 3
    assert off["fednova"] > 3


@pytest.mark.parametrize("kind", [FedAvg, FedNova])
def test_steps_of_one_chance_are_visits_over_it(kind):
    """Of whole visits; FedNova's τ_eff is that of all."""
    task, chances = mlp_task([3, 9, 7], precision="double"), np.array([0.3, 1.0, 0.6])
    found = []
    for by_steps in (True, False):
        known = rounds_of(kind(lr=LR, batch=3, epochs=1), task, correct="known", by_steps=by_steps)
        plan = replace(planned([1, 1, 1], L, 0), arrival=np.repeat(chances[:, None], L, 1))
        steps = {"steps": np.array([1, 3, 3]), "step_chances": np.repeat(chances[:, None], 3, 1)}
        known.step(replace(plan, **steps) if by_steps else plan)
        found.append(known.state)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-12, rtol=0)


class Halves(Given):
    """Client 0 sends 1, 1; client 1, which holds the first of the two numbers only, sends −1."""

    def layers(self, task):
        return (("w",),)

    def holds(self, task):
        return np.array([0, 1])

    def holders(self, task, clients, round):
        return {"w": torch.tensor([float(len(clients)), float((clients == 0).sum())], dtype=torch.float64)}

    def layout(self, task):
        return ({"loss": Block(())}, {"w": Block((2,), torch.float64, parts=((2,), (1,)))})

    def init_server(self, task):
        return {"w": torch.zeros(2, dtype=torch.float64)}

    def client(self, task, shared, personal, visits):
        sent = [[1.0, 1.0]] if visits.clients[0] == 0 else [[-1.0]]
        yield {"loss": (torch.zeros(1), visits.ones(1))}
        yield {"w": (torch.tensor(sent, dtype=torch.float64), visits.ones(1))}
        return {}


@pytest.mark.parametrize(
    ("correct", "both", "alone", "mean"),
    [("known", [0.5, 2.0], [-0.5, 0.0], [0.0, 1.0]), ("none", [0.0, 1.0], [-1.0, 0.0], [-0.5, 0.5])],
)
def test_chances_of_those_who_hold_a_number(correct, both, alone, mean):
    """Client 0 comes every other time: of the first number the mean is 0, of the second 1."""
    found = []
    for depth in ([1, 1], [2, 1]):
        rounds = rounds_of(Halves(), mlp_task([1, 1]), correct=correct)
        rounds.step(replace(planned(depth, 1, 0), arrival=np.array([[0.5], [1.0]])))
        found.append(rounds.state["w"].tolist())
    assert found == [both, alone]
    assert np.mean(found, axis=0).tolist() == mean


@pytest.mark.parametrize("correct", ["known", "estimated", "remembered"])
def test_parts_that_are_all_of_it_are_corrected_as_fedavg_is_to_the_bit(correct):
    task, keys = mlp_task(SIZES), {"lr": LR, "batch": 4, "weights": "samples"}
    whole = HeteroFl(rates=(1.0,), mask_labels=False, **keys)
    one, other = (rounds_of(method, task, 2, correct=correct) for method in (whole, FedAvg(**keys)))
    for number, depth in enumerate(([1, 4, 1, 1], [4, 1, 4, 1], [1, 1, 1, 4])):
        for rounds in (one, other):
            rounds.step(replace(planned(depth, L, number), arrival=np.full((4, L), 0.7)))
        assert same_bits(one.state, other.state)


@pytest.mark.parametrize("batch", [0, 4])
def test_steps_that_are_certain_count_once_to_the_bit(batch):
    task = mlp_task([3, 9, 7])
    method = FedAvg(lr=LR, batch=batch, epochs=0, steps=3, momentum=0.5)
    known, plain = rounds_of(method, task, correct="known", by_steps=True), Rounds(method, task)
    for number in range(2):
        steps = replace(planned([1, 1, 1], L, number), steps=np.array([1, 3, 2]))
        known.step(replace(steps, step_chances=np.ones((3, 3))))
        plain.step(steps)
    assert same_bits(known.state, plain.state)


CLOSINGS: dict[str, dict[str, Any]] = {
    "layers": {"close": "deadline", "partial": "layers"},
    "deadline": {"close": "deadline", "partial": "discard"},
    "first": {"close": "first", "first": 2, "partial": "discard"},
    "quorum": {"close": "quorum", "quorum": 2, "grace": 0.3},
    "invited": {"close": "deadline", "partial": "discard", "invite": "uniform", "size": 2},
}


@pytest.mark.parametrize("by", ["samples", "uniform"])
@pytest.mark.parametrize("closing", CLOSINGS)
def test_estimated_intervals_make_it_unbiased_in_the_end(closing: str, by: str) -> None:
    """However rounds close and clients are invited, once intervals are known; the plain mean is biased."""
    own, count = np.array([1.0, -2.0, 3.0, 5.0]), 800
    given = Given(changes=(tuple(own.tolist()),) * count, rates=(1.0,) * count, by=by)
    mean = np.average(own, weights=SIZES if by == "samples" else None)
    for correct, unbiased in (("estimated", True), ("none", False)):
        rounds, moves = rounds_of(given, mlp_task(SIZES), correct=correct), []
        for number in range(count):
            before = rounds.state
            rounds.step(rounds.plan(UNEQUAL, Participation(**CLOSINGS[closing]), 2, number))
            moves.append([float(rounds.state[name] - before[name]) for name in ("low", "high")])
        late = np.array(moves[200:])
        error = late.std(0, ddof=1) / np.sqrt(len(late))
        off = np.abs(late.mean(0) - mean) / error
        assert (off < 3).all() if unbiased else (off > 6).all()


@pytest.mark.parametrize("chance", [0.8, 0.3, 0.1])
def test_estimated_weights_times_the_chance_approach_1(chance):
    """Of 4000 clients alike: the first round is biased as the plain sum is, later ones ever less."""
    draws, kept = np.random.default_rng(0), torch.tensor([[-1.0, 0, 0]], dtype=torch.float64).repeat(4000, 1)
    means, errors = [], []
    for round_ in range(400):
        here = torch.from_numpy(draws.random(4000) < chance)
        weight, after = intervals(kept, round_)
        kept = torch.where(here[:, None], after, kept)
        means.append(float((weight * here).mean()))
        errors.append(float((weight * here).std()) / 4000**0.5)
    off = np.abs(np.array(means) - 1)
    assert means[0] == pytest.approx(chance, abs=3 * errors[0])
    assert off[:10].mean() > off[30:60].mean() > off[300:].mean()
    assert abs(np.mean(means[300:]) - 1) < 0.02


def test_known_is_salfs_inverse_probability_to_the_bit():
    task = mlp_task(SIZES)
    one = rounds_of(LAYERS, task, 2, correct="known")
    other = Rounds(Salf(lr=LR, batch=0, rule="inverse-probability"), task, 2)
    for number in range(4):
        plan = one.plan(UNEQUAL, DEADLINE, 3, number)
        assert (one.step(plan).invited, other.step(plan).invited) == (4, 4)
        assert same_bits(one.state, other.state)


@pytest.mark.parametrize("keys", [{"correct": "known"}, {"correct": "estimated"}, {"correct": "remembered"}])
@pytest.mark.parametrize(("method", "by"), PARTLY, ids=IDS)
def test_with_everybody_there_it_is_the_plain_mean(method, by, keys):
    task = mlp_task(SIZES)
    plain, corrected = Rounds(method, task), rounds_of(method, task, 2, **keys)
    for number in range(5):
        plain.step(planned([1] * 4, L, number))
        corrected.step(planned([1] * 4, L, number))
        for name, value in plain.state.items():
            torch.testing.assert_close(corrected.state[name], value, atol=1e-6, rtol=0)


# --- whole runs ---------------------------------------------------------------------------------------------------

CORRECTIONS = {
    "known": {"correct": "known"},
    "estimated": {"correct": "estimated", "cutoff": 3},
    "remembered": {"correct": "remembered"},
}
KEPT = {"momentum": 0.5, "persist_optimizer": True}
METHODS = {
    "layers": {"name": "salf", "missing": "none", "decay": 0.1, **KEPT},
    "whole": {"name": "fedavg", "epochs": 0, "steps": 2, **KEPT},
    "personal": {"name": "fedrep", "head_epochs": 1, "newcomer": "averaged"},
}


def values(correct: str, method: str, **more: Any) -> dict[str, Any]:
    """A small run of which most visits are late: layers count one by one, or nothing does."""
    participation = {"close": "deadline", **({} if method == "layers" else {"partial": "discard"})}
    keys = {"algorithm": METHODS[method], "participation": participation, "weighting": CORRECTIONS[correct]}
    return table("salf", "mlp", True, **{**keys, "speed": {"model": "uniform-depth"}, **more})


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("correct", "method"),
    [("known", "whole"), ("estimated", "layers"), ("remembered", "layers"), ("remembered", "personal")],
)
def test_one_rank_equals_n(world: Any, shared_dir: Path, correct: str, method: str) -> None:
    run = values(correct, method)
    same(play(world, run, shared_dir / "ranks", world.comm), play(world, run, shared_dir / "one", None))


@pytest.mark.parametrize(("correct", "method"), [("estimated", "layers"), ("remembered", "personal")])
def test_resumed_equals_uninterrupted(solo: Any, tmp_path: Path, correct: str, method: str) -> None:
    whole = play(solo, values(correct, method), tmp_path / "whole", None)
    half = shutil.copytree(whole, tmp_path / "half")
    resume(solo, half, 2, None)
    same(half, whole)
    states = [store.load(store.latest(run)) for run in (half, whole)]
    for name, value in states[0].extras.items():
        np.testing.assert_array_equal(value, states[1].extras[name])
    for (_, one), (_, other) in zip(*(state.personal for state in states)):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


def forgotten(run: Path, client: int) -> None:
    """Let the checkpoint of round 2 have a client's state of before its first visit, as where its rank was late."""
    saved = store.load(run / "checkpoints" / "round-000002")
    for ids, state in saved.personal:
        for value in state.values():
            value[ids == client] = 0
    more = {"memory": saved.memory, "stale": {client: 0}, "extras": saved.extras}
    save(run, 2, saved.shared, saved.personal, saved.clock, 5, **more)


def test_the_mean_is_that_of_what_clients_remember_and_is_formed_anew(solo: Any, tmp_path: Path) -> None:
    """Samples are unequal; of the second run a client's memory is lost when it goes on."""
    unequal = {"name": "digits", "sizes": "log-normal", "spread": 0.5}
    run = play(solo, values("remembered", "whole", data=unequal, rounds=3), tmp_path / "run", None)
    again = shutil.copytree(run, tmp_path / "again")
    sizes = Job.of(from_table(values("remembered", "whole", data=unequal)), None, 1).task.federation.train_sizes
    assert len(set(sizes.tolist())) > 1
    forgotten(again, 3)
    resume(solo, again, 2, None)
    for folder in (run, again):
        saved = store.load(store.latest(folder))
        own = store.load_personal(store.latest(folder), range(7))
        for name, mean in saved.extras.items():
            if name.startswith("remembered:"):
                wanted = np.average([own[client][name] for client in range(7)], axis=0, weights=sizes)
                np.testing.assert_allclose(mean, wanted, atol=1e-7)
                assert wanted.any()


def test_a_correction_changes_what_is_learnt_and_not_the_loss_of_the_first_round(solo: Any, tmp_path: Path) -> None:
    plain = {**values("known", "whole"), "weighting": {"correct": "none"}}
    runs = [
        play(solo, run, tmp_path / name, None) for name, run in (("none", plain), ("known", values("known", "whole")))
    ]
    losses = [store.open_run(run)["loss"].values for run in runs]
    assert losses[0][0] == losses[1][0]
    assert (losses[0][1:] != losses[1][1:]).all()


@pytest.mark.parametrize("correct", CORRECTIONS)
def test_buffers_of_a_module_keep_their_plain_means(correct: str) -> None:
    """Everybody is there: running means are as without a correction, whatever stands around what."""
    model = {"name": "helpers.modules:Normed"}
    found = []
    for weighting in ({"correct": "none"}, CORRECTIONS[correct]):
        run = {**values(correct, "whole", speed={"model": "none"}, weighting=weighting), "model": model}
        rounds = Rounds((job := Job.of(from_table(run), None, 1)).algorithm, job.task)
        for number in range(2):
            rounds.step(planned([1] * 7, len(rounds.layers), number))
        found.append(rounds.state)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-5)


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(**tables: Any) -> str:
    with pytest.raises(UsageError) as error:
        from_table({**values("known", "whole"), **tables}).check_values()
    return str(error.value)


def test_keys_that_would_do_nothing_are_refused() -> None:
    assert refused(weighting={"correct": "known", "cutoff": 3}) == (
        "weighting.cutoff = 3 has no meaning with weighting.correct = 'known': remove it, or set weighting.correct = "
        "'estimated'"
    )
    assert "weighting.mean = 'all' has no meaning" in refused(weighting={"mean": "all"})
    assert "weighting.cutoff" in refused(weighting={"correct": "estimated", "cutoff": -1})


@pytest.mark.parametrize("more", [{"rule": "paper"}, {"rule": "released"}, {"rule": "inverse-probability"}])
@pytest.mark.parametrize("correct", CORRECTIONS)
def test_salfs_own_rules_are_refused(correct: str, more: dict[str, Any]) -> None:
    line = refused(algorithm={"name": "salf", **more}, weighting=CORRECTIONS[correct])
    assert line.startswith("weighting.correct: algorithm.")
    assert line.endswith("expected weighting.correct = 'none', or algorithm.rule = 'paper' with missing = 'none'")


NO_MEANS = ["local", "fedhenn", "flic", "fedlrgd", "linear_fedrep", "feddyn", "focus"]


@pytest.mark.parametrize("name", NO_MEANS)
@pytest.mark.parametrize("correct", CORRECTIONS)
def test_methods_that_do_more_than_means_are_refused(correct: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"algorithm.name = '{name}' does more with what clients send than to take"):
        Weighting(**CORRECTIONS[correct]).check(algorithm_class(name)(name=name), DEADLINE, True)


def test_intervals_over_stages_of_other_chances_are_refused() -> None:
    first = {"close": "first", "first": 3}
    keys = {"participation": first, "speed": {"model": "exponential"}, "doubling": {"when": "plateau"}}
    line = refused(weighting={"correct": "estimated"}, **keys)
    assert line.startswith("weighting.correct = 'estimated': with doubling.when = 'plateau' chances to arrive change")


def test_submodels_by_labels_or_that_move_are_refused() -> None:
    for name in ("heterofl", "fedrolex"):
        line = refused(algorithm={"name": name}, weighting={"correct": "estimated"})
        assert line.startswith("weighting.correct: algorithm.mask_labels = true: which rows of the last layer")
    moving = {"name": "fedrolex", "mask_labels": False}
    line = refused(algorithm=moving, weighting={"correct": "remembered"})
    assert "other parts of the model in each round; did you mean weighting.correct = 'estimated'?" in line


def test_chances_that_nobody_knows_are_refused() -> None:
    first = {"close": "first", "first": 3}
    soon = {"model": "exponential"}
    assert refused(participation=first, speed=soon).startswith(
        "weighting.correct = 'known' needs the chance to arrive, which is not"
    )
    real = {"clock": "wall", "batch_clients": "auto", "speed": {"model": "none"}}
    assert "real time with speed.model = 'none'" in refused(**real)
    from_table({**values("estimated", "whole"), "participation": first, "speed": soon}).check_values()
    from_table({**values("remembered", "whole"), **real}).check_values()


@pytest.mark.parametrize(
    ("kind", "correct", "count"), [("fixed", "known", 1), ("dynamic", "known", 0), ("fixed", "none", 0)]
)
def test_clients_that_can_never_arrive_are_told(kind: str, correct: str, count: int) -> None:
    run = values("known", "whole", speed={"model": "exponential", "kind": kind}, weighting={"correct": correct})
    job = Job.of(from_table(run), None, 1)
    never = int((job.planner.plan(job.planner.attempt(0)).arrival == 0).any(1).sum())
    assert (never > 0, len(job.warnings)) == (kind == "fixed", count)
    for text in job.warnings.values():
        assert f"'known': {never} of 7 clients have no chance to arrive" in text


@pytest.mark.skipif(not fake_device.available(), reason="this torch has no back ends in Python")
def test_steps_over_their_chances_on_a_device(solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where visits of several chunks are computed together, each has its own chances."""
    values = table(
        *("fedavg", "mlp", True),
        algorithm={"name": "fedavg", "epochs": 0, "steps": 4, "batch": 8},
        participation={"close": "deadline", "deadline": 1.0, "partial": "steps"},
        speed={"model": "gamma", "mean": 2.5, "within": 1.0},
        weighting={"correct": "known"},
        clients=8,
        batch_clients=3,
    )
    values["model"] = {**values["model"], "dropout": 0.0}
    run = play(solo, values, tmp_path / "run", None)
    monkeypatch.setattr(host, "chosen", lambda wanted, key, number: fake_device.registered())
    alike(play(solo, values | {"ranks_per_device": 2}, tmp_path / "there", None), run)
