"""Visits that are cut short at a step: how many steps fit, and what of the visit then counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from helpers.runs import put_together
from helpers.toys import Rounds, mlp_task, planned, visits_of
from hpcfl import store
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Planner
from hpcfl.schedule.speeds import Speed
from hpcfl.schedule.speeds.drawn import Exponential, UniformDepth
from hpcfl.testing.runs import play, recorded, resume, same, table

STEPS = {"close": "deadline", "deadline": 0.5, "partial": "steps"}
DYNAMIC = {"model": "exponential", "kind": "dynamic"}
UNEQUAL = {"name": "digits", "partition": "dirichlet", "alpha": 5.0}
PROX = {"name": "fedprox", "epochs": 2, "batch": 20, "momentum": 0.5, "persist_optimizer": True}


class Fixed(Speed):
    """Seconds written down, the same in each round."""

    model: str = "fixed"
    seconds_of: ClassVar = [0.5, 1.0, 2.0, 4.0, 10.0, 20.0, np.inf]

    def seconds(self, attempt):
        return np.array(self.seconds_of)[attempt.cohort]


def planner(speed: Speed, algorithm: Any, sizes: Any, work: Any = (1.0, 0.5), **participation: Any) -> Planner:
    return Planner(
        Participation(partial="steps", **participation), speed, algorithm, np.array(sizes), np.array(work), seed=1
    )


def planned_by(speed: Speed, algorithm: Any, sizes: Any, **participation: Any) -> Plan:
    return next(planner(speed, algorithm, sizes, **participation).plans())


def small(**more: Any) -> dict[str, Any]:
    plain = {"algorithm": PROX, "speed": DYNAMIC, "participation": STEPS, "data": UNEQUAL}
    return table("fedavg", "mlp", True, **{**plain, **more})


# --- how many steps fit -------------------------------------------------------------------------------------


def test_steps_follow_from_speed_and_deadline() -> None:
    """Ten steps each: by second 1 two clients are through, the others have done 5, 2, 1, half a step and none."""
    plan = planned_by(Fixed(), FedAvg(epochs=0, steps=10), [30] * 7, close="deadline", deadline=1.0)
    assert plan.steps is not None
    assert plan.steps.tolist() == [10, 10, 5, 2, 1, 0, 0]
    assert plan.depth.tolist() == [1, 1, 1, 1, 1, 3, 3]
    assert plan.arrival.tolist() == [[1.0, 1.0]] * 5 + [[0.0, 0.0]] * 2
    assert plan.duration == 1.0


def test_steps_of_visits_whose_time_is_up_where_arrivals_end_rounds() -> None:
    """The same visits: those of 0.5 s are whole, the others report at 1 s, or in vain."""
    rules = {"close": "arrivals", "buffer": 5, "max_seconds": 1.0, "once_per_version": True}
    plan = planned_by(Fixed(), FedAvg(epochs=0, steps=10), [30] * 7, **rules)
    assert plan.steps is not None
    assert plan.arrivals is not None
    assert plan.cohort.tolist() == [0, 1, 2, 3, 4]
    assert plan.steps.tolist() == [10, 10, 5, 2, 1]
    assert plan.depth.tolist() == [1] * 5
    assert plan.arrivals.times.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_each_client_has_its_own_number_of_steps() -> None:
    """Two passes in batches of 10 over 5, 10, 11 and 40 samples are 2, 2, 4 and 8 steps; half of the time is left."""
    slow = Fixed()
    plan = planned_by(slow, FedAvg(epochs=2, batch=10), [5, 10, 11, 40], close="deadline", deadline=0.25)
    assert plan.steps is not None
    assert plan.steps.tolist() == [1, 0, 0, 0]
    plan = planned_by(slow, FedAvg(epochs=2, batch=10), [5, 10, 11, 40], close="deadline", deadline=2.0)
    assert plan.steps is not None
    assert plan.steps.tolist() == [2, 2, 4, 4]
    plan = planned_by(slow, FedAvg(epochs=3, batch=0), [5, 10, 11, 40], close="deadline", deadline=1.5)
    assert plan.steps is not None
    assert plan.steps.tolist() == [3, 3, 2, 1]


def test_the_first_visits_close_the_round_for_all_others() -> None:
    plan = planned_by(Fixed(), FedAvg(epochs=0, steps=10), [30] * 7, close="first", first=3)
    assert plan.steps is not None
    assert plan.steps.tolist() == [10, 10, 10, 5, 2, 1, 0]
    assert plan.depth.tolist() == [1, 1, 1, 1, 1, 1, 3]
    assert plan.duration == 2.0


def test_rounding_costs_no_step() -> None:
    class Hundred(Fixed):
        seconds_of: ClassVar = [1.0, 1.0 / 3.0, 7.0]

    for end, wanted in ((0.29, [29, 87, 4]), (0.57, [57, 100, 8]), (0.07, [7, 21, 1])):
        plan = planned_by(Hundred(), FedAvg(epochs=0, steps=100), [5] * 3, close="deadline", deadline=end)
        assert plan.steps is not None
        assert plan.steps.tolist() == wanted


def test_depths_are_shares_of_the_steps() -> None:
    """Of four equal layers a straggler has done 3/4, 2/4, 1/4 or nothing of its visit, so of its eight steps."""
    speed = UniformDepth(stragglers=1.0, complete=False)
    plans = planner(speed, FedAvg(epochs=0, steps=8), [9] * 50, (1.0, 0.75, 0.5, 0.25), close="deadline").plans()
    plan = next(plans)
    assert plan.steps is not None
    depth = speed.depth(planner(speed, FedAvg(), [9] * 50, (1.0, 0.75, 0.5, 0.25), close="deadline").attempt(0))
    np.testing.assert_array_equal(plan.steps, 8 - 2 * (depth - 1))
    assert set(plan.steps.tolist()) == {6, 4, 2, 0}


def test_heads_that_learn_first_are_no_visit_yet() -> None:
    """FedRep with 3 steps of the head before 1 of the representation: nothing that is shared has changed before."""
    algorithm = FedRep(head_epochs=3, batch=10, blocks=2)
    assert algorithm.visit_steps(10) == (8, 4)
    assert FedRep(head_layers=0, batch=10).visit_steps(10) == (1, 1)
    plan = planned_by(Fixed(), algorithm, [10] * 7, close="deadline", deadline=1.5)
    assert plan.steps is not None
    assert plan.steps.tolist() == [8, 8, 6, 0, 0, 0, 0]
    assert plan.counted.tolist() == [True] * 3 + [False] * 4


@pytest.mark.parametrize(
    "speed", [Exponential(kind="dynamic"), UniformDepth(stragglers=0.5), UniformDepth(stragglers=1.0)]
)
def test_the_chance_to_count_is_that_of_one_step(speed: Speed) -> None:
    """Within three standard errors, over 4000 rounds."""
    keys = {"close": "deadline", "deadline": 0.3}
    plans = list(
        islice(planner(speed, FedAvg(epochs=0, steps=3), [9] * 6, (1.0, 0.75, 0.5, 0.25), **keys).plans(), 4000)
    )
    counted, chance = np.array([plan.counted for plan in plans]).mean(), plans[0].arrival[0, 0]
    assert all((plan.arrival == chance).all() for plan in plans)
    assert 0.05 < chance < 0.95
    assert abs(counted - chance) < 3 * np.sqrt(chance * (1 - chance) / (4000 * 6))


# --- what counts --------------------------------------------------------------------------------------------


def collected(algorithm: Any, sizes: Any, steps: list[int] | None, per_chunk: int | None = None) -> Any:
    """One round of an algorithm whose clients take so many steps: the sums and the rounds."""
    rounds = Rounds(algorithm, mlp_task(sizes, precision="double"), per_chunk)
    plan = planned([1] * len(sizes), 3)
    if steps is not None:
        plan = replace(plan, steps=np.array(steps))
    return rounds.collect(plan), rounds


def test_a_visit_of_some_steps_is_one_that_was_to_take_no_more() -> None:
    """Two clients of 40 and 10 samples take 3 and 2 of 6 steps: what they send is what they sent had 3 or 2 been all.

    The mean's weights stay the samples, and momentum is kept as it was after the last step that counted.
    """
    keys: dict[str, Any] = {"epochs": 0, "batch": 4, "momentum": 0.9, "persist_optimizer": True, "lr": 0.1}
    sums, rounds = collected(FedAvg(steps=6, **keys), [40, 10], [3, 2])
    alone = [collected(FedAvg(steps=count, **keys), [40, 10], None) for count in (3, 2)]
    for name in rounds.state:
        changes = []
        for client, (_, one) in enumerate(alone):
            single = one.job.task
            own = {key: value[client : client + 1] * 0 for key, value in one.now.personal[0].items()}
            generator = one.job.algorithm.client(single, one.now.shared, own, visits_of(single, [client]))
            changes.append(next(message[name][0][0] for message in generator if name in message))
        mean = (40 * changes[0] + 10 * changes[1]) / 50
        torch.testing.assert_close(sums.mean(name), mean, rtol=1e-12, atol=1e-14)
        for client, (_, one) in enumerate(alone):
            torch.testing.assert_close(rounds.now.personal[0][name][client], one.now.personal[0][name][client])
    assert sums.weight("loss") == 50


def test_gradients_are_those_of_the_steps_that_were_taken() -> None:
    _, rounds = collected(FedAvg(epochs=2, batch=4), [10, 10, 3], [5, 2, 1])
    assert rounds.job.task.oracle_calls.tolist() == [4 + 4 + 2 + 4 + 4, 8, 3, 0]


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "optimizer": "adam", "lr": 0.01, "epochs": 2},
    "fedprox": {"name": "fedprox", "mu": 0.5, "epochs": 0, "steps": 9},
    "fedrep": {"name": "fedrep", "head_epochs": 1, "epochs": 1, "blocks": 2, "newcomer": "averaged"},
    "lg_fedavg": {"name": "lg_fedavg", "shared_layers": 1, "epochs": 2, "momentum": 0.5},
    "hf_maml": {"name": "hf_maml", "steps": 6, "hessian": "difference"},
    "local": {"name": "local", "epochs": 2},
    "fedhenn": {"name": "fedhenn", "alignment": 12, "epochs": 2},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_chunk_is_one_by_one_whatever_each_one_takes(solo: Any, tmp_path: Path, method: str) -> None:
    """Also: the loss is the mean over the steps that were taken, and who has come to no step changes nothing."""
    precision, close = (
        ("single", 1e-4) if method == "fedhenn" else ("double", 1e-7)
    )  # Adam's steps enlarge what differs
    values = small(algorithm={"batch": 20, **METHODS[method]}, precision=precision, rounds=2)
    together = play(solo, {**values, "batch_clients": 4}, tmp_path / "together", None)
    single = play(solo, {**values, "batch_clients": False}, tmp_path / "single", None)
    one, other = recorded(together), recorded(single)
    assert len(np.unique(one["steps"])) > 5
    for name in ("steps", "depth", "cohort", "layer_weight", "message_bytes"):
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=close)
    states = [store.load(store.latest(run)) for run in (together, single)]  # type: ignore[arg-type]
    for name, value in states[0].shared.items():
        np.testing.assert_allclose(value, states[1].shared[name], rtol=close, atol=close, err_msg=name)


def test_what_is_recorded_follows_from_what_is_recorded(solo: Any, tmp_path: Path) -> None:
    run = play(solo, small(oracle={"record": True, "phi": 1.0}), tmp_path / "run", None)
    data = store.open_run(run)
    whole = 2 * -(-data["train_samples"].values // 20)
    steps = np.floor(whole * np.minimum(1, 0.5 / data["visit_seconds"].values))
    np.testing.assert_array_equal(data["steps"].values, steps)
    np.testing.assert_array_equal(data["arrived"].values == 1, steps > 0)
    assert ((steps > 0) & (steps < whole)).sum() > 3
    most = np.minimum(data["train_samples"].values * 2, steps * 20).max(1)
    assert (data["gradients"].values <= most).all()
    assert (data["gradients"].values > most - 40).all()  # the last batch of a pass may be smaller


# --- runs ---------------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_ranks_and_resumption_do_not_matter(world: Any, shared_dir: Path) -> None:
    values = small(participation={**STEPS, "min_clients": 5, "deadline": "adaptive", "adaptive_first": 0.5})
    together = play(world, values, shared_dir / "ranks", world.comm)
    single = play(world, values, shared_dir / "single", None)
    resume(world, single, 2, world.comm)
    if world.rank == 0:
        same(together, single)


@pytest.mark.parametrize("rule", [STEPS, {"close": "first", "first": 3, "partial": "steps"}])
def test_a_replay_takes_the_recorded_steps(solo: Any, tmp_path: Path, rule: dict[str, Any]) -> None:
    values = small(participation=rule, speed={**DYNAMIC, "communication": 0.25})
    run = play(solo, values, tmp_path / "run", None)
    replay = {**values, "speed": {"model": "trace", "run": str(run)}}
    same(play(solo, replay, tmp_path / "again", None), run)
    # of the same rounds, whole visits alone
    whole = play(solo, {**replay, "participation": {"partial": "discard"}}, tmp_path / "whole", None)
    dropped = play(solo, {**values, "participation": {**rule, "partial": "discard"}}, tmp_path / "dropped", None)
    for name in ("depth", "loss", "sim_seconds"):
        np.testing.assert_array_equal(recorded(whole)[name], recorded(dropped)[name], err_msg=name)
    # and back: rounds that whole visits alone counted in have no others
    back = {**values, "speed": {"model": "trace", "run": str(dropped)}}
    again = recorded(play(solo, back, tmp_path / "back", None))
    steps = again.pop("steps")
    np.testing.assert_array_equal(steps > 0, again["arrived"] == 1)
    np.testing.assert_array_equal(again["loss"], recorded(dropped)["loss"])


@pytest.mark.parametrize("name", ["salf", "flic", "fedlrgd", "linear_fedrep"])
def test_methods_without_local_steps_are_refused(name: str) -> None:
    words = f"^participation.partial = 'steps': visits of algorithm.name = '{name}' cannot be cut short after a step"
    with pytest.raises(UsageError, match=words) as caught:
        put_together(from_table(small(algorithm={"name": name})))
    assert "\n" not in str(caught.value)


# --- steps by speed -----------------------------------------------------------------------------------------


def test_slow_clients_take_as_many_steps_as_the_fastest_ones_time_holds() -> None:
    class Paced(Fixed):
        seconds_of: ClassVar = [0.58, 0.75, 1.51, 3.33, 100.0]

        def paces(self, seed: int, clients: int) -> Any:
            return np.array(self.seconds_of)

    found = Planner(
        *(Participation(work="speed"), Paced(), FedAvg(epochs=0, steps=32), np.full(5, 30), np.array([1.0])), seed=1
    )
    assert found.visit_steps[0].tolist() == [32, 24, 12, 5, 1]
    assert found.visit_steps[1].tolist() == [1] * 5


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"speed": DYNAMIC}, "expected speed.per = 'step', and seconds by a law"),
        (
            {
                "speed": {"model": "exponential", "kind": "dynamic-scale", "per": "step"},
                "algorithm": {"name": "fedavg", "epochs": 0, "steps": 3},
                "participation": {"close": "deadline", "deadline": 1.0, "work": "speed", "partial": "layers"},
            },
            "layers leave in the last step of whole ones",
        ),
        ({"speed": {"model": "none", "per": "step"}}, "participation.work = 'speed' has no meaning with a .speed. by"),
        ({"speed": {**DYNAMIC, "per": "step"}, "algorithm": {"name": "salf"}}, "cannot be cut short after a step"),
        (
            {
                "speed": {"model": "exponential", "kind": "dynamic-scale", "per": "step"},
                "algorithm": {"name": "fednova"},
                "weighting": {"correct": "estimated"},
                "participation": {"close": "deadline", "deadline": 1.0, "work": "speed"},
            },
            "counts steps, which must not depend",
        ),
    ],
)
def test_work_by_speed_is_refused_where_it_has_no_sense(keys: dict[str, Any], line: str) -> None:
    given = small(**{"participation": {"work": "speed"}, "algorithm": PROX, **keys})
    with pytest.raises(UsageError, match=line):
        from_table(given).check_values()
