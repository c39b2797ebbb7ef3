"""Clients that are held out: they are not there for a run, whose newcomers they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.toys import planner
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.adapt import adapt_request
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.contrib.theory import optimum
from hpcfl.schedule.doubling import Doubling
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.drawn import Exponential
from hpcfl.testing.runs import play, recorded, resume, same, table

HELD = [2, 5]
FEW = {"invite": "uniform", "size": 3}


def write(path: Path, without: tuple[int, ...] = ()) -> None:
    """Write a data set of up to seven clients of unequal sizes, each with a test part."""
    with h5py.File(path, "w") as file:
        for client in (client for client in range(7) if client not in without):
            rng = np.random.default_rng(client)
            for part, count in (("train", 9 + 3 * client), ("test", 4)):
                y = rng.integers(3, size=count)
                file[f"clients/{client}/{part}/features"] = (np.eye(3, 5)[y] + rng.normal(size=(count, 5))).astype("f4")
                file[f"clients/{client}/{part}/labels"] = y


def config(file: Path, clients: int, **more: Any) -> dict[str, Any]:
    """A small run whose every bit depends on who takes part: cohorts, weights and the objective."""
    keys = {
        "algorithm": {"name": "fedrep", "batch": 4, "head_epochs": 1},
        "participation": FEW,
        "speed": {"model": "none"},
        "evaluate": {"every": 2, "last": 1, "objective": True},
        "data": {"name": "hdf5", "file": str(file)},
    }
    return {**table("fedavg", "mlp", False, clients=clients), **keys, **more}


@pytest.mark.parametrize("invite", [{}, {"invite": "uniform", "size": 3}])
def test_cohorts_are_those_of_fewer_clients(invite: dict[str, Any]) -> None:
    for round_ in range(20):
        fewer = Participation(**invite).cohort(3, round_, 6)
        assert Participation(**invite, hold_out=3).cohort(3, round_, 9).tolist() == fewer.tolist()
        listed = Participation(**invite, hold_out=(4, 0, 7)).cohort(3, round_, 9)
        assert listed.tolist() == np.array([1, 2, 3, 5, 6, 8])[fewer].tolist()


def test_rounds_for_everybody_and_stages_are_without_them() -> None:
    """The last stage waits for all that take part, and samples double from their mean."""
    rules = Participation(close="first", first=2, hold_out=(0, 4))
    found = planner(rules, Exponential(kind="dynamic-rate"), clients=7)
    found.doubling, found.sizes = Doubling(when="theory", by="samples"), np.array([50, 1, 2, 3, 90, 4, 5])
    assert found.attempt(0).cohort.tolist() == [1, 2, 3, 5, 6]
    assert [found.visits(stage) for stage in range(3)] == [2, 4, 5]
    assert [found.attempt(0, stage=stage).quorum for stage in range(3)] == [6, 12, None]
    times = found.speed.order(0, 7, found.members, 5)
    assert len(found.stage_limits) == 2
    assert times[-1] < found.speed.order(0, 7, np.arange(7), 7)[-1]


def test_a_round_for_everybody_leaves_them_out(solo: Any, tmp_path: Path) -> None:
    keys = {"name": "linear_fedrep", "initial": "moments"}
    linear = {"data": {"name": "linear", "dimension": 6, "rank": 2}, "model": {"name": "linear", "rank": 2}}
    values = {**table("fedavg", "mlp", False, algorithm=keys, participation={"hold_out": HELD}), **linear}
    data = store.open_run(play(solo, {**values, "speed": {"model": "none"}}, tmp_path / "run", None))
    assert (data["cohort"].values == np.isin(np.arange(7), HELD, invert=True)).all()


@pytest.mark.mpi
def test_a_run_is_as_though_they_were_not_there(world: Any, shared_dir: Path) -> None:
    """To the bit, on any ranks, after a resumption, in real time and in a replay; only their scores are missing."""
    if world.rank == 0:
        write(shared_dir / "all.h5")
        write(shared_dir / "fewer.h5", without=(5, 6))
    world.meet()
    values = config(shared_dir / "all.h5", 7, participation={**FEW, "hold_out": 2})
    run = play(world, values, shared_dir / "run", world.comm)
    fewer = play(world, config(shared_dir / "fewer.h5", 5), shared_dir / "fewer", world.comm)
    alone = play(world, values, shared_dir / "alone", None)
    replayed = {**values, "speed": {"model": "trace", "run": str(run)}, "participation": {}}
    replay = play(world, replayed, shared_dir / "replay", world.comm)
    if world.rank == 0:
        same(run, alone)
        assert summary(run)["state_sha256"] == summary(fewer)["state_sha256"] == summary(replay)["state_sha256"]
        left, right = recorded(run), recorded(fewer)
        for name in ("loss", "objective", "sim_seconds", "client_accuracy", "client_test_loss", "arrived"):
            mine = left[name][:, :5] if left[name].ndim == 2 else left[name]
            np.testing.assert_array_equal(mine, right[name], err_msg=name)
        np.testing.assert_array_equal(recorded(replay)["client_accuracy"], left["client_accuracy"])
        assert np.isnan(left["client_accuracy"][:, 5:]).all()
        assert summary(run)["client_accuracy"] == summary(fewer)["client_accuracy"]
        assert not left["cohort"][:, 5:].any()
        assert adapt_request(run, None, None, None, None).clients.tolist() == [5, 6]
    world.meet()
    if world.size > 1:
        real = play(world, {**values, "clock": "wall"}, shared_dir / "real", world.comm)
        if world.rank == 0:
            assert summary(real)["state_sha256"] == summary(run)["state_sha256"]
            for name in ("client_accuracy", "cohort", "objective"):
                np.testing.assert_array_equal(recorded(real)[name], recorded(run)[name], err_msg=name)
        world.meet()
    before = recorded(run) if world.rank == 0 else {}
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        after = recorded(run)
        for name, column in before.items():
            np.testing.assert_array_equal(after[name], column, err_msg=name)
    world.meet()


def test_chunks_of_both_kinds_are_tested_in_part(solo: Any, tmp_path: Path) -> None:
    """A chunk with a client that is held out gives the others the scores that they have without it."""
    write(tmp_path / "all.h5")
    values = config(tmp_path / "all.h5", 7, participation={"hold_out": HELD})
    chunks = recorded(play(solo, {**values, "batch_clients": 4}, tmp_path / "chunks", None))
    single = recorded(play(solo, values, tmp_path / "single", None))
    np.testing.assert_allclose(chunks["client_test_loss"], single["client_test_loss"], rtol=1e-4)
    assert (np.isnan(chunks["client_test_loss"][-1]) == np.isin(np.arange(7), HELD)).all()


def test_the_optimum_is_that_of_fewer_clients(tmp_path: Path) -> None:
    write(tmp_path / "all.h5")
    write(tmp_path / "fewer.h5", without=(5, 6))
    model = {"name": "glm", "link": "softmax", "ridge": 0.1}
    keys = {"model": model, "algorithm": {"name": "fedavg"}, "participation": {}}
    fewer = optimum.of(from_table({**config(tmp_path / "fewer.h5", 5), **keys}), None)
    held = {**keys, "participation": {"hold_out": 2}}
    found = optimum.of(from_table({**config(tmp_path / "all.h5", 7), **held}), None)
    assert found.facts() == pytest.approx(fewer.facts(), rel=1e-9, abs=1e-9)
    assert found.samples == sum(9 + 3 * client for client in range(5))


def test_they_do_nothing_between_rounds_either(solo: Any, tmp_path: Path) -> None:
    data = {"name": "linear_mapping", "labels": 3, "samples_per_class": 30, "least": 4, "most": 4}
    keys = {"name": "flic", "epochs": 1, "pretrain": 1, "realign": 1, "realign_who": "all"}
    few = {"participation": {**FEW, "hold_out": HELD}, "speed": {"model": "none"}, "batch_clients": 4, "rounds": 2}
    model = {"name": "latent", "widths": [], "dimension": 2}
    run = play(
        solo, {**table("fedavg", "mlp", True, algorithm=keys, data=data), "model": model, **few}, tmp_path / "run", None
    )
    newest = store.latest(run)
    assert newest is not None
    aligned = {client: float(state["pretrained"][0]) for client, state in store.load_personal(newest, range(7)).items()}
    assert aligned == {client: float(client not in HELD) for client in range(7)}


REFUSED = [
    ({"hold_out": 7}, r"participation.hold_out: expected 0 … 6, got 7; did you mean 6\?"),
    ({"hold_out": -1}, "participation.hold_out: expected 0 … 6, got -1"),
    ({"hold_out": [1, 7]}, r"participation.hold_out: expected ids 0 … 6, got 7; did you mean 6\?"),
    ({"hold_out": [1, -2]}, r"expected ids 0 … 6, got -2; did you mean 0\?"),
    ({"hold_out": [1, 3, 1]}, "participation.hold_out: expected each id once, got 1 twice"),
    ({"hold_out": [*range(7)]}, "expected at most 6 ids, so that somebody takes part, got 7"),
    ({"hold_out": "last"}, "participation.hold_out: expected a number of clients or a list of ids, got 'last'"),
    ({"hold_out": [1, True]}, "expected a number of clients or a list of ids"),
    ({"hold_out": 3, "invite": "uniform", "size": 5}, "participation.size: expected 1 … 4, got 5"),
    ({"hold_out": 3, "close": "first", "first": 5}, "participation.first: expected 1 … 4, got 5"),
    ({"hold_out": 3, "min_clients": 5}, "participation.min_clients: expected 0 … 4, got 5"),
]


@pytest.mark.parametrize(("keys", "line"), REFUSED, ids=[str(keys) for keys, _ in REFUSED])
def test_ids_and_numbers_that_cannot_be(keys: dict[str, Any], line: str) -> None:
    values = {**table("fedavg", "mlp", False), "algorithm": {"name": "fedavg"}, "speed": {"model": "none"}}
    with pytest.raises(UsageError, match=line):
        from_table({**values, "participation": keys}).check(None)


def test_a_method_that_speaks_for_all_clients_refuses() -> None:
    values = table("fedavg", "mlp", False, algorithm={"name": "fedlrgd", "rank": 2}, speed={"model": "none"})
    with pytest.raises(UsageError, match=r"hold_out: expected 0: the weights of algorithm.name = 'fedlrgd' stand for"):
        from_table({**values, "participation": {"hold_out": 1}}).check_values()


def test_a_replay_holds_out_who_was_held_out(solo: Any, tmp_path: Path) -> None:
    values = table("fedavg", "mlp", False, algorithm={"name": "fedavg"}, speed={"model": "none"}, rounds=1)
    run = play(solo, {**values, "participation": {"hold_out": 2}}, tmp_path / "run", None)
    again = {**values, "speed": {"model": "trace", "run": str(run)}}
    from_table({**again, "participation": {"hold_out": 2}}).check_values()
    with pytest.raises(
        UsageError, match=r"participation.hold_out: expected that of speed.run = .*, got 3; did you mean"
    ):
        from_table({**again, "participation": {"hold_out": 3}}).check_values()
