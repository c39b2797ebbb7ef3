"""Rounds in real time: the same numbers as in simulated time, and a replay that gives them again.

Nothing here depends on how fast anything is: where ranks are slow, other visits count, or the test takes longer.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import repeat
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import after_each_round
from hpcfl import store
from hpcfl.base.errors import Stopped, UsageError
from hpcfl.config import from_table
from hpcfl.engine import stopping
from hpcfl.launch.request import resume_request
from hpcfl.launch.run import launch
from hpcfl.mpi.placement import cut
from hpcfl.testing.runs import play, recorded, resume, table

pytestmark = pytest.mark.mpi

CLIENTS, ROUNDS = 7, 4
KEPT = {"momentum": 0.5, "persist_optimizer": True}
FEDAVG = {"name": "fedavg", "batch": 64, **KEPT}
FEDREP = {"name": "fedrep", "batch": 64, "head_epochs": 1, "newcomer": "averaged"}
SALF = {"name": "salf", "missing": "none", **KEPT}
UNEQUAL = {"name": "digits", "partition": "dirichlet", "alpha": 5.0}  # weights n_i that differ
HALF = {"model": "uniform-depth", "stragglers": 0.7}
DYNAMIC = {"model": "exponential", "kind": "dynamic", "rate": 20.0}
SOON = {"close": "deadline", "deadline": 0.1, "min_clients": 1}
SECONDS = ("visit_seconds", "round_seconds", "sim_seconds")
WIDTHS = (1, "all")


def real(width: Any, **more: Any) -> dict[str, Any]:
    """A small run in real time: 7 clients on however many ranks, evaluated and saved after rounds 2 and 4."""
    plain = {"participation": {"close": "all"}, "speed": {"model": "none"}, "data": UNEQUAL}
    return table("salf", "mlp", False, **{**plain, "clock": "wall", "lane_width": width, "threads": 1, **more})


def simulated(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**values, "clock": "simulated", **more}


def replay(values: dict[str, Any], run: Path, **more: Any) -> dict[str, Any]:
    return simulated(values, speed={"model": "trace", "run": str(run)}, **more)


@pytest.fixture(autouse=True)
def _unhurried(world: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for answers however long they take, and for late lanes where personal state is saved."""
    if world.size == 1:
        if "refused" not in request.node.name:
            pytest.skip("needs a server and a client")
        yield
        return
    from hpcfl.realtime import lanes, questions, server

    for module, name in ((lanes, "ANSWER_SECONDS"), (questions, "SAVE_SECONDS"), (questions, "LEAVE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)
    personal = server.Server.personal

    def settled(self: server.Server, *given: Any) -> Iterator[Any]:
        self.lanes.wait_for_all(inf)
        return personal(self, *given)

    monkeypatch.setattr(server.Server, "personal", settled)
    yield
    stopping.uninstall()


def personal(folder: Path, clients: int = CLIENTS) -> dict[int, dict[str, np.ndarray]]:
    newest = store.latest(folder)
    assert newest is not None
    found = store.load_personal(newest, range(clients))
    assert sorted(found) == list(range(clients))
    return found


def agree(one: Path, other: Path, exact: bool, seconds: bool = True, clients: int = CLIENTS) -> None:
    """Assert that two runs recorded the same and ended in the same state: to the bit, or nearly.

    Clients whose lane was late have no scores in `one`.
    """
    left, right = recorded(one), recorded(other)
    assert left.keys() == right.keys()
    for name in left:
        if name in SECONDS and not seconds:
            continue
        mine, theirs = left[name], right[name]
        if name.startswith("client_"):
            theirs = np.where(np.isnan(mine), mine, theirs)
        if name.startswith("mean_client_"):  # of those clients that have scores
            known = ~np.isnan(left[name.removeprefix("mean_")]).any(1)
            mine, theirs = mine[known], theirs[known]
        if exact or mine.dtype.kind != "f":
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        elif name != "loss" and "accuracy" not in name:  # scores may jump; the loss of an unfinished visit is there
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=name)
    close = {"rtol": 0, "atol": 0 if exact else 1e-6}
    states = [store.load(store.latest(run), personal=False).shared for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], **close, err_msg=name)
    states = [personal(run, clients) for run in (one, other)]
    for client, state in states[0].items():
        assert state.keys() == states[1][client].keys() != set()
        for name in state:
            np.testing.assert_allclose(state[name], states[1][client][name], **close, err_msg=f"{client} {name}")


def is_exact(world: Any, width: Any) -> bool:
    """Whether every rank has a lane of its own; sums over ranks are rounded on the way."""
    return width == 1 or world.size == 2


def fitting(world: Any, width: Any) -> Any:
    return min(width, world.size - 1) if isinstance(width, int) else width


def test_one_rank_is_refused(world: Any, shared_dir: Path) -> None:
    if world.size > 1:
        pytest.skip("is about one rank")
    with pytest.raises(UsageError, match=r"^clock = 'wall' needs .* at least 2 ranks, got 1; did you mean mpirun -n 2"):
        play(world, real(1), shared_dir / "run", world.comm)
    assert not (shared_dir / "run").exists()


# ---- the same as in simulated time


@pytest.mark.parametrize(
    ("algorithm", "width"), [(FEDAVG, "all"), (SALF, 1), (SALF, "all")], ids=["fedavg-all", "salf-1", "salf-all"]
)
def test_without_a_deadline_it_is_the_simulated_run(
    world: Any, shared_dir: Path, algorithm: dict[str, Any], width: Any
) -> None:
    values = real(width, algorithm=algorithm)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, is_exact(world, width), seconds=False)
        data = store.open_run(run)
        assert np.isfinite(data["client_accuracy"].values).all(1).tolist() == [False, True, False, True]
        assert (data["arrived"].values == 1).all()
        assert data["visits"].values[:, 0].tolist() == [0] * ROUNDS
        assert data["visits"].values.sum(1).tolist() == [CLIENTS] * ROUNDS
        newest = store.latest(run)
        assert newest is not None
        written = [f"rank-{rank:04d}.h5" for rank in range(1, world.size)]  # each its own clients' state
        assert sorted(path.name for path in newest.glob("*.h5")) == [*written, "server.h5"]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_sent_in_pieces_arrives_whole(
    world: Any, shared_dir: Path, width: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, messages, sums, scores and personal state, where a message has a thousand bytes at most."""
    from hpcfl.mpi import channel

    values = real(width, algorithm=SALF, rounds=2)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    monkeypatch.setattr(channel, "PIECE_BYTES", 1000)
    run = play(world, values, shared_dir / "run", world.comm)
    tree = play(world, simulated(values), shared_dir / "tree", world.comm)
    if world.rank == 0:
        agree(run, twin, is_exact(world, width), seconds=False)
        agree(tree, twin, True)


@pytest.mark.parametrize(
    ("name", "width"),
    [*zip(["two", "resnet18", "Attention", "Tied", "Branch", "Recurrent"], repeat(1)), ("Counter", "all")],
)
def test_a_module_gives_what_it_gives_in_simulated_time(world: Any, shared_dir: Path, name: str, width: Any) -> None:
    values = real(width, algorithm=SALF, rounds=2) | {"model": {"name": f"helpers.modules:{name}"}}
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, is_exact(world, width), seconds=False)
        assert (store.open_run(run)["depth"].values == 1).all()  # every layer arrived


# ---- replays


RULES: dict[str, dict[str, Any]] = {
    "parts": {"algorithm": SALF, "speed": HALF, "participation": SOON},
    "whole": {"algorithm": FEDAVG, "speed": HALF, "participation": SOON},
    "drawn": {"algorithm": SALF, "speed": DYNAMIC, "participation": {**SOON, "deadline": 0.05}},
    "discarded": {"algorithm": SALF, "speed": DYNAMIC, "participation": {**SOON, "partial": "discard"}},
    "newcomers": {"algorithm": FEDREP, "speed": HALF, "participation": SOON},
    "first": {"algorithm": FEDAVG, "speed": DYNAMIC, "participation": {"close": "first", "first": 3}},
    "layers": {"algorithm": SALF, "speed": DYNAMIC, "participation": {"close": "first", "first": 2}},
    "quorum": {
        "algorithm": SALF,
        "speed": DYNAMIC,
        "participation": {"close": "quorum", "quorum": 2, "grace": 0.02, "deadline": 0.5},
    },
    "last": {
        "algorithm": {**FEDAVG, "epochs": 0, "steps": 3},
        "speed": DYNAMIC,
        "participation": {**SOON, "partial": "layers"},
    },
    "known": {"algorithm": FEDAVG, "speed": DYNAMIC, "participation": SOON, "weighting": {"correct": "known"}},
    "estimated": {"algorithm": SALF, "speed": HALF, "participation": SOON, "weighting": {"correct": "estimated"}},
    "remembered": {"algorithm": SALF, "speed": HALF, "participation": SOON, "weighting": {"correct": "remembered"}},
}
REPLAYS = [("whole", 1), ("newcomers", 1), ("whole", "all"), ("drawn", 1), ("drawn", 2), ("discarded", "all")]
REPLAYS += [("known", 1), ("estimated", 1), ("remembered", 1), ("layers", 1), ("quorum", 1), ("quorum", "all")]
REPLAYS += [("last", 1)]


@pytest.mark.parametrize(("rule", "width"), REPLAYS)
def test_a_replay_ends_in_the_same_state(
    world: Any, shared_dir: Path, rule: str, width: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was in time: who was invited, how far each visit came, and what each client keeps.

    With one rule, blocks of 1 kB already travel by themselves, as large ones do.
    """
    if rule == "drawn":
        for module in ("hpcfl.sums.packing", "hpcfl.sums.frames"):
            monkeypatch.setattr(f"{module}.APART_BYTES", 1000)
    values = real(fitting(world, width), **RULES[rule])
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, is_exact(world, values["lane_width"]))
        rounds_are_sound(run)
        scores_are_missing_on_late_lanes_only(world, values, run)


def rounds_are_sound(run: Path) -> None:
    """What holds in every round, whatever the rule."""
    data = store.open_run(run)
    cohort, arrived, depth = (data[name].values for name in ("cohort", "arrived", "depth"))
    layers = data.sizes["layer"]
    rounds = np.arange(data.sizes["round"])
    np.testing.assert_array_equal(data["round"].values, rounds)
    np.testing.assert_array_equal(data["version"].values, np.where(cohort == 1, rounds[:, None], -1))
    np.testing.assert_array_equal(depth == -1, cohort == 0)
    np.testing.assert_array_equal(arrived == 1, (cohort == 1) & (depth <= layers))
    np.testing.assert_array_equal(data["blocks"].values, np.where(cohort == 1, layers + 1 - depth, 0))
    np.testing.assert_array_equal(np.isfinite(data["visit_seconds"].values) & (depth > 1), False)
    np.testing.assert_array_equal(data["void"].values == 1, ~(arrived == 1).any(1))
    assert (cohort == 1).any(1).all()
    reached = [(cohort == 1) & (depth <= layer) for layer in range(1, layers + 1)]
    weights = np.stack([each.sum(1) for each in reached], axis=1)
    assert ((data["layer_weight"].values > 0) == (weights > 0)).all()


def scores_are_missing_on_late_lanes_only(world: Any, values: dict[str, Any], run: Path) -> None:
    from hpcfl.mpi.placement import lane_topologies

    config, data = from_table(values), store.open_run(run)
    chunks = cut(1, config.speed.paces(config.seed, CLIENTS), world.size)
    missing, depth = np.isnan(data["client_test_loss"].values), data["depth"].values
    for round_ in (1, 3):
        for topology in lane_topologies(config.lane_width, ["here"] * world.size, chunks):
            if missing[round_, topology.clients].any():
                assert missing[round_, topology.clients].all()
                assert (depth[round_, topology.clients] != 1).any()
    assert (np.isfinite(data["test_loss"].values[[1, 3]]) == config.algorithm.evaluates_shared).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_visits_count_whoever_does_them(world: Any, shared_dir: Path, width: Any) -> None:
    """Visits are counted, not ranks: with 7 clients on fewer ranks, 3 visits close a round."""
    values = real(width, **RULES["first"])
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, is_exact(world, width))
        rounds_are_sound(run)
        cohort, arrived = (store.open_run(run)[name].values.sum(1) for name in ("cohort", "arrived"))
        enough = np.minimum(3, cohort)  # who is still at the visit of an earlier round is not invited
        assert cohort[0] == CLIENTS
        assert (arrived == enough).all() if is_exact(world, width) else (arrived >= enough).all()
        assert (arrived <= CLIENTS).all()


# ---- somebody is late


def stuck(world: Any, shared_dir: Path, width: Any, **keys: Any) -> dict[str, Any]:
    """One client per rank; client 1 is stuck in round 0, and all but one visit are enough."""
    clients = world.size - 1
    algorithm = {**FEDAVG, "name": "helpers.strange.late:Late", "victim": 1, "gate": str(shared_dir / "gate"), **keys}
    first = {"close": "first", "first": clients - 1}
    often, last = {"every": 1}, {"every": 400}  # where state is saved, these tests wait for whoever is late
    more = {"participation": first, "evaluate": often, "checkpoint": last}
    return real(width, clients=clients, rounds=400, algorithm=algorithm, **more)


def test_who_is_late_is_left_out_until_it_is_back(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size < 3:
        pytest.skip("needs two clients on ranks of their own")
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    values = stuck(world, shared_dir, 1, stall=1e6, pause=0.02)
    after_each_round(monkeypatch, lambda done, row: row["arrived"][1] and stopping.request(shared_dir / "run"))
    with pytest.raises(Stopped) as caught:
        play(world, values, shared_dir / "run", world.comm)
    world.meet()
    done, clients = caught.value.round, world.size - 1
    again = play(world, replay(values, shared_dir / "run", rounds=done), shared_dir / "again", None)
    if world.rank == 0:
        rounds_are_sound(shared_dir / "run")
        data = store.open_run(shared_dir / "run")
        cohort, arrived = (data[name].values == 1 for name in ("cohort", "arrived"))
        others = np.arange(clients) != 1
        assert len(cohort) == done > 4
        assert (arrived.sum(1) == clients - 1).all()
        assert (arrived[0] == others).all()  # it was asked in round 0, and was stuck
        assert cohort[0].all()
        assert not cohort[1:4, 1].any()  # others set it free in round 3
        assert cohort[:, others].all()
        assert cohort[-1].all()
        assert arrived[-1, 1]
        missing = np.isnan(data["client_test_loss"].values)
        assert missing[:3, 1].all()
        assert not missing[:3, others].any()
        agree(shared_dir / "run", again, exact=True, clients=clients)


def test_on_a_common_lane_who_is_late_holds_up_everybody(world: Any, shared_dir: Path) -> None:
    if world.size < 3:
        pytest.skip("needs two clients on ranks of their own")
    values = {**stuck(world, shared_dir, "all", stall=0.2), "rounds": ROUNDS}
    run = play(world, values, shared_dir / "run", world.comm)
    if world.rank == 0:
        rounds_are_sound(run)
        assert (store.open_run(run)["arrived"].values == 1).all()  # nothing arrives before all of it does


# ---- leaving and going on


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_goes_on_after_its_checkpoint(world: Any, shared_dir: Path, width: Any) -> None:
    values = real(width, **RULES["parts"])
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 2, world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        assert store.read_status(run).state == "done"
        assert store.open_run(run)["round"].values.tolist() == list(range(ROUNDS))
        assert len(list((run / "metrics").iterdir())) == 2
        agree(run, again, is_exact(world, width))
        rounds_are_sound(run)


@pytest.mark.parametrize("whose", ["server", "client"])
def test_one_rank_is_signalled_and_all_stop(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    from hpcfl.realtime.client import ClientRank

    values = real(1, rounds=8, algorithm=SALF)
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    visit = ClientRank._visit

    def signalled(self: ClientRank, command: Any) -> Any:
        if command.round == 2:
            signal.raise_signal(signal.SIGUSR1)
        return visit(self, command)

    with monkeypatch.context() as patch:
        if whose == "server":
            after_each_round(patch, lambda done, row: done == 3 and signal.raise_signal(signal.SIGUSR1))
        elif world.rank == world.size - 1:
            patch.setattr(ClientRank, "_visit", signalled)
        stopping.install()
        with pytest.raises(Stopped) as caught:
            play(world, values, shared_dir / "run", world.comm)
        world.meet()
        stopping.uninstall()
    done = caught.value.round
    assert 2 <= done <= 4
    assert caught.value.code == 85
    status = store.read_status(shared_dir / "run")
    assert (status.state, status.reason) == ("stopped", "signal USR1")
    newest = store.latest(shared_dir / "run")
    assert newest is not None
    assert store.load(newest).round == done
    assert store.open_run(shared_dir / "run")["round"].values.tolist() == list(range(done))
    world.meet()
    launch(lambda: resume_request(shared_dir / "run", None, quiet=True), world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        assert store.read_status(shared_dir / "run").state == "done"
        agree(shared_dir / "run", twin, exact=True, seconds=False)
