"""Federated oracle complexity: who has computed how many gradients, what was sent, and what both cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import mlp_task, visits_of
from hpcfl import store
from hpcfl.algorithms import algorithms
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import StepKey
from hpcfl.commands import list as catalogue
from hpcfl.commands.check import report
from hpcfl.commands.show import summary
from hpcfl.config import Config, from_table
from hpcfl.data import Federation
from hpcfl.engine import loop as engine
from hpcfl.engine.job import Job
from hpcfl.engine.record import Record, Recorder
from hpcfl.engine.simulated import Simulated
from hpcfl.learning.batches import Batch
from hpcfl.learning.derivatives import hessian_vector_product, per_sample_gradients
from hpcfl.learning.task import SERVER, Task
from hpcfl.mpi.transport import Transport
from hpcfl.schedule.oracle import Oracle, Spent
from hpcfl.schedule.plan import Plan
from hpcfl.sums.frames import FrameFormat
from hpcfl.sums.guard import Watch
from hpcfl.sums.message import Block, Sums
from hpcfl.testing.runs import play, table
from hpcfl.testing.test_algorithms import values

UNEQUAL = {"name": "digits", "train_samples": 280, "sizes": "uniform", "spread": 0.9}
COSTS = ("gradients", "server_gradients", "vectors", "epochs_a", "epochs_b", "epochs_c", "oracle", "running_time")
MLP = 65 * 16 + 17 * 10  # p of digits with one hidden layer of 16
PHI = 100.0
RECORDED = {"record": True, "phi": PHI}


class Notes(Recorder):
    """A recorder that keeps the costs in memory, and what tells who counted."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: list[dict[str, Any]] = []

    def row(self, plan: Plan, record: Record, sums: Sums, clock: Mapping[str, float]) -> None:
        self.rows.append(self.plan_columns(plan) | self.oracle_columns(plan, record, sums))


def run(values: dict[str, Any]) -> tuple[dict[str, Any], Federation]:
    """Return what a run of one rank records, ``{column: [rounds, …]}``, and who holds which samples."""
    config = from_table(values)
    config.check(None)
    job = Job.of(config, None, 1)
    notes, rounds = Notes(job), Simulated(job, Transport(), 0)
    nothing = SimpleNamespace(requested=str, look=dict, save=lambda now, scores: None)  # no signals, no checkpoints
    engine.run(job, rounds, notes, job.begin(0), nothing, nothing)  # type: ignore[arg-type]
    columns = {name: np.array([row[name] for row in notes.rows]) for name in notes.rows[0]}
    return columns, job.task.federation


def small(algorithm: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Two rounds of 7 clients of unequal sizes in chunks of 2, all in time, tested after both."""
    plain: dict[str, Any] = {"rounds": 2, "speed": {"model": "none"}, "participation": {"close": "all"}}
    plain |= {"data": UNEQUAL, "oracle": RECORDED}
    return table("salf", "mlp", True, algorithm=algorithm, **{**plain, **more})


# what it costs


def test_two_rounds_by_hand() -> None:
    one = Spent(gradients=5, server_gradients=0, active=4, numbers=40, parameters=10)  # a vector from each of 4
    assert (one.vectors, one.epochs) == (4.0, (1, 0, 0))
    assert one.complexity(100) == 5 + 100 * 4
    assert one.running_time(100) == 2 * 5 + log(4) + 100 * 4
    two = Spent(gradients=5, server_gradients=7, active=4, numbers=100, parameters=10)  # 2.5 from each, and the server
    assert (two.vectors, two.epochs) == (10.0, (1, 1, 2))
    assert two.complexity(100) == 5 + 7 + 100 * 10
    assert two.running_time(100) == 2 * 5 + log(4) + 2 * 7 + 100 * 10
    assert one.complexity(0) + two.complexity(0) == 17  # without communication: all oracle calls


@pytest.mark.parametrize(
    ("gradients", "server", "active", "numbers", "epochs"),
    [
        (0, 0, 0, 0, (0, 0, 0)),  # nobody
        (0, 9, 0, 0, (0, 1, 0)),  # the server alone
        (3, 0, 2, 1, (1, 0, 0)),  # less than a vector
        (3, 0, 2, 20, (1, 0, 0)),
        (3, 0, 2, 21, (1, 0, 1)),  # one more number is one more epoch
        (0, 0, 2, 20, (0, 0, 1)),  # sending only
        (0, 0, 2, 41, (0, 0, 3)),
    ],
)
def test_epochs_of_each_type(gradients: int, server: int, active: int, numbers: int, epochs: tuple[int, ...]) -> None:
    spent = Spent(gradients, server, active, numbers, parameters=10)
    assert spent.epochs == epochs
    computing = 2 * gradients + (log(active) if gradients else 0) + 2 * server
    assert spent.running_time(7) == pytest.approx(computing + 7 * numbers / 10, rel=1e-15)


def test_fedlrgd_and_fedave_cost_what_the_paper_says() -> None:
    r, s, m, p, steps, phi = 3, 4, 5, 11, 20, 50.0
    epochs = [Spent(0, r**2, 0, 0, p), Spent(r * s, 0, m, m * p, p)]
    epochs += [Spent(0, 0, m, m * p, p)] * (r - 1) + [Spent(0, r * steps, 0, 0, p)]
    assert sum(epoch.complexity(phi) for epoch in epochs) == r**2 + r * s + r * steps + phi * m * r
    assert np.sum([epoch.epochs for epoch in epochs], axis=0).tolist() == [1, 2, r - 1]
    together = Spent(r * s, r**2 + r * steps, m, m * r * p, p)  # in one round
    assert together.complexity(phi) == r**2 + r * s + r * steps + phi * m * r
    assert together.epochs == (1, 1, r - 1)
    # the last epoch in several rounds
    in_rounds = [Spent(0, r * steps // 4, 0, 0, p, continued) for continued in (False, True, True, True)]
    assert sum(part.complexity(phi) for part in in_rounds) == r * steps
    assert np.sum([part.epochs for part in in_rounds], axis=0).tolist() == [0, 1, 0]
    b, rounds = 8, 6
    assert sum(Spent(b, 0, m, m * p, p).complexity(phi) for _ in range(rounds)) == rounds * (b + phi * m)


# who computes how much, algorithm by algorithm: the gradients of one visit in rounds 0 and 1, of a client that holds n
# samples of h classes; the numbers that each visit sends, and p. Visits of n samples take ceil(n / batch) steps a pass.

NARROW = sum(65 * units + 10 * (units + 1) for units in (16, 8, 8, 4, 2, 2, 1)) / 7  # rates of 1, 1/2, … 1/16
HAND: dict[str, tuple[Callable[[int, int], tuple[int, int]], float | tuple[int, int], int]] = {
    # ten steps of 10 samples; of two fragments the first layer's matrix, and the rest
    "decoupled_diloco": (lambda n, h: (100, 100), (64 * 16, MLP - 64 * 16), MLP),
    "ditto": (lambda n, h: (2 * n, 2 * n), MLP, MLP),  # of both models
    "fedavg": (lambda n, h: (n, n), MLP, MLP),
    "feddyn": (lambda n, h: (n, n), MLP, MLP),
    # in round 1, 12 common samples in each step of 10; sent are their kernel, and its round
    "fedhenn": (lambda n, h: (n, n + ceil(n / 10) * 12), 12 * 13 // 2 + 1, MLP),
    "fednova": (lambda n, h: (n, n), MLP + 1, MLP),  # and its number of steps
    "fedprox": (lambda n, h: (n, n), MLP, MLP),  # the proximal term takes no sample
    "fedrolex": (lambda n, h: (n, n), MLP, MLP),  # at its place in the whole model
    "fedrep": (lambda n, h: (2 * n + n, 2 * n + n), 65 * 16, MLP),  # the head's two passes, one of the representation
    # once the alignment; then φ, β and α, each n, the latter two with 4 draws of h anchors in each step of 20; at last
    # the anchors, in one step by n samples and 4 draws of each. Sent are α and 6 anchors of 4 + 16 numbers
    "flic": (
        lambda n, h: (n + 3 * n + 2 * ceil(n / 20) * 4 * h + n + 4 * h, 3 * n + 2 * ceil(n / 20) * 4 * h + n + 4 * h),
        30 + 6 * 20,
        6 * 8 + 9 * 4 + 30 + 42,
    ),
    "focus": (lambda n, h: (3 * min(n, 128), 3 * min(n, 128)), MLP, MLP),
    "heterofl": (lambda n, h: (n, n), NARROW, MLP),
    "hf_maml": (lambda n, h: (10 + 10 + 2 * 10, 10 + 10 + 2 * 10), MLP, MLP),  # the third batch by its Hessian
    "lg_fedavg": (lambda n, h: (n, n), MLP, MLP),  # both layers are shared
    # a matrix of moments instead of B; then one gradient by 10 samples, the head being solved for
    "linear_fedrep": (lambda n, h: (0, 10), (20 * 20, 2 * 20), 42),
    "local": (lambda n, h: (n, n), 1, MLP),  # the loss
    "pfedme": (lambda n, h: (5 * n, 5 * n), MLP, MLP),  # five steps on each batch
    "salf": (lambda n, h: (16, 16), MLP, MLP),
    "scaffold": (lambda n, h: (n, n), 2 * MLP, MLP),  # and what its control variate has changed by
}
ARRIVING: dict[str, tuple[dict[str, Any], Callable[[int], int]]] = {  # the gradients of one visit of n samples
    "fedasync": ({}, lambda n: n),
    "ringleader": ({"dispatch": "reporter"}, lambda n: 10),
    "ringmaster": ({"dispatch": "reporter"}, lambda n: 10),
}
ELSEWHERE = {"fedlrgd", *ARRIVING}  # tests/algorithms/test_fedlrgd.py: the server computes too


def test_every_algorithm_is_counted_by_hand() -> None:
    assert HAND.keys() | ELSEWHERE == set(algorithms())


@pytest.mark.parametrize("name", ARRIVING)
def test_rounds_of_one_arrival_are_counted_by_hand(name: str) -> None:
    """All visits take equally long, so that clients report in the order of their ids."""
    rules, gradients = ARRIVING[name]
    arrivals = {"participation": {"close": "arrivals", "buffer": 1, **rules}}
    data, federation = run(small({"name": name, "batch": 10}, **arrivals))
    by_hand = np.array([gradients(size) for size in federation.train_sizes[:2].tolist()])
    np.testing.assert_array_equal(data["gradients"], by_hand)
    np.testing.assert_array_equal(data["vectors"], 1)
    np.testing.assert_array_equal(data["oracle"], by_hand + PHI)


@pytest.mark.parametrize("name", sorted(set(algorithms()) - ARRIVING.keys()))
def test_every_algorithm_is_counted_batched_or_not(name: str) -> None:
    own = {"rounds": 2, "speed": {"model": "none"}, "participation": {"close": "all"}, "oracle": RECORDED}
    found = []
    for batched in (True, False):
        config = values(name, batched) | own
        if config["data"]["name"] == "digits":
            config["data"] = UNEQUAL
        found.append(run(config))
    (data, federation), (single, _) = found
    for column in COSTS:
        np.testing.assert_array_equal(data[column], single[column], err_msg=column)
    if name not in HAND:
        return
    gradients, sent, size = HAND[name]
    by_hand, numbers = most(federation, gradients), np.broadcast_to(sent, 2)
    np.testing.assert_array_equal(data["gradients"], by_hand)
    np.testing.assert_array_equal(data["server_gradients"], 0)
    np.testing.assert_array_equal(data["vectors"], 7 * numbers / size)
    np.testing.assert_allclose(data["oracle"], by_hand + PHI * 7 * numbers / size, rtol=1e-15)
    np.testing.assert_array_equal(data["epochs_a"], by_hand > 0)
    np.testing.assert_array_equal(data["epochs_b"], 0)
    np.testing.assert_array_equal(data["epochs_c"], np.ceil(numbers / size) - (by_hand > 0))
    seconds = np.where(by_hand > 0, 2 * by_hand + log(7), 0.0) + PHI * 7 * numbers / size
    np.testing.assert_allclose(data["running_time"], seconds, rtol=1e-15)


def most(federation: Federation, gradients: Callable[[int, int], tuple[int, int]]) -> Any:
    """Return the most gradients of a visit in rounds 0 and 1, ``[2]``."""
    if federation.shapes[0] == (20,):  # drawn anew in each round
        return np.array(gradients(0, 0))
    labels = [federation.client(client).train_labels for client in range(federation.clients)]
    return np.max([gradients(len(y), len(np.unique(y))) for y in labels], 0)


def flic(n: int, h: int, passes: int = 2, draws: int = 4) -> int:
    """Return what φ takes in a pass, and β and α in so many passes with J draws of h anchors in each step of 20."""
    return n + passes * (n + ceil(n / 20) * draws * h)


FIXED = {"covariances": "fixed", "average": "active", "iterations": 100}
FLIC: dict[str, tuple[dict[str, Any], Callable[[int, int], int]]] = {  # the last term is the anchors' own
    "one pass": ({}, lambda n, h: flic(n, h) + n + 4 * h),
    "two of φ and β": ({"epochs": 2}, lambda n, h: n + flic(n, h, passes=3) + n + 4 * h),
    "no draws": ({"lambda2": 0.0, "draws": 0}, lambda n, h: flic(n, h, draws=0) + n),
    "J is the batch": ({"draws": 0}, lambda n, h: flic(n, h, draws=20) + n + 20 * h),
    "all is α": ({"inside": "fedavg-ft"}, lambda n, h: flic(n, h, passes=1) + n + 4 * h),
    "φ and β by one gradient": ({"local_step": "joint"}, lambda n, h: flic(n, h) - n + n + 4 * h),
    "α has the last pass": ({"epochs": 2, "shared_epoch": "last"}, lambda n, h: flic(n, h) + n + 4 * h),
    "α later": ({"shared_from": 1}, lambda n, h: flic(n, h, passes=1) + n + 4 * h),
    "alignment": ({"realign": 2}, lambda n, h: 2 * n + flic(n, h) + n + 4 * h),
    "three steps of the anchors": ({"anchor_steps": 3}, lambda n, h: flic(n, h) + 3 * (n + 4 * h)),
    "two after each batch": (
        {"anchor_every": "batch", "anchor_steps": 2},
        lambda n, h: flic(n, h) + 2 * (2 * n + 2 * ceil(n / 20) * 4 * h),
    ),
    "the means of all": ({"anchor_loss": "means", **FIXED}, lambda n, h: flic(n, h) + n + 6),
    "no anchors move": ({"lambda1": 0.0, "lambda2": 0.0, "draws": 0, **FIXED}, lambda n, h: flic(n, h, draws=0)),
    "a distance to samples": ({"distance": "samples"}, lambda n, h: flic(n, h) + n + 4 * h),
    "a test": ({"evaluation": "tuned", "tune_epochs": 3}, lambda n, h: flic(n, h) + n + 4 * h),
}


@pytest.mark.parametrize("keys", FLIC)
def test_samples_of_anchors_count_where_they_are_passed(keys: str) -> None:
    more, gradients = FLIC[keys]
    data, federation = run(few_anchors(1, more))
    assert data["gradients"].tolist() == most(federation, lambda n, h: (gradients(n, h), 0))[:1].tolist()


def test_who_aligns_between_rounds_does_so_in_the_next() -> None:
    data, federation = run(few_anchors(2, {"realign": 2, "realign_who": "all"}))
    by_hand = most(federation, lambda n, h: (flic(n, h) + n + 4 * h, 2 * n + flic(n, h) + n + 4 * h))
    np.testing.assert_array_equal(data["gradients"], by_hand)


def few_anchors(rounds: int, more: Mapping[str, Any]) -> dict[str, Any]:
    config = values("flic") | {"rounds": rounds, "speed": {"model": "none"}, "oracle": RECORDED}
    config["data"] = config["data"] | {"samples_per_class": 20}
    config["algorithm"] = config["algorithm"] | {"pretrain": 0} | more
    return config


def test_anchors_of_targets_are_drawn_too() -> None:
    """J = 3 samples in each of 2 steps of φ and β (n = 12, one pass), and in the step of the anchors."""
    config = values("flic") | {"rounds": 1, "speed": {"model": "none"}, "oracle": RECORDED}
    config["data"] = {"name": "unit_cube", "dimension": 3, "labels": 1, "samples": 12, "test_samples": 0}
    config["algorithm"] = {"name": "flic", "epochs": 1, "batch": 6, "draws": 3, "lambda1": 0.1, "lambda2": 0.1}
    config["model"] = config["model"] | {"hidden": []}
    data, _ = run(config)
    np.testing.assert_array_equal(data["gradients"], 12 + (12 + 2 * 3) + (12 + 3))


WORK: dict[str, tuple[dict[str, Any], Callable[[int], int]]] = {
    "epochs": ({"name": "fedavg", "epochs": 3, "batch": 32}, lambda n: 3 * n),
    "steps": ({"name": "fedavg", "epochs": 0, "steps": 5, "batch": 4}, lambda n: 20),
    "one sample": ({"name": "fedavg", "epochs": 0, "steps": 6, "batch": 1, "decay": 6.0}, lambda n: 6),
    "all at once": ({"name": "fedavg", "epochs": 2, "batch": 0}, lambda n: 2 * n),
    "fine-tuning is no part": ({"name": "fedavg", "evaluation": "fine-tune", "tune_epochs": 2}, lambda n: n),
    "nor is a head's": ({"name": "fedrep", "head_epochs": 1, "evaluation": "new-client"}, lambda n: 2 * n),
    "turns": ({"name": "fedrep", "epochs": 2, "head_epochs": 1, "blocks": 2}, lambda n: 6 * n),
    "differences": ({"name": "hf_maml", "steps": 2, "batch": 3, "hessian": "difference"}, lambda n: 24),
    "products": ({"name": "hf_maml", "steps": 2, "batch": 3, "hessian": "exact"}, lambda n: 24),
    "local, before a test": ({"name": "local", "epochs": 2, "evaluation": "tuned", "tune_epochs": 3}, lambda n: 2 * n),
    "no alignment": ({"name": "fedhenn", "eta": 0.0, "alignment": 9}, lambda n: n),
    "salf, all samples": ({"name": "salf", "batch": 0}, lambda n: n),
}


@pytest.mark.parametrize("work", WORK)
def test_gradients_are_the_local_work(work: str) -> None:
    algorithm, gradients = WORK[work]
    data, federation = run(small(algorithm, evaluate={"every": 1}))
    sizes = federation.train_sizes
    assert sizes.min() < sizes.max()
    np.testing.assert_array_equal(data["gradients"], gradients(sizes.max()))


def test_the_maximum_is_over_those_who_counted() -> None:
    three = {"close": "first", "first": 3, "invite": "uniform", "size": 5}
    speed = {"model": "exponential"}
    config = small({"name": "fedavg", "epochs": 2}, rounds=6, participation=three, speed=speed)
    data, federation = run(config)
    wanted = 2 * (data["arrived"] * federation.train_sizes).max(1)
    np.testing.assert_array_equal(data["gradients"], wanted)
    assert len(set(wanted.tolist())) > 1
    np.testing.assert_array_equal(data["vectors"], 3.0)
    np.testing.assert_array_equal(data["oracle"], wanted + 3 * PHI)
    np.testing.assert_allclose(data["running_time"], 2 * wanted + log(3) + 3 * PHI)


def test_visits_that_come_half_way_send_part_of_a_vector() -> None:
    config = small(
        {"name": "salf", "batch": 8},
        speed={"model": "uniform-depth", "stragglers": 1.0},
        oracle={"record": True, "phi": 0.5},
    )
    data, _ = run({**config, "participation": {"close": "deadline"}})
    depth = data["depth"]
    numbers = (depth <= 1).sum(1) * 65 * 16 + (depth <= 2).sum(1) * 17 * 10
    np.testing.assert_array_equal(data["vectors"], numbers / MLP)
    assert ((depth == 2).any(1)).all()
    np.testing.assert_array_equal(data["oracle"], 8 + 0.5 * numbers / MLP)
    np.testing.assert_array_equal(data["epochs_a"], 1)
    np.testing.assert_array_equal(data["epochs_c"], 0)


@pytest.mark.parametrize("keys", [{}, {"newcomer": "averaged"}, {"evaluation": "fine-tune"}])
def test_personal_layers_cost_where_they_are_sent_to_be_averaged(keys: dict[str, str]) -> None:
    data, federation = run(small({"name": "fedrep", "head_epochs": 2, **keys}))
    np.testing.assert_array_equal(data["vectors"], 7.0 if keys else 7 * 65 * 16 / MLP)
    np.testing.assert_array_equal(data["gradients"], 3 * federation.train_sizes.max())


def test_a_method_that_sends_several_vectors_sends_in_several_epochs() -> None:
    data, _ = run(small({"name": "fedhenn", "alignment": 80}))
    numbers = 80 * 81 // 2 + 1  # 2.68 times the model
    np.testing.assert_array_equal(data["vectors"], 7 * numbers / MLP)
    np.testing.assert_array_equal(data["epochs_a"], 1)
    np.testing.assert_array_equal(data["epochs_c"], 2)


def test_where_nobody_counts_or_is_invited_nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"speed": {"model": "exponential", "rate": 1e-6}, "participation": {"close": "deadline"}}
    monkeypatch.setattr(Watch, "ended", lambda self: "")  # such a run ends as diverged
    void, _ = run(small({"name": "fedavg"}, **late))
    monkeypatch.setattr(FedAvg, "invites", lambda self, number: number == 0)
    alone, _ = run(small({"name": "fedavg"}))
    for column in COSTS:
        np.testing.assert_array_equal(void[column], 0, err_msg=column)
        assert alone[column][1] == 0
    assert alone["oracle"][0] > 7 * PHI


def test_what_the_server_computes_is_an_epoch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    step = FedAvg.server

    def server(self: FedAvg, task: Task, shared: Any, sums: Any) -> Any:
        task.oracle_calls[SERVER] += 11
        return step(self, task, shared, sums)

    monkeypatch.setattr(FedAvg, "server", server)
    monkeypatch.setattr(FedAvg, "metrics", lambda self, task, shared: task.oracle_calls.put(SERVER, 1) or {})
    data, _ = run(small({"name": "fedavg", "epochs": 0, "steps": 1, "batch": 2}))
    np.testing.assert_array_equal(data["gradients"], 2)
    np.testing.assert_array_equal(data["server_gradients"], 11)
    np.testing.assert_array_equal(data["epochs_b"], 1)
    np.testing.assert_array_equal(data["oracle"], 13 + 7 * PHI)
    np.testing.assert_allclose(data["running_time"], 4 + log(7) + 22 + 7 * PHI)


# where they are counted


def counted(task: Task) -> dict[int, int]:
    clients = [*range(task.federation.clients), SERVER]
    found = {client: count for client, count in zip(clients, task.oracle_calls.tolist()) if count}
    task.oracle_calls[:] = 0
    return found


def test_padding_is_no_sample() -> None:
    task = mlp_task([3, 9, 5])
    visits = visits_of(task, [0, 1, 2])
    params = task.replicate(task.initial(), visits)
    for batch in task.batches(visits, 4, epochs=2).padded():
        task.gradients(params, batch)
        assert batch.sample_counts() == Batch(batch.x, batch.y, batch.valid, batch.key).sample_counts()  # by the mask
    assert counted(task) == {0: 6, 1: 18, 2: 10}
    assert counted(task) == {}


def test_each_way_to_a_gradient_counts() -> None:
    task = mlp_task([3, 9, 5])
    visits = visits_of(task, [1, 2, 0])
    params = task.replicate(task.initial(), visits)
    batch = next(task.batches(visits, 4, steps=1))
    task.gradients(params, batch, ["fc3.bias"])  # by a part of the parameters
    assert counted(task) == {1: 4, 2: 4, 0: 3}
    list(task.backprop(params, batch, [0, 1, 2]))  # the last client does not even begin
    assert counted(task) == {1: 4, 2: 4}
    list(task.backprop(params, batch, [0, 0, 0]))
    assert counted(task) == {}
    hessian_vector_product(task, params, batch, params)
    assert counted(task) == {1: 8, 2: 8, 0: 6}


def test_sample_by_sample_and_at_the_server() -> None:
    task = mlp_task([3, 9, 5])
    own = next(task.batches(visits_of(task, [1]), 6, steps=1))
    per_sample_gradients(task, task.initial(), own)
    held = Batch(own.x, own.y, None, StepKey(0, 0, [SERVER], 0))
    per_sample_gradients(task, task.initial(), held)
    task.gradients({name: value[None] for name, value in task.initial().items()}, held)
    assert counted(task) == {1: 6, SERVER: 12}


def test_the_task_above_fixed_layers_shares_the_count() -> None:
    task = mlp_task([4, 6])
    visits = visits_of(task, [0, 1])
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    upper = task.freeze_below(params, visits, ["fc3.weight"])
    assert upper is not task
    for batch in upper.batches(visits, 4, epochs=1).padded():
        upper.gradients(params, batch, ["fc3.weight"])
    assert counted(task) == {0: 4, 1: 6}
    assert counted(upper) == {}


def test_the_largest_model_gives_p() -> None:
    task = mlp_task([3, 4], hidden=(4, 3))
    assert task.parameter_count == 6 * 4 + 5 * 3 + 4 * 3


# in real time


def test_a_visit_signs_with_its_gradients_to_the_last_one() -> None:
    group = FrameFormat({"a": Block((3,))}, 2)
    frame = group.zeros()
    assert frame[0].dtype == torch.float32
    odd = 2**24 + 1  # float32 does not have it
    group.sign(frame, 1, 0.5, odd)
    group.weigh(frame, 1, "a", 3.0)
    assert [group.gradients(frame, local_rank) for local_rank in (0, 1)] == [0, odd]
    assert group.weights(frame, "a").tolist() == [0.0, 3.0]


@pytest.mark.mpi
def test_costs_are_the_same_on_all_ranks_and_in_real_time(world: Any, shared_dir: Path) -> None:
    config = small({"name": "fedhenn", "alignment": 9}, batch_clients=False, threads=1)
    one = play(world, config, shared_dir / "one", None)
    runs = [play(world, config, shared_dir / "ranks", world.comm)]
    if world.size > 1:
        runs.append(play(world, config | {"clock": "wall"}, shared_dir / "wall", world.comm))
    if world.rank == 0:
        costs = store.open_run(one)
        assert costs["gradients"].values[1] > costs["gradients"].values[0]
        for run in runs:
            for column in COSTS:
                np.testing.assert_array_equal(store.open_run(run)[column], costs[column], err_msg=f"{run}: {column}")


# around it


def test_phi_is_a_key() -> None:
    config = from_table(small({"name": "fedrep"}, oracle={"phi": 7.5}))
    assert (config.oracle.phi, config.oracle.record) == (7.5, False)
    assert Oracle().phi is None
    with pytest.raises(UsageError, match=r"^oracle\.phi: .*greater than or equal to 0, got -1"):
        from_table(small({"name": "fedavg"}, oracle={"phi": -1}))
    lines = "\n".join(report(config, config.check(None), None, 2))
    assert f"oracle        p = {MLP}, φ = 7.5; 0.8595 vectors of p numbers per whole visit" in lines
    assert any(line.startswith("    phi = nothing (number ≥ 0)  φ, the cost") for line in catalogue.lines("keys"))


def test_a_summary_adds_up_the_rounds(solo: Any, tmp_path: Path) -> None:
    algorithm = {"name": "fedavg", "epochs": 0, "steps": 2, "batch": 3}
    config = small(algorithm, rounds=3)
    data, (costs, _) = store.open_run(play(solo, config, tmp_path / "run", None)), run(config)
    for column in COSTS:
        np.testing.assert_array_equal(data[column], costs[column], err_msg=column)
    assert summary(tmp_path / "run")["oracle"] == 3 * (6 + 7 * PHI)


def test_to_record_needs_phi() -> None:
    config = from_table(small({"name": "fedavg"}, oracle={"record": True}))
    with pytest.raises(UsageError, match=r"^oracle\.record = true needs oracle\.phi: expected a number of at least 0"):
        config.check(None)
    with pytest.raises(UsageError, match=r"^oracle\.record: expected boolean, got 1"):
        from_table(small({"name": "fedavg"}, oracle={"record": 1}))


def test_costs_are_recorded_only_where_asked_for(solo: Any, tmp_path: Path) -> None:
    config = small({"name": "fedavg", "epochs": 0, "steps": 1}, oracle={"phi": PHI})
    data = store.open_run(play(solo, config, tmp_path / "run", None))
    assert data["message_bytes"].values.all()
    assert not set(COSTS) & set(data.variables)
    assert summary(tmp_path / "run")["oracle"] is None


def test_the_step_size_of_fedave() -> None:
    mu, b = 0.25, 5
    algorithm = FedAvg(lr=4 / mu, decay=b, epochs=0, steps=b, batch=1)
    assert [algorithm.learning_rate(k) for k in range(4)] == [4 / (mu * (k * b + 1)) for k in range(4)]
    assert [FedAvg(lr=0.1).learning_rate(k) for k in (0, 9)] == [0.1, 0.1]
    assert Salf(lr=0.2).learning_rate(3) == 0.2


def test_decaying_steps_by_hand() -> None:
    task = mlp_task([6])
    algorithm = FedAvg(lr=0.5, decay=3.0, epochs=0, steps=1, batch=0)
    for round_, size in ((0, 0.5), (1, 0.125), (3, 0.05)):
        visits = visits_of(task, [0], round_=round_)
        client = algorithm.client(task, task.initial(), {}, visits)
        sent = {name: value for message in client for name, (value, _) in message.items()}
        batch = next(task.batches(visits, 0, steps=1))
        slopes, _ = task.gradients(task.replicate(task.initial(), visits), batch)
        for name, slope in slopes.items():
            torch.testing.assert_close(sent[name], -size * slope, rtol=1e-4, atol=1e-6)


def test_the_config_is_written_down_with_phi() -> None:
    config = from_table(small({"name": "fedavg"}))
    assert isinstance(config, Config)
    assert '"record": true,\n  "phi": 100.0' in config.text()
