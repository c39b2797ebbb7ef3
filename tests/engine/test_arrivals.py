"""Rounds that arrivals end, in simulated time: which visits count by which states; runs that do not depend on ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from helpers.toys import planner
from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.check import report
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt, Plan
from hpcfl.schedule.planner import Flights
from hpcfl.schedule.speeds import Speed
from hpcfl.schedule.speeds.drawn import UniformDepth
from hpcfl.testing.runs import play, resume, same, table

L = 4
SHARES = np.arange(L, 0, -1) / L
DYNAMIC = {"model": "exponential", "kind": "dynamic"}
MALENIA = {"close": "arrivals", "buffer": 7, "max_staleness": 0, "every_client": True}
SOME = {"close": "arrivals", "buffer": 1, "invite": "uniform", "size": 3}
UNIFORM = {"name": "fedavg", "batch": 32, "weights": "uniform"}


class Written(Speed):
    """Seconds written down by client."""

    model: str = "written"
    seconds_of: ClassVar = [1.0, 2.5]

    def seconds(self, attempt: Attempt) -> np.ndarray:
        return np.array(self.seconds_of * 3)[attempt.cohort]


def planned(rounds: int, clients: int = 2, speed: Speed | None = None, **rules: Any) -> list[Plan]:
    rule = planner(Participation(close="arrivals", **rules), speed or Written(), clients, SHARES)
    return list(islice(rule.plans(), rounds))


def visits(plan: Plan) -> list[tuple[int, int, float]]:
    """Client, version, time of arrival, in the order of their arrival."""
    known = plan.arrivals
    assert known is not None
    order = np.argsort(known.times, kind="stable")
    table = zip(plan.cohort[order].tolist(), known.versions[order].tolist(), known.times[order].tolist())
    return list(table)


# ---- who arrives when, by hand: visits of client 0 take 1 s, those of client 1 take 2.5 s


def test_every_arrival_ends_a_round() -> None:
    plans = planned(5, buffer=1)
    assert [visits(plan) for plan in plans] == [
        [(0, 0, 1.0)],
        [(0, 1, 2.0)],
        [(1, 0, 2.5)],  # two versions later
        [(0, 2, 3.0)],
        [(0, 4, 4.0)],
    ]
    assert [plan.duration for plan in plans] == [1.0, 1.0, 0.5, 0.5, 1.0]
    assert plans[1].arrivals is not None
    assert plans[1].arrivals.waiting.tolist() == [1]  # who has just reported begins with what comes of it
    assert plans[1].arrivals.served.tolist() == [0]


def test_what_is_too_old_does_not_count_and_may_be_stopped() -> None:
    """Ringmaster's toy, R = 2: of the slow client nothing is used, with stops or without."""
    going_on = planned(5, buffer=1, max_staleness=1)
    assert [visits(plan)[0][:2] for plan in going_on] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    stopped = planned(5, buffer=1, max_staleness=1, stop_stale=True)
    assert [visits(plan) for plan in stopped] == [visits(plan) for plan in going_on]
    assert stopped[2].arrivals is not None
    assert stopped[2].arrivals.served.tolist() == [2]  # restarted at 2 s
    assert [visits(plan)[0][:2] for plan in planned(5, buffer=1, max_staleness=2)][:3] == [(0, 0), (0, 1), (1, 0)]


def test_a_buffer_takes_several_visits_of_one_client_to_one_state() -> None:
    plans = planned(2, buffer=2)
    assert [visits(plan) for plan in plans] == [[(0, 0, 1.0), (0, 0, 2.0)], [(1, 0, 2.5), (0, 1, 3.0)]]
    first, second = plans[0].parts()
    assert (first.round, first.number, second.round, second.number) == (0, 0, 0, 1)
    once = planned(2, buffer=2, once_per_version=True)
    assert [visits(plan) for plan in once] == [[(0, 0, 1.0), (1, 0, 2.5)], [(0, 1, 3.5), (1, 1, 5.0)]]


@pytest.mark.parametrize(
    ("buffer", "seconds", "numbers"),
    [
        (2, 2.5, [2, 1]),  # every client once
        (3, 3.0, [3, 1]),  # 1/3 + 1/1 ≤ 4/3
        (4, 5.0, [4, 2]),  # 1/4 + 1/2 ≤ 1: who has reported four times waits
        (5, 5.0, [5, 2]),  # 1/5 + 1/2 ≤ 4/5
    ],
)
def test_every_client_is_waited_for_until_the_harmonic_mean_is_reached(
    buffer: int, seconds: float, numbers: list[int]
) -> None:
    """Malenia SGD: the server's step is due when Σ 1/B_i ≤ n²/S, here 4/S."""
    plans = planned(2, buffer=buffer, max_staleness=0, every_client=True, stop_stale=True)
    for plan in plans:
        assert plan.duration == seconds
        assert np.bincount(plan.cohort).tolist() == numbers
        assert plan.arrivals is not None
        assert plan.arrivals.factors.tolist() == [sum(numbers) / (2 * numbers[client]) for client in plan.cohort]


def test_places_are_filled_with_clients_that_are_idle() -> None:
    """2 of 6 are at work: with `uniform` all have their turn, with `reporter` the same two go on."""
    for dispatch, wanted in (("uniform", 6), ("reporter", 2)):
        plans = planned(60, 6, buffer=1, concurrency=2, dispatch=dispatch)
        assert len({visit[0] for plan in plans for visit in visits(plan)}) == wanted
        assert all(plan.arrivals is not None and len(plan.arrivals.waiting) == 1 for plan in plans)


def test_a_visit_reports_the_layers_that_it_has_when_its_time_is_up() -> None:
    plans = planned(3, buffer=1, max_seconds=1.5)
    assert [visits(plan)[0] for plan in plans] == [(0, 0, 1.0), (1, 0, 1.5), (0, 1, 2.0)]
    assert [plan.depth.tolist() for plan in plans] == [[1], [3], [1]]  # 1.5 of 2.5 s: 2 of 4 layers


@pytest.mark.parametrize(("redraw", "complete"), [(False, False), (True, True)])
def test_a_straggler_that_stopped_at_layer_l_reports_every_2l_th_deadline(redraw: bool, complete: bool) -> None:
    """One that stopped nowhere is no straggler. l is the layer down to which it came when it left."""
    speed = UniformDepth(stragglers=0.5, redraw=redraw, nothing=False, complete=complete, late="rounds")
    plans = planned(60, 6, speed, deadline=0.1, once_per_version=True)
    found = set()
    for plan in plans:
        assert plan.duration == pytest.approx(0.1)
        for client, version, _ in visits(plan):
            depth = int(speed.depth(Attempt(0, 6, SHARES, version, 0, np.arange(6), 0.1))[client])
            assert plan.round - version + 1 == (2 * depth if depth > 1 else 1)
            found.add(depth)
    assert found == {1, 2, 3, 4}
    assert [len(plan.invited) for plan in plans] == [6] * 60  # the others are at work


def test_in_real_time_such_a_visit_ends_midway_between_two_deadlines() -> None:
    speed = UniformDepth(stragglers=1.0, complete=False, nothing=False, late="rounds")
    attempt = Attempt(0, 6, SHARES, 3, 0, np.arange(6), 0.1)
    np.testing.assert_allclose(speed.enforced(attempt), 0.1 * (2 * speed.depth(attempt) - 0.5))


def test_nobody_may_ever_arrive() -> None:
    class Endless(Written):
        seconds_of: ClassVar = [np.inf, np.inf]

    with pytest.raises(RunError, match="nobody arrives any more"):
        planned(1, speed=Endless(), buffer=1)
    with pytest.raises(RunError, match="of which nothing counted"):
        planned(1, buffer=1, max_seconds=0.1)


def test_a_queue_goes_on_where_it_was_saved() -> None:
    rule = planner(Participation(close="arrivals", buffer=2, concurrency=3), Written(), 6, SHARES)
    flights = Flights.none(6)
    plans = rule.plans(0, flights=flights)
    for _ in range(5):
        next(plans)
    again = rule.plans(5, flights=Flights.restored(flights.saved(), 6))
    for _ in range(20):
        assert visits(next(plans)) == visits(next(again))


# ---- what is refused


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({}, "needs it, or a participation.deadline"),
        ({"buffer": 8, "once_per_version": True}, r"participation.buffer: expected 1 … 7 \(clients\) with .*, got 8"),
        (
            {"buffer": 3, "concurrency": 2, "dispatch": "reporter", "once_per_version": True},
            r"participation.buffer: expected 1 … 2 \(participation.concurrency\) with .*once_per_version = true, got 3",
        ),
        ({"buffer": 1, "concurrency": 8}, r"participation.concurrency: .*7"),
        ({"buffer": 1, "max_staleness": -1}, "max_staleness"),
        ({"deadline": 1.0}, "once_per_version"),
        ({"buffer": 1, "stop_stale": True}, "max_staleness"),
        ({"buffer": 1, "partial": "layers"}, "max_seconds"),
        ({"buffer": 1, "invite": "uniform", "size": 3}, "participation.invite"),
        ({"buffer": 1, "min_clients": 1}, "participation.min_clients"),
        ({"buffer": 1, "deadline": "adaptive"}, "adaptive"),
        (
            {"close": "all", "buffer": 1},
            "^participation.buffer = 1 has no meaning with .* set .*close = 'arrivals'$",
        ),
        ({"close": "all", "dispatch": "reporter"}, "dispatch = 'reporter' has no meaning with .*close = 'all'"),
        ({"close": "all", "every_client": True}, "every_client = true has no meaning with .*close = 'all'"),
        ({**MALENIA, "buffer": None}, r"participation.buffer: expected 7 or more .*, got nothing; did you mean 7\?"),
        ({**MALENIA, "buffer": 6}, r"participation.buffer: expected 7 or more .*; did you mean 7\?"),
        ({**MALENIA, "max_staleness": None}, r"participation.max_staleness: expected 0 .*; did you mean 0\?"),
        ({**MALENIA, "max_staleness": 1}, r"participation.max_staleness: expected 0 .*; did you mean 0\?"),
        ({**MALENIA, "concurrency": 5}, r"participation.concurrency: expected all 7 .*; did you mean 7\?"),
        ({**MALENIA, "once_per_version": True}, r"participation.once_per_version: .*; did you mean false\?"),
        ({**MALENIA, "dispatch": "reporter"}, r"participation.dispatch: expected 'uniform' with .*every_client"),
        ({**MALENIA, "deadline": 2.0}, r"participation.deadline: expected nothing with .*every_client"),
        ({**MALENIA, "max_seconds": 2.0}, r"participation.max_seconds: expected nothing with .*every_client"),
    ],
)
def test_participation_refuses(rules: dict[str, Any], match: str) -> None:
    rules = {key: value for key, value in rules.items() if value is not None}
    values = table("fedavg", "mlp", True, participation={"close": "arrivals", **rules})
    with pytest.raises(UsageError, match=match):
        from_table(values).check_values()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"algorithm": {"name": "fedhenn"}}, "'fedhenn' needs rounds: "),
        ({"algorithm": {"name": "flic"}}, "'flic' needs rounds: .*'all'"),
        ({"algorithm": {"name": "flic"}, "participation": SOME}, "'flic' needs rounds: "),
        ({"algorithm": {"name": "fedlrgd"}}, "'fedlrgd' needs rounds: "),
        ({"doubling": {"when": "plateau"}}, "doubling.when"),
        ({"weighting": {"correct": "estimated"}}, "weighting.correct"),
        ({"weighting": {"correct": "known"}}, "weighting.correct"),
        ({"algorithm": {"name": "salf"}}, "algorithm.missing"),
        ({"staleness": {"a": 0.5}}, "staleness.a"),
        (
            {"algorithm": {"name": "local"}, "staleness": {"weight": "hinge"}},
            "^staleness.weight = 'hinge' has no meaning with algorithm.name = 'local', which shares nothing",
        ),
        ({"staleness": {"weight": "polynomial"}, "participation": {"close": "all"}}, "staleness.weight"),
    ],
)
def test_methods_that_need_rounds_are_refused(more: dict[str, Any], match: str) -> None:
    values = table("fedavg", "mlp", True, **{"participation": {"close": "arrivals", "buffer": 1}, **more})
    with pytest.raises(UsageError, match=match):
        from_table(values).check_values()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"algorithm": {"name": "fedavg"}}, r"algorithm.weights: expected 'uniform' with .*every_client"),
        ({"algorithm": {"name": "heterofl"}}, r"participation.every_client = true: algorithm.name = 'heterofl'"),
        (
            {"weighting": {"correct": "remembered"}},
            r"weighting.correct = 'remembered' has no meaning with .*every_client",
        ),
        ({"staleness": {"weight": "hinge"}}, r"staleness.weight: expected 'constant' with .*every_client"),
    ],
)
def test_what_does_not_let_clients_count_alike_is_refused(more: dict[str, Any], match: str) -> None:
    values = table("fedavg", "mlp", True, **{"algorithm": UNIFORM, "participation": MALENIA, **more})
    with pytest.raises(UsageError, match=match):
        from_table(values).check_values()


# ---- runs


def small(**more: Any) -> dict[str, Any]:
    rules = {"close": "arrivals", "buffer": 3, "concurrency": 5}
    return table("fedavg", "mlp", True, **{"rounds": 6, "speed": DYNAMIC, "participation": rules, **more})


@pytest.mark.parametrize(
    "more",
    [
        {
            "participation": {"close": "arrivals", "buffer": 7, "once_per_version": True},
            "staleness": {"weight": "polynomial"},
        },
        {"participation": {**MALENIA, "stop_stale": True}, "algorithm": UNIFORM},
    ],
)
def test_all_of_equal_pace_are_fedavg(solo: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    """To the bit: K = concurrency = all clients, at most once per version, or S = n."""
    equal = {"speed": {"model": "none"}}
    one = play(solo, small(**equal, **more), tmp_path / "arrivals", None)
    twin = {**more, "participation": {"close": "all"}, "staleness": {}}
    other = play(solo, small(**equal, **twin), tmp_path / "all", None)
    columns = ("loss", "accuracy", "sim_seconds", "message_bytes")
    left, right = store.open_run(one), store.open_run(other)
    for name in columns:
        np.testing.assert_array_equal(left[name].values, right[name].values, err_msg=name)
    states = [store.load(store.latest(run)).shared for run in (one, other)]  # type: ignore[arg-type]
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "more",
    [
        {"staleness": {"weight": "polynomial"}, "algorithm": {"name": "fedavg", "batch": 32, "momentum": 0.5}},
        {
            "algorithm": {"name": "salf", "missing": "none", "momentum": 0.5, "persist_optimizer": True},
            "participation": {"close": "arrivals", "buffer": 4, "max_seconds": 0.7, "max_staleness": 2},
        },
        {
            "algorithm": {"name": "fedavg", "batch": 32, "epochs": 0, "steps": 5},
            "participation": {"close": "arrivals", "buffer": 4, "max_seconds": 0.7, "partial": "steps"},
        },
    ],
)
def test_ranks_and_resumption_in_the_middle_of_a_flight_do_not_matter(
    world: Any, shared_dir: Path, more: dict[str, Any]
) -> None:
    together = play(world, small(**more), shared_dir / "ranks", world.comm)
    single = play(world, small(**more), shared_dir / "single", None)
    resume(world, single, 2, world.comm)
    if world.rank == 0:
        same(together, single)
        assert (store.open_run(single)["arrival_staleness"].values > 0).any()
        saved = store.load(store.latest(single))  # type: ignore[arg-type]
        at_work = ~np.isnan(saved.memory["flight due"])
        assert set(saved.served) == set(saved.memory["flight version"][at_work].tolist())  # each once, no others


@pytest.mark.mpi
def test_where_clients_count_alike_ranks_resumption_and_replay_do_not_matter(world: Any, shared_dir: Path) -> None:
    """Clients with labels of their own, who report unequally often; checkpoints are in the middle of visits."""
    data = {"name": "digits", "partition": "shards", "classes": 2}
    values = small(participation={**MALENIA, "buffer": 9}, algorithm=UNIFORM, data=data, rounds=4)
    together = play(world, values, shared_dir / "ranks", world.comm)
    single = play(world, values, shared_dir / "single", None)
    resume(world, single, 2, world.comm)
    again = play(world, values | {"speed": {"model": "trace", "run": str(single)}}, shared_dir / "again", None)
    if world.rank == 0:
        same(together, single)
        same(again, single)
        for row in store.open_run(single)["arrival_client"].values:
            times = np.bincount(row[row >= 0], minlength=7)
            assert times.min() > 0
            assert times.max() > times.min()
            assert (1 / times).sum() <= 49 / 9 * (1 + 1e-12)


def test_a_replay_has_the_same_bits(solo: Any, tmp_path: Path) -> None:
    run = play(solo, small(staleness={"weight": "hinge", "b": 1}), tmp_path / "run", None)
    replay = small(staleness={"weight": "hinge", "b": 1}, speed={"model": "trace", "run": str(run)})
    same(play(solo, replay, tmp_path / "again", None), run)


def test_visits_that_another_method_goes_on_from_have_their_places_in_a_replay(solo: Any, tmp_path: Path) -> None:
    """Decoupled DiLoCo records those that are too old beside the buffer; FedAvg's replay of it has them too."""
    rules = {"close": "arrivals", "buffer": 2, "max_staleness": 0}
    method = {"name": "decoupled_diloco", "batch": 16, "steps": 3, "lr": 0.01}
    run = play(solo, small(participation=rules, algorithm=method), tmp_path / "run", None)
    depths = store.open_run(run)["arrival_depth"].values
    assert ((depths > 0).sum(1) > 2).any()
    replay = small(participation=rules, speed={"model": "trace", "run": str(run)})
    again = play(solo, replay, tmp_path / "again", None)
    np.testing.assert_array_equal(store.open_run(again)["arrival_depth"].values, depths)


def test_a_client_may_report_twice_between_two_deadlines(solo: Any, tmp_path: Path) -> None:
    """Once the visit that it had begun before, once another one; on file, and replayed."""
    rules = {"close": "arrivals", "deadline": 1.5, "once_per_version": True}
    run = play(solo, small(participation=rules), tmp_path / "run", None)
    came = store.open_run(run)["arrival_client"].values
    assert any(len(set(row[row >= 0])) < np.count_nonzero(row >= 0) for row in came)
    replay = small(participation=rules, speed={"model": "trace", "run": str(run)})
    same(play(solo, replay, tmp_path / "again", None), run)


@pytest.mark.mpi
def test_of_two_visits_of_a_client_to_a_step_the_one_that_is_rejected_is_marked(world: Any, shared_dir: Path) -> None:
    """Client 0 takes 1 s, others 2.5 s: client 0 twice, its second visit not finite, then clients 1 and 2."""
    file = shared_dir / "speeds.csv"
    if world.rank == 0:
        file.write_text("\n".join(["client,seconds", "0,1.0", *(f"{client},2.5" for client in range(1, 7))]))
    world.meet()
    again = {"name": "helpers.strange.again:Again", "batch": 32, "momentum": 0.5, "persist_optimizer": True}
    rules = {"close": "arrivals", "buffer": 4}
    values = small(rounds=1, algorithm=again, speed={"model": "table", "file": str(file)}, participation=rules)
    together = play(world, values, shared_dir / "ranks", world.comm)
    single = play(world, values, shared_dir / "single", None)
    again = play(world, values | {"speed": {"model": "trace", "run": str(single)}}, shared_dir / "again", None)
    if world.rank == 0:
        same(together, single)
        data = store.open_run(single)
        assert data["arrival_client"].values.tolist() == [[0, 0, 1, 2]]
        assert data["arrival_depth"].values.tolist() == [[1, data.sizes["layer"] + 1, 1, 1]]
        assert np.flatnonzero(data["rejected"].values[0]).tolist() == [0]
        assert np.flatnonzero(data["arrived"].values[0]).tolist() == [0, 1, 2]
        assert summary(single)["state_sha256"] == summary(again)["state_sha256"]


# ---- what a check says


@pytest.mark.parametrize(
    ("more", "ranks", "at_work", "states"),
    [
        ({}, 1, "5 clients", {"of them for states in clients' hands": 5}),
        ({}, 4, "5 clients", {"of them for states": 3, "MB at the server for such states": 10}),  # 3 clients a rank
        (
            {"clock": "wall", "batch_clients": "auto"},
            4,
            "3 clients being at work, one on each client rank",
            {"of them": 6},
        ),
    ],
)
def test_a_check_states_the_memory_of_states_in_clients_hands(
    more: dict[str, Any], ranks: int, at_work: str, states: dict[str, int]
) -> None:
    """Once each; the server's copies for checkpoints are beside them."""
    config = from_table(small(**more))
    size = Job.of(config, None, ranks).task.nbytes
    lines = dict(line.split(maxsplit=1) for line in report(config, config.check(None), None, ranks))
    assert f" {at_work}" in lines["closes"]
    assert lines["cohort"].startswith(f"{at_work[0]} at work, 3.0 counted on average")
    for words, times in states.items():
        assert f"{times * size / 1e6:.3g} {words}" in lines["memory"]
