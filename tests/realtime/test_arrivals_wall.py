"""Rounds that arrivals end, in real time: what they come to is what simulated time makes of the same arrivals.

Nothing here depends on how fast anything is: which visits come first is recorded, and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import agree, real, replay, simulated

from helpers.runs import after_each_round
from hpcfl import store
from hpcfl.base.errors import Stopped, UsageError
from hpcfl.config import from_table
from hpcfl.engine import stopping
from hpcfl.launch.request import resume_request
from hpcfl.launch.run import launch
from hpcfl.testing.runs import play, resume

pytestmark = pytest.mark.mpi

CLIENTS, ROUNDS = 7, 4
KEPT = {"momentum": 0.5, "persist_optimizer": True}
FEDAVG = {"name": "fedavg", "batch": 64, **KEPT}
SALF = {"name": "salf", "missing": "none", **KEPT}
PARTS = {"model": "uniform-depth", "stragglers": 1.0, "complete": False}
SLOW = {"model": "exponential", "kind": "dynamic", "rate": 10.0}
FAST = {"model": "exponential", "kind": "dynamic", "rate": 50.0}
OLD = {"weight": "polynomial"}


@pytest.fixture(autouse=True)
def _unhurried(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for answers and for personal state however long they take."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.realtime import arrivals, lanes, questions

    for module, name in ((lanes, "ANSWER_SECONDS"), (questions, "SAVE_SECONDS"), (arrivals, "SAVE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)
    monkeypatch.setattr(questions, "LEAVE_SECONDS", 1e6)
    yield
    stopping.uninstall()


def arriving(rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    participation = {"close": "arrivals", "buffer": 2, **rules}
    return real(1, **{"algorithm": FEDAVG, "staleness": OLD, "rounds": 6, **more, "participation": participation})


def led(world: Any, rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same over two levels: two nodes, of which each has a rank that passes on what the others say."""
    return {**arriving(rules, **more), "lane_width": "two-level", "leaders": min(2, world.size - 1)}


def replays(world: Any, values: dict[str, Any], run: Path, folder: Path) -> None:
    """Replay a run in simulated time, and compare to the bit."""
    again = play(world, replay(values, run), folder / "again", None)
    if world.rank == 0:
        agree(run, again, exact=True)


def test_all_at_once_are_fedavg(world: Any, shared_dir: Path) -> None:
    """K = concurrency = all, at most once with the same state: nobody is ever stale."""
    values = arriving({"buffer": CLIENTS, "once_per_version": True}, rounds=ROUNDS)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values, participation={"close": "all"}, staleness={}), shared_dir / "twin", None)
    if world.rank == 0:
        for name in ("loss", "accuracy", "layer_weight", "message_bytes", "arrived"):
            pair = (store.open_run(each)[name].values for each in (run, twin))
            np.testing.assert_array_equal(*pair, err_msg=name)
        assert (store.open_run(run)["arrival_staleness"].values == 0).all()


@pytest.mark.parametrize(
    "case",
    [
        ({"buffer": 1}, {}),
        ({"buffer": 3, "concurrency": 4}, {"algorithm": SALF, "speed": FAST}),
        ({"buffer": 1, "dispatch": "reporter"}, {"algorithm": {"name": "fedasync", "batch": 64, **KEPT}}),
        ({"buffer": 3}, {"weighting": {"correct": "remembered"}, "staleness": {}}),
        ({"buffer": 3}, {"fragments": {"count": 3}, "server": {"optimizer": "nesterov"}}),
        ({"buffer": 3}, {"algorithm": SALF, "speed": FAST, "fragments": {"count": 2, "schedule": "shuffled"}}),
    ],
)
def test_a_replay_in_simulated_time_has_the_same_bits(world: Any, shared_dir: Path, case: Any) -> None:
    rules, more = case
    values = arriving(rules, **more)
    run = play(world, values, shared_dir / "run", world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        data = store.open_run(run)
        assert (data["arrival_client"].values >= 0).all()
        assert (np.diff(data["arrival_seconds"].values.ravel()) >= 0).all()
        assert data["round_seconds"].values.sum() == pytest.approx(data["arrival_seconds"].values[-1, -1])


@pytest.mark.parametrize("led_", [False, True])
def test_workers_go_on_though_they_are_late(world: Any, shared_dir: Path, led_: bool) -> None:
    """Decoupled DiLoCo, resumed: who is late does not count, and what it keeps of that is what a replay has."""
    grace = {"slack": 0.9} if led_ else {"grace": 0.02}
    rules = {"buffer": 1, "max_staleness": 0, "dispatch": "reporter", **grace}
    algorithm = {"name": "decoupled_diloco", "batch": 64, "steps": 3, "lr": 0.01}
    more = {"algorithm": algorithm, "staleness": {}, "fragments": {"count": 3}, "server": {"optimizer": "nesterov"}}
    values = (led if led_ else lambda world, *given, **more: arriving(*given, **more))(world, rules, **more, speed=SLOW)
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 4, world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        data = store.open_run(run)
        late = data["arrival_depth"].values > data.sizes["layer"]
        assert late.any() or world.size == 2
        assert (data["arrival_staleness"].values[late] > 0).all()


def test_a_resumed_run_goes_on_with_who_was_at_work(world: Any, shared_dir: Path) -> None:
    values = arriving({})
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 4, world.comm)
    replays(world, values, run, shared_dir)


@pytest.mark.parametrize("case", [({"buffer": 1}, {}), ({"buffer": 3}, {"algorithm": SALF, "speed": FAST})])
def test_neighbours_of_a_leader_arrive_one_by_one(world: Any, shared_dir: Path, case: Any) -> None:
    """With scores, personal state, a resume, and visits that are stopped."""
    rules, more = case
    values = led(world, {**rules, "max_staleness": 2, "stop_stale": True}, **more)
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 4, world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        data = store.open_run(run)
        assert len(np.unique(data["arrival_client"].values)) > 2
        assert np.isfinite(data["client_accuracy"].values).any()


def test_where_clients_count_alike_a_replay_has_the_same_bits(world: Any, shared_dir: Path) -> None:
    """Malenia SGD, resumed after two of its steps, in the middle of visits."""
    rules = {"buffer": CLIENTS + 1, "max_staleness": 0, "every_client": True}
    algorithm = {**FEDAVG, "weights": "uniform"}
    values = arriving(rules, algorithm=algorithm, staleness={}, speed=FAST, rounds=ROUNDS)
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 2, world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        for row in store.open_run(run)["arrival_client"].values:
            times = np.bincount(row[row >= 0], minlength=CLIENTS)
            assert (1 / times).sum() <= CLIENTS**2 / (CLIENTS + 1)


def test_of_two_visits_of_a_client_to_a_step_the_one_that_is_rejected_is_marked(world: Any, shared_dir: Path) -> None:
    """What a client begins with a state for the second time is not finite: one of three visits on two lanes."""
    algorithm = {**FEDAVG, "name": "helpers.strange.again:Again"}
    values = arriving({"buffer": 3, "dispatch": "reporter"}, algorithm=algorithm, staleness={}, guard={"most": 1.0})
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        data, others = store.open_run(run), store.open_run(again)
        rejected = data["arrival_depth"].values > data.sizes["layer"]
        np.testing.assert_array_equal(rejected, data["arrival_number"].values == 1)
        assert rejected[0].any() or world.size > 3
        for name in ("arrival_depth", "loss", "layer_weight", "arrived"):
            np.testing.assert_array_equal(data[name].values, others[name].values, err_msg=name)
        states = [store.load(store.latest(each), personal=False).shared for each in (run, again)]  # type: ignore[arg-type]
        for name, value in states[0].items():
            np.testing.assert_array_equal(value, states[1][name], err_msg=name)


@pytest.mark.parametrize("stop", [False, True])
def test_what_is_too_old_is_dropped_or_stopped(world: Any, shared_dir: Path, stop: bool) -> None:
    values = arriving({"buffer": 1, "max_staleness": 0, "stop_stale": stop})
    run = play(world, values, shared_dir / "run", world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        assert (store.open_run(run)["arrival_staleness"].values == 0).all()


def test_visits_report_the_layers_that_they_have_when_their_time_is_up(world: Any, shared_dir: Path) -> None:
    values = arriving({"deadline": 1e3, "max_seconds": 0.6}, algorithm=SALF, speed=PARTS, rounds=ROUNDS)
    run = play(world, values, shared_dir / "run", world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        data = store.open_run(run)
        depth, seconds = data["arrival_depth"].values, data["arrival_visit_seconds"].values
        assert (depth > 1).any()
        assert (depth <= data.sizes["layer"]).all()
        np.testing.assert_array_equal(np.isinf(seconds), depth > 1)


def test_visits_report_the_steps_that_they_have_when_their_time_is_up(world: Any, shared_dir: Path) -> None:
    """Whole visits take longer than they are given."""
    file, steps = shared_dir / "speeds.csv", 8
    if world.rank == 0:
        file.write_text("\n".join(["client,seconds", *(f"{client},{1.6 + 0.1 * client}" for client in range(CLIENTS))]))
    world.meet()
    rules = {"max_seconds": 1.2, "partial": "steps"}
    algorithm = {**FEDAVG, "epochs": 0, "steps": steps, "batch": 16}
    values = arriving(rules, algorithm=algorithm, speed={"model": "table", "file": str(file)}, rounds=2)
    run = play(world, values, shared_dir / "run", world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        data = store.open_run(run)
        taken = data["arrival_steps"].values
        assert (taken >= 1).all()
        assert (taken <= 1.2 / 1.6 * steps).all()  # no step is done sooner than the speed model says
        assert np.isinf(data["arrival_visit_seconds"].values).all()


def test_a_deadline_ends_rounds_in_which_nobody_need_arrive(world: Any, shared_dir: Path) -> None:
    values = arriving({"buffer": 3, "deadline": 0.05}, speed=SLOW)
    run = play(world, values, shared_dir / "run", world.comm)
    replays(world, values, run, shared_dir)


def test_a_run_that_was_asked_to_stop_goes_on(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked between two of the server's steps: what has come by then makes a step of its own."""
    folder, values = shared_dir / "run", arriving({"buffer": CLIENTS})
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    after_each_round(monkeypatch, lambda done, row: done == 3 and stopping.request(folder))
    with pytest.raises(Stopped):
        play(world, values, folder, world.comm)
    world.meet()
    launch(lambda: resume_request(folder, None, quiet=True), world.comm)
    world.meet()
    replays(world, values, folder, shared_dir)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"lane_width": "all"}, r"^lane_width: participation.close = 'arrivals' .* expected 1, got 'all'"),
        ({"batch_clients": 2}, r"^batch_clients: .* waits for single messages: expected 'auto', false or 1, got 2"),
        ({"guard": {"max_norm": 5.0}}, r"^guard.max_norm: .* in simulated time only"),
    ],
)
def test_what_has_no_visits_of_its_own_is_refused(more: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        from_table({**arriving({}), **more}).check_values()
