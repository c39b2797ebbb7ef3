"""FedCompass, FedQueue, and asynchronous Nesterov: who works how long, and what counts when.

A client's visit v takes ``seconds[i][v]`` for each step, FedQueue's also ``delays[i][v]`` before the first; beyond
their end the lists begin anew. ``change(i, w, steps)``, FedQueue's ``change(i, w, steps, factor)``, is what a visit
makes of the model w that it was sent: ``w_i − w``. The loops end with the last event at `until`. Of those who arrive
at once the lowest client comes first; who arrives as a timer runs out is in time. With `models` clients send w_i and
not ``w_i − w``. Where the papers leave something open the loops do what APPFL 1.12 does, as ``recorded/`` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor, inf, sqrt
from typing import Any, NamedTuple

import numpy as np

from judges.plain import Params
from judges.server import Server

Vector = np.ndarray[Any, Any]


class Sent(NamedTuple):
    client: int
    began: int
    """The version that it was sent."""
    steps: int
    what: Vector


@dataclass(eq=False)
class Group:
    expected: float
    latest: float
    members: list[int] = field(default_factory=list)
    here: list[Sent] = field(default_factory=list)


class Record(NamedTuple):
    merges: list[tuple[float, list[tuple[int, int, float]], Vector]]
    """When; client, staleness and its steps (FedCompass) or weight (FedQueue), of each; the model then."""
    departures: list[tuple[float, int, int, float, float]]
    """When, client, steps; its group's expected and latest time, or its factor of the learning rate and its limit.

    Without those at 0.
    """
    arrivals: list[tuple[float, int, bool]]
    """When, client, whether in time."""


def compass(
    seconds: Sequence[Sequence[float]], w: Vector, change: Callable[[int, Vector, int], Vector],
    s: Callable[[int], float], *, least: int, most: int, latest: float, momentum: float, alpha: float, until: float,
    models: bool = False, every: bool = False,
) -> Record:  # fmt: skip
    """Li et al. (2024), arXiv 2309.14675, as APPFL 1.12 has it.

    `every` change counts; without it (APPFL) of a client's changes between two merges only the newest does.
    """
    n, version, found = len(seconds), 0, Record([], [], [])
    pace, left, due, visits = [0.0] * n, [0.0] * n, [most * each[0] for each in seconds], [0] * n
    began, steps, models_of = [0] * n, [most] * n, [w] * n
    group: list[Group | None] = [None] * n
    groups: list[Group] = []
    """Those that have neither merged nor passed their latest time, the oldest first."""
    late: list[Sent] = []

    def merge(now: float, sent: list[Sent]) -> None:
        nonlocal w, version
        came = sent if every else list({each.client: each for each in sent}.values())
        shares = [alpha * s(version - each.began) / n for each in came]
        moved = sum((a * each.what for a, each in zip(shares, came)), np.zeros_like(w))
        w = (1 - sum(shares)) * w + moved if models else w + moved
        found.merges.append((now, [(each.client, version - each.began, each.steps) for each in came], w))
        version += 1

    def leave(now: float, i: int) -> None:
        joined = [(floor((g.expected - now) / pace[i]), number) for number, g in enumerate(groups)]
        joined = [(q, number) for q, number in joined if least <= q <= most]
        if joined:
            q, number = max(joined)  # of equals the newest
            g = groups[number]
        else:
            nexts = [g.latest + most * min(pace[j] for j in g.members) for g in groups if now < g.latest]
            fits = [q for q in (floor((end - now) / pace[i]) for end in nexts) if q <= most]
            q = max(least, max(fits)) if fits else most
            g = Group(now + q * pace[i], now + q * pace[i] * latest)
            groups.append(g)
        g.members.append(i)
        visits[i] += 1
        group[i], left[i], began[i], steps[i], models_of[i] = g, now, version, q, w
        due[i] = now + q * seconds[i][visits[i] % len(seconds[i])]
        found.departures.append((now, i, q, g.expected, g.latest))

    def close(now: float, g: Group) -> None:
        groups.remove(g)
        if g.here:
            merge(now, late + g.here)
            late.clear()
        for each in sorted(g.here, key=lambda each: pace[each.client]):
            leave(now, each.client)

    while True:
        i = min(range(n), key=lambda j: due[j])
        ends = min(groups, key=lambda g: g.latest, default=None)
        now = due[i] if ends is None else min(due[i], ends.latest)
        if now > until:
            return found
        if ends and ends.latest < due[i]:
            close(now, ends)
            continue
        took = (now - left[i]) / steps[i]
        pace[i] = (1 - momentum) * pace[i] + momentum * took if group[i] else took
        delta = change(i, models_of[i], steps[i])
        sent = Sent(i, began[i], steps[i], models_of[i] + delta if models else delta)
        due[i], mine = inf, group[i]
        found.arrivals.append((now, i, mine is None or mine in groups))
        if mine in groups:
            mine.here.append(sent)
            if len(mine.here) == len(mine.members):
                close(now, mine)
            continue
        if mine:
            late.append(sent)
        else:
            merge(now, [sent])
        leave(now, i)


def queue(
    seconds: Sequence[Sequence[float]], delays: Sequence[Sequence[float]], samples: Sequence[int], w: Vector,
    change: Callable[[int, Vector, int, float], Vector], s: Callable[[int], float], *, t_sync: float, theta: float,
    alpha: float, beta: float, momentum: float, least: int, tolerance: float, q_init: float, until: float,
    models: bool = False,
) -> Record:  # fmt: skip
    """Li et al. (2026), arXiv 2605.02125, as APPFL 1.12 has it."""
    n, version, found = len(seconds), 0, Record([], [], [])
    delay, pace = [q_init] * n, dict[int, float]()
    limit, due, visits = [q_init + alpha * t_sync] * n, [inf] * n, [-1] * n
    began, steps, factor, models_of = [0] * n, [least] * n, [1.0] * n, [w] * n
    here, late, timer = list[Sent](), list[Sent](), None

    def during(table: Sequence[Sequence[float]], i: int) -> float:
        return table[i][visits[i] % len(table[i])]

    def leave(now: float, i: int) -> None:
        visits[i] += 1
        began[i], models_of[i] = version, w
        due[i] = now + during(delays, i) + steps[i] * during(seconds, i)

    def merge(now: float) -> None:
        nonlocal w, version, timer, here, late
        came, late = here + [each for each in late if each.began < version], [e for e in late if e.began == version]
        if not came:
            came, late = late, []
        if not came:
            timer = inf  # no other is started
            return
        parts = [samples[each.client] * s(version - each.began) for each in came]
        shares = [part / sum(parts) for part in parts]
        moved = sum((a * each.what for a, each in zip(shares, came)), np.zeros_like(w))
        w = moved if models else w + moved
        found.merges.append((now, [(e.client, version - e.began, a) for a, e in zip(shares, came)], w))
        version, here, timer = version + 1, [], now + (1 + tolerance) * t_sync
        fit = {i: max(least, floor(max(0.5, t_sync - delay[i] - theta) / pace[i])) for i in pace}
        for i in sorted(each.client for each in came):
            steps[i], factor[i], limit[i] = fit[i], min(fit.values()) / fit[i], delay[i] + alpha * t_sync
            found.departures.append((now, i, steps[i], factor[i], limit[i]))
            leave(now, i)

    for i in range(n):
        leave(0.0, i)
    while True:
        i = min(range(n), key=lambda j: due[j])
        now = due[i] if timer is None else min(due[i], timer)
        if now > until:
            return found
        if timer is not None and timer < due[i]:
            merge(now)
            continue
        q, took = during(delays, i), during(seconds, i)
        delay[i] = beta * q + (1 - beta) * delay[i]
        pace[i] = momentum * took + (1 - momentum) * pace.get(i, took)
        delta = change(i, models_of[i], steps[i], factor[i])
        (here if q <= limit[i] else late).append(Sent(i, began[i], steps[i], models_of[i] + delta if models else delta))
        found.arrivals.append((now, i, q <= limit[i]))
        due[i] = inf
        if timer is None:
            timer = now + (1 + tolerance) * t_sync
        if len(here) + len(late) == n:
            merge(now)


def nesterov(
    seconds: Sequence[float], w: Params, change: Callable[[int, Params], Params], move: Server,
    s: Callable[[int], float], *, arrivals: int, grace: float = 0.0, every: int = 1,
) -> list[tuple[float, int, int, Params]]:  # fmt: skip
    """Local SGD of Liu et al. (2024), arXiv 2401.09135, as their notebook simulates it: time, client, staleness and w.

    A step with each arrival is of ``s(x) Δ / √n``, one with `every` so many of their mean, whatever their staleness.
    Who arrives within `grace` of the first counts on its own, and all of these leave with the last of them.
    """
    n, found = len(seconds), list[tuple[float, int, int, Params]]()
    due, began, sent, first, now = list(seconds), [0] * n, [w] * n, 0.0, -inf
    mean: Params = {}
    while len(found) < arrivals:
        i = min(range(n), key=lambda j: due[j])
        if not found or due[i] - first > grace:
            for j in (j for j in range(n) if due[j] == inf):
                due[j], began[j], sent[j] = now + seconds[j], len(found), w
            i = min(range(n), key=lambda j: due[j])
            first = due[i]
        now, x, delta = due[i], len(found) - began[i], change(i, sent[i])
        share = s(x) / sqrt(n) if every == 1 else 1 / every
        mean = {name: mean.get(name, 0.0) + share * d for name, d in delta.items()}
        if (len(found) + 1) % every == 0:
            w, mean = move(w, mean), {}
        found.append((now, i, x, w))
        due[i] = inf
    return found
