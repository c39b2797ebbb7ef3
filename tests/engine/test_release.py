"""Clients that are needed no more: their ranks are let go, and the server ends the run as if they were there."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import after_each_round
from helpers.toys import federation, same_bits
from hpcfl import store
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import Stopped
from hpcfl.config import from_table
from hpcfl.engine import stopping
from hpcfl.engine.job import Job
from hpcfl.engine.loop import objective
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.launch.request import run_request
from hpcfl.launch.run import launch
from hpcfl.learning.evaluate import client_objectives, server_objective
from hpcfl.learning.task import Task
from hpcfl.models import Model
from hpcfl.models.mlp import Mlp
from hpcfl.mpi.transport import Transport
from hpcfl.testing.runs import play, recorded, resume, same, table, toml

ROUNDS, OVER = 5, 2
DATA = {"name": "digits", "partition": "dirichlet", "alpha": 5.0, "server": 10}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "batch": 32},
    "fedrep": {"name": "fedrep", "batch": 32, "head_epochs": 2},
}


@pytest.fixture(autouse=True)
def _over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let methods need no clients from round 2 on, and models have a penalty."""
    for cls in (FedAvg, FedRep, Salf):
        monkeypatch.setattr(cls, "clients_done", lambda self, round_: round_ >= OVER)
    monkeypatch.setattr(Model, "penalty", property(lambda self: 0.01))
    yield
    stopping.uninstall()


def values(method: str, **more: Any) -> dict[str, Any]:
    """A small run of 7 clients that is evaluated and saved after each round."""
    often = {"evaluate": {"every": 1, "objective": True}, "checkpoint": {"every": 1, "keep": 9}}
    plain = {"rounds": ROUNDS, "seed": 11, "algorithm": METHODS.get(method), "data": DATA, **often}
    return table("fedavg", "mlp", True, **{**plain, **more})


def news(folder: Path) -> list[tuple[int, str]]:
    return [(event["round"], event["text"]) for event in store.events(folder) if event["kind"] == "released"]


def personal(folder: Path) -> dict[int, dict[str, Any]]:
    newest = store.latest(folder)
    assert newest is not None
    return {
        client: {name: torch.from_numpy(value) for name, value in state.items()}
        for client, state in store.load_personal(newest, range(7)).items()
    }


# ---- released in simulated time


def test_who_is_not_invited_is_not_visited(solo: Any, tmp_path: Path) -> None:
    data = store.open_run(play(solo, values("fedavg"), tmp_path / "run", None))
    assert (data["cohort"].values == 1).any(1).tolist() == [True] * OVER + [False] * (ROUNDS - OVER)
    assert data["visits"].values.sum(1).tolist() == [4, 4, 0, 0, 0]
    assert news(tmp_path / "run") == []  # a rank alone is not released


@pytest.mark.parametrize("rank", [0, 1])
def test_the_server_takes_over_and_the_others_forget(rank: int) -> None:
    """Two ranks, either of them without the other."""
    transport = Transport(2)
    transport.rank = rank
    job = Job.of(from_table(values("fedrep")), None, 2)
    rounds, now = Simulated(job, transport, 0), job.begin(1)  # all clients live on rank 1
    before = now.personal
    for now.round in range(OVER):
        assert not rounds.release(now, Record.open())
    hosted = {chunk.number for chunk in rounds.mine}
    assert hosted == (set(before) if rank == 1 else set())
    now.round, record = OVER, Record.open()
    assert rounds.release(now, record) == rounds.released == (rank == 1)
    if rank == 1:
        assert (now.shared, now.personal, rounds.mine, record.events) == ({}, {}, [], [])
        assert not hasattr(job.task, "federation")
        return
    assert record.events == [("released", -1, "clients are needed no more: 1 rank released")]
    assert [chunk.number for chunk in rounds.mine] == sorted(before)
    assert all(same_bits(now.personal[number], before[number]) for number in before)
    assert np.isfinite(rounds.scores(now)).all()
    again = Record.open()
    assert not rounds.release(now, again)
    assert again.events == []


@pytest.mark.mpi
def test_released_ranks_do_not_matter(world: Any, shared_dir: Path) -> None:
    """One rank and n give the same bits, personal state included, also where a run goes on before the release."""
    run = play(world, values("fedrep"), shared_dir / "run", world.comm)
    single = play(world, values("fedrep"), shared_dir / "single", None)
    if world.rank == 0:
        check_released(world, run)
        same(run, single)
    resume(world, run, 1, world.comm)
    if world.rank != 0:
        return
    same(run, single)
    mine, theirs = personal(run), personal(single)
    assert mine.keys() == theirs.keys()
    assert all(same_bits(mine[client], theirs[client]) for client in mine)
    assert mine[0].keys() == {"fc2.weight", "fc2.bias"}
    text = f"clients are needed no more: {world.size - 1} rank{'s' * (world.size > 2)} released"
    assert news(run) == [(OVER, text)] * (2 if world.size > 1 else 0)


def check_released(world: Any, run: Path) -> None:
    """Nothing happens on ranks that were released, and everything is still evaluated."""
    data = store.open_run(run)
    assert data["visits"].values.sum(1).tolist() == [4, 4, 0, 0, 0]
    for name in ("wire_bytes_in", "wire_bytes_out"):
        assert (data[name].values.sum(1) > 0).tolist() == [world.size > 1] * OVER + [False] * (ROUNDS - OVER)
    assert (data["compute_seconds"].values[OVER:, 1:] == 0).all()
    assert np.isfinite(data["objective"].values).all()
    assert np.isfinite(data["client_test_loss"].values).all()


@pytest.mark.mpi
def test_a_signal_to_a_rank_that_was_released_stops_all(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("nobody is released")
    file, folder = shared_dir / "run.toml", shared_dir / "run"
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    release = Simulated.release

    def wait_for_stop(done: int, row: Any) -> None:
        while done == 3 and not (folder / "stop").exists():
            time.sleep(0.001)

    def signalled(self: Simulated, now: Any, record: Any) -> bool:
        found = release(self, now, record)
        if found and world.rank == world.size - 1:
            signal.raise_signal(signal.SIGUSR1)
        return found

    with monkeypatch.context() as patch:
        after_each_round(patch, wait_for_stop)
        patch.setattr(Simulated, "release", signalled)
        if world.rank == 0:
            toml(values("fedrep"), file)
        world.meet()
        stopping.install()
        with pytest.raises(Stopped) as caught:
            launch(lambda: run_request(str(file), (), folder, None, quiet=True), world.comm)
        stopping.uninstall()
    stopped = caught.value
    assert stopped.code == 85
    assert stopped.round in (3, 4)  # the server may hear of it while it is in the round of the release, or after it
    status = store.read_status(folder)
    assert (status.state, status.reason) == ("stopped", "signal USR1")
    assert not (folder / "stop").exists()
    world.meet()
    resume(world, folder, stopped.round, world.comm)
    single = play(world, values("fedrep"), shared_dir / "single", None)
    if world.rank == 0:
        same(folder, single)


# ---- released in real time


@pytest.mark.mpi
def test_in_real_time_ranks_sleep_and_nobody_tests_clients(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.realtime import lanes, questions

    for module, name in ((lanes, "ANSWER_SECONDS"), (questions, "SAVE_SECONDS"), (questions, "LEAVE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)
    plain = {"speed": {"model": "none"}, "participation": {"close": "all"}, "threads": 1, "batch_clients": False}
    asked = values("", algorithm={"name": "fedrep", "batch": 32, "head_epochs": 2}, **plain)
    run = play(world, {**asked, "clock": "wall", "lane_width": 1}, shared_dir / "run", world.comm)
    twin = play(world, asked, shared_dir / "twin", None)
    if world.rank != 0:
        return
    assert [round_ for round_, _ in news(run)] == [OVER]
    mine, theirs = recorded(run), recorded(twin)
    for name in ("client_test_loss", "objective"):
        np.testing.assert_array_equal(mine[name][:OVER], theirs[name][:OVER], err_msg=name)
        known = np.isfinite(mine[name]).reshape(ROUNDS, -1).any(1)
        assert known.tolist() == [True] * OVER + [False] * (ROUNDS - OVER)
    assert store.open_run(run)["visits"].values.sum(1).tolist() == [7, 7, 0, 0, 0]
    for client, state in personal(run).items():
        assert same_bits(state, personal(twin)[client])


# ---- the objective


def by_hand(task: Task, x: Any, y: Any, params: dict[str, Any], mu: float) -> float:
    """The sum of cross-entropy and penalty of a linear model over some samples, in NumPy."""
    logits = x.astype(np.float64) @ params["fc1.weight"].T + params["fc1.bias"]
    peak = logits.max(1, keepdims=True)
    logs = logits - peak - np.log(np.exp(logits - peak).sum(1, keepdims=True))
    square = sum(float((value**2).sum()) for value in params.values())
    return float(-logs[np.arange(len(y)), y].sum()) + len(y) * mu / 2 * square


@pytest.mark.parametrize("holds", [0, 9])
def test_the_objective_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, holds: int) -> None:
    """In passes of 4 rows; clients predict with models of their own, the server with the shared one."""
    monkeypatch.setattr("hpcfl.learning.evaluate.TEST_BATCH", 4)
    rng, sizes = np.random.default_rng(1), [3, 11, 8]
    found = federation(sizes)
    own = rng.normal(size=(holds, 5)).astype(np.float32), rng.integers(3, size=holds)
    object.__setattr__(found, "server_train", lambda: own if holds else None)
    task = Task(Mlp(hidden=()), found, 0, precision="double")
    task.penalty = 0.3
    shared = {name: torch.randn_like(value) for name, value in task.initial().items()}
    params = {name: torch.randn(3, *value.shape, dtype=value.dtype) for name, value in shared.items()}
    sums = client_objectives(task, params, np.arange(3))
    wanted = [
        by_hand(
            task,
            found.client(client).train_features,
            found.client(client).train_labels,
            {name: value[client].numpy() for name, value in params.items()},
            0.3,
        )
        for client in range(3)
    ]
    np.testing.assert_allclose(sums, wanted, rtol=1e-12)
    server = by_hand(task, *own, {name: value.numpy() for name, value in shared.items()}, 0.3)
    planner = SimpleNamespace(members=np.arange(3))
    job, now = SimpleNamespace(task=task, planner=planner), SimpleNamespace(shared=shared)
    total = (sum(wanted) + server) / (sum(sizes) + holds)
    assert objective(job, now, sums) == pytest.approx(total, rel=1e-12)  # type: ignore[arg-type]
    unknown = np.array([1.0, np.nan, 2.0])
    assert np.isnan(objective(job, now, unknown))  # type: ignore[arg-type]
    del now.shared["fc1.bias"]  # no whole model is shared: the clients' samples alone
    alone = sum(wanted) / sum(sizes)
    assert objective(job, now, sums) == pytest.approx(alone, rel=1e-12)  # type: ignore[arg-type]


def test_the_objective_is_recorded_where_it_is_wanted(solo: Any, tmp_path: Path) -> None:
    asked = values("fedavg", rounds=2, evaluate={"every": 2, "last": 1, "objective": True})
    run = play(solo, asked, tmp_path / "run", None)
    job = Job.of(from_table(asked), None, 1)
    newest = store.latest(run)
    assert newest is not None
    shared = {name: torch.from_numpy(value) for name, value in store.load(newest, personal=False).shared.items()}
    sums = [client_objectives(job.task, {n: v[None] for n, v in shared.items()}, np.array([c]))[0] for c in range(7)]
    server, count = server_objective(job.task, shared)
    assert (server > 0, count) == (True, 10)
    total = (sum(sums) + server) / (job.task.federation.train_sizes.sum() + 10)
    np.testing.assert_allclose(store.open_run(run)["objective"].values, [np.nan, total], rtol=1e-6)
    off = play(solo, {**asked, "evaluate": {"every": 2, "last": 1}}, tmp_path / "off", None)
    mine, theirs = recorded(run), recorded(off)
    assert np.isnan(theirs["objective"]).all()
    for name in mine.keys() - {"objective"}:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
