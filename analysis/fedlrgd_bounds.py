"""What the bounds of FedLRGD's paper say as numbers, where their constants are known (Jadbabaie, Makur & Shah).

    python analysis/fedlrgd_bounds.py

The loss is logistic with a ridge (Appendix A), with features in [0, 1]^d, d + 1 parameters and α = 1: what
`hpcfl check fedlrgd-logistic` takes for eqs. 47 and 48.

proposition1  Γ of Theorem 2 over Γ of FedAve, clients m growing, each with 50 samples, φ = 100, ε = n^(-1/2) with n
              counting the server's r samples too: log10 of the least m from which on FedLRGD's is the smaller one, and
              log10 of the ratio for some m. FedAve's Γ is `form`, 8 φ m (p/ε)^(3/4) without the constant C, which the
              proof of Theorem 3 leaves open; or `lemma3`, the least T (b + φ m) for which Lemma 3's bound is at most ε,
              with σ² ≤ B² p and ‖θ - θ*‖² ≤ 4 p, as on [-1, 1]^p.
settings      The same for the problem of fedlrgd-logistic, m = 50, and some ε: r, S, and Γ of both.
theorem1      For the logistic problems of fedlrgd-rough, ϑ ~ N(0, I), the label being a coordinate of the data: the
              bound at a rank, times √p, since analysis/error_by_rank.py adds coordinates up; the least rank at which
              it is at most 1e-2, over all η.
lemma1        Largest error of piecewise Taylor polynomials (49), over a grid of samples (x, y) and parameters, as a
              share of the bound: n² square cells have ℓ1-radius 1/q for q = n. It may be at most 1.
lemma4        Largest share of its bound that the expression of Lemma 4 is off.
appendixA     L1 and L2 as printed, and the largest curvature and second derivatives found on a grid.
distinct      The chance that r uniform samples of the server, features and soft label, make Φ (45) invertible, at most:
              so many in each cell as there are monomials.

Costs seconds. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from math import ceil, comb, exp, factorial, lgamma, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from error_by_rank import needed

from hpcfl.contrib.theory.complexity import Constants

Floats = npt.NDArray[np.float64]
RIDGE, SAMPLES, PHI, CLIENTS = 0.01, 50, 100.0, 50
BETA = 0.5
POWERS = np.arange(0, 120.5, 0.5)
"""log10 of numbers of clients that are tried."""
SHOWN = 2, 4, 8, 16, 32, 64
DRAWS = 4000
LEVEL = 1e-2
ORDERS = range(1, 7)


def problem(d: int, ridge: float = RIDGE) -> Constants:
    """Return the constants of logistic regression with d features and a bias."""
    return Constants(d, d + 1, (d + 1) / 4 + ridge, ridge, 1 + ridge, log(2))


# Theorems 2 and 3, Proposition 1


def lrgd(known: Constants, m: float, epsilon: float) -> tuple[float, int, float]:
    """Return log r (eq. 47), S (eq. 48) and log Γ of Theorem 2."""
    rank, steps = known.best_log_rank(epsilon)[0], known.steps(epsilon)
    return rank, steps, rank + float(np.logaddexp(rank, log(SAMPLES + steps + PHI * m)))


def form(known: Constants, m: float, epsilon: float) -> float:
    """Return log of ``8 φ m (p/ε)^(3/4)``."""
    return log(8 * PHI * m) + 0.75 * log(known.parameters / epsilon)


def lemma3(known: Constants, m: float, b: Floats, epsilon: float) -> Floats:
    """Return the least T ≥ T0 for which Lemma 3's bound is at most ε, of each b, with τ = 1."""
    smooth, convex, kappa = known.smooth, known.convex, known.condition
    variance, apart = known.bound**2 * known.parameters, 4 * known.parameters
    first = 4 * np.maximum(max(kappa, 4), 4 * m / (convex**2 * b))
    # the bound is a/u² + c/u with u = T b + 1
    a = smooth / 2 * (first * b + 1) ** 2 * apart + 128 * exp(1) * kappa**3 * variance / convex * (b - 1)
    c = 8 * kappa * variance / (convex * m) * b + 8 * exp(1) * smooth * kappa**2 * variance / m * (b - 1) ** 2
    u = (c + np.sqrt(c**2 + 4 * a * epsilon)) / (2 * epsilon)
    epochs: Floats = np.ceil(np.maximum(first, (u - 1) / b))
    return epochs


def fedave(known: Constants, m: float, epsilon: float) -> float:
    """Return log of the least Γ = T (b + φ m) that Lemma 3 allows of."""
    b = np.unique(np.round(np.geomspace(1, max(10 * m, 1e4), 1000)))
    return float(np.log(lemma3(known, m, b, epsilon) * (b + PHI * m)).min())


def ratios(known: Constants, power: float) -> tuple[float, float]:
    """Return log10 of both ratios for m = 10^power and ε = n^(-β); n counts the r samples that ε asks for."""
    m = 10.0**power
    n = log(m * SAMPLES)
    for _ in range(5):
        n = float(np.logaddexp(log(m * SAMPLES), known.best_log_rank(exp(-BETA * n))[0]))
    epsilon = exp(-BETA * n)
    ours = lrgd(known, m, epsilon)[2]
    return tuple((ours - theirs(known, m, epsilon)) / log(10) for theirs in (form, fedave))  # type: ignore[return-value]


def proposition1(d: int) -> dict[str, Any]:
    """Return from which m on FedLRGD's bound is the smaller one (null: from none), and the ratios for some m."""
    found = [ratios(problem(d), power) for power in POWERS]
    least = {}
    for name, column in zip(("form", "lemma3"), np.transpose(found)):
        since = np.flatnonzero(np.append(0.0, column) >= 0)[-1]  # the place after the last where it is not
        least[name] = float(POWERS[since]) if since < len(POWERS) else None
    shown = {f"{power:g}": np.round(row, 2).tolist() for power, row in zip(POWERS, found) if power in SHOWN}
    return {"d": d, **least, "ratios": shown}


def settings(epsilon: float) -> dict[str, Any]:
    """Return what both theorems say of fedlrgd-logistic."""
    known = problem(2)
    rank, steps, ours = lrgd(known, CLIENTS, epsilon)
    theirs = fedave(known, CLIENTS, epsilon)
    costs = {"FedLRGD": exp(ours), "FedAve": exp(theirs), "ratio": exp(ours - theirs)}
    return {"epsilon": epsilon, "r": ceil(exp(rank)), "S": steps} | costs


# Theorem 1, Lemma 1


@cache
def steepest(order: int) -> float:
    """Return sup |σ^(k)|, and 1 for k = 0, which no σ - y exceeds."""
    return 1.0 if not order else float(np.abs(sigmoid(np.linspace(-9, 9, 20001), order)).max())


def sigmoid(z: Floats, order: int) -> Floats:
    """Return σ^(k)(z), from σ' = σ (1 - σ) as polynomials in σ."""
    power = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(order):
        power = power.deriv() * np.polynomial.Polynomial([0.0, 1.0, -1.0])
    found: Floats = power(1 / (1 + np.exp(-z)))
    return found


def holder(eta: int, largest: Floats) -> Floats:
    """Return L2 of ``x_i (σ(wᵀx + b) - y) + μ θ_i``, in features and label, for weights of at most `largest`."""
    found = largest**eta * steepest(eta) + eta * largest ** (eta - 1) * steepest(eta - 1)
    return np.maximum(found, 1.0 if eta <= 2 else 0.0)


def theorem1(d: int, eta: int, rank: float, steep: float) -> float:
    """Return the bound of Theorem 1 for L2 = `steep`, its root taken; d counts the label."""
    low = eta - 1
    constant = exp(eta / d) * d ** (eta / (2 * d)) * 2.0**eta * (low + d) ** eta / factorial(low)
    return float(steep * constant * rank ** (-eta / d))


def low_rank(features: int, rank: int) -> dict[str, Any]:
    """Return Theorem 1's bound at a rank, with the best η of which it speaks there, and the least rank for `LEVEL`."""
    d, p = features + 1, features + 1
    drawn = np.abs(np.random.default_rng(1).standard_normal((DRAWS, features))).max(1)
    rms = {eta: sqrt(float(np.square(holder(eta, drawn)).mean()) * p) for eta in range(1, 21)}
    there = [(theorem1(d, eta, rank, rms[eta]), eta) for eta in rms if rank >= needed(d, eta)]
    bound, at = min(there, default=(None, None))
    least = min(max(needed(d, eta), (theorem1(d, eta, 1, rms[eta]) / LEVEL) ** (d / eta)) for eta in rms)
    about = {"features": features, "rank": rank, "needed": needed(d, 1)}
    return about | {"bound": bound, "eta": at, "least": ceil(least)}


def lemma1(eta: int, cells: int, points: int = 400) -> float:
    """Return the largest error of (49) for ``x (σ(w x + b) - y)`` as a share of ``L2/(l! q^η)``."""
    x, low, worst = (np.arange(points) + 0.5) / points, eta - 1, 0.0
    centre = (np.floor(x * cells) + 0.5) / cells
    step = x - centre
    for w in (-1.0, -0.3, 0.6, 1.0):
        for b in (-1.0, 0.0, 1.0):
            smooth = np.zeros(points)
            for k in range(low + 1):
                lower = k * w ** (k - 1) * sigmoid(w * centre + b, k - 1) if k else 0.0
                smooth += (centre * w**k * sigmoid(w * centre + b, k) + lower) * step**k / factorial(k)
            off = (x * sigmoid(w * x + b, 0) - smooth)[:, None]
            # x y has the terms z z', z' (x - z), z (y - z') and (x - z) (y - z'), of orders 0, 1, 1 and 2
            if low == 0:
                off = off - (np.outer(x, x) - np.outer(centre, centre))
            elif low == 1:
                off = off - np.outer(step, step)
            bound = float(holder(eta, np.array(1.0))) / (factorial(low) * cells**eta)
            worst = max(worst, float(np.abs(off).max()) / bound)
    return worst


def invertible(cells: int, eta: int) -> dict[str, Any]:
    """Return log10 of the chance that n² equal cells hold as many uniform samples as there are monomials, each."""
    each, count = comb(eta + 1, 2), cells**2
    r = each * count
    chance = lgamma(r + 1) - count * lgamma(each + 1) - r * log(count)
    return {"r": r, "cells": count, "monomials": each, "log10": chance / log(10)}


def lemma4() -> float:
    """Return the largest share of its bound that ``sin(arcsin(1 - t²)/3 + 2π/3)`` is off."""
    t = np.linspace(0, 1, 100_001)[1:]
    off = np.sin(np.arcsin(1 - t**2) / 3 + 2 * np.pi / 3) - 0.5 - t / sqrt(6)
    return float((np.abs(off) / (5 * t**2 / 9)).max())


def appendix(d: int, draws: int = 200_000) -> dict[str, float]:
    """Return L1 and L2 (η = 2) as printed for a sample of d numbers, one of them its label, and what is found."""
    rng = np.random.default_rng(1)
    x, theta = rng.random((draws, d - 1)), rng.uniform(-1, 1, (draws, d - 1))
    x[: 2**9], theta[: 2**9] = 1.0, 0.0  # where the curvature is largest
    z = (x * theta).sum(1)
    first, second = sigmoid(z, 1), sigmoid(z, 2)
    curvature = float((first * np.square(x).sum(1)).max()) + RIDGE
    # ∂²/∂x_j ∂x_k of g_1, and ∂²/∂x_1 ∂y = -1
    twice = np.einsum("n,nj,nk->njk", second * x[:, 0], theta, theta)
    twice[:, 0] += first[:, None] * theta
    twice[:, :, 0] += first[:, None] * theta
    return {"d": d, "L1": (d - 1) / 2 + RIDGE, "curvature": curvature, "L2": 1.0, "second": float(np.abs(twice).max())}


def main() -> None:
    """Print the JSON line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = {
        "proposition1": [proposition1(d) for d in (1, 2, 3, 5, 10)],
        "settings": [settings(epsilon) for epsilon in (1e-2, 1e-4, 1e-6, 1e-8)],
        "theorem1": [low_rank(features, rank) for features in (1, 2) for rank in (64, 128, 1024)],
        "lemma1": {str(cells): [lemma1(eta, cells) for eta in ORDERS] for cells in (2, 4, 8, 16)},
        "lemma4": lemma4(),
        "appendixA": [appendix(d) for d in (2, 3, 5)],
        "distinct": [invertible(cells, eta) for cells, eta in ((2, 2), (3, 2), (4, 2), (3, 4))],
    }
    print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
