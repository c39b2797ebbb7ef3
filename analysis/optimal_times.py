"""Seconds until gradients are small, beside the laws that no method beats: workers whose data are alike, or unlike.

    python analysis/optimal_times.py [--workers 4 16 64] [--noise 1e-5 1e-4 2.5e-3] [--epsilon 1e-4]

Worker i takes i seconds per gradient. The objective is that of `arrival_times`, L = 1; where data are unlike worker i's
gradients are off by a vector h_i of its own, and these add up to 0. Rounds are hpcfl's own (`hpcfl.schedule`); the
arithmetic is here, of all step sizes and seeds at once. Each method has the best step size, B, R or S of a grid:

- alike data: ``rennala`` (Tyurin & Richtárik, NeurIPS 2023) and ``ringmaster`` (Maranjyan et al., ICML 2025), beside
  ``min_m (1/m Σ_(i≤m) 1/τ_i)⁻¹ (LΔ/ε + σ²LΔ/(mε²))``;
- unlike data: ``malenia`` (Tyurin & Richtárik, NeurIPS 2023) and ``ringleader`` (Maranjyan & Richtárik, ICLR 2026),
  beside ``τ_max LΔ/ε + τ_mean σ²LΔ/(nε²)``.

The laws are of the worst objective, up to a constant: quotients below 1 are no wonder; those of an optimal method are
to change little with n and σ². Costs 2 minutes. Prints one JSON line last (null: not within --gradients).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from arrival_times import STEPS, SYMBOLS, Paced, Quadratic, optimal_time, rules
from rich.console import Console
from rich.table import Table

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.types import Floats
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Planner

GRID = (1, 2, 4, 8, 16, 32, 64)
"""B and R that are tried, and S over n."""
LAWS = {"alike": ("rennala", "ringmaster"), "unlike": ("malenia", "ringleader")}
UNLIKE = 0.1  # the mean length of h_i; that of ∇f is ¼ in the beginning


def closing(method: str, workers: int, size: int) -> Participation:
    """Return when the rounds of a method end, of this B, R or S/n."""
    if method == "malenia":
        keys: dict[str, Any] = {"buffer": size * workers, "every_client": True, "max_staleness": 0}
        return Participation(close="arrivals", stop_stale=True, **keys)
    return rules("asynchronous" if method == "ringleader" else method, size)


def plans(participation: Participation, seconds: Sequence[float]) -> Iterator[Plan]:
    """Yield the rounds of workers that take so long per gradient."""
    ones = np.ones(len(seconds), dtype=np.int64)
    return Planner(
        participation, Paced(of=tuple(seconds)), FedAvg(epochs=0, steps=1, weights="uniform"), ones, np.ones(1)
    ).plans()


def unlike_time(seconds: Sequence[float], smooth: float, gap: float, noise: float, accuracy: float) -> float:
    """Return ``τ_max LΔ/ε + τ_mean σ²LΔ/(nε²)``: the least seconds, up to a constant, where workers' data differ."""
    mean = sum(seconds) / len(seconds)
    return smooth * gap / accuracy * (max(seconds) + mean * noise / (len(seconds) * accuracy))


class Tables:
    """Ringleader's server: sums of each worker's gradients and their numbers, of this cycle and of the next."""

    def __init__(self, workers: int, like: Floats) -> None:
        self.sums, self.done = np.zeros((2, workers, *like.shape)), np.zeros(workers, dtype=bool)
        self.counts = np.zeros((2, workers))
        self.mean = np.zeros_like(like)

    def takes(self, worker: int, gradient: Floats) -> bool:
        """Take a gradient; return whether there is a step, along the `mean`."""
        table = int(self.done[worker])
        self.sums[table, worker] += gradient
        self.counts[table, worker] += 1
        if table or not self.counts[0].all():
            return False
        self.mean = np.einsum("i...,i->...", self.sums[0], 1 / self.counts[0]) / len(self.done)
        self.done[worker] = True
        if self.done.all():
            for each in (self.sums, self.counts):
                each[0], each[1] = each[1], 0.0
            self.done[:] = False
        return True


def times(
    problem: Quadratic,
    method: str,
    size: int,
    seconds: Sequence[float],
    epsilon: float,
    steps: Sequence[float] = STEPS,
    seeds: int = 4,
    gradients: int = 20_000,
    unlike: float = 0.0,
    within: float = np.inf,
) -> Floats:
    """Return the seconds until the mean of |∇f|² over the seeds is at most ε, by step size.

    inf: not in so many gradients, or `within` so many seconds.
    """
    workers, sd = len(seconds), np.sqrt(problem.noise / problem.dimension)
    rng, apart = np.random.default_rng(1), np.random.default_rng(2).standard_normal((workers, problem.dimension))
    apart = unlike * (apart - apart.mean(0)) / np.sqrt(problem.dimension)
    w = np.zeros((len(steps), seeds, problem.dimension))
    rates, found, now, used = np.array(steps)[:, None, None], np.full(len(steps), np.inf), 0.0, 0
    served, tables = {0: problem.gradient(w)}, Tables(workers, w) if method == "ringleader" else None
    for plan in plans(closing(method, workers, size), seconds):
        known = plan.arrivals
        assert known is not None
        now, used = now + plan.duration, used + len(plan.cohort)
        step: Floats | None = None
        for client, version, factor in zip(plan.cohort.tolist(), known.versions.tolist(), known.factors):
            gradient = served[version] + apart[client] + sd * rng.standard_normal((seeds, problem.dimension))
            if tables is None:
                part = factor / len(plan.cohort) * gradient
                step = part if step is None else step + part
            elif tables.takes(client, gradient):
                step = tables.mean
        w = w if step is None else w - rates * step
        gradient = problem.gradient(w)
        small = np.square(gradient).sum(2).mean(1)
        found[(small <= epsilon) & np.isinf(found)] = now
        lost = ~(small < 1e3)  # such a step is too large, and is tried no longer
        w[lost], rates[lost] = 0.0, 0.0
        if found.min() < np.inf or used >= gradients or now > within:  # another step's time would come later
            return found
        served = {each: served[each] for each in {*known.served.tolist()} & served.keys()} | {plan.round + 1: gradient}
    raise AssertionError


def best(
    problem: Quadratic, method: str, seconds: Sequence[float], epsilon: float, gradients: int, unlike: float
) -> dict[str, Any]:
    """Return the least time of a method, by which size and step."""
    least, chosen = np.inf, (0, 0.0)
    for size in (1,) if method == "ringleader" else GRID:
        found = times(problem, method, size, seconds, epsilon, STEPS, 4, gradients, unlike, least)
        if found.min() < least:
            least, chosen = float(found.min()), (size, STEPS[int(found.argmin())])
    return {"seconds": least if least < np.inf else None, "size": chosen[0], "step": chosen[1]}


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64], help="[4 16 64]")
    parser.add_argument("--noise", type=float, nargs="+", default=[1e-5, 1e-4, 2.5e-3], help="σ² [1e-5 1e-4 2.5e-3]")
    parser.add_argument("--epsilon", type=float, default=1e-4, help="[1e-4]")
    parser.add_argument("--gradients", type=int, default=40_000, help="the most that a method uses [40000]")
    asked = parser.parse_args()
    symbols, rows = {**SYMBOLS, "malenia": "S/n = "}, []
    columns = [name for law, methods in LAWS.items() for name in (f"law, {law}", *methods)]
    table = Table("n", "σ²", *columns)
    for workers in asked.workers:
        paces = [float(each) for each in range(1, workers + 1)]
        for noise in asked.noise:
            problem, cells = Quadratic(noise=noise), []
            row: dict[str, Any] = {"workers": workers, "noise": noise}
            for law, methods in LAWS.items():
                least = (optimal_time if law == "alike" else unlike_time)(paces, 1.0, problem.gap, noise, asked.epsilon)
                row[law] = least
                cells.append(f"{least:.0f} s")
                for method in methods:
                    unlike = UNLIKE if law == "unlike" else 0.0
                    own = row[method] = best(problem, method, paces, asked.epsilon, asked.gradients, unlike)
                    end, size = own["seconds"], f", {symbols[method]}{own['size']}" if method in symbols else ""
                    cells.append(
                        "never" if end is None else f"{end:.0f} s ({end / least:.2g}), γ {own['step']:.3g}{size}"
                    )
            rows.append(row)
            table.add_row(str(workers), f"{noise:g}", *cells)
    Console(width=170).print(table)
    print(json.dumps({"optimal_times": rows}))


if __name__ == "__main__":
    main()
