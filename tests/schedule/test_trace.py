"""A replay is the run again: its cohorts, its depths, its seconds, and the same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.check import report
from hpcfl.config import Config, from_table
from hpcfl.engine.job import Job
from hpcfl.engine.record import Recorder
from hpcfl.results.trained import recorded_chunk
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Planner
from hpcfl.schedule.speeds import speed_class
from hpcfl.schedule.speeds.trace import Trace
from hpcfl.testing.runs import play, recorded, resume, same, table

DYNAMIC = {"model": "exponential", "kind": "dynamic-rate"}
SALF = {"name": "salf", "missing": "exact"}
RULES: dict[str, dict[str, Any]] = {
    "deadline": {"close": "deadline", "deadline": 1.5},
    "schedule": {"close": "deadline", "deadline": [[0, 1.5], [2, 3.0]]},
    "adaptive": {"close": "deadline", "deadline": "adaptive", "adaptive_first": 1.0, "adaptive_window": 9},
    "repeated": {"close": "deadline", "deadline": 1.5, "min_clients": 4, "partial": "discard"},
    "sampled": {"close": "deadline", "deadline": 1.5, "invite": "uniform", "size": 3},
    "first": {"close": "first", "first": 3, "invite": "uniform", "size": 5},
    "all": {"close": "all"},
}


def replay(values: dict[str, Any], run: Path, **more: Any) -> dict[str, Any]:
    """Return a config that takes its rounds from `run`; all of ``[speed]`` is forgotten."""
    return {**values, "speed": {"model": "trace", "run": str(run)}, **more}


def job_of(values: dict[str, Any], ranks: int = 1) -> Job:
    config = from_table(values)
    config.check(None)
    return Job.of(config, None, ranks)


def equal(one: Plan, other: Plan) -> bool:
    pairs = zip(vars(one).values(), vars(other).values())
    return all(a is b or (a == b if isinstance(a, dict) else np.array_equal(a, b, equal_nan=True)) for a, b in pairs)


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["fedavg", "salf"])
def test_a_replay_gives_the_same_bits(world: Any, shared_dir: Path, method: str) -> None:
    values = table(method, "mlp", batched=False)
    run = play(world, values, shared_dir / "run", None)
    again = play(world, replay(values, run, batch_clients="auto"), shared_dir / "again", world.comm)
    if world.rank == 0:
        same(again, run)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_replays_to_the_bit(solo: Any, tmp_path: Path, rule: str) -> None:
    algorithm = {"name": "fedavg", "persist_optimizer": True, "momentum": 0.5} if rule == "repeated" else SALF
    costs = {**DYNAMIC, "costs": "parameters"}
    values = table("salf", "mlp", False, algorithm=algorithm, speed=costs, participation=RULES[rule])
    run = play(solo, values, tmp_path / "run", None)
    again = play(solo, replay(values, run), tmp_path / "again", None)
    same(again, run)
    third = play(solo, replay(values, again), tmp_path / "third", None)  # a trace of a trace
    resume(solo, third, 2, None)
    same(third, run)
    plans = zip(job_of(values).planner.plans(0), islice(job_of(replay(values, again)).planner.plans(0), 4))
    assert all(equal(*pair) for pair in plans)  # the chances too
    found = recorded(third)
    assert (found["repeats"].sum() > 0) == (rule == "repeated")
    assert len(np.unique(found["deadline"])) == {"adaptive": 3, "schedule": 2}.get(rule, 1)


@pytest.mark.parametrize("doubling", [{"when": "theory"}, {"when": "rounds", "rounds": 1, "by": "samples"}])
def test_doubling_does_not_reach_into_a_replay(solo: Any, tmp_path: Path, doubling: dict[str, Any]) -> None:
    values = table("fedavg", "mlp", False, speed=DYNAMIC, participation=RULES["first"])
    run = play(solo, values, tmp_path / "run", None)
    own = {"participation": {"close": "first", "first": 2}, "doubling": doubling}
    again = play(solo, replay(values, run, **own), tmp_path / "again", None)
    for name in ("cohort", "blocks", "sim_seconds"):
        np.testing.assert_array_equal(store.open_run(again)[name].values, store.open_run(run)[name].values)


def test_the_chance_to_be_among_the_first_is_not_known_in_a_replay_either(solo: Any, tmp_path: Path) -> None:
    values = table("salf", "mlp", True, algorithm=SALF, speed=DYNAMIC, participation={"close": "first", "first": 3})
    run = play(solo, values, tmp_path / "run", None)
    for rules in ({"close": "all"}, {"close": "first", "first": 7}):
        (plan,) = islice(job_of(replay(values, run, participation=rules)).planner.plans(0), 1)
        assert np.isnan(plan.arrival).all()


def test_chances_and_work_are_those_of_the_recorded_run(solo: Any, tmp_path: Path) -> None:
    values = table("salf", "mlp", True, algorithm=SALF, speed={**DYNAMIC, "costs": "parameters"})
    run = play(solo, values, tmp_path / "run", None)
    job = job_of(replay(values, run, seed=99, participation={"close": "first", "first": 1}))
    original = job_of(values)
    np.testing.assert_array_equal(job.planner.work_fractions, original.planner.work_fractions)
    for plan, other in zip(islice(job.planner.plans(0), 4), original.planner.plans(0)):
        assert 0 < plan.miss_probability[0] < 1
        assert equal(plan, other)
    paces = job.config.speed.paces(99, 7)
    np.testing.assert_array_equal(paces, original.config.speed.paces(3, 7))
    found = next(job.planner.plans(3))
    assert found.round == 3
    asked = job.config.speed.recorded(job.planner.attempt(3))
    np.testing.assert_array_equal(job.config.speed.seconds(asked), found.seconds)
    np.testing.assert_array_equal(job.config.speed.arrival(asked), found.arrival)
    np.testing.assert_array_equal(job.config.speed.miss_probability(asked), found.miss_probability)


@pytest.mark.parametrize(
    ("algorithm", "partial"),
    [("fedavg", "auto"), ("fedavg", "discard"), ("salf", "discard"), ("salf", "auto"), ("salf", "layers")],
)
def test_parts_of_visits_count_only_where_they_may(solo: Any, tmp_path: Path, algorithm: str, partial: str) -> None:
    values = table("salf", "mlp", False)
    run = play(solo, values, tmp_path / "run", None)
    other = {"close": "deadline", "partial": partial, "min_clients": 7}
    job = job_of(replay(values, run, algorithm={"name": algorithm}, participation=other))
    plans, originals = list(islice(job.planner.plans(0), 4)), list(islice(job_of(values).planner.plans(0), 4))
    assert any((plan.depth == 2).any() for plan in originals)
    for plan, original in zip(plans, originals):
        keeps = algorithm == "salf" and partial != "discard"
        depth = original.depth if keeps else np.where(original.depth > 1, 3, 1)
        np.testing.assert_array_equal(plan.depth, depth)
        np.testing.assert_array_equal(
            plan.miss_probability, original.miss_probability if keeps else original.miss_probability[[0, 0]]
        )
        assert (plan.duration, plan.repeats) == (original.duration, 0)  # whatever min_clients says


def by_hand(rounds: list[tuple[list[int], list[float], list[int], float, int]]) -> list[Plan]:
    """Plans as real time gives them: who, seconds, depth, closing time, repeats."""
    chances = [(np.full((len(who), 2), np.nan), np.full(2, np.nan)) for who, *_ in rounds]
    return [
        Plan(number, np.array(who, np.int64), np.array(seconds), np.array(depth, np.int64), closes, *chance, 0.25, void)
        for number, ((who, seconds, depth, closes, void), chance) in enumerate(zip(rounds, chances))
    ]


MEASURED = by_hand(
    [
        ([0, 1, 2, 3, 4, 5, 6], [0.1, 0.11, 0.2, 0.12, np.nan, np.inf, 0.3], [1, 1, 1, 1, 2, 3, 2], 0.2531, 0),
        ([0, 1, 2, 3, 6], [0.1, 0.11, 0.2, 0.12, 0.2], [1, 1, 1, 1, 1], 0.2011, 2),  # 4 and 5 are late still
        ([], [], [], 0.25, 0),
        ([4], [np.nan], [3], 0.26, 1),
    ]
)


def test_what_was_measured_is_replayed(solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = table("salf", "mlp", False, participation={"close": "deadline", "deadline": 0.25})
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plans", lambda _, first, *more: iter(MEASURED[first:]))
        run = play(solo, values, tmp_path / "run", None)
    again = play(solo, replay(values, run), tmp_path / "again", None)
    same(again, run)
    found = store.open_run(again)
    assert found["cohort"].values.sum(1).tolist() == [7, 5, 0, 1]
    assert found["void"].values.tolist() == [0, 0, 1, 1]
    assert found["repeats"].values.tolist() == [0, 2, 0, 1]
    assert found["blocks"].values[0].tolist() == [2, 2, 2, 2, 1, 0, 1]
    assert found["sim_seconds"].values[-1] == pytest.approx(0.2531 + 0.2011 + 0.25 + 0.26)
    assert (found["deadline"] == 0.25).all()


def as_if_in_real_time(speed: Trace) -> Trace:
    """Let a trace believe that its run was by the wall clock, at the speed of the hardware."""
    config: Config = speed.tape.config.model_copy(update={"clock": "wall", "speed": speed_class("none")()})
    speed.__dict__["tape"] = replace(speed.tape, config=config)
    return speed


def test_chances_that_nobody_knew_are_not_made_up(solo: Any, tmp_path: Path) -> None:
    values = table("salf", "mlp", False, algorithm=SALF)
    run = play(solo, values, tmp_path / "run", None)
    config = from_table(replay(values, run))
    config.check(None)
    assert isinstance(config.speed, Trace)
    as_if_in_real_time(config.speed)
    with pytest.raises(UsageError, match=r"algorithm\.missing = 'exact'"):
        config.check(None)
    other = config.model_copy(update={"algorithm": from_table(table("salf", "mlp", False)).algorithm})
    other.check(None)
    plan = next(Job.of(other, None, 1).planner.plans(0))
    assert np.isnan(plan.miss_probability).all()
    assert np.isnan(plan.arrival).all()


def test_rules_are_judged_as_recorded(solo: Any, tmp_path: Path) -> None:
    unbiased = {"name": "salf", "rule": "inverse-probability"}
    first = table("fedavg", "mlp", False)
    run = play(solo, first, tmp_path / "run", None)
    with pytest.raises(UsageError, match=r"'inverse-probability'.*participation\.close = 'first'"):
        job_of(replay(first, run, algorithm=unbiased, participation={"close": "deadline"}))


def sizes(values: dict[str, Any], ranks: int = 2) -> set[int]:
    """How many clients are in a chunk."""
    return {len(chunk.clients) for chunk in job_of(values, ranks).chunks}


def test_a_replay_has_the_chunks_of_its_run(solo: Any, tmp_path: Path) -> None:
    values = table("salf", "mlp", True, clients=20, rounds=1)
    for size, expected in (("auto", {3, 2}), (False, {1}), (4, {4})):
        run = play(solo, {**values, "batch_clients": size}, tmp_path / str(size), None)
        again = {**replay(values, run), "batch_clients": "auto"}
        assert sizes(again) == sizes({**values, "batch_clients": size}) == expected
        assert sizes({**again, "batch_clients": 5}) == {5}
        attributes = store.run_attributes(run)
        assert attributes["chunk"] == str(max(expected))
        assert recorded_chunk(attributes) == max(expected)


ALL = {"close": "all"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {3, 2}),
        ({"algorithm": {"name": "fedrep"}}, {3, 2}),
        ({"participation": {"close": "deadline"}}, {1}),
        ({"participation": {"close": "first", "first": 3}}, {1}),
        ({"participation": {"close": "deadline"}, "batch_clients": 5}, {5}),
        ({"speed": DYNAMIC}, {1}),  # visits end at different times
        ({"guard": {"max_norm": 3.0}}, {1}),
        ({"algorithm": {"name": "salf", "missing": "none"}}, {1}),
        ({"algorithm": {"name": "salf", "missing": "none"}, "participation": {**ALL, "partial": "discard"}}, {3, 2}),
    ],
)
def test_in_real_time_clients_are_batched_where_rounds_wait_for_all(keys: dict[str, Any], expected: set[int]) -> None:
    plain = {"speed": {"model": "none"}, "participation": ALL, "batch_clients": "auto"}
    values = table("fedavg", "mlp", True, clients=20, clock="wall", **{**plain, **keys})
    assert sizes(values) == expected


@pytest.mark.parametrize(("ranks", "expected"), [(2, {3, 2}), (8, {2}), (11, {2}), (21, {1})])
def test_in_real_time_chunks_are_smaller_on_many_ranks(ranks: int, expected: set[int]) -> None:
    plain = {"speed": {"model": "none"}, "participation": ALL, "batch_clients": "auto"}
    values = table("fedavg", "mlp", True, clients=20, clock="wall", **plain)
    assert sizes(values, ranks) == expected
    with pytest.raises(UsageError, match=r"only 4 chunks of 5 clients"):
        sizes({**values, "batch_clients": 5}, 6)


# --- what cannot be replayed --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(solo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds of seven clients and two layers."""
    return play(solo, table("salf", "mlp", False), tmp_path_factory.mktemp("traced") / "run", None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"clients": 4}, r"recorded 7 clients, got 4; did you mean clients = 7\?$"),
        ({"clients": 8}, r"recorded 7 clients, got 8; did you mean clients = 7\?$"),
        ({"rounds": 5}, r"recorded 4 rounds, got 5; did you mean rounds = 4\?$"),
        ({"clock": "wall"}, "'trace' replays in simulated time: expected clock = 'simulated', got 'wall'$"),
        ({"model": {"name": "mlp", "hidden": [8, 8]}}, "recorded 2 layers, the model of this config has 3$"),
        ({"algorithm": {"name": "salf", "blocks": "tensor"}}, "recorded 2 layers, the model of this config has 4$"),
    ],
)
def test_traces_of_another_shape_are_refused(run: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        job_of(replay(table("salf", "mlp", False), run, **keys))
    assert "\n" not in str(caught.value)


def test_fewer_rounds_than_recorded_are_fine(run: Path) -> None:
    job = job_of(replay(table("salf", "mlp", False), run, rounds=2))
    assert [plan.round for plan in islice(job.planner.plans(0), 2)] == [0, 1]


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    values = table("salf", "mlp", False)
    with pytest.raises(UsageError, match=r"^speed\.run: missing$"):
        from_table({**values, "speed": {"model": "trace"}})
    with pytest.raises(UsageError, match=r"^speed\.run: '.*none' is no run folder: .*run\.h5 does not exist$"):
        job_of(replay(values, tmp_path / "none"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "run.h5").write_text("no")
    with pytest.raises(UsageError, match=r"^speed\.run: .*run\.h5 cannot be read"):
        job_of(replay(values, tmp_path / "text"))
    store.create(tmp_path / "empty", {"config": from_table(values).text(), "data_dir": ""})
    with pytest.raises(UsageError, match=r"^speed\.run: '.*empty' has recorded no round yet$"):
        job_of(replay(values, tmp_path / "empty"))
    store.create(tmp_path / "odd", {"config": "{}", "data_dir": ""})
    with pytest.raises(UsageError, match=r"^speed\.run: '.*odd' has no config that can be read: 'speed' is missing$"):
        job_of(replay(values, tmp_path / "odd"))
    with pytest.raises(UsageError, match=r"speed\.model: no 'trac'; did you mean 'trace'\?"):
        from_table({**values, "speed": {"model": "trac"}})


def test_runs_that_recorded_less_are_refused(tmp_path: Path) -> None:
    store.create(tmp_path / "old", {"config": from_table(table("salf", "mlp", False)).text(), "data_dir": ""})
    columns = [store.Column(name, ("client",), "int64", "") for name in ("cohort", "version", "depth")]
    segment = store.begin(tmp_path / "old", columns, {"client": range(7), "layer": ["a", "b"]}, 0, 4)
    segment.write(0, {"cohort": [1] * 7})
    segment.close()
    with pytest.raises(UsageError, match="did not record visit_seconds, round_seconds, repeats, deadline"):
        job_of(replay(table("salf", "mlp", False, rounds=1), tmp_path / "old"))


def test_older_states_are_refused_by_round(solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Recorder.plan_columns

    def stale(self: Recorder, plan: Plan) -> dict[str, Any]:
        row = honest(self, plan)
        return row if plan.round < 2 else {**row, "version": np.where(row["cohort"] == 1, 1, -1)}

    values = table("salf", "mlp", False)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "plan_columns", stale)
        run = play(solo, values, tmp_path / "run", None)
    with pytest.raises(RunError, match="older states in round 2"):
        job_of(replay(values, run))
    job_of(replay(values, run, rounds=2))


def test_a_trace_that_goes_on_counts_with_its_rows(run: Path) -> None:
    status = (run / "status").read_text()
    try:
        store.write_status(run, "running")
        job_of(replay(table("salf", "mlp", False), run))
    finally:
        (run / "status").write_text(status)


def test_the_folder_is_found_from_elsewhere(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    config = from_table(replay(table("salf", "mlp", False), Path(run.name)))
    monkeypatch.chdir(tmp_path)
    assert from_table({**table("salf", "mlp", False), "speed": {"model": "trace", "run": str(run)}}) == config
    config.check(None)


def test_check_tells_of_a_replay(run: Path) -> None:
    config = from_table(replay(table("salf", "mlp", False), run))
    text = "\n".join(report(config, config.check(None), None, 1))
    assert "(4 rounds recorded)" in text
    assert "7 invited" in text
