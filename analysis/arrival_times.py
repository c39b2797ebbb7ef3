"""Seconds until gradients are small, of five ways to use workers of which one is very slow.

    python analysis/arrival_times.py [--workers 16] [--slow 1 10 100 1000] [--linear 64 256] [--longest 64]

All but one of the workers take 1 second per gradient, the last one --slow; or worker i takes i seconds, with --linear
so many of them. They share one objective, the quadratic
``½ wᵀAw − bᵀw`` with ``A = ¼ tridiag(−1, 2, −1)`` and ``b = ¼ e_1`` that is hard for gradient methods, L = 1, and add
noise to its gradients. Rounds are hpcfl's own (`hpcfl.schedule`), from participation and speed alone; the arithmetic
is here, of all step sizes and seeds at once. Methods, each with its best step size γ and α, B or R of the grid:

- ``synchronous``: SGD that waits for a gradient of each worker;
- ``asynchronous``: SGD that takes a step with each gradient, however old;
- ``fedasync``: the server mixes w_i = w_v − γ ∇f(w_v) into w, α (1 + x)^−½ times (Xie, Koyejo & Gupta, 2019);
- ``rennala``: steps of B gradients at the newest point (Tyurin & Richtárik, NeurIPS 2023);
- ``ringmaster``: asynchronous SGD without gradients of delay R and more (Maranjyan et al., ICML 2025).

The last two stop workers whose points are too old.

Printed are the seconds until the mean of |∇f|² over the seeds is at most ε, and their quotients by the optimal law
``min_m (1/m Σ_(i≤m) 1/τ_i)⁻¹ (LΔ/ε + σ²LΔ/(mε²))`` (`optimal_time`): of optimal methods
those change little with the slow worker. The law is of the worst objective, up to a constant, so that below 1 is no
wonder. Costs 2 minutes. Prints one JSON line last (null: not within --gradients).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.types import Floats
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.planner import Planner
from hpcfl.schedule.speeds.base import Speed

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""B and R that are tried, and 1/α."""
STEPS = tuple(2.0**-k for k in range(-6, 9))
METHODS = ("synchronous", "asynchronous", "fedasync", "rennala", "ringmaster")
SYMBOLS = {"fedasync": "α = 1/", "rennala": "B = ", "ringmaster": "R = "}
"""What the size of a method is."""


class Paced(Speed):
    """Seconds per gradient, worker by worker."""

    model: str = "paced"
    of: tuple[float, ...] = ()

    def seconds(self, attempt: Attempt) -> Floats:
        return np.array(self.of)[attempt.cohort]


@dataclass(frozen=True)
class Quadratic:
    """``½ wᵀAw − bᵀw`` in so many dimensions, from w = 0; L = 1.

    Attributes
    ----------
    noise : float
        σ², the variance of a gradient, over all coordinates.
    """

    dimension: int = 100
    noise: float = 0.0025

    def gradient(self, w: Floats) -> Floats:
        """Return ∇f at points, float64 ``[…, d]``."""
        padded = np.pad(w, [(0, 0)] * (w.ndim - 1) + [(1, 1)])
        found: Floats = (2 * w - padded[..., :-2] - padded[..., 2:]) / 4
        found[..., 0] -= 0.25
        return found

    @property
    def gap(self) -> float:
        """Δ = f(0) − min f; the minimum is at ``w_i = 1 − i/(d + 1)``."""
        return (1 - 1 / (self.dimension + 1)) / 8


def rules(method: str, size: int) -> Participation:
    """Return when the rounds of a method end; `size` is B or R, if it has one of these."""
    if method == "synchronous":
        return Participation()
    keys: dict[str, Any] = {"close": "arrivals", "dispatch": "reporter", "buffer": 1}
    if method == "rennala":
        keys |= {"buffer": size, "max_staleness": 0, "stop_stale": True}
    if method == "ringmaster":
        keys |= {"max_staleness": size - 1, "stop_stale": True}
    return Participation(**keys)


def threshold(noise: float, accuracy: float) -> int:
    """Return R = max(1, ⌈σ²/ε⌉) of Ringmaster's theorem as we remember it, not read again.

    Parameters
    ----------
    noise : float
        σ², the variance of a gradient.
    accuracy : float
        ε, above 0: the mean of ``|∇f|²`` that is wanted.
    """
    return max(1, ceil(noise / accuracy))


def optimal_time(seconds: Sequence[float], smooth: float, gap: float, noise: float, accuracy: float) -> float:
    """Return the least seconds until ``E|∇f|² ≤ ε``, up to a constant, by workers of fixed pace.

    ``min_m (1/m Σ_(i≤m) 1/τ_i)⁻¹ (LΔ/ε + σ²LΔ/(mε²))``, workers in the order of their seconds τ_i per gradient: the
    bound holds for all methods that ask for gradients at points of their choice, and Rennala SGD and Ringmaster reach
    it (Tyurin & Richtárik, NeurIPS 2023; Maranjyan et al., ICML 2025; from memory).

    Parameters
    ----------
    gap : float
        Δ = f(w_0) − inf f.
    """
    rates, found = 0.0, []
    for count, pace in enumerate(sorted(seconds), start=1):
        rates += 1 / pace
        found.append(count / rates * smooth * gap / accuracy * (1 + noise / (count * accuracy)))
    return min(found)


def times(
    problem: Quadratic,
    participation: Participation,
    seconds: Sequence[float],
    epsilon: float,
    steps: Sequence[float] = STEPS,
    seeds: int = 8,
    gradients: int = 20_000,
    alpha: float | None = None,
) -> Floats:
    """Return the seconds until the mean of |∇f|² over the seeds is at most ε, by step size; inf: not in so many.

    All seeds have the same rounds, which do not depend on what is computed. With an `alpha` models are mixed.
    """
    workers = len(seconds)
    method, ones = FedAvg(epochs=0, steps=1), np.ones(workers, dtype=np.int64)
    staleness = Staleness(weight="constant" if alpha is None else "polynomial")
    planner = Planner(participation, Paced(of=tuple(seconds)), method, ones, np.ones(1), staleness=staleness)
    rng, sd = np.random.default_rng(1), np.sqrt(problem.noise / problem.dimension)
    w = np.zeros((len(steps), seeds, problem.dimension))
    rates, found, now, used = np.array(steps)[:, None, None], np.full(len(steps), np.inf), 0.0, 0
    served = {0: (w, problem.gradient(w))}
    for plan in planner.plans():
        known = plan.arrivals
        versions = np.full(workers, plan.round) if known is None else known.versions
        noise = sd * rng.standard_normal((len(versions), seeds, problem.dimension)).mean(0)
        change = -rates * (np.mean([served[version][1] for version in versions.tolist()], axis=0) + noise)
        if alpha is not None and known is not None:
            change = alpha * known.factors[0] * (change + served[int(versions[0])][0] - w)
        w = w + change
        now, used = now + plan.duration, used + len(versions)
        gradient = problem.gradient(w)
        small = np.square(gradient).sum(2).mean(1)
        found[(small <= epsilon) & np.isinf(found)] = now
        lost = ~(small < 1e3)  # such a step is too large, and is tried no longer
        w[lost], rates[lost] = 0.0, 0.0
        held = set() if known is None else {*known.served.tolist()}
        served = {version: served[version] for version in held if version in served} | {plan.round + 1: (w, gradient)}
        if found.min() < np.inf or used >= gradients:  # another step's time would come later
            return found
    raise AssertionError


def best(
    problem: Quadratic, method: str, seconds: Sequence[float], epsilon: float, gradients: int, longest: float = STEPS[0]
) -> dict[str, Any]:
    """Return the least time of a method, and by which size, and which step up to the `longest`."""
    steps = [step for step in STEPS if step <= longest]
    tried = []
    for size in SIZES if method in SYMBOLS else (0,):
        alpha = 1 / size if method == "fedasync" else None
        tried.append(
            (times(problem, rules(method, size), seconds, epsilon, steps, gradients=gradients, alpha=alpha), size)
        )
    least, size = min(((float(each.min()), size) for each, size in tried), key=lambda pair: pair[0])
    step = steps[int(next(each for each, other in tried if other == size).argmin())]
    return {"seconds": least if least < np.inf else None, "size": size or None, "step": step}


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16, help="[16]")
    parser.add_argument("--slow", type=float, nargs="+", default=[1.0, 10.0, 100.0, 1000.0], help="[1 10 100 1000]")
    parser.add_argument("--linear", type=int, nargs="*", default=[64, 256], help="[64 256]")
    parser.add_argument("--epsilon", type=float, default=1e-4, help="[1e-4]")
    parser.add_argument("--noise", type=float, default=0.0025, help="σ² [0.0025]")
    parser.add_argument("--gradients", type=int, default=20_000, help="the most that a method uses [20000]")
    parser.add_argument("--longest", type=float, default=STEPS[0], help="the largest γ that is tried [64]")
    asked = parser.parse_args()
    problem, rows = Quadratic(noise=asked.noise), []
    cases = {
        f"{asked.workers - 1} of 1 s, one of {slow:g} s": [1.0] * (asked.workers - 1) + [slow] for slow in asked.slow
    }
    cases |= {f"1 … {count} s": [float(i) for i in range(1, count + 1)] for count in asked.linear}
    table = Table("workers", "law", *METHODS, title=f"R in theory: {threshold(asked.noise, asked.epsilon)}")
    for name, paces in cases.items():
        law = optimal_time(paces, 1.0, problem.gap, asked.noise, asked.epsilon)
        limits = asked.epsilon, asked.gradients, asked.longest
        found = {method: best(problem, method, paces, *limits) for method in METHODS}
        rows.append({"workers": name, "law": law, **found})
        cells = (
            "never"
            if each["seconds"] is None
            else f"{each['seconds']:.0f} s ({each['seconds'] / law:.3g}), γ {each['step']:.3g}"
            + (f", {SYMBOLS[method]}{each['size']}" if each["size"] else "")
            for method, each in found.items()
        )
        table.add_row(name, f"{law:.0f} s", *cells)
    Console(width=170).print(table)
    print(json.dumps({"arrival_times": rows}))


if __name__ == "__main__":
    main()
