from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from helpers.toys import planner
from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.config import from_table, load
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.base import Equal
from hpcfl.schedule.speeds.drawn import Exponential, UniformDepth
from hpcfl.schedule.tape import Tape
from hpcfl.testing.runs import play, resume, same, table

ADAPTIVE = {"close": "deadline", "deadline": "adaptive"}
ONCE = {"rounds": 9, "clients": 6, "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [3]}}


def deadlines(**keys):
    return planner(Participation.from_table({"close": "deadline", **keys}, "participation"))


def seconds(rule, round_):
    return rule.attempt(round_).closes_after


def test_the_same_seconds_always():
    rule = deadlines(deadline=0.3)
    rule.saw(np.array([5.0, 0.1]), 0.3)
    assert [seconds(rule, round_) for round_ in (0, 1, 50)] == [0.3] * 3
    assert not rule.participation.adaptive


def test_rounds_that_close_otherwise_have_no_deadline():
    assert seconds(planner(Participation(deadline=0.3)), 4) == np.inf
    assert seconds(planner(Participation(close="first", first=2)), 4) == np.inf
    assert not Participation(deadline="adaptive").adaptive


def test_a_schedule_holds_from_each_round_on():
    rule = deadlines(deadline=[[0, 1.0], [3, 0.5], [10, 2]])
    assert [seconds(rule, round_) for round_ in (0, 1, 2, 3, 4, 9, 10, 11, 1000)] == [1, 1, 1, 0.5, 0.5, 0.5, 2, 2, 2]


def test_adaptive_by_hand():
    rule = deadlines(deadline="adaptive", adaptive_quantile=0.75, adaptive_window=4, adaptive_first=10.0)
    assert rule.participation.adaptive
    # after each round of visits of 1, 2 and 30 s: the last four seconds known, sorted, and the third of them
    wanted = [
        10.0,
        20.0,  # 1 2 20: 30 s missed 10 s and counts as 20; three quarters of three visits are all three
        20.0,  # 1 2 20 40
        40.0,  # 1 2 40 40
        30.0,  # 1 2 30 40: in time now
        30.0,  # 1 2 30 30
    ]
    for round_, closes_after in enumerate(wanted):
        assert seconds(rule, round_) == closes_after
        rule.saw(np.array([1.0, 2.0, 30.0]), closes_after)


def test_what_never_arrives_counts_as_twice_the_deadline():
    rule = deadlines(deadline="adaptive", adaptive_quantile=1.0, adaptive_window=3)
    rule.saw(np.array([1.0, np.inf]), 4.0)
    assert seconds(rule, 1) == 8.0
    rule.saw(np.array([np.nan, 1.0]), 3.0)
    assert seconds(rule, 2) == 8.0
    rule.saw(np.array([4.5]), 4.5)  # just in time; the 8 s are forgotten
    assert seconds(rule, 3) == 6.0


def test_a_share_of_visits_is_let_in():
    rule = deadlines(deadline="adaptive")
    times = np.random.default_rng(0).permutation(np.arange(1.0, 101.0)) / 20  # 0.05 … 5 s, all within 10 s
    rule.saw(times, seconds(rule, 0))
    assert seconds(rule, 1) == 4.5
    rule.saw(np.full(10, 0.01), 4.5)  # the first ten are forgotten
    left = np.sort(np.append(times[10:], np.full(10, 0.01)))
    assert seconds(rule, 2) == left[89]


def plans(speed, rounds=9, **participation):
    config = from_table({**ONCE, "algorithm": {"name": "salf"}, "speed": speed, "participation": participation})
    config.check(None)
    return Job.of(config, None, 1), list(islice(Job.of(config, None, 1).planner.plans(0), rounds))


def test_simulated_deadlines_follow_from_the_drawn_times():
    keys = {"adaptive_quantile": 0.5, "adaptive_window": 15, "adaptive_first": 0.4, **ADAPTIVE}
    job, found = plans({"model": "exponential", "kind": "dynamic"}, **keys)
    known: list[float] = []
    for plan in found:
        wanted = np.sort(known[-15:])[int(np.ceil(len(known[-15:]) / 2)) - 1] if known else 0.4
        assert plan.closes_after == wanted
        assert plan.duration <= wanted
        known += [time if time <= wanted else 2 * wanted for time in plan.seconds]
        np.testing.assert_array_equal(
            plan.depth, (np.outer(plan.seconds, [*job.planner.work_fractions, 0]) <= wanted).argmax(1) + 1
        )
        means = np.outer(np.ones(6), job.planner.work_fractions)
        np.testing.assert_allclose(plan.arrival, 1 - np.exp(-wanted / means), rtol=1e-12)
    assert len({plan.closes_after for plan in found}) > 5


def test_adaptive_deadlines_do_not_depend_on_where_a_run_begins():
    keys = {"adaptive_window": 20, "adaptive_first": 0.2, "min_clients": 2, "partial": "discard", **ADAPTIVE}
    job, found = plans({"model": "exponential", "kind": "dynamic"}, **keys)
    assert sum(plan.repeats for plan in found) > 0
    for first in (1, 4, 8):
        later = next(job.planner.plans(first))
        assert later.round == first
        assert (later.closes_after, later.duration, later.repeats) == (
            found[first].closes_after,
            found[first].duration,
            found[first].repeats,
        )


@pytest.mark.parametrize(
    ("participation", "distinct"),
    [
        ({**ADAPTIVE, "adaptive_first": 0.5, "adaptive_window": 10, "adaptive_quantile": 0.6}, 4),
        ({"close": "deadline", "deadline": [[0, 0.5], [2, 0.8], [5, 0.4]]}, 3),
    ],
)
def test_a_resumed_run_has_the_same_deadlines(solo, tmp_path, participation, distinct):
    speed = {"model": "exponential", "kind": "dynamic-rate"}
    values = table("salf", "mlp", True, rounds=6, speed=speed, participation=participation)
    whole = play(solo, values, tmp_path / "whole", None)
    half = play(solo, values, tmp_path / "half", None)
    resume(solo, half, 4, None)
    same(half, whole)
    assert len(set(store.open_run(whole)["deadline"].values)) >= distinct


def test_what_an_earlier_start_has_recorded_is_recalled(solo, tmp_path):
    keys = {**ADAPTIVE, "adaptive_first": 0.5, "adaptive_window": 10, "adaptive_quantile": 0.6}
    speed = {"model": "exponential", "kind": "dynamic"}
    run = play(solo, table("salf", "mlp", True, rounds=6, speed=speed, participation=keys), tmp_path / "run", None)
    wanted = store.open_run(run)["deadline"].values
    assert len(set(wanted)) > 3
    for done, closes_after in enumerate(wanted):
        rule = deadlines(**keys)
        rule.recall(run, done)
        assert seconds(rule, done) == closes_after
    deadlines(deadline=0.3).recall(tmp_path / "no run", 3)  # nothing follows from it
    segment = run / "metrics" / "segment-000.h5"
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"has lost what visits took in rounds 0, 1, from which its deadline follows"):
        deadlines(**keys).recall(run, 2)
    with pytest.raises(UsageError, match=r"^speed\.run: .* has lost rounds 0, 1, 2, 3, 4, 5 to damage: run it again"):
        Tape.read(str(run))


def test_a_setting_may_be_a_rule():
    for text, rule in (
        ("adaptive", "adaptive"),
        ("2", 2.0),
        ("[[0, 1.0], [100, 0.5]]", ((0, 1.0), (100, 0.5))),
    ):
        config = load("salf-digits", [f"participation.deadline={text}"])
        assert config.participation.deadline == rule
        again = from_table(json.loads(config.text()))
        assert again == config


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("adaptve", "participation.deadline: expected seconds, 'adaptive', 'planned' or .*, got 'adaptve'$"),
        (True, "expected seconds, 'adaptive', 'planned' or .*, got True$"),
        ([1.0, 2.0], r"expected seconds, 'adaptive', 'planned' or .*, got \[1.0, 2.0\]$"),
        ([[0.5, 2.0]], "expected seconds, 'adaptive', 'planned' or "),
        ([[0, 2.0, 3.0]], "expected seconds, 'adaptive', 'planned' or "),
        ([[0, float("nan")]], "expected seconds, 'adaptive', 'planned' or "),
        (float("inf"), "participation.deadline: .*finite.*, got inf$"),
        ([], r"participation.deadline: expected a first entry \[0, seconds\], got none$"),
        ([[1, 2.0]], r"expected a first entry \[0, seconds\], got one from round 1$"),
        ([[0, 1.0], [5, 2.0], [5, 1.0]], "expected ascending rounds, got 5 after 5$"),
        ([[0, 1.0], [5, 2.0], [3, 1.0]], "expected ascending rounds, got 3 after 5$"),
        ([[0, 1.0], [5, 0]], "expected seconds above 0, got 0.0 from round 5 on$"),
        (0, "expected seconds above 0, got 0.0$"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line(rule, words):
    with pytest.raises(UsageError, match=words) as caught:
        Participation.from_table({"close": "deadline", "deadline": rule}, "participation").check(4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [{"adaptive_quantile": 0.0}, {"adaptive_quantile": 1.1}, {"adaptive_window": 0}])
def test_numbers_of_the_adaptive_rule_have_bounds(key):
    with pytest.raises(UsageError, match=f"participation.{next(iter(key))}: expected "):
        Participation.from_table(key, "participation")
    with pytest.raises(UsageError, match=r"participation\.adaptive_first: expected "):
        Participation.from_table({"adaptive_first": 0.0}, "participation")


def test_times_that_follow_from_the_deadline_cannot_set_it():
    adaptive = Participation(close="deadline", deadline="adaptive")
    with pytest.raises(UsageError, match=r"'adaptive'.*'uniform-depth'"):
        UniformDepth().check(adaptive)
    Exponential().check(adaptive)
    Equal().check(adaptive)
