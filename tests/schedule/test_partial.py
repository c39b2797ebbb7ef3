"""What counts of visits that are not complete when a round closes, whatever closes it; by hand where it can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest

from helpers.toys import planner
from hpcfl import store
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt, Plan
from hpcfl.schedule.speeds import Speed
from hpcfl.schedule.speeds.base import Equal
from hpcfl.schedule.speeds.drawn import Exponential, UniformDepth
from hpcfl.testing.runs import play, resume, same, table

L = 4
SHARES = np.arange(L, 0, -1) / L  # layer 4 after a quarter of a visit, layer 1 after all of it
DYNAMIC = {"model": "exponential", "kind": "dynamic"}
FIRST = {"close": "first", "first": 3}
QUORUM = {"close": "quorum", "quorum": 3, "grace": 0.25}


class Written(Speed):
    """Seconds written down by client."""

    model: str = "written"
    seconds_of: ClassVar = [1.0, 2.0, 3.0, 4.5, 9.0]

    def seconds(self, attempt: Attempt) -> np.ndarray:
        return np.array(self.seconds_of)[attempt.cohort]


def planned(rules: dict[str, Any], speed: Speed | None = None, layerwise: bool = True, round_: int = 0) -> Plan:
    rule = planner(Participation(**rules), speed or Written(), 5, SHARES, layerwise=layerwise)
    return next(rule.plans(round_))


# ---- plans, by hand


@pytest.mark.parametrize(
    ("rules", "depth", "duration"),
    [
        # after 2 s: the third visit is two thirds through, the fourth at 1.78 of 4 quarters, the last at 0.89 of one
        ({"close": "first", "first": 2}, [1, 1, 3, 4, 5], 2.0),
        ({"close": "first", "first": 2, "partial": "layers"}, [1, 1, 3, 4, 5], 2.0),
        ({"close": "first", "first": 2, "partial": "discard"}, [1, 1, 5, 5, 5], 2.0),
        ({"close": "first", "first": 5}, [1, 1, 1, 1, 1], 9.0),
        # half a second later: 2.5 of 3 s, 2.5 of 4.5 s, 2.5 of 9 s
        ({"close": "quorum", "quorum": 2, "grace": 0.5}, [1, 1, 2, 3, 4], 2.5),
        ({"close": "quorum", "quorum": 2, "grace": 1.0}, [1, 1, 1, 3, 4], 3.0),
        ({"close": "quorum", "quorum": 2, "grace": 1.0, "partial": "discard"}, [1, 1, 1, 5, 5], 3.0),
        ({"close": "quorum", "quorum": 2}, [1, 1, 3, 4, 5], 2.0),
        ({"close": "quorum", "quorum": 4, "grace": 9.0}, [1, 1, 1, 1, 1], 9.0),  # all are there before it is over
        # an upper bound: 1.5 of 2, 3, 4.5 and 9 s
        ({"close": "first", "first": 2, "deadline": 1.5}, [1, 2, 3, 4, 5], 1.5),
        ({"close": "first", "first": 2, "deadline": 1.5, "partial": "discard"}, [1, 5, 5, 5, 5], 1.5),
        ({"close": "quorum", "quorum": 2, "grace": 0.5, "deadline": 2.25}, [1, 1, 2, 3, 4], 2.25),
        ({"close": "quorum", "quorum": 2, "grace": 0.5, "deadline": 7.0}, [1, 1, 2, 3, 4], 2.5),
        ({"close": "first", "first": 2, "deadline": [[0, 1.0], [1, 9.0]]}, [1, 3, 4, 5, 5], 1.0),
    ],
)
def test_how_far_visits_are_when_a_round_closes(rules: dict[str, Any], depth: list[int], duration: float) -> None:
    plan = next(planner(Participation.from_table(rules, ""), Written(), 5, SHARES).plans())
    assert plan.depth.tolist() == depth
    assert plan.duration == duration


@pytest.mark.parametrize("rules", [FIRST, QUORUM, {**FIRST, "deadline": 0.9}, {**QUORUM, "deadline": 2.0}])
def test_a_method_that_sends_no_layers_has_none_that_count(rules: dict[str, Any]) -> None:
    for round_ in range(20):
        speed = Exponential(kind="dynamic")
        plain, thrown = (planned({**rules, **more}, speed, False, round_) for more in ({}, {"partial": "discard"}))
        assert_same(plain, thrown)
        assert_same(thrown, planned({**rules, "partial": "discard"}, speed, True, round_))
        assert set(plain.depth) <= {1, L + 1}


def assert_same(one: Plan, other: Plan) -> None:
    for mine, theirs in zip(vars(one).values(), vars(other).values()):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("speed", [Equal(), Exponential(), Exponential(kind="dynamic")])
def test_without_a_deadline_there_is_no_partial_work(speed: Speed) -> None:
    for round_ in range(10):
        parts, whole = (planned({"partial": partial}, speed, True, round_) for partial in ("layers", "discard"))
        assert (parts.depth == 1).all()
        assert_same(parts, whole)


def test_of_visits_at_once_all_are_there() -> None:
    assert planned({"close": "first", "first": 2}, Equal()).depth.tolist() == [1] * 5
    assert planned({"close": "first", "first": 2, "partial": "discard"}, Equal()).depth.tolist() == [1, 1, 5, 5, 5]
    assert planned({"close": "quorum", "quorum": 2, "partial": "discard"}, Equal()).counted.sum() == 2


def test_a_quorum_without_grace_is_the_first_visits() -> None:
    for partial in ("layers", "discard"):
        for round_ in range(10):
            speed = Exponential(kind="dynamic")
            first = planned({**FIRST, "partial": partial}, speed, True, round_)
            assert_same(planned({"close": "quorum", "quorum": 3, "partial": partial}, speed, True, round_), first)


def test_a_bound_that_never_counts_changes_nothing_but_its_column() -> None:
    for rules in (FIRST, QUORUM):
        for round_ in range(10):
            plain, bound = (planned(each, Written(), True, round_) for each in (rules, {**rules, "deadline": 1e3}))
            assert (bound.closes_after, np.isnan(plain.closes_after)) == (1e3, True)
            assert_same(replace(bound, closes_after=0.0), replace(plain, closes_after=0.0))


# ---- chances


def test_chances_to_be_among_the_first_are_not_known() -> None:
    for rules in (FIRST, QUORUM, {**FIRST, "deadline": 1.0}):
        assert np.isnan(planned(rules, Exponential(kind="dynamic")).arrival).all()
    everybody = planned({"close": "first", "first": 5, "deadline": 1.0}, Exponential(kind="dynamic"))
    by_time = planned({"close": "deadline", "deadline": 1.0}, Exponential(kind="dynamic"))
    np.testing.assert_array_equal(everybody.arrival, by_time.arrival)


@pytest.mark.parametrize("partial", ["layers", "discard"])
@pytest.mark.parametrize("rules", [{"close": "first", "first": 1}, {"close": "quorum", "quorum": 2, "grace": 0.1}])
def test_the_chance_that_nobody_reaches_a_layer_is_that_of_the_bound(rules: dict[str, Any], partial: str) -> None:
    """Who is complete before it has all layers; so nobody's counting is nobody's being there in time."""
    speed, rounds = Exponential(kind="dynamic"), 4000
    assert (planned({**rules, "partial": partial}, speed).miss_probability == 0).all()
    rule = planner(Participation(**rules, deadline=0.1, partial=partial), speed, 3, SHARES)
    plans = list(islice(rule.plans(), rounds))
    empty = np.mean([[(plan.depth > layer).all() for layer in range(1, L + 1)] for plan in plans], axis=0)
    chance = plans[0].miss_probability
    assert ((chance > 0.2) & (chance < 0.8)).all()
    np.testing.assert_array_less(np.abs(empty - chance), 3 * np.sqrt(chance * (1 - chance) / rounds))


# ---- adaptive deadlines


def test_an_adaptive_bound_learns_from_what_it_could_see() -> None:
    rules = {"close": "first", "first": 2, "deadline": "adaptive", "adaptive_quantile": 0.5, "adaptive_first": 5.0}
    found = list(islice(planner(Participation(**rules), Written(), 5, SHARES).plans(), 3))
    # closed after 2 s, with visits of 1 and 2 s; three that had not ended then count as 4 s each
    assert [plan.closes_after for plan in found] == [5.0, 4.0, 4.0]
    tight = {**rules, "adaptive_first": 1.5}
    found = list(islice(planner(Participation(**tight), Written(), 5, SHARES).plans(), 3))
    # closed by 1.5 s: 1 and four times 3 s; then by 2 visits after 2 s: 1, 2 and three times 4 s, the median of ten
    assert [plan.closes_after for plan in found] == [1.5, 3.0, 3.0]
    later = next(planner(Participation(**tight), Written(), 5, SHARES).plans(2))
    assert_same(later, found[2])


def test_an_adaptive_bound_is_resumed_and_recalled(solo: Any, tmp_path: Any) -> None:
    keys = {**QUORUM, "deadline": "adaptive", "adaptive_first": 0.5, "adaptive_window": 10, "adaptive_quantile": 0.6}
    values = table("salf", "mlp", True, rounds=6, speed=DYNAMIC, participation=keys)
    whole = play(solo, values, tmp_path / "whole", None)
    half = play(solo, values, tmp_path / "half", None)
    resume(solo, half, 4, None)
    same(half, whole)
    wanted = store.open_run(whole)["deadline"].values
    assert len(set(wanted)) > 3
    for done, closes_after in enumerate(wanted):
        rule = planner(Participation(**keys), clients=7)
        rule.recall(whole, done)
        assert rule.attempt(done).closes_after == closes_after


# ---- stages


def test_stages_wait_for_ever_more_visits_and_take_layers_of_the_others() -> None:
    doubling = {"when": "rounds", "rounds": 2}
    keys = {"rounds": 5, "clients": 5, "algorithm": {"name": "salf"}, "data": {"name": "digits"}, "doubling": doubling}
    rules = {"close": "first", "first": 1, "deadline": 4.0}
    config = from_table({**keys, "model": {"name": "mlp", "hidden": [3]}, "participation": rules})
    job = replace(Job.of(config, None, 1), config=config.model_copy(update={"speed": Written()}))
    found = [next(job.planner.plans(round_, lambda stage=stage: stage)) for round_, stage in enumerate((0, 0, 1, 2, 3))]
    # two layers, after half and all of a visit: closed with 1, 2, 4 visits, the last two by 4 s
    assert [plan.duration for plan in found] == [1.0, 1.0, 2.0, 4.0, 4.0]
    assert [plan.depth.tolist() for plan in found[1:4]] == [[1, 2, 3, 3, 3], [1, 1, 2, 3, 3], [1, 1, 1, 2, 3]]


# ---- runs


RUNS = {"first": FIRST, "quorum": QUORUM, "bound": {**QUORUM, "deadline": 0.6, "min_clients": 2}}


def values_of(rule: str, **more: Any) -> dict[str, Any]:
    return table("salf", "mlp", True, speed=DYNAMIC, participation=RUNS[rule], **more)


@pytest.mark.parametrize("rule", RUNS)
def test_layers_count_of_those_who_were_not_complete(solo: Any, tmp_path: Any, rule: str) -> None:
    values = {**values_of(rule), "rounds": 8, "model": {"name": "mlp", "hidden": [16, 8]}}
    run = play(solo, values, tmp_path / "run", None)
    data = store.open_run(run)
    depth, layers = data["depth"].values, data.sizes["layer"]
    assert layers == 3
    assert set(range(1, layers + 2)) <= set(depth.flatten())
    np.testing.assert_array_equal(data["layer_weight"].values[:, 1], (depth <= 2).sum(1))
    whole = play(solo, {**values, "participation": {**RUNS[rule], "partial": "discard"}}, tmp_path / "whole", None)
    assert set(store.open_run(whole)["depth"].values.flatten()) == {1, layers + 1}


@pytest.mark.parametrize("rule", RUNS)
def test_resumed_runs_and_replays_are_the_same(solo: Any, tmp_path: Any, rule: str) -> None:
    whole = play(solo, values_of(rule), tmp_path / "whole", None)
    half = play(solo, values_of(rule), tmp_path / "half", None)
    resume(solo, half, 2, None)
    same(half, whole)
    trace = {"model": "trace", "run": str(whole)}
    again = play(solo, {**values_of(rule), "speed": trace, "participation": {"close": "all"}}, tmp_path / "again", None)
    same(again, whole)


@pytest.mark.mpi
@pytest.mark.parametrize("rule", RUNS)
def test_any_number_of_ranks_gives_the_same(world: Any, shared_dir: Any, rule: str) -> None:
    run = play(world, values_of(rule), shared_dir / "run", world.comm)
    alone = play(world, values_of(rule), shared_dir / "alone", None)
    if world.rank == 0:
        same(run, alone)


def test_without_a_deadline_layers_that_are_discarded_are_whole_visits_to_the_bit(solo: Any, tmp_path: Any) -> None:
    values = table("salf", "mlp", True, speed=DYNAMIC)
    runs = [
        play(solo, {**values, "participation": {"close": "all", "partial": partial}}, tmp_path / partial, None)
        for partial in ("auto", "discard")
    ]
    same(*runs)


# ---- what is refused


def without_meaning(given: str, close: str, instead: str) -> str:
    has = f"participation.{given} has no meaning with participation.close = '{close}'"
    return f"{has}: remove it, or set participation.close = '{instead}'"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"close": "quorum"}, "participation.quorum: close = 'quorum' needs it"),
        ({"quorum": 2}, without_meaning("quorum = 2", "all", "quorum")),
        ({"close": "first", "first": 2, "quorum": 2}, without_meaning("quorum = 2", "first", "quorum")),
        ({"close": "quorum", "quorum": 2, "first": 2}, without_meaning("first = 2", "quorum", "first")),
        ({"grace": 0.5}, without_meaning("grace = 0.5", "all", "quorum")),
        ({"close": "first", "first": 2, "grace": 0.0}, without_meaning("grace = 0.0", "first", "quorum")),
        ({"close": "quorum", "quorum": 5}, "participation.quorum: expected 1 … 4, got 5; did you mean 4?"),
        (
            {"close": "quorum", "quorum": 4, "invite": "uniform", "size": 3},
            "participation.quorum: expected 1 … 3, got 4; did you mean 3?",
        ),
        (
            {"close": "quorum", "quorum": 2, "min_clients": 3},
            "participation.min_clients: expected 0 … 2, got 3; did you mean 2?",
        ),
        (
            {"close": "quorum", "quorum": 2, "grace": -1.0},
            "participation.grace: expected greater than or equal to 0, got -1.0; did you mean 0.0?",
        ),
        (
            {"close": "quorum", "quorum": 0},
            "participation.quorum: expected greater than or equal to 1, got 0; did you mean 1?",
        ),
        (
            {"close": "first", "first": 2, "deadline": 0.0},
            "participation.deadline: expected seconds above 0, got 0.0",
        ),
    ],
)
def test_bad_rules_are_refused_in_one_line(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        Participation.from_table(keys, "participation").check(4)
    assert str(caught.value) == line


def test_times_that_follow_from_a_deadline_need_rounds_that_close_by_it() -> None:
    for rules in (QUORUM, {**FIRST, "deadline": 1.0}):
        with pytest.raises(UsageError, match=r"'uniform-depth'.*participation\.close = 'deadline', got"):
            UniformDepth().check(Participation(**rules))


def test_chances_that_are_not_known_are_not_asked_for() -> None:
    for rules in (FIRST, QUORUM, {**QUORUM, "deadline": 1.0}):
        with pytest.raises(UsageError, match=rf"'inverse-probability'.*participation\.close = '{rules['close']}'"):
            Salf(rule="inverse-probability").check(Participation(**rules))
    Salf(missing="exact").check(Participation(**QUORUM), known=False)  # somebody always is complete
    with pytest.raises(UsageError, match=r"algorithm\.missing = 'exact'"):
        Salf(missing="exact").check(Participation(**QUORUM, deadline=1.0), known=False)


def test_stages_and_an_adaptive_bound_do_not_go_together() -> None:
    values = table("salf", "mlp", True, participation={**FIRST, "deadline": "adaptive"}, doubling={"when": "rounds"})
    with pytest.raises(UsageError, match=r"^participation\.deadline = 'adaptive'.*doubling\.when = 'rounds'"):
        from_table({**values, "speed": DYNAMIC}).check_values()
