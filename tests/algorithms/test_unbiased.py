"""What the docs call unbiased is so: mean steps of many rounds that a deadline cuts short, against whole rounds.

Clients are unequal in data, samples and speed, and the method begins with the state of its third round. In each round
some visits are late, and the server's step is held against that of the same clients if nobody were: the mean
difference is 0, within what Hotelling's T² allows along all directions in which steps vary. The plain mean over those
who arrived is not. SALF's own rules have such tests of theirs in `test_salf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest
from scipy import stats

import grid
from helpers.toys import Rounds
from hpcfl.algorithms import Algorithm, ServerState, algorithm_class, algorithms
from hpcfl.algorithms.weighting import Weighting, with_correction
from hpcfl.base.errors import UsageError
from hpcfl.base.types import Floats
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.plan import Plan

DRAWN, CLIENTS = 2000, 4
"""Rounds of each case, and clients of 1, 3, 60 and 7 samples."""
ROUND = 2  # whose batches are drawn
CHANCE = 0.9973  # three standard errors of one number
STEPS: dict[str, Any] = {"epochs": 0, "steps": 3}
SMALL: dict[str, Any] = {"mask_labels": False, "rates": [1.0, 0.5], "scaler": False}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "salf, layers": ("layers", {"name": "salf", "missing": "none"}),
    "salf, whole": ("discard", {"name": "salf", "missing": "none"}),
    "fedavg, layers": ("layers", {"name": "fedavg", **STEPS}),
    "fedavg, steps": ("steps", {"name": "fedavg", "momentum": 0.5}),
    "fedavg, whole": ("discard", {"name": "fedavg", "weights": "uniform"}),
    "lg_fedavg, layers": ("layers", {"name": "lg_fedavg", "shared_layers": 2, **STEPS}),
    "lg_fedavg, steps": ("steps", {"name": "lg_fedavg", "shared_layers": 2}),
    "lg_fedavg, whole": ("discard", {"name": "lg_fedavg", "shared_layers": 2}),
    "fedprox, steps": ("steps", {"name": "fedprox", "mu": 0.5}),
    "fedprox, whole": ("discard", {"name": "fedprox", "mu": 0.5}),
    "fednova, steps": ("steps", {"name": "fednova", "momentum": 0.5}),
    "fednova, whole": ("discard", {"name": "fednova", "mu": 0.5}),
    "scaffold, steps": ("steps", {"name": "scaffold"}),
    "scaffold, whole": ("discard", {"name": "scaffold"}),
    "ditto, steps": ("steps", {"name": "ditto"}),
    "ditto, whole": ("discard", {"name": "ditto"}),
    "heterofl, steps": ("steps", {"name": "heterofl", **SMALL, "weights": "samples"}),
    "heterofl, whole": ("discard", {"name": "heterofl", **SMALL, "redraw": True}),
    "fedrolex, steps": ("steps", {"name": "fedrolex", **SMALL}),
    "fedrolex, whole": ("discard", {"name": "fedrolex", **SMALL}),
    "fedrep, whole": ("discard", {"name": "fedrep"}),
    "hf_maml, whole": ("discard", {"name": "hf_maml"}),
    "pfedme, whole": ("discard", {"name": "pfedme", "lr": 0.05}),
}
"""By name what counts of visits that are late, and the method: all that ``correct = "known"`` accepts."""


def table(partial: str, algorithm: dict[str, Any], correct: str, **more: Any) -> dict[str, Any]:
    method = algorithm_class(algorithm["name"])
    batch = {"batch": 30} if "batch" in method.model_fields else {}
    epochs = {"epochs": 2} if "epochs" in method.model_fields else {}
    return {
        **{"rounds": 3, "clients": CLIENTS, "seed": 3, "precision": "double", "evaluate": {"every": 9}},
        **{"data": {"name": "judges.world:Unequal"}, "model": {"name": "mlp", "hidden": [5, 3]}},
        "algorithm": {"lr": 0.5, **batch, **epochs, **algorithm},
        "participation": {"close": "deadline", "deadline": 1.2, "partial": partial, **more.pop("participation", {})},
        "speed": {"model": "gamma", "mean": 1.0, "between": 0.5, "within": 1.0},
        "weighting": {"correct": correct},
        **more,
    }


class Steps:
    """The steps of a method's server from one state; `algorithm` may take the place of the config's."""

    def __init__(self, keys: dict[str, Any], algorithm: Algorithm | None = None) -> None:
        config = from_table(keys)
        config.check_values()
        self.job = Job.of(config, None, 1)
        self.algorithm, self.known = algorithm or self.job.algorithm, dict[Any, Any]()
        self.rounds = Rounds(self.algorithm, self.job.task)
        for number in range(2):
            self.rounds.step(self.whole(self.plan(number)))
        self.personal = self.rounds.now.personal

    def plan(self, number: int) -> Plan:
        return self.job.planner.plan(self.job.planner.attempt(number))

    def plans(self, count: int = DRAWN) -> list[Plan]:
        """Rounds that all have the batches of one, and its draws of what messages say."""
        return [replace(self.plan(number), round=ROUND) for number in range(count)]

    def whole(self, plan: Plan) -> Plan:
        """The same round, if all its visits were complete, and sure to be."""
        steps = None if plan.steps is None else self.job.planner.visit_steps[0][plan.cohort]
        chances = None if plan.step_chances is None else np.ones_like(plan.step_chances)
        sure = {"arrival": np.ones_like(plan.arrival), "step_chances": chances}
        return replace(plan, depth=np.ones_like(plan.depth), steps=steps, **sure)

    def of(self, plan: Plan) -> Floats:
        """By how much the server moves the model in a round."""
        drawn = plan.round, *(each.tobytes() for each in (plan.cohort, plan.depth, plan.steps) if each is not None)
        if drawn not in self.known:
            now, names = self.rounds.now, self.job.task.initial()
            now.personal = deepcopy(self.personal)  # which a visit that counts moves on
            sums = self.rounds.collect(plan)
            sums.round = plan.round
            after = self.algorithm.step(self.job.task, ServerState(now.shared, now.extras), sums).shared
            self.known[drawn] = np.concatenate([(after[n] - now.shared[n]).flatten() for n in names if n in after])
        return self.known[drawn]


def differences(late: Steps, whole: Steps, plans: Sequence[Plan]) -> Floats:
    """By how much the steps of rounds differ from those of whole rounds of the same clients."""
    late.rounds.now.shared = whole.rounds.now.shared
    return np.array([late.of(plan) - whole.of(replace(whole.whole(plan), round=ROUND)) for plan in plans])


def off(found: Floats) -> float:
    """Hotelling's T² of a mean against 0, over what it exceeds by chance in 0.27 % of all drawings."""
    mean, rows = found.mean(0), len(found)
    spread, along = np.linalg.eigh(np.cov(found.T))
    varies = spread > 1e-9 * spread[-1]
    if np.abs(mean @ along[:, ~varies]).max(initial=0) > 1e-6 * spread[-1] ** 0.5:
        return inf
    count = int(varies.sum())
    square = rows * float(((mean @ along[:, varies]) ** 2 / spread[varies]).sum())
    return square / (count * (rows - 1) / (rows - count) * float(stats.f.ppf(CHANCE, count, rows - count)))


@pytest.mark.parametrize("case", KNOWN)
def test_known_chances(case: str) -> None:
    known, plain = (Steps(table(*KNOWN[case], correct)) for correct in ("known", "none"))
    plans = known.plans()
    assert off(differences(known, plain, plans)) < 1
    assert off(differences(plain, plain, plans)) > 20


def test_that_is_all_that_known_chances_go_with() -> None:
    """Who accepts them has to be unbiased: a method that is new, too."""
    accepted = set()
    for name, partial in product(algorithms(), ("layers", "steps", "discard")):
        with suppress(UsageError):
            from_table(
                grid.table((name, "deadline", partial, "known", "none", "none", "all", "simulated"))
            ).check_values()
            accepted.add((name, partial))
    assert accepted == {(algorithm["name"], partial) for partial, algorithm in KNOWN.values()}


def test_steps_over_the_chance_of_their_visit() -> None:
    """Of visits that are cut short at a step the mean is then not that of whole ones."""
    steps, plain = KNOWN["fedavg, steps"], Steps(table(*KNOWN["fedavg, steps"], "none"))
    visits = with_correction(plain.algorithm, Weighting(correct="known"), np.arange(CLIENTS))
    late = Steps(table(*steps, "known"), visits)
    assert off(differences(late, plain, late.plans())) > 20


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_known_chances_of_those_who_are_invited(weights: str) -> None:
    """The mean is over them: with unequal weights it is not that over all clients, who are not invited alike often."""
    algorithm, some = {"name": "fedavg", "weights": weights}, {"participation": {"invite": "uniform", "size": 2}}
    known, plain = (Steps(table("discard", algorithm, correct, **some)) for correct in ("known", "none"))
    plans = known.plans()
    assert off(differences(known, plain, plans)) < 1
    everybody = Steps(table("discard", algorithm, "none"))
    everybody.rounds.now.shared = known.rounds.now.shared
    whole = everybody.of(everybody.whole(everybody.plans(1)[0]))
    found = np.array([known.of(plan) - whole for plan in plans])
    assert (off(found) < 1) == (weights == "uniform")


@pytest.mark.parametrize("message", [{"compress": "random-k", "share": 0.3}, {"compress": "qsgd", "levels": 3}])
def test_known_chances_of_messages_that_say_less(message: dict[str, Any]) -> None:
    algorithm, feedback = {"name": "fedavg", "batch": 0}, {"feedback": False} if "share" in message else {}
    known, whole = table("discard", algorithm, "known"), Steps(table("discard", algorithm, "none"))
    late, rounded = (
        Steps(known | {"message": each})
        for each in (message | feedback, {"compress": "top-k", "share": 0.7, "feedback": False})
    )
    assert off(differences(late, whole, [late.plan(number) for number in range(600)])) < 1
    assert off(differences(rounded, whole, rounded.plans())) > 20
