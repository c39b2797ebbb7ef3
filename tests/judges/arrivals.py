"""Methods without rounds: FedAsync, FedBuff, CA2FL, Rennala, Malenia and Ringmaster SGD, DiLoCo.

Which visits made up each step of the server is given, in the order in which they arrived; or, where every client goes
on at once and takes as long each time, worked out by `timetable`. What a client sends is the change Δ of the version
that it began with; its staleness is how many steps the server has taken since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, count
from math import inf
from typing import Any

import torch
from torch import Tensor

from judges.plain import Client, Params
from judges.server import Server
from judges.steps import Adam, Sgd, gradient, mean_loss

Visit = tuple[int, int, int]
"""Client, the version that it began with, how many visits it had begun before with the same."""
Change = tuple[Params, Params, int, int]
"""Δ, the version that it belongs to, staleness, client."""
Work = Callable[[Params, int, int, int], Params]
"""Δ of a visit that begins with these parameters."""


def trace(rows: Mapping[str, Any]) -> list[list[Visit]]:
    """The visits of each step, in the order in which they arrived, from what a run has recorded."""
    columns = (rows[f"arrival_{name}"] for name in ("client", "version", "number"))
    return [[visit for visit in zip(*row) if visit[0] >= 0] for row in zip(*(column.tolist() for column in columns))]


def depths(rows: Mapping[str, Any]) -> dict[Visit, int]:
    """The first layer that was there of each visit."""
    return {visit: int(d) for visits, row in zip(trace(rows), rows["arrival_depth"]) for visit, d in zip(visits, row)}


def played(
    w: Params, steps: Sequence[Sequence[Visit]], work: Work,
    server: Callable[[Params, list[Change]], Params],
) -> Params:  # fmt: skip
    versions = [w]
    for now, visits in enumerate(steps):
        came = [(work(versions[v], i, v, number), versions[v], now - v, i) for i, v, number in visits]
        versions.append(server(versions[-1], came))
    return versions[-1]


def local(
    data: Sequence[Client], batches: Callable[[int, int, int], list[Tensor]], optimiser: Callable[[], Sgd | Adam],
    rho: float = 0.0, persist: bool = False,
) -> Work:  # fmt: skip
    """Local steps on the mean loss and ``ρ/2 |y − w|²``; `persist`: the optimiser's memory stays with the client."""
    kept: dict[int, Sgd | Adam] = {}

    def work(w: Params, i: int, version: int, number: int) -> Params:
        y, how = w, kept.setdefault(i, optimiser()) if persist else optimiser()
        for rows in batches(version, i, number):
            g = gradient(mean_loss(data[i][0][rows], data[i][1][rows]), y)
            y = how.step(y, {name: g[name] + rho * (y[name] - w[name]) for name in g})
        return {name: y[name] - w[name] for name in w}

    return work


def reaching(work: Work, depth: Mapping[Visit, int], layer: Mapping[str, int]) -> Work:
    """What visits send who send those layers alone that they have reached."""

    def some(w: Params, i: int, version: int, number: int) -> Params:
        change, first = work(w, i, version, number), depth[i, version, number]
        return {name: d for name, d in change.items() if layer[name] >= first}

    return some


def polynomial(x: int, a: float) -> float:
    return float((1 + x) ** -a)


def hinge(x: int, a: float, b: int) -> float:
    return 1.0 if x <= b else 1 / (a * (x - b) + 1)


def fedasync(alpha: float, s: Callable[[int], float]) -> Callable[[Params, list[Change]], Params]:
    """``w ← (1 − α s(x)) w + α s(x) w_i``."""

    def server(w: Params, came: list[Change]) -> Params:
        ((change, began, x, _),) = came
        a = alpha * s(x)
        return {name: (1 - a) * w[name] + a * (began[name] + change[name]) for name in w}

    return server


def fedbuff(
    s: Callable[[int], float], weights: dict[int, float], move: Server
) -> Callable[[Params, list[Change]], Params]:
    """``Δ = (1/K) Σ s(x) Δ_i``, with weights ``Σ n_i s(x) Δ_i / Σ n_i``; `move` says what becomes of it.

    K are the visits that sent the tensor.
    """

    def server(w: Params, came: list[Change]) -> Params:
        mean = {}
        for n in w:
            if sent := [(weights[i], s(x) * d[n]) for d, _, x, i in came if n in d]:
                mean[n] = sum(v * d for v, d in sent) / sum(v for v, _ in sent)
        return move(w, mean)

    return server


def ca2fl(weights: dict[int, float], move: Server) -> Callable[[Params, list[Change]], Params]:
    """``v = h + (1/M) Σ (Δ_i − h_i)``, h the mean over all clients of what they sent last, as it was a step ago.

    All of it is each tensor's own: M are the visits that sent it, and without any v is h.
    """
    sent: Params = {}

    def server(w: Params, came: list[Change]) -> Params:
        v = {}
        for n in w:
            h = {i: sent.get(f"{i} {n}", torch.zeros_like(w[n])) for i in weights}
            v[n] = sum(weights[i] * h[i] for i in weights) / sum(weights.values())
            over = sum(weights[i] for change, _, _, i in came if n in change)
            for change, _, _, i in came:  # who comes twice is compared with what it sent in this very step
                if n in change:
                    v[n] = v[n] + weights[i] / over * (change[n] - h[i])
                    h[i] = sent[f"{i} {n}"] = change[n]
        return move(w, v)

    return server


def malenia(clients: int) -> Callable[[Params, list[Change]], Params]:
    """``1/n Σ_i 1/B_i Σ_j Δ_ij``, client i having reported B_i times."""

    def server(w: Params, came: list[Change]) -> Params:
        of = [[d for d, _, _, i in came if i == client] for client in range(clients)]
        return {n: w[n] + sum(sum(d[n] for d in each) / len(each) for each in of) / clients for n in w}

    return server


def timetable(
    seconds: Sequence[float], steps: int, *, buffer: int = 1, most: float = inf, every: bool = False, stop: bool = False
) -> list[list[Visit]]:
    """Who makes up each step, where everybody is at work and leaves again as soon as it has reported.

    Rennala: ``most = 0``, `buffer` is B. Ringmaster: ``most = R − 1``, and with `stop` its Algorithm 5. Malenia: with
    `every` steps end when the harmonic mean of the B_i is `buffer` over n, and who has reported `buffer` times waits.
    """
    n, version, found = len(seconds), 0, []
    began, number, due = [0] * n, [0] * n, list(seconds)
    came: list[Visit] = []
    while version < steps:
        i = min(range(n), key=lambda j: (due[j], j))
        now, fresh = due[i], version - began[i] <= most
        came += [(i, began[i], number[i])] if fresh else []
        reports = [sum(each[0] == j for each in came) for j in range(n)]
        harmonic = n / sum(1 / b for b in reports) if min(reports) else 0.0
        full = fresh and (harmonic * n >= buffer * (1 - 1e-12) if every else len(came) >= buffer)
        if full:
            found.append(came)
            came, reports, version = [], [0] * n, version + 1
        late = {j for j in range(n) if full and stop and version - began[j] > most}
        waits = {j for j in range(n) if every and due[j] == inf}
        for j in {i} | late | (waits if full else set()):
            number[j] = number[j] + 1 if began[j] == version else 0
            began[j], due[j] = version, now + seconds[j]
        if every and reports[i] >= buffer:
            due[i] = inf
    return found


def delays(noise: float, accuracy: float) -> int:
    """Ringmaster's R: so many gradients have together a variance σ² of at most ε."""
    return next(R for R in count(1) if R * accuracy >= noise)


def optimal_time(seconds: Sequence[float], smooth: float, gap: float, noise: float, accuracy: float) -> float:
    """The least of all sets of m workers, each with ``LΔ/ε + σ²LΔ/(mε²)`` gradients of their mean pace (harmonic)."""
    teams = [team for m in range(1, 1 + len(seconds)) for team in combinations(seconds, m)]
    each = [smooth * gap / accuracy + noise * smooth * gap / (len(team) * accuracy**2) for team in teams]
    return min(n * len(team) / sum(1 / pace for pace in team) for n, team in zip(each, teams))
