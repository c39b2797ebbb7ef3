"""What clients begin with that have not taken part yet, by hand with two numbers; what takes steps before a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, Toy, mlp_task, plain, planned, read, same_bits, visits_of
from hpcfl import store
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.hf_maml import HfMaml
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.algorithms.local import Local
from hpcfl.algorithms.local_sgd import LocalTraining, PartlyPersonal
from hpcfl.base.errors import UsageError
from hpcfl.data import ClientData
from hpcfl.learning.optim import FINE_TUNING
from hpcfl.learning.task import Task
from hpcfl.models.linear import Linear
from hpcfl.schedule.participation import Participation
from hpcfl.testing.runs import play, resume, same, table

LR = 0.05
X, Y = [[1.0], [0.5, 1.0, -1.0], [2.0, -1.0]], [[1.0], [2.0, 1.0, 0.0], [-1.0, 3.0]]
B, W = "representation.weight", "head.weight"
AVERAGED: dict[str, Any] = {"lr": LR, "batch": 0, "newcomer": "averaged"}
METHODS = {
    "fedrep": FedRep(**AVERAGED, head_epochs=1),
    "lg_fedavg": LgFedAvg(**AVERAGED, shared_layers=1),
}


def two_numbers() -> Task:
    """Three clients of 1, 3 and 2 samples, for whom ``y ≈ w·b·x``."""
    parts = [(np.array(x, np.float32)[:, None], np.array(y, np.float32)) for x, y in zip(X, Y)]
    held = [ClientData(x, y, x[:0], y[:0]) for x, y in parts]
    sizes = np.array([len(y) for y in Y])
    data = Toy(1, sizes, np.zeros(3, dtype=np.int64), [(1,)] * 3, held)
    return Task(Linear(rank=1), data, 0, precision="double")


def slopes(client: int, b: float, w: float) -> tuple[float, float]:
    """The derivatives of the mean of (w·b·x − y)² by b and by w."""
    apart = [2 * (w * b * x - y) * x for x, y in zip(X[client], Y[client])]
    return w * float(np.mean(apart)), b * float(np.mean(apart))


def visited(method: str, client: int, b: float, w: float) -> tuple[float, float]:
    """FedRep: a step of w, then one of b. LG-FedAvg: one of both."""
    if method == "fedrep":
        w -= LR * slopes(client, b, w)[1]
        return b - LR * slopes(client, b, w)[0], w
    by_b, by_w = slopes(client, b, w)
    return b - LR * by_b, w - LR * by_w


@pytest.mark.parametrize("per_chunk", [1, None], ids=["one by one", "one chunk"])
@pytest.mark.parametrize("method", METHODS)
def test_a_first_visit_begins_with_the_mean_of_the_last_round(method: str, per_chunk: int | None) -> None:
    """Clients 0 and 1, then 1 and (too late to count) 2, then 2 for the first time, then all."""
    task = two_numbers()
    rounds = Rounds(METHODS[method], task, per_chunk)
    own = 1 if method == "fedrep" else 0
    mean = [float(task.initial()[name]) for name in (B, W)]
    kept: dict[int, float] = {}
    for round_, counted in enumerate([[0, 1], [1], [2], [0, 1, 2]]):
        found = {}
        for client in counted:
            start = list(mean)
            start[own] = kept.get(client, mean[own])
            found[client] = visited(method, client, *start)
        mean = list(np.average(list(found.values()), axis=0, weights=[len(Y[c]) for c in counted]))
        kept |= {client: values[own] for client, values in found.items()}
        rounds.step(planned([1 if c in counted else 3 for c in range(3)], 2, round_))
        assert [float(rounds.state[name]) for name in (B, W)] == pytest.approx(mean, rel=1e-12)
        tested = {}
        for chunk in rounds.job.chunks:
            visits = visits_of(task, chunk.clients, round_=round_ + 1)
            state = rounds.job.algorithm.model(task, rounds.state, rounds.now.personal[chunk.number], visits)
            tested |= {int(c): float(state[(B, W)[own]][row]) for row, c in enumerate(chunk.clients)}
        assert tested == pytest.approx({c: kept.get(c, mean[own]) for c in range(3)}, rel=1e-12)


@pytest.mark.parametrize("method", [FedRep, LgFedAvg])
def test_where_all_take_part_at_first_both_are_the_same(method: type[PartlyPersonal]) -> None:
    both = [Rounds(method(batch=4, newcomer=each, evaluation="fine-tune"), mlp_task([3, 20, 8])) for each in WAYS]
    absent = len(both[0].layers) + 1
    for round_, depth in enumerate([[1, 1, 1], [1, absent, 1], [absent, 1, 1]]):
        for rounds in both:
            rounds.step(planned(depth, len(rounds.layers), round_))
        assert same_bits(both[0].state, both[1].state)
        one, other = (rounds.now.personal[0] for rounds in both)
        assert same_bits(one, {name: value for name, value in other.items() if name != "visited"})
        assert (other["visited"] == 1).all()


WAYS = ("initial", "averaged")


@pytest.mark.parametrize("method", [FedRep, LgFedAvg])
def test_what_a_late_client_and_one_after_training_begin_with(method: type[PartlyPersonal]) -> None:
    """Neither has anything of its own: both begin with what the server holds, as do tests before a first visit."""
    algorithm, task = method(batch=4, newcomer="averaged"), mlp_task([3, 20, 8])
    rounds = Rounds(algorithm, task)
    rounds.step(planned([1, 1, len(rounds.layers) + 1], len(rounds.layers)))
    visits = visits_of(task, [2], round_=1)
    later = algorithm.adapted(task, rounds.state, visits, 0)
    found = algorithm.model(task, rounds.state, {n: v[2:] for n, v in rounds.now.personal[0].items()}, visits)
    assert same_bits({name: value[0] for name, value in later.items()}, rounds.state)
    assert same_bits(found, later)
    assert not algorithm.evaluates_shared


def newcomers(**more: Any) -> dict[str, Any]:
    """A run of 7 clients of whom each round invites 3; the last one takes part at the end only, or never."""
    keys = {"name": "fedrep", "batch": 64, "head_epochs": 1, "newcomer": "averaged"}
    few = {"participation": {"invite": "uniform", "size": 3}, "speed": {"model": "exponential"}}
    return table("fedavg", "mlp", True, **{"algorithm": keys, **few, **more})


@pytest.mark.mpi
def test_ranks_and_a_stop_change_nothing(world: Any, shared_dir: Path) -> None:
    run = play(world, newcomers(), shared_dir / "run", world.comm)
    single = play(world, newcomers(), shared_dir / "single", None)
    if world.rank == 0:
        same(run, single)
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        same(run, single)
        flags = [store.load_personal(store.latest(each), range(7)) for each in (run, single)]
        arrived = (store.open_run(run)["arrived"].values == 1).any(0)
        for held in flags:
            assert [bool(held[client]["visited"]) for client in range(7)] == arrived.tolist()
        assert 0 < arrived.sum() < 7


# ---- what takes the steps before a test


TUNED: dict[str, Any] = {"tune_lr": 0.02, "tune_momentum": 0.5, "tune_weight_decay": 0.1, "tune_epochs": 2}
TUNING: dict[str, LocalTraining] = {
    "fedrep": FedRep(lr=0.1, batch=4, evaluation="fine-tune", momentum=0.9, **TUNED),
    "fedavg": FedAvg(lr=0.1, batch=4, evaluation="fine-tune", **TUNED),
    "hf_maml": HfMaml(lr=0.1, batch=4, evaluation="fine-tune", **TUNED),
}


@pytest.mark.parametrize("method", TUNING)
@pytest.mark.parametrize("after_training", [False, True], ids=["in a run", "adapt"])
def test_it_has_an_optimiser_of_its_own(method: str, after_training: bool) -> None:
    algorithm, task = TUNING[method], mlp_task([3, 11])
    visits = visits_of(task, [0, 1], round_=3)
    if after_training:
        found = algorithm.adapted(task, task.initial(), visits, 2)
    else:
        found = algorithm.model(task, task.initial(), {}, visits)
    for client in range(2):
        net = plain(task, task.initial())
        named = dict(zip(task.initial(), net.parameters(), strict=True))
        weight, bias = (named[name] for name in ("fc3.weight", "fc3.bias"))
        groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}]
        optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.5)
        for batch in task.batches(visits_of(task, [client], round_=3), 4, 2, phase=FINE_TUNING):
            real = slice(None) if batch.valid is None else batch.valid[0]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(batch.x[0][real]), batch.y[0][real]).backward()
            optimizer.step()
        for name, value in read(net, task).items():
            torch.testing.assert_close(found[name][client], value, atol=1e-6, rtol=1e-5)
    assert not torch.equal(found["fc3.bias"][0], task.initial()["fc3.bias"])


def test_training_does_not_take_the_steps_of_tuning() -> None:
    one, other = (Rounds(FedRep(batch=4, **keys), mlp_task([3, 8])) for keys in ({}, TUNED))
    for rounds in (one, other):
        rounds.step(planned([1, 1], len(rounds.layers)))
    assert same_bits(one.state, other.state)


# ---- bad input


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (FedRep(newcomer="averaged", evaluation="new-client"), r"or set algorithm\.evaluation = 'fine-tune'$"),
        (Local(tune_lr=0.1), r"^algorithm\.tune_lr = 0\.1 has no meaning .* or set algorithm\.evaluation = 'tuned'$"),
        (FedRep(optimizer="adam", tune_momentum=0.5), r"^algorithm\.tune_momentum = 0\.5 has no meaning .* 'adam'"),
    ],
)
def test_keys_that_would_do_nothing(algorithm: LocalTraining, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        algorithm.check(Participation())


@pytest.mark.parametrize(
    "algorithm",
    [FedRep(newcomer="averaged", head_layers=0), LgFedAvg(newcomer="averaged", shared_layers=3)],
    ids=["fedrep", "lg_fedavg"],
)
def test_nobody_is_new_to_layers_that_all_share(algorithm: PartlyPersonal) -> None:
    line = r"^algorithm\.newcomer: expected 'initial' where all layers are shared, got 'averaged'; did you mean"
    with pytest.raises(UsageError, match=line):
        algorithm.init_server(mlp_task([3, 8]))
