"""Planned deadlines: against sums written out, grids of all plans, and what the first author's code found."""

from __future__ import annotations

import json
from itertools import islice
from math import exp, factorial
from pathlib import Path

import numpy as np
import pytest

from helpers.toys import planner
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.check import report
from hpcfl.config import from_table, load
from hpcfl.contrib.theory.planned import PARTS, bound
from hpcfl.engine.job import Job
from hpcfl.launch.request import resume_request
from hpcfl.schedule.deadlines import planned
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.drawn import Exponential
from hpcfl.schedule.speeds.laws import Gamma, Lognormal, Pareto, Weibull
from hpcfl.testing.runs import play, resume, same, table

RECORDED = json.loads(
    (Path(__file__).parents[1] / "judges" / "recorded" / "adel.json").read_text(encoding="utf-8"),
)["runs"]
"""What the first author's code found, with how it was made."""
RULES = {"close": "deadline", "deadline": "planned", "planned_seconds": 2.0, "planned_least": 0.1}
DYNAMIC = {"model": "exponential", "kind": "dynamic"}


def poisson(users, layers):
    """The chances that nobody has done 1 … L layers by a second, each layer taking Exp(1) seconds."""

    def missing(second):
        none = [exp(-second) * second**k / factorial(k) for k in range(layers)]
        return np.cumsum(none) ** users

    return missing


def value(deadlines, missing, gamma, users=2, g=1.0, convex=1.0):
    """The part of the bound that deadlines decide about, step by step: Σ_t η_t² Π_{s>t} (1 − ρ_c η_s) C(T_t)."""
    steps = [1 / (convex * (t + gamma)) for t in range(1, len(deadlines) + 1)]
    total = 0.0
    for t, deadline in enumerate(deadlines):
        weight = steps[t] ** 2
        for later in steps[t + 1 :]:
            weight *= 1 - convex * later
        total += weight * g**2 * 4 * users / (users - 1) * sum((1 + p) / (1 - p) for p in missing(deadline))
    return total


@pytest.mark.parametrize("run", RECORDED, ids=["defaults", "kappa", "least"])
def test_the_bound_is_that_of_the_authors_code_and_not_above_what_it_found(run):
    missing = poisson(run["users"], run["layers"])
    of = {"gamma": run["gamma"], "users": run["users"], "g": run["g"], "convex": run["rho_c"]}
    even = np.full(run["rounds"], run["t_max"] / run["rounds"])
    assert run["gamma"] == max(8 * run["rho_s"] / run["rho_c"], 1) - 1
    assert value(even, missing, **of) == pytest.approx(run["uniform"], rel=1e-12)
    assert value(run["deadlines"], missing, **of) == pytest.approx(run["value"], rel=1e-12)
    mine = planned(missing, run["rounds"], run["t_max"], run["t_min"], run["gamma"])
    np.testing.assert_allclose(mine, run["deadlines"], rtol=1e-4)
    assert sum(mine) == pytest.approx(run["t_max"], rel=1e-12)
    assert value(mine, missing, **of) <= run["value"]
    assert value(mine, missing, **of) == pytest.approx(run["value"], rel=1e-6)  # it leaves a little of t_max


def test_the_toy_of_two_layers_and_two_users():
    """By hand: of two users who are done with a Poisson number of layers in 2 s, of mean 2."""
    np.testing.assert_allclose(poisson(2, 2)(2.0), [exp(-4), 9 * exp(-4)], rtol=1e-12)  # the output comes first
    np.testing.assert_allclose(poisson(2, 2)(2.0), [0.0183156, 0.1648407], atol=1e-7)
    assert value([2.0], poisson(2, 2), 0.0) == pytest.approx(8 * (1.0183156 / 0.9816844 + 1.1648407 / 0.8351593))


@pytest.mark.parametrize("seconds", [3.4, 6.0, 12.0])  # of the first, two rounds have the least
@pytest.mark.parametrize("gamma", [0.0, 3.0])
def test_three_rounds_are_the_best_of_a_grid_of_all_plans(gamma, seconds):
    missing, least = poisson(3, 2), 1.0
    middle, width = np.full(2, seconds / 3), seconds
    best = (np.inf, None)
    for _ in range(12):  # ever finer about the best so far
        for first in middle[0] + width * np.linspace(-1, 1, 21):
            for second in middle[1] + width * np.linspace(-1, 1, 21):
                plan = [first, second, seconds - first - second]
                if min(plan) >= least:
                    best = min(best, (value(plan, missing, gamma, 3), plan))
        middle, width = np.array(best[1][:2]), width / 3
    mine = planned(missing, 3, seconds, least, gamma)
    assert value(mine, missing, gamma, 3) == pytest.approx(best[0], rel=1e-6)
    np.testing.assert_allclose(mine, best[1], atol=2e-3)
    assert min(mine) >= least * (1 - 1e-12)


LAWS = {
    "exponential": Exponential(kind="dynamic"),
    "by-client": Exponential(kind="dynamic-rate"),
    "lognormal": Lognormal(between=0.5, within=0.8),
    "gamma": Gamma(within=0.5),
    "weibull": Weibull(within=1.5),
    "pareto": Pareto(mean=0.5, within=1.0),
}


@pytest.mark.parametrize("law", LAWS)
def test_deadlines_never_rise_and_are_not_worse_than_even_ones(law):
    missing = planner(Participation(close="deadline"), LAWS[law], clients=6, work=[1.0, 0.7, 0.2]).missing
    for gamma in (0.0, 10.0):
        found = planned(missing, 30, 15.0, 0.05, gamma)
        assert (np.diff(found) <= 1e-12).all()
        assert found[0] > 1.05 * found[-1]
        assert sum(found) == pytest.approx(15.0)
        assert value(found, missing, gamma, 6) < value([0.5] * 30, missing, gamma, 6)
    np.testing.assert_allclose(planned(missing, 30, 15.0, 0.05, 1e9), 0.5, rtol=1e-6)


def test_where_nothing_is_gained_all_are_alike():
    np.testing.assert_array_equal(planned(lambda _: np.zeros(2), 4, 8.0, 0.5, 0.0), [2.0] * 4)
    assert planned(poisson(3, 2), 1, 7.0, 0.5, 0.0) == pytest.approx([7.0])


def test_chances_that_rise_in_steps_are_waited_for_whole():
    """Of clients that take 1 s or, as often, 5 s, three rounds of four can wait for all with 16 s."""
    missing = planner(Participation(close="deadline"), Lognormal(slow=5.0, slow_share=0.5), clients=3).missing
    assert [missing(each).item() for each in (0.9, 1.0, 4.9, 5.0)] == pytest.approx([1, 1 / 8, 1 / 8, 0])
    found = planned(missing, 4, 16.1, 0.5, 0.0)
    assert found == pytest.approx([5, 5, 5, 1], rel=0.02)
    assert (found[:3] >= 5).all()
    assert found[3] >= 1


def test_somebody_has_to_be_able_to_reach_each_layer():
    def missing(second):
        return np.array([max(0.0, 1 - second / 4) if second > 2 else 1.0])

    for seconds in (6.05, 9.0):
        assert planned(missing, 3, seconds, 0.5, 0.0).min() >= 2
    with pytest.raises(UsageError, match=r"^participation\.planned_seconds: expected at least 6\.\d+: .*, got 5\.0$"):
        planned(missing, 3, 5.0, 0.5, 0.0)


def test_chances_of_a_cohort_that_is_drawn_are_geometric_means():
    law = Exponential(kind="dynamic-rate")
    rules = Participation(close="deadline", invite="uniform", size=2)
    late = np.exp(-0.5 / law.paces(0, 4)[:, None] / np.array([1.0, 0.4]))  # [clients, layers]
    pairs = [late[one] * late[two] for one in range(4) for two in range(one)]
    wanted = np.exp(np.mean(np.log(pairs), 0))
    np.testing.assert_allclose(planner(rules, law, work=[1.0, 0.4]).missing(0.5), wanted, rtol=1e-12)
    np.testing.assert_allclose(planner(Participation(), law, work=[1.0, 0.4]).missing(0.5), late.prod(0), rtol=1e-12)
    np.testing.assert_allclose(  # whole visits
        planner(Participation(partial="discard"), law, work=[1.0, 0.4]).missing(0.5), late.prod(0)[:1].repeat(2)
    )


def values(**participation):
    return table("salf", "mlp", True, rounds=6, speed=DYNAMIC, participation={**RULES, **participation}) | {
        "algorithm": {"name": "salf", "missing": "exact"}
    }


def test_a_run_follows_its_plan_and_so_does_one_that_goes_on(solo, tmp_path):
    whole = play(solo, values(), tmp_path / "whole", None)
    half = play(solo, values(), tmp_path / "half", None)
    resume(solo, half, 4, None)
    same(half, whole)
    data = store.open_run(whole)
    work = Job.of(from_table(values()), None, 1).planner.work_fractions
    wanted = planned(lambda second: np.exp(-second / work) ** 7, 6, 2.0, 0.1, 0.0)
    np.testing.assert_allclose(data["deadline"].values, wanted, rtol=1e-6)
    assert len(set(wanted)) == 6
    plans = list(islice(Job.of(from_table(values()), None, 1).planner.plans(), 6))
    np.testing.assert_array_equal([plan.closes_after for plan in plans], data["deadline"].values)
    chances = [plan.miss_probability for plan in plans]  # p_l of eq. 9, each round's own
    np.testing.assert_allclose(chances, np.exp(-np.outer(wanted, 1 / work)) ** 7, rtol=1e-5)
    with pytest.raises(UsageError, match=r"^--rounds 9: .*: expected 6: its deadlines were planned for that number$"):
        resume_request(whole, None, quiet=True, rounds=9)


@pytest.mark.parametrize(("seconds", "best"), [(2.0, 0.5), (60.0, 1.0)])
def test_the_part_of_the_batch_is_the_best_of_a_grid(seconds, best):
    """And a run of that part has its deadlines: visits take as much less time."""
    config = from_table(values(planned_seconds=seconds))
    job, users, batch = Job.of(config, None, 1), 7, 16
    work = job.planner.work_fractions

    def by_hand(part):
        def missing(second):  # of visits that take `part` of a second in the mean
            return np.exp(-second / (part * work)) ** users

        plan = planned(missing, 6, seconds, 0.1, 0.0)
        noise = 1.0 / (users * round(part * batch))
        return sum(1 / t for t in range(1, 7)) * noise + 6 * value(plan, missing, 0.0, users), plan

    parts = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]
    np.testing.assert_allclose(PARTS, parts)
    wanted = [by_hand(part)[0] for part in parts]
    keys = config.participation
    found = [bound(job.planner.missing, keys, 6, users, batch, part) for part in parts]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert parts[int(np.argmin(wanted))] == best
    lines = dict(line.split(maxsplit=1) for line in report(config, config.check(None), None, 1))
    assert lines["closes"].startswith("by planned deadlines; ")
    plan = by_hand(1.0)[1]
    told = f"{plan[0]:.4g} s in the first round, {plan[-1]:.4g} s in the last, {seconds:.4g} s in all"
    assert lines["deadlines"] == told
    if best == 1:
        assert lines["batch"] == "as it is suits them best"
        return
    assert lines["batch"] == "0.5 of it suits them best: algorithm.batch = 8, speed.scale = 0.5"
    half = Job.of(load(values(), ["algorithm.batch=8", "speed.scale=0.5"]), None, 1).planner
    ends = [half.attempt(number).closes_after for number in range(6)]
    np.testing.assert_allclose(ends, by_hand(0.5)[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"participation.close": "first", "participation.first": 2},
            r"^participation\.close: expected 'deadline' with ",
        ),
        (
            {"participation.close": "arrivals", "participation.buffer": 2},
            r"^participation\.close: expected 'deadline' ",
        ),
        ({"participation.deadline": 1.0}, r"^participation\.planned_seconds = 2\.0 has no meaning with .*'planned'$"),
        ({"participation.planned_seconds": 0.5}, r"expected more than rounds · planned_least = 0\.6, got 0\.5$"),
        ({"speed.kind": "fixed"}, r"draws seconds anew in each round, .*, got 'exponential'$"),
        ({"speed": {"model": "uniform-depth"}}, r"draws seconds anew in each round, .*, got 'uniform-depth'$"),
        ({"speed": {"model": "none"}}, r"draws seconds anew in each round, .*, got 'none'$"),
        (
            {"speed": {"model": "none"}, "clock": "wall", "batch_clients": False},
            r"^participation\.deadline = 'planned' needs the chance that ",
        ),
        ({"link.server": "1 Mbit/s"}, r"^participation\.deadline = 'planned' needs the chance that "),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused_in_one_line(changes, words):
    keys = values()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        keys[section] = keys.get(section, {}) | {name: value} if name else value
    with pytest.raises(UsageError, match=words) as caught:
        from_table(keys).check(None)
    assert "\n" not in str(caught.value)


def test_a_plan_needs_seconds_and_a_replay_has_its_runs_own(solo, tmp_path):
    with pytest.raises(UsageError, match=r"^participation\.planned_seconds: deadline = 'planned' needs it$"):
        Participation(close="deadline", deadline="planned").check(4)
    run = play(solo, values(), tmp_path / "run", None)
    trace = {"model": "trace", "run": str(run)}
    with pytest.raises(UsageError, match=r"a replay has the deadlines of its run; .* speed\.closing = 'rule'"):
        from_table(values() | {"speed": trace}).check(None)
    again = play(solo, values() | {"speed": {**trace, "closing": "rule"}}, tmp_path / "again", None)
    same(again, run)  # the law of the recorded seconds is known


@pytest.mark.mpi
def test_all_ranks_have_the_same_plan_by_either_clock(world, shared_dir):
    single = play(world, values(), shared_dir / "single", None)
    together = play(world, values(), shared_dir / "ranks", world.comm)
    runs = [single, together]
    if world.size > 1:
        real = values() | {"clock": "wall", "batch_clients": False}
        runs.append(play(world, real, shared_dir / "wall", world.comm))
    if world.rank == 0:
        same(together, single)
        plans = [store.open_run(run)["deadline"].values for run in runs]
        np.testing.assert_array_equal(plans[1:], [plans[0]] * (len(runs) - 1))
