from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import stats

from helpers.toys import planner
from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds import Speed
from hpcfl.schedule.speeds.base import Equal
from hpcfl.schedule.speeds.drawn import Exponential, UniformDepth
from hpcfl.testing.runs import play, resume, same, table

ALPHA = 1e-4
L = 4
SHARES = np.arange(L, 0, -1) / L
DEADLINE = Participation(close="deadline")
FEW = {"close": "deadline", "deadline": 0.9, "min_clients": 5}
DYNAMIC = {"model": "exponential", "kind": "dynamic"}


def asked(cohort=(0, 1, 2, 3), deadline=1.0, attempt=0, seed=3, round_=5, clients=4):
    return Attempt(seed, clients, SHARES, round_, attempt, np.array(cohort, dtype=np.int64), deadline)


def job_of(speed: Speed, **participation: Any) -> Job:
    """A job on digits whose speed model may be one of the tests' own."""
    keys = {"rounds": 5, "clients": 3, "algorithm": {"name": "salf"}, "data": {"name": "digits"}}
    config = from_table({**keys, "model": {"name": "mlp", "hidden": [3]}, "participation": participation})
    return replace(Job.of(config, None, 1), config=config.model_copy(update={"speed": speed}))


class Written(Speed):
    """Seconds written down by attempt; the last ones stay."""

    model: str = "written"
    seconds_of: ClassVar = [[2.0, 3.0, 0.5], [1.1, 9.0, 8.0], [0.5, 0.75, 3.0]]

    def seconds(self, asked):
        return np.array(self.seconds_of[min(asked.number, len(self.seconds_of) - 1)])[asked.cohort]


# --- the time of a round ------------------------------------------------------------------------------------

RULES = {
    "all": ({}, lambda times: times.max()),
    "first": ({"close": "first", "first": 3}, lambda times: np.sort(times)[2]),
    "deadline": ({"close": "deadline", "deadline": 2.0}, lambda times: min(2.0, times.max())),
    "nobody": ({"close": "deadline", "deadline": 1e-9}, lambda times: 1e-9),
}


@pytest.mark.parametrize("communication", [0.0, 0.25, 100.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_a_round_takes_its_slowest_visit_and_the_communication(rule, kind, communication):
    keys, slowest = RULES[rule]
    speed = Exponential(kind=kind, communication=communication)
    for round_ in range(20):
        asked_ = replace(
            asked(range(6), deadline=keys.get("deadline", np.inf), clients=6), round=round_, quorum=keys.get("first")
        )
        plan = planner(Participation(**keys), speed, work=SHARES).plan(asked_)
        assert plan.duration == slowest(speed.seconds(asked_)) + communication


# --- an attempt ---------------------------------------------------------------------------------------------


def test_first_attempts_draw_what_they_always_drew():
    """Numbers written down before there were further attempts."""
    seconds = {
        Exponential(): [0.9583705783920506, 1.4030636282817204, 0.199224946662197, 2.3548633235570264],
        Exponential(kind="dynamic"): [0.19125155929542095, 2.238210955173021, 0.2551460851874356, 2.089905491945514],
        Exponential(kind="dynamic-rate"): [
            0.19476162182718582,
            2.2577762649821556,
            0.31961217760783855,
            3.062357482967903,
        ],
        UniformDepth(): [2.0, 1.0, 1.0, 1.0],
        UniformDepth(redraw=False): [1.0, 1.0, 1.0, np.inf],
        UniformDepth(stragglers=1.0, nothing=False): [2.0, 1.0, 1.0, 4.0],
    }
    for speed, wanted in seconds.items():
        assert speed.seconds(asked()).tolist() == wanted
    assert UniformDepth(stragglers=1.0, nothing=False).depth(asked()).tolist() == [3, 1, 1, 4]
    assert Participation(invite="uniform", size=3).cohort(3, 5, 9).tolist() == [4, 6, 8]


def test_further_attempts_draw_anew_and_evenly():
    speed, late = Exponential(kind="dynamic"), UniformDepth(stragglers=1.0)
    tries = [asked(np.arange(300), attempt=attempt, clients=300) for attempt in range(6)]
    times = np.array([speed.seconds(one) for one in tries])
    assert len(np.unique(times)) == times.size
    assert stats.kstest(times[1:].flatten(), stats.expon.cdf).pvalue > ALPHA
    assert stats.spearmanr(times[1:].flatten(), times[:-1].flatten()).pvalue > ALPHA
    depth = np.array([late.depth(one) for one in tries])
    assert stats.chisquare(np.unique(depth[1:], return_counts=True)[1]).pvalue > ALPHA
    assert stats.spearmanr(depth[1:].flatten(), depth[:-1].flatten()).pvalue > ALPHA
    who = np.array([UniformDepth(complete=False).depth(one) > 1 for one in tries])
    assert (who.sum(1) == 150).all()
    assert len(np.unique(who, axis=0)) == 6
    cohorts = [Participation(invite="uniform", size=20).cohort(0, 0, 300, attempt).tolist() for attempt in range(6)]
    assert len({tuple(cohort) for cohort in cohorts}) == 6
    np.testing.assert_array_equal(Exponential().seconds(tries[0]), Exponential().seconds(tries[5]))  # drawn once


def test_attempts_are_not_rounds():
    speed = Exponential(kind="dynamic")
    seen = {tuple(speed.seconds(asked(attempt=a, round_=r))) for a in range(5) for r in range(5)}
    assert len(seen) == 25


def test_the_cohort_may_be_given():
    plan = planner(Participation(close="first", first=3)).plan(asked([1, 3], np.inf, attempt=2))
    assert plan.cohort.tolist() == [1, 3]
    assert plan.counted.all()  # fewer than are waited for: then all of them
    assert (plan.arrival == 1).all()
    assert (plan.duration, plan.repeats) == (1.0, 2)
    assert np.isnan(plan.closes_after)
    late = planner(DEADLINE, UniformDepth(stragglers=0.5)).plan(asked([0, 2], 3.0))
    assert late.closes_after == 3.0
    assert (late.miss_probability == 0).all()  # one of two is in time


@pytest.mark.parametrize("participation", [Participation(), Participation(close="first", first=2), DEADLINE])
@pytest.mark.parametrize("speed", [Equal(), Exponential(), UniformDepth()])
def test_a_cohort_of_nobody_is_a_round_of_nobody(participation, speed):
    plan = planner(participation, speed).plan(asked([], attempt=1))
    assert (len(plan.cohort), plan.layers, plan.duration, plan.repeats) == (0, L, 0.0, 1)
    assert (plan.miss_probability == 1).all()
    assert not plan.counted.any()


# --- enough visits ------------------------------------------------------------------------------------------


def test_a_round_is_repeated_until_enough_visits_count():
    job = job_of(Written(), close="deadline", deadline=1.0, partial="discard", min_clients=2)
    for plan in islice(job.planner.plans(0), 3):
        assert plan.repeats == 2  # attempt 0 counts one visit, attempt 1 none, attempt 2 two
        assert plan.duration == 3.0  # three times the deadline
        assert plan.seconds.tolist() == [0.5, 0.75, 3.0]
        assert plan.counted.tolist() == [True, True, False]


def test_a_part_of_a_visit_counts_as_a_visit():
    job = job_of(Written(), close="deadline", deadline=1.0, min_clients=2)
    plan = next(job.planner.plans(0))  # two layers: attempt 0 has [2, 3, 0.5] seconds, half of it for layer 2
    assert plan.depth.tolist() == [2, 3, 1]
    assert (plan.repeats, plan.duration) == (0, 1.0)


def test_without_a_least_number_nothing_is_repeated():
    job = job_of(Written(), close="deadline", deadline=0.2, partial="discard")
    plan = next(job.planner.plans(0))
    assert not plan.counted.any()
    assert (plan.repeats, plan.duration) == (0, 0.2)


def test_attempts_are_as_many_as_chance_says():
    participation = {"close": "deadline", "deadline": 1.0, "partial": "discard", "min_clients": 3}
    repeats = [
        plan.repeats for plan in islice(job_of(Exponential(kind="dynamic"), **participation).planner.plans(0), 3000)
    ]
    chance = (1 - np.exp(-1)) ** 3  # all three are in time
    mean, deviation = (1 - chance) / chance, np.sqrt(1 - chance) / chance
    assert abs(np.mean(repeats) - mean) < 4 * deviation / np.sqrt(len(repeats))


def test_a_round_that_is_always_void_is_given_up():
    job = job_of(Equal(), close="deadline", deadline=0.1, min_clients=2)
    with pytest.raises(RunError, match=r"^round 0: given up after 1000 void attempts: 0 .*min_clients = 2$"):
        next(job.planner.plans(0))

    class One(Written):
        seconds_of: ClassVar = [[5.0, 0.5, 5.0]]

    one = job_of(One(), close="deadline", partial="discard", min_clients=3)
    with pytest.raises(RunError, match=r"^round 7: given up after 1000 void attempts: 1 .*min_clients = 3$"):
        next(one.planner.plans(7))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"min_clients": 11}, "participation.min_clients: expected 0 … 10, got 11; did you mean 10"),
        ({"min_clients": -1}, "got -1; did you mean 0"),
        ({"invite": "uniform", "size": 4, "min_clients": 5}, "did you mean 4"),
        ({"close": "first", "first": 3, "min_clients": 4}, "did you mean 3"),
    ],
)
def test_no_more_can_be_needed_than_can_count(keys, words):
    with pytest.raises(UsageError, match=words):
        Participation.from_table(keys, "participation").check(10)
    Participation(**{**keys, "min_clients": 3}).check(10)


def test_repeats_are_recorded_and_resumed(solo: Any, tmp_path: Path) -> None:
    values = table("drop", "mlp", False, rounds=6, speed=DYNAMIC, participation={**FEW, "partial": "discard"})
    whole = play(solo, values, tmp_path / "whole", None)
    half = play(solo, values, tmp_path / "half", None)
    resume(solo, half, 2, None)
    same(half, whole)
    data = store.open_run(whole)
    repeats, seconds = data["repeats"].values, data["round_seconds"].values
    assert repeats.sum() > 0
    assert summary(whole)["repeats"] == repeats.sum()
    assert not data["void"].any()
    assert (data["arrived"].sum("client") >= 5).all()
    assert (data["deadline"] == 0.9).all()
    np.testing.assert_allclose(seconds[repeats > 0], 0.9 * (repeats[repeats > 0] + 1), rtol=1e-12)


@pytest.mark.mpi
def test_repeats_on_any_number_of_ranks(world: Any, shared_dir: Path) -> None:
    uniform = {**FEW, "min_clients": 4, "deadline": "adaptive", "adaptive_first": 0.8, "invite": "uniform", "size": 5}
    values = table("salf", "mlp", True, rounds=6, speed=DYNAMIC, participation={**uniform, "partial": "discard"})
    together = play(world, values, shared_dir / "ranks", world.comm)
    single = play(world, values, shared_dir / "single", None)
    resume(world, single, 4, world.comm)
    if world.rank == 0:
        same(together, single)
        data = store.open_run(single)
        assert len(set(data["deadline"].values)) > 2
        assert data["repeats"].sum() > 0


def test_who_is_asked_follows_from_the_config():
    job = job_of(Exponential(kind="dynamic"), invite="uniform", size=2, close="deadline", deadline=0.7)
    one = job.planner.attempt(4)
    np.testing.assert_array_equal(one.cohort, job.config.participation.cohort(0, 4, 3))
    assert (one.closes_after, one.number, one.layers) == (0.7, 0, 2)
    own = job.planner.attempt(4, 6, cohort=np.array([2]), closes_after=0.3)
    assert (own.cohort.tolist(), own.closes_after, own.number) == ([2], 0.3, 6)
    assert job.planner.plan(own).cohort.tolist() == [2]
