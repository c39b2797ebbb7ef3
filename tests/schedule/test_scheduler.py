"""FedCompass and FedQueue send clients out with the steps, and merge them when, as toys counted by hand say."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from pydantic import Field

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.planner import Flights, Planner, Scheduled
from hpcfl.schedule.scheduler import Scheduler
from hpcfl.schedule.speeds.base import Equal
from hpcfl.testing.runs import play, resume, same, table
from judges import arrivals, world
from judges.steps import Sgd


class Given(Equal):
    """Seconds per step by client and visit, and waits, as they are written down; the last ones go on."""

    paces_of: list[list[float]]
    waits_of: list[list[float]] = Field(default_factory=lambda: [[0.0]])
    most: int

    def seconds(self, attempt):
        return self._given(self.paces_of, attempt) * self.most + self.waits(attempt)

    def lasting(self, attempt, share):
        return self._given(self.paces_of, attempt) * self.most * share + self.waits(attempt)

    def waits(self, attempt):
        return self._given(self.waits_of, attempt)

    def _given(self, table, attempt):
        """The numbers of each client's visit that begins in this round: a row has (round, number) from where on."""
        return np.array(
            [
                table[client % len(table)][min(attempt.round, len(table[client % len(table)]) - 1)]
                for client in attempt.cohort
            ]
        )


def run(rule, speed, steps, clients=2, flights=None, first=0, **keys):
    rules = Participation(close="arrivals", dispatch=rule)
    method = FedAvg(epochs=0, steps=steps)
    ones = np.ones(clients, dtype=np.int64)
    return Planner(rules, speed, method, ones, np.ones(1), scheduler=Scheduler(**keys)).plans(first, flights=flights)


def told(plans, count):
    """When, whom by staleness, and the steps, of each merge."""
    now, found = 0.0, []
    for plan in islice(plans, count):
        now += plan.duration
        stale = plan.round - plan.arrivals.versions
        found.append((round(now, 6), dict(zip(plan.cohort.tolist(), stale.tolist())), plan.steps.tolist()))
    return found


def test_fedcompass_as_counted_by_hand():
    # client 1 slows from 2 to 4 seconds a step with its second visit, which begins in round 3
    speed = Given(paces_of=[[1.0], [2.0, 2.0, 2.0, 4.0]], most=10)
    assert told(run("fedcompass", speed, 10, least_steps=2, patience=1.5), 7) == [
        (10, {0: 0}, [10]),
        (20, {0: 0}, [10]),
        (20, {1: 2}, [10]),
        (35, {0: 1}, [10]),
        (45, {0: 0, 1: 1}, [10, 5]),
        (55, {0: 0}, [10]),
        (60, {0: 0, 1: 2}, [4, 5]),
    ]


def test_fedqueue_as_counted_by_hand():
    speed = Given(paces_of=[[2.0], [4.0]], waits_of=[[0.0, 5.0, 0.0], [0.0, 5.0, 30.0, 0.0]], most=100)
    keys = {"period": 100.0, "margin": 10.0, "allowance": 0.2, "least_steps": 20}
    plans = list(islice(run("fedqueue", speed, 100, **keys), 5))
    assert [plan.steps.tolist() for plan in plans] == [[20, 20], [44, 22], [43], [44, 21], [44, 20]]
    assert [plan.arrivals.rates.tolist() for plan in plans][:3] == [[1, 1], [0.5, 1], [21 / 43]]
    # 30 s are more than the 3 + 20 admitted: merged in the next round; the server waits 115 s at most
    assert told(iter(plans), 4) == [
        (80, {0: 0, 1: 0}, [20, 20]),
        (173, {0: 0, 1: 0}, [44, 22]),
        (287, {0: 0}, [43]),
        (375, {0: 0, 1: 1}, [44, 21]),
    ]


@pytest.mark.parametrize("rule", ["fedcompass", "fedqueue"])
def test_a_rule_goes_on_where_it_was_saved(rule):
    rng = np.random.default_rng(3)
    speed = Given(paces_of=rng.gamma(2, 1, (4, 40)).tolist(), waits_of=rng.gamma(1, 9, (4, 40)).tolist(), most=30)
    flights, keys = Flights.none(4), {"least_steps": 4} | ({"period": 60.0} if rule == "fedqueue" else {})
    plans = run(rule, speed, 30, 4, flights, **keys)
    for _ in range(7):
        next(plans)
    again = run(rule, speed, 30, 4, Flights.restored(flights.saved(), 4), 7, **keys)
    assert told(plans, 20) == told(again, 20)


class Recorded(Scheduled):
    """Visits whose seconds and waits are given by client and visit; beyond their end the lists begin anew."""

    def __init__(self, run, seconds, waits):
        self.tables, self.visit = (seconds, waits), [-1] * len(seconds)
        super().__init__(run, Flights.none(len(seconds)))

    def _draw(self, clients):
        for client in clients.tolist():
            self.visit[client] += 1
            pace, wait = (table[client][self.visit[client] % len(table[client])] for table in self.tables)
            self.waits[client] = wait
            self.seconds[client] = wait + self.flights.known["steps"][client] * pace


def played(rule, given, waits, method, **keys):
    """The merges of recorded arrivals, and departures: when, client, steps and two numbers of its."""
    clients = len(given["seconds"])
    rules, ones = Participation(close="arrivals", dispatch=rule), np.ones(clients, dtype=np.int64)
    planner = Planner(rules, Equal(), method, ones, np.ones(1), scheduler=Scheduler(**keys))
    queue = Recorded(planner, given["seconds"], waits)
    queue.rule.newest = given["momentum"]
    if rule == "fedqueue":
        queue.rule.newest_wait, queue.rule.overtime = given["beta"], 1 + given["tolerance"]
    merges, departures, depart = [], [], queue.rule.depart

    def noted(clients, now):
        depart(clients, now)
        known = queue.flights.known
        names = ("expected", "latest") if rule == "fedcompass" else ("rate", "limit")
        for client in clients.tolist():
            departures.append((now, client, known["steps"][client], *(known[name][client] for name in names)))

    queue.rule.depart = noted
    for plan in islice(queue.plans(0), len(given["merges"]) + 1):
        came = sorted(zip(plan.cohort.tolist(), (plan.round - plan.arrivals.versions).tolist(), plan.steps.tolist()))
        merges.append((queue.flights.now, came))
    return merges[:-1], [each for each in departures if each[0] > 0]


def recorded(name):
    return json.loads((Path(world.__file__).parent / "recorded" / f"{name}.json").read_text())["runs"]


def agree(found, given, departures, firsts=0):
    """Times of merges and departures are those recorded; whose visits, from merge `firsts` on."""
    last = given["merges"][-1]["time"] - 1e-6
    assert [when for when, _ in found] == pytest.approx([merge["time"] for merge in given["merges"]], abs=1e-9)
    theirs = sorted(map(tuple, (each for each in given["departures"] if each[0] < last)))
    assert sorted(each for each in departures if each[0] < last) == [pytest.approx(each, abs=1e-9) for each in theirs]
    for (_, came), merge in list(zip(found, given["merges"]))[firsts:]:
        newest = {client: (client, x, steps) for client, x, steps in sorted(came, key=lambda each: -each[1])}
        assert {client: x for client, x, _ in newest.values()} == {client: x for client, x, _ in merge["came"]}


@pytest.mark.parametrize("number", range(4))
def test_fedcompass_merges_whom_appfl_merges(number):
    """It forgets a late change for a newer one of the same client, and merges first visits alone: here all count."""
    given = recorded("fedcompass")[number]
    keys = {"least_steps": given["least"], "patience": given["latest"]}
    waits = [[0.0]] * len(given["seconds"])
    found, departures = played("fedcompass", given, waits, FedAvg(epochs=0, steps=given["most"]), **keys)
    seen = [{client for client, _, _ in merge["came"]} for merge in given["merges"]]
    firsts = max(next(n for n, came in enumerate(seen) if client in came) for client in range(len(waits)))
    agree(found, given, departures, firsts + 2)


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5])
def test_fedqueue_merges_whom_appfl_merges(number):
    """All runs but one: there its timer finds nobody, and is not set again."""
    given = recorded("fedqueue")[number]
    keys = {"least_steps": given["least"], "period": given["t_sync"]}
    keys |= {"margin": given["theta"], "allowance": given["alpha"]}
    found, departures = played("fedqueue", given, given["queue"], FedAvg(epochs=0, steps=10**6), **keys)
    agree(found, given, departures)


# ---- runs

COMPASS = {
    "participation": {"close": "arrivals", "dispatch": "fedcompass"},
    "scheduler": {"least_steps": 2, "patience": 1.2},
    "staleness": {"weight": "polynomial", "divisor": "clients"},
}
QUEUE = {
    "participation": {"close": "arrivals", "dispatch": "fedqueue"},
    "scheduler": {"least_steps": 2, "period": 3.0, "margin": 0.2, "allowance": 0.1},
    "staleness": {"weight": "harmonic", "divisor": "weights"},
    "queue": {"model": "lognormal", "mean": 0.7, "within": 0.9},
}
PACES = {"model": "lognormal", "mean": 2.0, "between": 0.6, "within": 0.3}


def compass(weights, s):
    """``w ← w + Σ v_i s(x_i) Δ_i / Σ_all v``."""
    return lambda w, came: {
        n: w[n] + sum(weights[i] * s(x) * d[n] for d, _, x, i in came) / sum(weights.values()) for n in w
    }


def queue(weights, s):
    """``w ← w + Σ a_i Δ_i``, ``a_i = v_i s(x_i) / Σ v_j s(x_j)``."""

    def server(w, came):
        whole = sum(weights[i] * s(x) for _, _, x, i in came)
        return {n: w[n] + sum(weights[i] * s(x) * d[n] for d, _, x, i in came) / whole for n in w}

    return server


@pytest.mark.parametrize("by", ["samples", "uniform"])
@pytest.mark.parametrize(
    ("more", "server", "s"),
    [(COMPASS, compass, lambda x: (1 + x) ** -0.5), (QUEUE, queue, lambda x: 1 / (1 + x))],
    ids=["fedcompass", "fedqueue"],
)
def test_runs_are_those_of_a_loop(tmp_path, more, server, s, by):
    """Who came with how many steps is the run's own record; all else is the loop's."""
    method = {"name": "fedavg", "lr": 0.2, "batch": world.BATCH, "epochs": 0, "steps": 9, "weights": by}
    found = world.play(tmp_path, rounds=25, algorithm=method, speed=PACES, **more)
    steps, took = arrivals.trace(found.rows), {}
    for column, kind in (("steps", int), ("rate", float)):
        rows = found.rows.get(f"arrival_{column}", np.ones_like(found.rows["arrival_steps"]))
        took[column] = {visit: kind(n) for visits, row in zip(steps, rows.tolist()) for visit, n in zip(visits, row)}
    assert len(set(took["steps"].values())) > 3
    assert max(now - version for now, visits in enumerate(steps) for _, version, _ in visits) >= 1
    if more is QUEUE:
        assert len(set(took["rate"].values())) > 3

    def work(w, i, version, number):
        visit = i, version, number
        batches = lambda *at: world.batches(version, i, steps=9, phase=2**16 * number)[: took["steps"][visit]]  # noqa: E731
        return arrivals.local(world.clients(), batches, lambda: Sgd(0.2 * took["rate"][visit]))(w, *visit)

    world.near(found.shared, arrivals.played(world.start(), steps, work, server(world.weights(by), s)))


def test_fedqueue_of_equal_clients_is_fedavg(tmp_path):
    """To the bit: nobody waits, and all take as many steps."""
    method = {"name": "fedavg", "lr": 0.2, "batch": world.BATCH, "epochs": 0, "steps": 4}
    more = {**QUEUE, "queue": {}, "scheduler": {"least_steps": 4, "period": 9.0, "margin": 0.2}}
    found = world.play(tmp_path, algorithm=method, **more)
    other = world.play(tmp_path, algorithm=method)
    for name, value in other.shared.items():
        np.testing.assert_array_equal(found.shared[name], value)


def small(**more):
    method = {"name": "fedavg", "batch": 8, "epochs": 0, "steps": 9}
    return table("fedavg", "mlp", True, **{"rounds": 12, "speed": PACES, "algorithm": method, **more})


@pytest.mark.mpi
@pytest.mark.parametrize("more", [COMPASS, QUEUE], ids=["fedcompass", "fedqueue"])
def test_ranks_and_resumption_in_the_middle_of_a_flight_do_not_matter(world, shared_dir, more):
    together = play(world, small(**more), shared_dir / "ranks", world.comm)
    single = play(world, small(**more), shared_dir / "single", None)
    resume(world, single, 5, world.comm)
    if world.rank == 0:
        same(together, single)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"scheduler": {"period": 5.0}}, r"scheduler.period = 5.0 has no meaning with .*fedcompass.*'fedqueue'"),
        ({"scheduler": {"least_steps": 10}}, r"scheduler.least_steps: expected 1 … 9 \(algorithm.steps\), got 10"),
        ({"algorithm": {"name": "fedavg"}}, r"expected a method with algorithm.epochs = 0 and algorithm.steps"),
        ({"availability": {"model": "on-off"}}, r"availability.model = 'on-off' does not go with it"),
        (
            {"participation": {**COMPASS["participation"], "buffer": 2}},
            r"participation.buffer: expected nothing with .*'fedcompass', which sees to it, got 2",
        ),
        ({"staleness": {"divisor": "weights"}}, r"staleness.divisor = 'weights' has no meaning with staleness.weight"),
        (
            {"participation": {}, "staleness": {"divisor": "clients"}, "scheduler": {}},
            r"staleness.divisor = 'clients' has no meaning with participation.close = 'all'",
        ),
        (
            {"algorithm": {"name": "decoupled_diloco"}, "staleness": {}},
            r"'fedcompass' merges .*'decoupled_diloco'; did you mean 'uniform'",
        ),
        (
            {"weighting": {"correct": "remembered"}},
            r"staleness.divisor = 'clients': with weighting.correct = 'remember",
        ),
        ({"fragments": {"count": 2}}, r"fragments.count: expected 1, since staleness.divisor = 'clients' divides by"),
        ({"participation": {**COMPASS["participation"], "slack": 0.5}}, r"participation.slack: expected nothing with"),
        (
            {"algorithm": {"name": "fednova", "epochs": 0, "steps": 9}, "scheduler": {"least_steps": 2}},
            r"staleness.divisor = 'clients' has no meaning with algorithm.name = 'fednova', which does more",
        ),
        (
            {
                "participation": {"close": "arrivals", "every_client": True, "buffer": 7, "max_staleness": 0},
                "algorithm": {"name": "fedavg", "weights": "uniform"},
                "scheduler": {},
                "staleness": {"divisor": "clients"},
            },
            r"staleness.divisor = 'clients' has no meaning with participation.every_client = true",
        ),
        (
            {**QUEUE, "algorithm": {"name": "scaffold", "epochs": 0, "steps": 9}, "staleness": {}},
            r"'fedqueue' scales clients' step sizes, which algorithm.name = 'scaffold' does not do",
        ),
    ],
)
def test_what_does_not_go_with_a_rule_is_refused_in_a_line(more, match):
    with pytest.raises(UsageError, match=match):
        from_table(small(**{**COMPASS, **more})).check_values()
