from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from helpers.toys import Rounds, mlp_task, planner
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt, Plan
from hpcfl.schedule.speeds import Speed, speed_class
from hpcfl.schedule.speeds.base import Equal
from hpcfl.schedule.speeds.drawn import Exponential, Groups, Uniform, UniformDepth

ALPHA = 1e-4  # chance of a false alarm per comparison; the seeds are fixed, so it is drawn once for all
L = 4
SHARES = np.arange(L, 0, -1) / L
DEADLINE = Participation(close="deadline")
HARMONIC_MEAN = np.log(100) / (1 - 1 / 100)  # E[1/λ] for λ ~ U[1/100, 1]: 4.65


def asked(seed=0, round_=0, clients=10, deadline=1.0, cohort=None, shares=SHARES):
    return Attempt(seed, clients, shares, round_, 0, np.arange(clients) if cohort is None else cohort, deadline)


def plans(participation, speed, rounds, clients, seed=0, shares=SHARES, layerwise=True):
    return [plan_of(participation, speed, seed, round_, clients, shares, layerwise) for round_ in range(rounds)]


def plan_of(participation, speed, seed, round_, clients, shares=SHARES, layerwise=True, clock="simulated"):
    own = planner(participation, speed, clients, shares, seed, clock, layerwise)
    return own.plan(own.attempt(round_))


def mean_is(samples, wanted, deviation):
    """Whether the samples' mean is within 4 standard errors of what it should be."""
    return abs(np.mean(samples) - wanted) < 4 * deviation / np.sqrt(np.size(samples))


# --- exponential --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 1.0, 4.0])
def test_fixed_times_are_exponential_with_this_rate(rate):
    speed = Exponential(rate=rate)
    times = np.concatenate([speed.seconds(asked(seed, clients=100)) for seed in range(40)])
    assert stats.kstest(times, stats.expon(scale=1 / rate).cdf).pvalue > ALPHA
    assert stats.kstest(times, stats.expon(scale=1.2 / rate).cdf).pvalue < ALPHA


def test_fixed_times_are_drawn_once():
    speed = Exponential()
    first = speed.seconds(asked())
    for round_ in (1, 2, 50):
        np.testing.assert_array_equal(speed.seconds(asked(round_=round_)), first)
    np.testing.assert_array_equal(first, speed.paces(0, 10))
    assert (speed.seconds(asked(seed=1)) != first).all()


@pytest.mark.parametrize(
    ("kind", "mean", "square"),
    [
        ("dynamic-rate", 4.65, 100.0),  # E[1/λ²] = 99/(1 − 1/100)
        ("dynamic-scale", 50.5, 50.5**2 + 99**2 / 12),
    ],
)
def test_dynamic_means_are_the_specs(kind, mean, square):
    if kind == "dynamic-rate":
        assert mean == pytest.approx(HARMONIC_MEAN, abs=5e-3)
        mean = HARMONIC_MEAN
    speed, seeds = Exponential(kind=kind), 1000
    paces = np.array([speed.paces(seed, 100) for seed in range(seeds)])
    assert paces.min() >= 1
    assert paces.max() <= 100
    assert mean_is(paces, mean, np.sqrt(square - mean**2))
    times = np.array([speed.seconds(asked(seed, 3, 100)) for seed in range(seeds)])
    # T = pace · Exp(1): E[T²] = 2 E[pace²]
    assert mean_is(times, mean, np.sqrt(2 * square - mean**2))
    assert not mean_is(times, mean * 1.2, np.sqrt(2 * square - mean**2))


@pytest.mark.parametrize("kind", ["dynamic", "dynamic-rate", "dynamic-scale"])
def test_dynamic_times_are_drawn_anew_each_round_around_paces_that_stay(kind):
    speed = Exponential(kind=kind)
    rounds = np.array([speed.seconds(asked(7, round_, 20)) for round_ in range(300)])
    units = rounds / speed.paces(7, 20)
    assert len(np.unique(units)) == units.size
    assert stats.kstest(units.flatten(), stats.expon.cdf).pvalue > ALPHA
    assert stats.spearmanr(units[1:].flatten(), units[:-1].flatten()).pvalue > ALPHA
    assert stats.spearmanr(units[:, 1:].flatten(), units[:, :-1].flatten()).pvalue > ALPHA


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_groups_are_as_fast_as_their_means(kind):
    speed = Groups(kind=kind, means_of=(0.1, 2.0, 10.0), shares_of=(0.5, 0.2, 0.3))
    groups = np.array([speed.group(seed, 10) for seed in range(500)])
    assert (np.sort(groups) == [0] * 5 + [1] * 2 + [2] * 3).all()
    assert mean_is(groups[:, 0] == 2, 0.3, np.sqrt(0.21))  # client 0 is in any of them
    times = np.array([speed.seconds(asked(seed, seed % 3)) for seed in range(500)])
    units = times / np.array(speed.means_of)[groups]
    assert stats.kstest(units.flatten(), stats.expon.cdf).pvalue > ALPHA
    again = np.array([speed.seconds(asked(seed, seed % 3 + 1)) for seed in range(500)])
    assert (times == again).all() if kind == "fixed" else (times != again).all()


@pytest.mark.parametrize("speed", [Exponential(), Exponential(kind="dynamic-rate"), Groups(), Groups(kind="dynamic")])
def test_clients_may_be_numbered_from_fast_to_slow(speed):
    ordered = speed.model_copy(update={"sorted": True})
    np.testing.assert_array_equal(ordered.paces(3, 30), np.sort(speed.paces(3, 30)))
    assert (np.diff(speed.paces(3, 30)) < 0).any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"means_of": (0.0, 1.0)}, r"^speed\.means_of: expected greater than 0, got 0\.0$"),
        ({"shares_of": (1.0,)}, r"^speed\.shares_of: .* each of the 2 groups"),
        ({"shares_of": (0.9, 0.2)}, r"1 in all, got \[0\.9, 0\.2\]$"),
        ({"shares_of": (1.5, -0.5)}, r"^speed\.shares_of: expected greater than or equal to 0, got -0\.5"),
    ],
)
def test_groups_that_cannot_be_are_refused(keys, message):
    with pytest.raises(UsageError, match=message):
        Groups.from_table(keys, "speed").check(Participation())


def test_a_clients_time_does_not_depend_on_who_else_is_invited():
    for speed in (Exponential(), Exponential(kind="dynamic-rate"), Groups(), UniformDepth(redraw=False)):
        everyone = speed.seconds(asked(3, 5))
        some = np.array([1, 4, 8])
        np.testing.assert_array_equal(speed.seconds(asked(3, 5, cohort=some)), everyone[some])


def test_depth_is_the_first_layer_ready_by_the_deadline():
    class Written(Speed):
        model: str = "written"

        def seconds(self, asked):
            return np.array([0.5, 1.0, 1.01, 1.4, 2.0, 3.9, 4.0, 4.01, np.inf])

    # shares 1, 3/4, 1/2, 1/4 for layers 1 … 4
    depth = Written().depth(asked(clients=9))
    assert depth.tolist() == [1, 1, 2, 3, 3, 4, 4, 5, 5]


def test_depth_counts_unequal_layer_costs():
    task = {"name": "digits"}
    table = {
        "rounds": 1,
        "clients": 4,
        "algorithm": {"name": "salf"},
        "speed": {"model": "none", "costs": "parameters"},
        "data": task,
        "model": {"name": "mlp", "hidden": [5, 2]},
    }
    job = Job.of(from_table(table), None, 1)
    sizes = np.array([64 * 5 + 5, 5 * 2 + 2, 2 * 10 + 10])
    np.testing.assert_allclose(job.planner.work_fractions, np.cumsum(sizes[::-1])[::-1] / sizes.sum(), rtol=1e-15)
    assert job.planner.work_fractions[0] == 1
    table["speed"]["costs"] = "equal"
    np.testing.assert_allclose(Job.of(from_table(table), None, 1).planner.work_fractions, [1, 2 / 3, 1 / 3], rtol=1e-15)
    table["speed"]["costs"] = [3.0, 2.0, 5.0]
    np.testing.assert_allclose(Job.of(from_table(table), None, 1).planner.work_fractions, [1, 0.7, 0.5], rtol=1e-15)
    table["algorithm"]["blocks"] = "tensor"
    table["speed"]["costs"] = "parameters"
    tensors = np.array([64 * 5, 5, 5 * 2, 2, 2 * 10, 10])
    shares = Job.of(from_table(table), None, 1).planner.work_fractions
    np.testing.assert_allclose(shares, np.cumsum(tensors[::-1])[::-1] / tensors.sum(), rtol=1e-15)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([1.0, 2.0], "3 numbers, one for each layer of the model, got"),
        ([1.0, 0.0, 2.0], "numbers above 0"),
        ("measured", "'equal' or 'parameters'"),
    ],
)
def test_costs_that_cannot_be_are_refused_in_one_line(costs, words):
    table = {"algorithm": {"name": "salf"}, "data": {"name": "digits"}, "model": {"name": "mlp"}}
    with pytest.raises(UsageError, match=rf"^speed\.costs[^\n]*{words}[^\n]*$"):
        assert Job.of(from_table({**table, "rounds": 1, "clients": 4, "speed": {"costs": costs}}), None, 1).planner


# --- uniform ------------------------------------------------------------------------------------------------


def test_uniform_times_end_where_they_should_and_are_drawn_anew() -> None:
    speed = Uniform(longest=3.0)
    times = np.array([speed.seconds(asked(5, round_, 20)) for round_ in range(200)])
    assert stats.kstest(times.flatten(), stats.uniform(scale=3.0).cdf).pvalue > ALPHA
    assert len(np.unique(times)) == times.size
    np.testing.assert_array_equal(speed.seconds(asked(5, 7, 20, cohort=np.array([1, 19]))), times[7, [1, 19]])


def test_layers_of_uniform_visits_arrive_as_often_as_they_say() -> None:
    """Layers ready after 1, 3/4, 1/2 and 1/4 of up to 2 s, by a deadline of 0.8 s: chances 0.4, 0.533, 0.8 and 1."""
    speed, deadline = Uniform(longest=2.0), 0.8
    wanted = np.array([0.4, 0.8 / 1.5, 0.8, 1.0])
    np.testing.assert_allclose(speed.arrival(asked(clients=3, deadline=deadline)), np.tile(wanted, (3, 1)), rtol=1e-15)
    depths = np.array([speed.depth(asked(1, round_, 10, deadline)) for round_ in range(400)])
    found = (depths[:, :, None] <= np.arange(1, L + 1)).mean((0, 1))
    assert np.abs(found - wanted).max() < 4 * 0.5 / np.sqrt(depths.size)


# --- uniform depth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("redraw", [True, False])
def test_the_number_of_stragglers_is_exact(share, redraw):
    speed = UniformDepth(stragglers=share, complete=False, redraw=redraw)
    for plan in plans(DEADLINE, speed, 20, 30):
        assert (plan.depth > 1).sum() == round(share * 30)


def test_who_straggles_is_drawn_anew_or_once():
    late = {
        redraw: np.array(
            [plan.depth > 1 for plan in plans(DEADLINE, UniformDepth(complete=False, redraw=redraw), 400, 10)]
        )
        for redraw in (True, False)
    }
    assert (late[False] == late[False][0]).all()
    assert len(np.unique(late[True], axis=0)) > 100  # of 252 sets
    assert evenly_drawn(late[True].sum(0), 400, 5)
    other_runs = np.array([UniformDepth(complete=False, redraw=False).depth(asked(seed)) > 1 for seed in range(400)])
    assert evenly_drawn(other_runs.sum(0), 400, 5)


def evenly_drawn(counts, rounds, size):
    """Chi-square test that every client is drawn equally often in draws of `size` without replacement."""
    clients, chance = len(counts), size / len(counts)
    # each round's counts have covariance chance·(1−chance)·(I − 11ᵀ/n)·n/(n−1)
    scale = rounds * chance * (1 - chance) * clients / (clients - 1)
    return stats.chi2.sf(((counts - rounds * chance) ** 2).sum() / scale, clients - 1) > ALPHA


@pytest.mark.parametrize("nothing", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_stragglers_depths_are_uniform_on_the_allowed_ones(nothing, complete):
    speed = UniformDepth(stragglers=1.0, nothing=nothing, complete=complete)
    depth = np.concatenate([plan.depth for plan in plans(DEADLINE, speed, 500, 8)])
    allowed = range(1 if complete else 2, L + 2 if nothing else L + 1)
    values, counts = np.unique(depth, return_counts=True)
    assert values.tolist() == list(allowed)
    assert stats.chisquare(counts).pvalue > ALPHA


def test_the_shown_seconds_go_with_the_depth():
    plan = plan_of(DEADLINE, UniformDepth(stragglers=1.0), 0, 0, 50)
    assert len(set(plan.depth)) == L + 1
    for seconds, depth in zip(plan.seconds, plan.depth):
        ready = np.flatnonzero(seconds * SHARES <= 1.0 + 1e-12)
        assert (ready[0] + 1 if np.isfinite(seconds) else L + 1) == depth


# --- in real time -------------------------------------------------------------------------------------------


def test_enforced_seconds_are_the_models():
    for kind in ("fixed", "dynamic", "dynamic-rate", "dynamic-scale"):
        speed = Exponential(kind=kind, enforce="busy")
        np.testing.assert_array_equal(speed.enforced(asked(3, 5, 20)), speed.seconds(asked(3, 5, 20)))


def test_no_model_enforces_nothing():
    assert Equal().enforced(asked(cohort=np.array([1, 4]))).tolist() == [0, 0]


def test_uniform_depths_do_not_race_with_the_deadline():
    class Written(UniformDepth):
        def depth(self, asked):
            return np.arange(1, L + 2)

    # layers 4 … 1 are ready after 1/4, 1/2, 3/4 and all of the work; the deadline of 2 s is midway to the next one
    paces = Written().enforced(asked(clients=L + 1, deadline=2.0))
    np.testing.assert_allclose(paces, [1.0, 2 / (7 / 8), 2 / (5 / 8), 2 / (3 / 8), 2 / (1 / 8)], rtol=1e-15)
    shares = np.array([1.0, 0.1])  # layer 2 takes a tenth of the work
    two = UniformDepth(stragglers=1.0, complete=False)
    found = two.enforced(asked(clients=200, shares=shares, deadline=1.0))
    np.testing.assert_allclose(np.unique(found), [1 / 0.55, 20.0], rtol=1e-15)


@pytest.mark.parametrize("nothing", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_enforced_paces_come_as_far_as_drawn(nothing, complete):
    speed = UniformDepth(stragglers=0.8, nothing=nothing, complete=complete)
    for round_ in range(50):
        one = asked(5, round_, 30, deadline=0.7)
        ready = np.outer(speed.enforced(one), one.work_fractions)
        depth = np.where((ready <= 0.7).any(1), (ready <= 0.7).argmax(1), L) + 1
        np.testing.assert_array_equal(depth, speed.depth(one))
        assert abs(ready / 0.7 - 1).min() > 0.1  # no layer is ready within a tenth of the deadline
        assert np.isfinite(ready).all()


def test_chances_of_real_hardware_are_not_known():
    assert not Equal().known("wall")
    real = plan_of(DEADLINE, Equal(), 0, 0, 3, clock="wall")
    assert real.arrival.shape == (3, L)
    assert np.isnan(real.arrival).all()
    assert np.isnan(real.miss_probability).all()
    assert (plan_of(Participation(), Equal(), 0, 0, 3, clock="wall").miss_probability == 0).all()  # all are waited for
    assert Equal().known("simulated")
    assert (Equal().arrival(asked()) == 1).all()
    for speed in (Exponential(), UniformDepth()):
        assert speed.known("wall")
        one, other = (plan_of(DEADLINE, speed, 0, 0, 3, clock=clock) for clock in ("wall", "simulated"))
        np.testing.assert_array_equal(one.arrival, other.arrival)


# --- the chances, against frequencies -----------------------------------------------------------------------

SCENARIOS = {
    "everyone, all depths": (UniformDepth(stragglers=1.0), 3, {}),
    "everyone, never nothing": (UniformDepth(stragglers=1.0, nothing=False), 3, {}),
    "everyone, never complete": (UniformDepth(stragglers=1.0, complete=False), 3, {}),
    "everyone, neither": (UniformDepth(stragglers=1.0, complete=False, nothing=False), 3, {}),
    "everyone, discarded": (UniformDepth(stragglers=1.0), 3, {"partial": "discard"}),
    "some in time": (UniformDepth(stragglers=0.67), 3, {}),
    "nobody late": (UniformDepth(stragglers=0.0), 3, {}),
    "fixed set": (UniformDepth(stragglers=0.5, redraw=False), 4, {}),
    "fixed set of everyone": (UniformDepth(stragglers=1.0, redraw=False), 3, {}),
    "fixed set, discarded": (UniformDepth(stragglers=1.0, redraw=False), 3, {"partial": "discard"}),
    "fixed set, sampled": (UniformDepth(stragglers=0.7, redraw=False), 10, {"invite": "uniform", "size": 2}),
    "sampled": (UniformDepth(stragglers=1.0), 10, {"invite": "uniform", "size": 2}),
    "alike": (Exponential(kind="dynamic", rate=2.0), 3, {"deadline": 0.1}),
    "rates": (Exponential(kind="dynamic-rate"), 3, {"deadline": 0.4}),
    "scales": (Exponential(kind="dynamic-scale"), 3, {"deadline": 0.7}),
    "rates, discarded": (Exponential(kind="dynamic-rate"), 3, {"deadline": 1.0, "partial": "discard"}),
    "rates, sampled": (Exponential(kind="dynamic-rate"), 8, {"invite": "uniform", "size": 2, "deadline": 0.5}),
    "fixed times": (Exponential(), 3, {"deadline": 0.3}),
    "equal": (Equal(), 3, {"deadline": 0.6}),
}


def chances_fit(happened, chances, tests):
    """Whether sums of 0/1 outcomes fit their chances (two-sided z with Bonferroni; sure things exactly)."""
    error = np.sqrt((chances * (1 - chances)).sum(0))
    return (np.abs((happened - chances).sum(0)) <= stats.norm.isf(ALPHA / 2 / tests) * error + 1e-6).all()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_probabilities_are_the_frequencies(scenario):
    speed, clients, keys = SCENARIOS[scenario]
    found = plans(Participation(close="deadline", **keys), speed, 3000, clients, seed=5)
    levels = np.arange(1, L + 1)
    reached = np.array([plan.depth[:, None] <= levels for plan in found])
    empty, missing = ~reached.any(1), np.array([plan.miss_probability for plan in found])
    assert chances_fit(empty, missing, L)
    # per client: an unequal pace must not hide in the mean over clients
    arrived, arrival, invited = (np.zeros((len(found), clients, L)) for _ in range(3))
    for row, plan in enumerate(found):
        arrived[row, plan.cohort], invited[row, plan.cohort] = reached[row], 1
        arrival[row, plan.cohort] = plan.arrival
    assert chances_fit(arrived, arrival, clients * L)
    assert (invited.sum(0) > 0).all()
    if ((missing > 0.05) & (missing < 0.95)).any():  # and a chance that is a fifth off would be noticed
        assert not chances_fit(empty, missing * 0.8, L)


def test_missing_is_zero_as_soon_as_somebody_is_always_in_time():
    for speed in (UniformDepth(stragglers=0.67), UniformDepth(stragglers=0.67, redraw=False)):
        assert (plan_of(DEADLINE, speed, 0, 0, 3).miss_probability == 0).all()


# --- participation ------------------------------------------------------------------------------------------


def test_uniform_cohorts_are_distinct_and_even():
    participation = Participation(invite="uniform", size=4)
    found = [plan.cohort for plan in plans(participation, Equal(), 2000, 11)]
    counts = np.zeros(11)
    for cohort in found:
        assert len(cohort) == 4
        assert (np.diff(cohort) > 0).all()
        counts[cohort] += 1
    assert evenly_drawn(counts, 2000, 4)
    pairs = np.zeros((11, 11))
    for cohort in found:
        pairs[np.ix_(cohort, cohort)] += 1
    together = pairs[np.triu_indices(11, 1)]
    assert abs(together - 2000 * 4 * 3 / (11 * 10)).max() < 5 * np.sqrt(2000 * 0.109 * 0.891)


def test_everybody_is_invited_by_default():
    assert [plan.cohort.tolist() for plan in plans(Participation(), Equal(), 2, 3)] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("speed", [Exponential(), Exponential(kind="dynamic-rate"), Equal()])
def test_all_closes_with_the_slowest_and_first_with_the_nth(speed):
    for round_ in range(5):
        whole = plan_of(Participation(), speed, 3, round_, 9)
        assert whole.duration == max(whole.seconds)
        assert (whole.depth == 1).all()
        assert (whole.arrival == 1).all()
        assert (whole.miss_probability == 0).all()
        for first in range(1, 10):
            plan = plan_of(Participation(close="first", first=first, partial="discard"), speed, 3, round_, 9)
            np.testing.assert_array_equal(plan.seconds, whole.seconds)
            assert plan.duration == sorted(plan.seconds)[first - 1]
            assert plan.counted.sum() == first
            assert plan.seconds[plan.counted].max() <= plan.duration
            assert set(plan.depth) <= {1, L + 1}
            assert np.isnan(plan.arrival).all() == (first < 9)


def test_first_of_a_uniform_cohort_are_its_fastest():
    participation = Participation(invite="uniform", size=5, close="first", first=2, partial="discard")
    paces = Exponential().paces(0, 12)
    for plan in plans(participation, Exponential(), 30, 12):
        fastest = plan.cohort[np.argsort(paces[plan.cohort])[:2]]
        assert set(plan.cohort[plan.counted]) == set(fastest)
        assert plan.duration == paces[fastest].max()


def test_a_deadline_closes_at_the_deadline_or_with_the_last_visit():
    deadline = Participation(close="deadline", deadline=2.0)
    closes = []
    for plan in plans(deadline, Exponential(kind="dynamic-rate"), 200, 2):
        assert plan.duration == (2.0 if plan.seconds.max() > 2 else plan.seconds.max())
        closes.append(plan.duration)
    assert 0 < sum(close < 2 for close in closes) < 200


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("partial", ["auto", "layers", "discard"])
def test_partial_visits_count_only_where_layers_leave_one_by_one(layerwise, partial):
    participation = Participation(close="deadline", partial=partial)
    speed = UniformDepth(stragglers=1.0)
    kept = plan_of(DEADLINE, speed, 0, 0, 40)
    plan = plan_of(participation, speed, 0, 0, 40, layerwise=layerwise)
    if layerwise and partial != "discard":
        assert set(plan.depth) == set(range(1, L + 2))
    else:
        np.testing.assert_array_equal(plan.depth, np.where(kept.depth == 1, 1, L + 1))


def same(one: Plan, other: Plan) -> bool:
    pairs = zip(vars(one).values(), vars(other).values())
    return all(a is b or (a == b if isinstance(a, dict) else np.array_equal(a, b, equal_nan=True)) for a, b in pairs)


@pytest.mark.parametrize(
    "speed", [Equal(), Exponential(), Exponential(kind="dynamic-rate"), UniformDepth(), UniformDepth(redraw=False)]
)
def test_plans_are_pure_functions_of_seed_and_round(speed):
    participation = Participation(invite="uniform", size=6, close="deadline", deadline=0.8)
    order = [(seed, round_) for seed in (0, 1) for round_ in range(4)]
    first = {key: plan_of(participation, speed, *key, 20) for key in order}
    np.random.seed(0)
    again = {key: plan_of(participation, speed, *key, 20) for key in reversed(order)}
    assert all(same(first[key], again[key]) for key in order)
    assert not any(np.array_equal(first[a].cohort, first[b].cohort) for a, b in pairwise(order))


def test_rows_come_deepest_first_and_only_where_they_count():
    plan = Plan(0, np.array([2, 3, 5, 7, 9]), np.ones(5), np.array([3, 1, 5, 1, 2]), 1.0, np.ones((5, 4)), np.zeros(4))
    assert plan.rows(np.arange(10)).tolist() == [1, 3, 4, 0]
    assert plan.rows(np.array([5, 2, 9])).tolist() == [4, 0]
    assert plan.rows(np.array([5])).tolist() == []


def test_a_round_of_nobody():
    plan = Plan.nobody(3, L)
    assert (plan.round, len(plan.cohort), plan.duration, plan.layers, plan.repeats) == (3, 0, 0.0, L, 0)
    assert np.isnan(plan.closes_after)
    rounds = Rounds(FedAvg(), mlp_task([3, 3]))
    before = rounds.state
    rounds.step(Plan.nobody(0, 3))
    assert all((before[name] == rounds.state[name]).all() for name in before)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"invite": "uniform"}, "participation.size"),
        ({"size": 3}, "participation.size"),
        ({"invite": "uniform", "size": 11}, "did you mean 10"),
        ({"invite": "uniform", "size": 0}, "did you mean 1"),
        ({"close": "first"}, "participation.first"),
        ({"first": 2}, "participation.first"),
        ({"close": "first", "first": 11}, "did you mean 10"),
        ({"invite": "uniform", "size": 4, "close": "first", "first": 5}, "did you mean 4"),
        ({"deadline": 0.0}, "participation.deadline"),
    ],
)
def test_participation_refuses_numbers_that_do_not_fit(keys, words):
    with pytest.raises(UsageError, match=words):
        Participation.from_table(keys, "participation").check(10)


def test_speeds_refuse_what_they_cannot_do():
    with pytest.raises(UsageError, match=r"speed\.sorted = true .* did you mean speed\.kind = 'dynamic-rate'"):
        Exponential(kind="dynamic", sorted=True).check(Participation())
    with pytest.raises(UsageError, match=r"speed\.rate"):
        Exponential.from_table({"rate": 0.0}, "speed")
    with pytest.raises(UsageError, match=r"did you mean 1\.0"):
        UniformDepth.from_table({"stragglers": 1.5}, "speed")
    with pytest.raises(UsageError, match="deadline"):
        UniformDepth().check(Participation())
    with pytest.raises(UsageError, match="one layer"):
        UniformDepth(nothing=False, complete=False).depth(asked(shares=np.ones(1)))
    with pytest.raises(UsageError, match="exponential"):
        speed_class("exponentail")


def in_real_time(**more):
    keys = {"rounds": 2, "clients": 4, "clock": "wall", "algorithm": {"name": "salf"}, "data": {"name": "digits"}}
    deadline = {"participation": {"close": "deadline"}, "model": {"name": "mlp"}}
    from_table({**keys, **deadline, **more}).check(None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, r"algorithm\.missing = 'exact' needs .* speed\.model = 'none' .*did you mean .*missing = 'empirical'"),
        (
            {"algorithm": {"name": "salf", "rule": "inverse-probability"}},
            "rule = 'inverse-probability' needs .*did you mean ",
        ),
        ({"batch_clients": 2}, r"^batch_clients: .*'auto', false or 1, got 2; did you mean 1\?$"),
    ],
)
def test_real_time_refuses_what_it_cannot_know(keys, words):
    with pytest.raises(UsageError, match=words):
        in_real_time(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"speed": {"model": "exponential"}},
        {"speed": {"model": "uniform-depth", "enforce": "busy"}, "batch_clients": 1},
        {"participation": {"close": "all"}, "batch_clients": False},
        {"participation": {"close": "first", "first": 2}},
        *({"algorithm": {"name": "salf", "missing": missing}} for missing in ("empirical", "none", "paper")),
        {"algorithm": {"name": "salf", "rule": "released"}},
        {"algorithm": {"name": "fedavg"}},
    ],
)
def test_real_time_takes_what_goes_without(keys):
    in_real_time(**keys)


def test_the_layerwise_ones_are_known():
    assert Salf.layerwise
    assert not FedAvg.layerwise
