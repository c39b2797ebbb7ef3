"""Methods on rounds that arrivals end, by hand through the engine: 1-d quadratics, and changes written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.launcher import ROOT
from helpers.toys import Arriving, Rounds, W, full_batch, mlp_task, plain, planned, quadratics, read
from hpcfl.algorithms import Algorithm
from hpcfl.algorithms.fedasync import FedAsync
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.ringleader import Ringleader
from hpcfl.algorithms.ringmaster import Ringmaster
from hpcfl.algorithms.server_optimizer import ServerOptimizer, with_server_optimizer
from hpcfl.algorithms.weighting import Weighting, with_correction
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.testing.runs import play, resume, same, table

FIRST = {"epochs": 0, "steps": 1, "batch": 0, "weights": "uniform"}
LEAP = {**FIRST, "lr": 1.0}  # from wherever to b_i


class Told(Algorithm):
    """A client sends the change that was written down for its visit: ``changes[client, version, number]``."""

    name: str = "told"
    changes: Any = None

    def mean_weights(self) -> Any:
        return "uniform"

    def client(self, task: Any, shared: Any, personal: Any, visits: Any) -> Any:
        sent = [self.changes[client, visits.round, visits.number] for client in visits.clients.tolist()]
        ones = visits.ones(len(sent))
        yield {"loss": (0 * ones, ones), W: (torch.tensor(sent, dtype=torch.float64).view(-1, 1, 1), ones)}
        return personal


def reached(found: list[tuple[float, float]], *wanted: tuple[float, float]) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


# ---- FedAsync


@pytest.mark.parametrize(
    ("keys", "stale", "wanted"),
    [
        ({"weight": "constant"}, [0, 9], [1, 1]),
        ({"weight": "polynomial"}, [0, 3, 8], [1, 1 / 2, 1 / 3]),
        ({"weight": "polynomial", "a": 2.0}, [0, 1], [1, 1 / 4]),
        ({"weight": "hinge"}, [0, 4, 5, 6], [1, 1, 1 / 11, 1 / 21]),
        ({"weight": "hinge", "a": 4.0, "b": 2}, [2, 3], [1, 1 / 5]),
        ({"weight": "adaptive"}, [0, 2, 3, 12], [1, 1, 1, 1 / 4]),
        ({"weight": "adaptive", "b": 2}, [0, 2, 3], [1, 1, 2 / 3]),
        ({"weight": "adaptive", "b": 0}, [0, 1, 2], [1, 1, 1 / 2]),
        ({"weight": "harmonic"}, [0, 1, 3], [1, 1 / 2, 1 / 4]),
        ({"weight": "exponential", "a": 0.5}, [0, 2], [1, np.exp(-1)]),
    ],
)
def test_what_a_change_counts_by_its_staleness(keys: dict[str, Any], stale: list[int], wanted: list[float]) -> None:
    assert Staleness(**keys).factors(np.array(stale), 3).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("staleness", "alpha", "seconds", "after"),
    [({"weight": "polynomial"}, 0.6, 3.5, 1.6), ({"weight": "hinge"}, 0.9, 5.5, 1.1636363636363636)],
)
def test_fedasync_mixes_by_staleness(staleness: dict[str, Any], alpha: float, seconds: float, after: float) -> None:
    """The fast client leaves w at 1; the slow one has 3, and is 3 (5) versions old."""
    method = FedAsync(**LEAP, mu=0.0, alpha=alpha)
    toy = Arriving(method, quadratics([1.0, 3.0], start=1.0), [1.0, seconds], Staleness(**staleness), buffer=1)
    *before, last = toy.path(int(seconds) + 1)
    assert {w for _, w in before} == {1.0}
    reached([last], (seconds, after))


def test_fedasync_mixes_models_not_changes() -> None:
    """w = 1.5, 1.75, then ½·1.75 + ½·3: the slow client's change since version 0, added, would give 2.75."""
    toy = Arriving(FedAsync(**LEAP, mu=0.0, alpha=0.5), quadratics([2.0, 3.0], start=1.0), [1.0, 2.5], buffer=1)
    reached(toy.path(3), (1.0, 1.5), (2.0, 1.75), (2.5, 2.375))


def test_fedasync_holds_clients_to_where_they_began() -> None:
    """ρ = 1, two steps of η = .1 towards 4: .4, then .72."""
    method = FedAsync(epochs=0, steps=2, batch=0, lr=0.1, mu=1.0, alpha=0.5)
    reached(Arriving(method, quadratics([4.0]), [1.0], buffer=1).path(1), (1.0, 0.36))


def test_a_server_optimiser_steps_by_what_fedasync_proposes() -> None:
    plain = FedAsync(**LEAP, mu=0.0, alpha=0.5)
    task = quadratics([2.0, 3.0], start=1.0)
    double = with_server_optimizer(plain, task, ServerOptimizer(optimizer="momentum", lr=2.0, betas=(0.0,)))
    reached(Arriving(double, task, [1.0, 2.5], buffer=1).path(1), (1.0, 2.0))


# ---- FedBuff and CA2FL


def test_fedbuff_divides_by_the_number_of_visits() -> None:
    """Clients 0 and 1 leave w at 0 for three steps; then Δ = 4 (x = 3) and 1 (x = 0) are there: (4/2 + 1)/2."""
    centres, seconds = [1.0, -1.0, 4.0], [1.0, 1.0, 3.5]
    rules: dict[str, Any] = {"buffer": 2, "once_per_version": True}
    toy = Arriving(FedAvg(**LEAP), quadratics(centres), seconds, Staleness(weight="polynomial"), **rules)
    reached(toy.path(4), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 1.5))


def test_ca2fl_remembers_what_clients_sent() -> None:
    """Δ = 2, 4: v = 3. Then client 0 twice, Δ = 1 and 3, the second beside its renewed memory: v = 3 + (−1 + 2)/2."""
    changes = {(0, 0, 0): 2.0, (1, 0, 0): 4.0, (0, 0, 1): 1.0, (0, 1, 0): 3.0}
    task = quadratics([0.0, 0.0])
    method = with_correction(Told(changes=changes), Weighting(correct="remembered"), np.arange(2))
    toy = Arriving(method, task, [1.0, (1.0, 9.0)], buffer=2)
    reached(toy.path(2), (1.0, 3.0), (3.0, 6.5))
    assert float(toy.now.extras[f"remembered:{W}"]) == 3.5


# ---- Rennala, Ringmaster


@pytest.mark.parametrize("stops", [False, True])
def test_rennala_collects_gradients_of_the_newest_version(stops: bool) -> None:
    """f = ½w², B = 3: gradients of 1, 2 and 2.5 s; then of 4, 5, 5 (the one of 3 s is too old), or of 3.5, 4.5, 5."""
    method = FedAvg(**FIRST, lr=1 / 3)
    rules = {"buffer": 3, "max_staleness": 0, "stop_stale": stops, "dispatch": "reporter"}
    Participation(close="arrivals", **rules).check(2)  # more visits than clients at work is the method's own case
    toy = Arriving(method, quadratics([0.0, 0.0], start=3.0), [1.0, 2.5], **rules)
    plans = [toy.step(), toy.step()]
    times = [sorted(plan.arrivals.times.tolist()) for plan in plans if plan.arrivals is not None]
    assert times == [[1.0, 2.0, 2.5], [3.5, 4.5, 5.0] if stops else [4.0, 5.0, 5.0]]
    assert float(toy.state[W]) == pytest.approx(4 / 3)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(
    ("delay", "wanted"),
    [
        (2, [(1.0, 4.0), (2.0, 2.0), (3.0, 1.0), (4.0, 0.5)]),
        (4, [(1.0, 4.0), (2.0, 2.0), (2.5, -2.0), (3.0, -3.0), (4.0, -1.5)]),
    ],
)
def test_ringmaster_ignores_gradients_of_delay_r(delay: int, wanted: list[Any], stops: bool) -> None:
    rules = {"buffer": 1, "max_staleness": delay - 1, "stop_stale": stops, "dispatch": "reporter"}
    toy = Arriving(Ringmaster(batch=0, lr=0.5), quadratics([0.0, 0.0], start=8.0), [1.0, 2.5], **rules)
    reached(toy.path(len(wanted)), *wanted)


def test_delay_adaptive_steps_are_shorter_for_what_is_old() -> None:
    """Of two workers, one four times as slow: its gradient at 8 counts half when it is 4 steps old."""
    stale = Staleness(weight="adaptive")
    rules = {"buffer": 1, "dispatch": "reporter"}
    toy = Arriving(Ringmaster(batch=0, lr=0.5), quadratics([0.0, 0.0], start=8.0), [1.0, 4.0], stale, **rules)
    wanted = [(1.0, 4.0), (2.0, 2.0), (3.0, 1.0), (4.0, 0.5), (4.0, -1.5), (5.0, -1.75), (6.0, -0.875)]
    reached(toy.path(7), *wanted)
    plain = Arriving(Ringmaster(batch=0, lr=0.5), quadratics([0.0, 0.0], start=8.0), [1.0, 4.0], **rules)
    reached(plain.path(5), *wanted[:4], (4.0, -3.5))


def test_delay_adaptive_steps_of_what_is_fresh_are_plain_to_the_bit() -> None:
    """Of three workers of like pace no gradient is more than three steps old."""
    ends = []
    for weight in ("adaptive", "constant"):
        toy = Arriving(
            Ringmaster(batch=0, lr=0.3),
            quadratics([0.0, 0.0, 1.0], start=8.0),
            [1.0, 1.1, 1.2],
            Staleness(weight=weight),
            buffer=1,
            dispatch="reporter",
        )
        ends.append(toy.path(12))
    assert ends[0] == ends[1]


# ---- a buffer, then a little for more


def test_a_round_that_has_its_buffer_goes_on_for_a_grace() -> None:
    """By 1.5 s two have come, who go out again with the same state; by 2.5 s one of them, .5 s after it came."""
    rules: dict[str, Any] = {"buffer": 1, "grace": 0.5}
    toy = Arriving(FedAvg(**LEAP), quadratics([1.0, 3.0, 9.0]), [1.0, 1.4, 5.0], **rules)
    reached(toy.path(2), (1.5, 2.0), (2.5, 3.0))
    assert toy.job.config.participation.slots(3) == 7


def test_a_grace_ends_before_there_is_no_room_for_arrivals() -> None:
    toy = Arriving(FedAvg(**LEAP), quadratics([1.0, 3.0]), [1.0, 50.0], buffer=1, grace=100.0)
    assert len(toy.step().cohort) == 5


def test_a_grace_needs_a_buffer() -> None:
    rules = Participation(close="arrivals", deadline=1.0, once_per_version=True, grace=0.5)
    with pytest.raises(UsageError, match=r"participation.grace = 0.5 has no meaning with close = 'arrivals' and no"):
        rules.check(3)


@pytest.mark.parametrize(("law", "oldest"), [("adaptive", 7), ("hinge", 4)])
def test_a_law_by_which_nothing_counts_less_is_refused(law: str, oldest: int) -> None:
    rules = Participation(close="arrivals", buffer=1, max_staleness=oldest)
    with pytest.raises(UsageError, match=f"staleness.weight = '{law}' has no meaning with .*: nothing that old counts"):
        Staleness(weight=law).check(rules, 7)
    Staleness(weight=law).check(rules.model_copy(update={"max_staleness": oldest + 1}), 7)


# ---- Ringleader


@pytest.mark.parametrize(
    ("centres", "seconds", "start", "rate", "wanted"),
    [
        (
            [0.0, 2.0],
            [1.0, 2.5],
            3.0,
            0.5,
            [
                (1, 3),
                (2, 3),
                (2.5, 2),
                (3, 1),
                (4, 1),
                (5, 1),
                (5, 0.75),
                (6, 0.5),
                (7, 0.5),
                (7.5, 0.6875),
                (8, 0.875),
            ],
        ),
        (
            [0.0, 2.0, 4.0],
            [1.0, 2.0, 5.5],
            6.0,
            0.5,
            [
                *[(1, 6), (2, 6), (2, 6), (3, 6), (4, 6), (4, 6), (5, 6), (5.5, 4), (6, 2), (6, 0)],
                *[(7, 0), (8, 0), (8, 0), (9, 0), (10, 0), (10, 0), (11, 0), (11, 4 / 15)],
                *[(12, 49 / 90), (12, 37 / 45)],
            ],
        ),
    ],
)
def test_ringleader_takes_a_step_for_each_client_once_all_are_there(
    centres: list[float], seconds: list[float], start: float, rate: float, wanted: list[Any]
) -> None:
    """The steps of a cycle are taken along means of each client's gradients, which the fast ones send more often."""
    method = Ringleader(batch=0, lr=rate)
    toy = Arriving(method, quadratics(centres, start=start), seconds, buffer=1, dispatch="reporter")
    reached(toy.path(len(wanted)), *wanted)


RECORDED = json.loads((ROOT / "tests" / "judges" / "recorded" / "asynchronous.json").read_text(encoding="utf-8"))[
    "runs"
]
"""What code of Ringleader's authors reached, with how it was made."""


@pytest.mark.parametrize("run", RECORDED, ids=["three", "four"])
def test_ringleader_and_delay_adaptive_steps_are_what_code_of_authors_does(run: dict[str, Any]) -> None:
    """Ringleader's at the end of each of 6 cycles, and the others at each of 40 arrivals."""
    task, rules = quadratics(run["centres"], start=run["start"]), {"buffer": 1, "dispatch": "reporter"}
    toy = Arriving(Ringleader(batch=0, lr=run["gamma"]), task, run["seconds"], **rules)
    found = dict(toy.path(200))
    for when, reached_then in run["ringleader"]:
        at = min(found, key=lambda time: abs(time - when))
        assert at == pytest.approx(when, abs=1e-9)
        assert found[at] == pytest.approx(reached_then, abs=1e-12)
    task = quadratics(run["centres"], start=run["start"])
    toy = Arriving(Ringmaster(batch=0, lr=run["gamma"]), task, run["seconds"], Staleness(weight="adaptive"), **rules)
    np.testing.assert_allclose(toy.path(40), run["delay_adaptive"], rtol=0, atol=1e-9)


TOGETHER = json.loads((ROOT / "tests" / "judges" / "recorded" / "async-nesterov.json").read_text(encoding="utf-8"))
ALONE = [run for run in TOGETHER["runs"] if run["grace"] == 0 and len({each[0] for each in run["reached"]}) == 40]
"""What the notebook on asynchronous local SGD reached where each worker leaves as soon as it has arrived."""


@pytest.mark.parametrize("run", ALONE, ids=lambda run: f"{run['method']}-{run['weight']}-{run['seconds'][0]}")
def test_an_outer_nesterov_step_with_each_arrival_or_four_is_what_code_of_its_authors_does(run: dict[str, Any]) -> None:
    """It multiplies each change by √4/4, which is half the rate here; means of four it takes as they are."""
    every, outer = 4 if run["method"] == "delayed_sgd" else 1, run["outer"]
    task = quadratics(run["centres"], start=run["start"])
    method = FedAvg(epochs=0, steps=run["steps"], batch=0, lr=run["pull"], weights="uniform")
    server = ServerOptimizer(
        optimizer="nesterov", lr=outer["lr"] / (1 if every == 4 else 2), betas=(outer["momentum"],)
    )
    stale = Staleness(weight="polynomial", a=0.5) if run["weight"] == "polynomial" else Staleness()
    seconds = [run["steps"] * each for each in run["seconds"]]
    toy = Arriving(with_server_optimizer(method, task, server), task, seconds, stale, buffer=every, dispatch="reporter")
    wanted = [(now, w) for now, _, _, w in run["reached"]][every - 1 :: every]
    np.testing.assert_allclose(toy.path(len(wanted)), wanted, rtol=0, atol=1e-9)


def test_ringleader_of_one_client_is_sgd() -> None:
    toy = Arriving(Ringleader(batch=0, lr=0.5), quadratics([0.0], start=8.0), [1.0], buffer=1, dispatch="reporter")
    reached(toy.path(3), (1.0, 4.0), (2.0, 2.0), (3.0, 1.0))


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({"concurrency": 2}, "participation.concurrency: expected not to be set"),
        ({"max_staleness": 3}, "participation.max_staleness"),
        ({"max_seconds": 3.0}, "participation.max_seconds"),
        ({"grace": 3.0}, "participation.grace: expected nothing"),
        ({"slack": 0.5}, "participation.slack: expected nothing"),
        ({"dispatch": "fedcompass"}, "participation.dispatch: expected 'uniform' or 'reporter' with .*'ringleader'"),
        ({"dispatch": "uniform"}, "participation.dispatch: expected 'reporter'"),
    ],
)
def test_ringleader_needs_all_clients(rules: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        Ringleader().check(Participation(**{"close": "arrivals", "buffer": 1, "dispatch": "reporter", **rules}))


# ---- Malenia


@pytest.mark.parametrize(("rules", "after"), [({"buffer": 2, "every_client": True}, 2.5), ({"buffer": 3}, 2.0)])
def test_malenia_lets_clients_count_alike(rules: dict[str, Any], after: float) -> None:
    """Gradients (1, 1 | 4) by 2.5 s: ½(1 + 4), where Rennala has the mean of three."""
    changes = {(0, 0, 0): 1.0, (0, 0, 1): 1.0, (1, 0, 0): 4.0}
    toy = Arriving(Told(changes=changes), quadratics([0.0, 0.0]), [1.0, 2.5], max_staleness=0, **rules)
    reached(toy.path(1), (2.5, after))


def test_of_malenias_clients_those_who_report_otherwise_have_no_more_weight() -> None:
    """Ten visits by three clients, whose changes have means 2, 5 and 8, in whichever order they come."""
    cohort = np.array([0, 0, 0, 0, 1, 2, 2, 2, 2, 2])
    changes = np.array([1.0, 1.0, 3.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    order = np.array([3, 9, 4, 0, 8, 1, 5, 2, 7, 6])
    rules = Participation(close="arrivals", buffer=3, every_client=True, max_staleness=0)
    factors = rules.evened(cohort[order])
    assert (factors * changes[order]).mean() == pytest.approx((2 + 5 + 8) / 3)
    assert factors.mean() == pytest.approx(1.0)


def test_malenia_beside_ringleader() -> None:
    """Its first step is that of Ringleader's; the others come as often as the slow one does."""
    rules = {"buffer": 2, "max_staleness": 0, "every_client": True, "stop_stale": True}
    toy = Arriving(FedAvg(**FIRST, lr=0.5), quadratics([0.0, 2.0], start=3.0), [1.0, 2.5], **rules)
    reached(toy.path(3), (2.5, 2.0), (5.0, 1.5), (7.5, 1.25))


@pytest.mark.parametrize("stops", [False, True])
def test_malenia_uses_gradients_of_the_newest_version(stops: bool) -> None:
    """f_i = ½(w − b_i)², b = (0, 3): from w = 0 half-way to 1.5 by 1.5 s, and again by 3 s.

    The fast one's visit that ends at 2 s is too old, so it has reported at 3 s, or with stops at 2.5 s.
    """
    method = FedAvg(**FIRST, lr=0.5)
    rules = {"buffer": 2, "max_staleness": 0, "every_client": True, "stop_stale": stops}
    toy = Arriving(method, quadratics([0.0, 3.0]), [1.0, 1.5], **rules)
    plans, found = [], []
    for _ in range(2):
        plans.append(toy.step())
        found.append(float(toy.state[W]))
    times = [plan.arrivals.times.tolist() for plan in plans if plan.arrivals is not None]
    assert times == [[1.0, 1.5], [2.5 if stops else 3.0, 3.0]]
    assert found == pytest.approx([0.75, 1.125])


# ---- DiLoCo


def test_diloco_takes_nesterovs_steps_at_the_server() -> None:
    changes = {(0, 0, 0): -0.5, (0, 1, 0): -0.2}
    task = quadratics([0.0], start=1.0)
    outer = ServerOptimizer(optimizer="nesterov", lr=0.7, betas=(0.9,))
    toy = Arriving(with_server_optimizer(Told(changes=changes), task, outer), task, [1.0], buffer=1)
    reached(toy.path(2), (1.0, 0.335), (2.0, -0.2145))


@pytest.mark.parametrize("persist", [True, False])
def test_inner_adamw_goes_on_where_it_was(persist: bool) -> None:
    """Two visits of three steps on all samples are six of torch's steps, if the moments stay with the client."""
    task = mlp_task([6])
    inner: dict[str, Any] = {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    toy = Rounds(FedAvg(epochs=0, steps=3, batch=0, persist_optimizer=persist, **inner), task)
    for number in range(2):
        toy.step(planned([1], len(toy.layers), number))
    net = plain(task, task.initial())
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in net.parameters()]
    torchs, (x, y) = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95)), full_batch(task, 0)
    for _ in range(6):
        torchs.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        torchs.step()
    apart = max(float((value - toy.state[name]).abs().max()) for name, value in read(net, task).items())
    assert (apart < 1e-6) if persist else (apart > 1e-3)


# ---- what is refused


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"optimizer": "adamw", "momentum": 0.5}, r"algorithm.momentum = 0.5 has no meaning with .* = 'adamw': remove"),
        ({"betas": [0.9, 0.95]}, r"algorithm.betas = \[0.9, 0.95\] has no meaning with .* = 'sgd': .* = 'adam'"),
        ({"epsilon": 1e-6}, r"algorithm.epsilon = 1e-06 has no meaning"),
        ({"optimizer": "adamw", "betas": [0.9, 1.0]}, r"algorithm.betas"),
        ({"name": "scaffold", "optimizer": "adamw"}, r"algorithm.optimizer: expected 'sgd' with"),
    ],
)
def test_inner_optimisers_refuse_what_is_not_theirs(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        from_table(table("fedavg", "mlp", True, algorithm={"name": "fedavg", **keys})).check_values()


@pytest.mark.parametrize(
    ("name", "rules", "match"),
    [
        ("fedasync", {"close": "all"}, r"participation.close: expected 'arrivals' with algorithm.name = 'fedasync'"),
        ("fedasync", {"close": "arrivals", "buffer": 2}, r"participation.buffer: expected 1 .*; did you mean 1\?"),
        ("ringmaster", {"close": "all"}, r"participation.close: expected 'arrivals' with"),
        ("ringmaster", {"close": "arrivals", "buffer": 2, "dispatch": "reporter"}, r"participation.buffer: expected 1"),
        ("ringmaster", {"close": "arrivals", "buffer": 1}, r"participation.dispatch: expected 'reporter'"),
    ],
)
def test_what_needs_single_arrivals_says_so(name: str, rules: dict[str, Any], match: str) -> None:
    values = table("fedavg", "mlp", True, algorithm={"name": name}, participation=rules)
    with pytest.raises(UsageError, match=match):
        from_table(values).check_values()


def test_a_visit_to_ringmaster_is_one_gradient() -> None:
    values = table("fedavg", "mlp", True, algorithm={"name": "ringmaster", "steps": 2})
    with pytest.raises(UsageError, match=r"algorithm.steps"):
        from_table(values)


@pytest.mark.parametrize(
    ("more", "kept_by"),
    [
        ({"weighting": {"correct": "remembered"}}, "weighting.correct = 'remembered'"),
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name = 'scaffold'"),
    ],
)
def test_what_clients_keep_counts_as_a_whole(more: dict[str, Any], kept_by: str) -> None:
    aged = {"participation": {"close": "arrivals", "buffer": 2}, "staleness": {"weight": "polynomial"}}
    values = table("fedavg", "mlp", True, **aged, **more)
    with pytest.raises(UsageError, match=rf"staleness.weight = 'polynomial': with {kept_by} clients keep"):
        from_table(values).check_values()


# ---- runs


@pytest.mark.mpi
@pytest.mark.parametrize(
    "more",
    [
        {"weighting": {"correct": "remembered"}},
        {
            "algorithm": {"name": "fedavg", "optimizer": "adamw", "lr": 0.01, "persist_optimizer": True},
            "server": {"optimizer": "nesterov", "lr": 0.7},
            "staleness": {"weight": "hinge", "b": 1},
        },
    ],
)
def test_ranks_and_resumption_do_not_matter(world: Any, shared_dir: Path, more: dict[str, Any]) -> None:
    """FedAsync and Ringmaster are among the methods of `hpcfl.testing.test_algorithms`."""
    rules = {"close": "arrivals", "buffer": 2, "concurrency": 5}
    speed = {"model": "exponential", "kind": "dynamic"}
    values = table("fedavg", "mlp", True, **{"rounds": 5, "speed": speed, "participation": rules, **more})
    together = play(world, values, shared_dir / "ranks", world.comm)
    single = play(world, values, shared_dir / "single", None)
    resume(world, single, 2, world.comm)
    if world.rank == 0:
        same(together, single)
