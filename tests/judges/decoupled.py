"""Decoupled DiLoCo (Douillard et al., arXiv 2604.21428): workers that go on, fragments that are merged.

Which visits ended before each step of the server, in their order, is given, and which of them count. A visit has the
version that it began with, and reports fragment `version` mod P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from judges.arrivals import Visit
from judges.plain import Client, Params
from judges.server import Server
from judges.steps import Adam, gradient, mean_loss

Report = tuple[float, Tensor]
"""What a report counts, and the change."""


def weight(tokens: float, steps: float) -> float:
    return tokens**2 / steps if steps else 0.0


def mean(reports: Iterable[Report]) -> Tensor:
    each = list(reports)
    return sum(w * d for w, d in each) / sum(w for w, _ in each)


def radial(reports: Iterable[Report]) -> Tensor:
    """The mean length along the mean direction; the mean where directions cancel."""
    each = list(reports)
    along = sum(w * d / d.norm() if d.norm() else 0 * d for w, d in each)
    length = sum(w * d.norm() for w, d in each) / sum(w for w, _ in each)
    if along.norm() <= 1e-6 * sum(w for w, _ in each):
        return mean(each)
    return length * along / along.norm()


class Worker:
    def __init__(self, w: Params, optimiser: Adam) -> None:
        self.own, self.optimiser = dict(w), optimiser
        self.known = dict.fromkeys(w, 0)  # how often each tensor had been merged when it came last
        self.steps, self.tokens = dict.fromkeys(w, 0), dict.fromkeys(w, 0)

    def receive(self, w: Params, merged: Mapping[str, int]) -> None:
        for name, times in merged.items():
            if times > self.known[name]:
                self.own[name], self.known[name], self.steps[name], self.tokens[name] = w[name], times, 0, 0

    def learn(self, data: Client, batches: Iterable[Tensor]) -> None:
        for rows in batches:
            self.own = self.optimiser.step(self.own, gradient(mean_loss(data[0][rows], data[1][rows]), self.own))
            for name in self.own:
                self.steps[name] += 1
                self.tokens[name] += len(rows)


def decoupled(
    w: Params,
    data: Sequence[Client],
    ended: Sequence[Sequence[Visit]],
    counts: Callable[[int, Visit], bool],
    batches: Callable[[int, int, int], list[Tensor]],
    fragments: list[list[str]],
    optimiser: Callable[[], Adam],
    omega: Callable[[int, float, float], float],
    merge: Callable[[str], Callable[[Iterable[Report]], Tensor]],
    server: Server,
) -> tuple[Params, list[Worker]]:
    """Return what the server has, and the workers. `omega` is by worker, tokens and steps; `merge` by tensor."""
    workers = [Worker(w, optimiser()) for _ in data]
    versions, merged = [w], [dict.fromkeys(w, 0)]
    for now, visits in enumerate(ended):
        reports: dict[str, list[Report]] = {}
        for i, version, number in visits:
            worker = workers[i]
            worker.receive(versions[version], merged[version])
            worker.learn(data[i], batches(version, i, number))
            if counts(now, (i, version, number)):
                for name in fragments[version % len(fragments)]:
                    own = omega(i, worker.tokens[name], worker.steps[name]), worker.own[name] - versions[-1][name]
                    reports.setdefault(name, []).append(own)
        versions.append(server(versions[-1], {name: merge(name)(each) for name, each in reports.items()}))
        merged.append({name: times + (name in reports) for name, times in merged[-1].items()})
    return versions[-1], workers


def grace(slack: float, overlap: int, step: float, quorum: float, sync: float) -> float:
    """What is left of the seconds in which a fragment must be back."""
    return max(0.0, slack * (overlap * step - quorum - sync))


def toy(lr: float = 0.7, beta: float = 0.9) -> list[float]:
    """w = 1 by gradients .5 and .2: b = .5, .65; w = .335, −.2145."""
    w, b, found = 1.0, 0.0, []
    for g in (0.5, 0.2):
        b = beta * b + g
        w -= lr * (g + beta * b)
        found.append(w)
    return found


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
