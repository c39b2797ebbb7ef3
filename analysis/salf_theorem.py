"""Theorem III.1 of SALF on ridge regression in layers: gap against rounds, beside its expectation and the bound (15).

    python analysis/salf_theorem.py -o docs/studies/salf_theorem.png --jobs 2

Runs the preset salf-ridge with 20 seeds on the same samples, those of its own seed: only the depths differ, over which
the theorem takes its expectation. Runs that are there already are only read. On a quadratic objective the expectation
of F - F* is known exactly, by a recursion of the iterates' first and second moments; it is printed beside the runs'
mean, and so is (15) with the largest exact variance of a step for B + C. The slope of log gap against log(γ + t) is
that from --first on, with an interval by resampling seeds; the level is the mean of gap times (γ + t) there. As many
runs as --simulated says, of the same rounds by NumPy alone, show how far the slope of so few seeds scatters. Costs
5 minutes of CPU. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import factorial, prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import hpcfl
from hpcfl.algorithms.salf import Salf
from hpcfl.config import load
from hpcfl.config.presets import read
from hpcfl.contrib.theory.optimum import PooledObjective, optimum
from hpcfl.contrib.theory.salf_bounds import Convergence, convergence, uniform_reach
from hpcfl.engine.job import Job

Floats = npt.NDArray[np.float64]
PRESET = "salf-ridge"
RESAMPLED = 2000
POINTS = 16
"""Evaluations from which slopes and levels are taken."""


def outcomes(users: int, layers: int) -> Iterator[tuple[Floats, float]]:
    """Yield how many of the users reach each layer, float64 [L], and the chance of it, for depths as in AS4."""
    for bars in combinations(range(users + layers), layers):
        counts = np.diff((-1, *bars, users + layers)) - 1  # of depths 1 … L + 1
        ways = factorial(users) / prod(factorial(int(count)) for count in counts)
        yield np.cumsum(counts)[:layers].astype(np.float64), ways / (layers + 1) ** users


def products(users: int, layers: int) -> tuple[Floats, Floats]:
    """Return ``E[a_ul a_um]`` and ``E[a_ul a_vm]`` for u ≠ v, float64 [L, L].

    ``a_ul = 1/((1 − p_l) |U^l|)`` where user u reaches layer l, else 0: eq. 9's weight of its gradient. Who reaches
    layer l reaches all above it.
    """
    same, other = np.zeros((2, layers, layers))
    first, last = np.sort(np.indices((layers, layers)), axis=0)
    for reached, chance in outcomes(users, layers):
        low, high = reached[first], reached[last]
        some = low > 0
        same[some] += chance / (users * high[some])
        other[some] += chance * (high[some] - 1) / (users * (users - 1) * high[some])
    scale = 1 - (1 - uniform_reach(layers)) ** users
    return same / np.outer(scale, scale), other / np.outer(scale, scale)


@dataclass(frozen=True)
class Quadratic:
    """Users' objectives ``F_u(w) = F_u(w*) + g_uᵀ e + eᵀ H_u e / 2`` with ``e = w − w*``.

    Attributes
    ----------
    hessians : float64 [U, p, p]
    slopes : float64 [U, p]
        g_u; they add up to 0.
    start : float64 [p]
        The first e.
    layer : int64 [p]
        Which layer a coordinate belongs to, from 0.
    """

    hessians: Floats
    slopes: Floats
    start: Floats
    layer: npt.NDArray[np.int64]

    @cached_property
    def hessian(self) -> Floats:
        """∇²F."""
        mean: Floats = self.hessians.mean(0)
        return mean

    def gradients(self, mean: Floats, second: Floats) -> Floats:
        """Return ``E[∇F_u ∇F_uᵀ]``, float64 [U, p, p], from the first and second moments of e."""
        cross = (self.hessians @ mean)[:, :, None] * self.slopes[:, None]
        return (
            self.hessians @ second @ self.hessians
            + cross
            + cross.transpose(0, 2, 1)
            + self.slopes[:, :, None] * self.slopes[:, None]
        )

    def expected(self, steps: Floats) -> dict[str, Floats]:
        """Return what is expected of SALF's rounds by eq. 9 with these step sizes, whole batches and AS4.

        Returns
        -------
        dict of float64 [rounds + 1]
            ``gap``: E F − F*. ``variance``: that of the next step over η². ``gradient``: the largest over users of
            E |∇F_u|². All before each round, and after the last.
        """
        users, blocks = len(self.hessians), np.ix_(self.layer, self.layer)
        same, other = (part[blocks] for part in products(users, int(self.layer.max()) + 1))
        mean, second, found = self.start, np.outer(self.start, self.start), []
        for step in (*steps, 0.0):
            own, driven = self.gradients(mean, second), self.hessian @ second
            squared = other * users**2 * (driven @ self.hessian) + (same - other) * own.sum(0)
            variance = np.trace(squared) - np.trace(driven @ self.hessian)
            found.append((np.trace(driven) / 2, variance, np.trace(own, axis1=1, axis2=2).max()))
            mean = mean - step * self.hessian @ mean
            second = second - step * (driven + driven.T) + step**2 * squared
        return dict(zip(("gap", "variance", "gradient"), np.array(found).T))


def simulated(quadratic: Quadratic, steps: Floats, runs: int) -> Floats:
    """Draw F − F* after each of the rounds that `Quadratic.expected` is about, float64 [runs, rounds]."""
    rng, found = np.random.default_rng(0), []
    users, layers = len(quadratic.slopes), int(quadratic.layer.max()) + 1
    points, scale = np.tile(quadratic.start, (runs, 1)), 1 - (1 - uniform_reach(layers)) ** users
    for step in steps:
        gradients = np.einsum("upq,nq->nup", quadratic.hessians, points) + quadratic.slopes
        came = rng.integers(1, layers + 2, (runs, users, 1)) <= np.arange(1, layers + 1)
        weights = came / np.maximum(came.sum(1, keepdims=True), 1) / scale
        points = points - step * (weights[:, :, quadratic.layer] * gradients).sum(1)
        found.append(np.einsum("np,pq,nq->n", points, quadratic.hessian, points) / 2)
    return np.array(found).T


def scatter(gaps: Floats, x: Floats, seeds: int) -> dict[str, Any]:
    """Return the slope of runs ``[runs, n]``, and the standard deviation of slopes over groups of so many of them."""
    groups = [slope(gaps[start : start + seeds], x)[0] for start in range(0, len(gaps) - seeds + 1, seeds)]
    return {"runs": len(gaps), "slope": slope(gaps, x), "scatter": float(np.std(groups))}


def problem(config: Any) -> tuple[Convergence, Quadratic, float]:
    """Return the theorem's constants, the users' objectives, and F*."""
    job = Job.of(config, None, 1)
    found, task = convergence(job), job.task
    if found is None:
        raise SystemExit(f"{PRESET}: its constants are not known")
    pooled, best = PooledObjective(task), optimum(task)
    at = pooled.flat(best.parameters)
    users = [PooledObjective(task, [client]) for client in range(config.clients)]
    sizes = [sum(best.parameters[name].numel() for name in names) for names in task.layer_names()]
    parts = np.array([user.hessian(at) for user in users]), np.array([user.gradient(at) for user in users])
    start = pooled.flat(task.initial()) - at
    return found, Quadratic(*parts, start, np.repeat(np.arange(len(sizes)), sizes)), best.value


def write(config: Any, path: Path) -> None:
    """Write the samples of a config's clients, for runs with other seeds."""
    federation = config.data.federate(config.clients, config.seed, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for client in range(config.clients):
            held = federation.client(client)
            for part, x, y in (
                ("train", held.train_features, held.train_labels),
                ("test", held.test_features, held.test_labels),
            ):
                group = file.create_group(f"clients/{client}/{part}")
                group["features"], group["labels"] = x, y


def objective(seed: int, rounds: int, out: Path) -> tuple[Floats, Floats]:
    """Return one run's numbers of rounds and objectives, float64 [evaluations]; carry it out if it is not there."""
    data = {"name": "hdf5", "file": str((out / "samples.h5").resolve())}
    table = read(PRESET) | {"seed": seed, "rounds": rounds, "data": data}
    run = hpcfl.run(table, out=out / f"seed={seed}", resume=True, quiet=True).data
    found = run["objective"].dropna("round")
    return found["round"].values.astype(np.float64) + 1, found.values


def objectives(seeds: int, rounds: int, out: Path, jobs: int) -> list[tuple[Floats, Floats]]:
    """Return what `objective` does of each seed, `jobs` runs at a time."""
    each = range(1, seeds + 1), [rounds] * seeds, [out] * seeds
    if jobs == 1:
        return list(map(objective, *each))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(objective, *each))


def slope(gaps: Floats, x: Floats) -> tuple[float, float, float]:
    """Return the slope of the log of the mean gap ``[seeds, n]`` against log x, and a 95 % interval over seeds."""
    rng, logs = np.random.default_rng(0), np.log(x)
    picked = rng.integers(len(gaps), size=(RESAMPLED, len(gaps)))
    slopes = np.polyfit(logs, np.log(gaps[picked].mean(1)).T, 1)[0]
    low, high = np.quantile(slopes, (0.025, 0.975))
    return float(np.polyfit(logs, np.log(gaps.mean(0)), 1)[0]), float(low), float(high)


def draw(rounds: Floats, gaps: Floats, lines: dict[str, tuple[Floats, str]], picture: Path) -> None:
    """Draw runs, their mean and the other lines against γ + t on log axes, one of slope -1 beside them."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4.4), layout="constrained")
    panel.plot(rounds, gaps.T, "C0", alpha=0.15, linewidth=0.7)
    panel.plot(rounds, gaps.mean(0), "C0", label=f"mean of {len(gaps)} runs")
    for label, (values, style) in lines.items():
        panel.plot(np.arange(1, len(values)), values[1:], style, label=label)
    panel.set(xlabel="rounds t", ylabel="F − F*", xscale="log", yscale="log")
    panel.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(picture, dpi=100)


def figures(
    seeds: int, rounds: int, first: int, out: Path, jobs: int, picture: Path | None, drawn: int
) -> dict[str, Any]:
    """Carry out the runs, print the table, and return what the JSON line says."""
    config = load(PRESET)
    keys = config.algorithm
    assert isinstance(keys, Salf)
    if not (out / "samples.h5").exists():
        write(config, out / "samples.h5")
    found, quadratic, least = problem(config)
    runs = objectives(seeds, rounds, out, jobs)
    times, gaps = runs[0][0], np.array([values for _, values in runs]) - least
    every = np.arange(rounds + 1, dtype=np.float64)
    steps = np.array([keys.learning_rate(k) for k in range(rounds)])
    expected = quadratic.expected(steps)
    bound = found.bound(every, keys.lr, keys.decay)
    exact = found.bound(every, keys.lr, keys.decay, variance=float(expected["variance"].max()))
    show(times, gaps, expected["gap"], exact, bound)
    if picture:
        lines = {"expectation": (expected["gap"], "k--"), "(15)": (bound, "C3"), "(15), exact variance": (exact, "C1")}
        draw(times, gaps, lines, picture)
    tail = np.unique(np.searchsorted(times, np.geomspace(first, times[-1], POINTS)))  # even on a log axis
    x, tails, foreseen = 1 / keys.decay + times[tail], gaps[:, tail], expected["gap"][times[tail].astype(int)]
    levels = (tails * x).mean(1)
    return {
        "seeds": seeds,
        "rounds": rounds,
        "slope": slope(tails, x),
        "slope_expected": slope(foreseen[None], x)[0],
        "simulated": scatter(simulated(quadratic, steps, drawn)[:, times[tail].astype(int) - 1], x, seeds),
        "level": [float(levels.mean()), float(levels.std(ddof=1) / seeds**0.5)],
        "level_expected": float((foreseen * x).mean()),
        "gap": float(gaps.mean(0)[-1]),
        "expected": float(expected["gap"][-1]),
        "bound": float(bound[-1]),
        "bound_exact_variance": float(exact[-1]),
        "runs_above_bound": int((gaps >= bound[times.astype(int)]).any(1).sum()),
        "constants": {"rho_c": found.convex, "rho_s": found.smooth, "gamma": found.gamma, "B": found.b, "C": found.c},
        "gradient": [float(expected["gradient"].max()), found.gradient],
        "variance": [float(expected["variance"][0]), float(expected["variance"][-1])],
        "by_layers": by_layers(found, quadratic, steps, keys),
    }


def by_layers(found: Convergence, quadratic: Quadratic, steps: Floats, keys: Salf) -> list[dict[str, float]]:
    """Return what is expected of the same objective cut into L layers: exact variances, C, expected gap and (15)."""
    rows, count = [], len(quadratic.start)
    for layers in (number for number in range(1, count + 1) if count % number == 0):
        cut = replace(quadratic, layer=np.arange(count) * layers // count)
        constants, expected = replace(found, layers=layers), cut.expected(steps)
        row = {"layers": layers, "variance": float(expected["variance"][0]), "C": constants.c}
        row |= {"gap": float(expected["gap"][-1]), "bound": float(constants.bound(len(steps), keys.lr, keys.decay))}
        rows.append(row)
    return rows


def show(times: Floats, gaps: Floats, expected: Floats, exact: Floats, bound: Floats) -> None:
    """Print the gap at some rounds."""
    table = Table("rounds", "mean gap", "± s.e.", "expected", "(15), exact variance", "(15)", "(15) over gap")
    for at in (10, 30, 100, 300, 1000, 3000, 10000):
        (place,) = np.flatnonzero(times == at)[:1] if at in times else (None,)
        if place is not None:
            mean, error = gaps[:, place].mean(), gaps[:, place].std(ddof=1) / len(gaps) ** 0.5
            cells = (mean, error, expected[at], exact[at], bound[at], bound[at] / mean)
            table.add_row(str(at), *(f"{cell:.3g}" for cell in cells))
    Console(width=120).print(table)


def main() -> None:
    """Print the table and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    parser.add_argument("--out", type=Path, default=Path("runs/salf-theorem"), help="folder of the runs: %(default)s")
    parser.add_argument("--seeds", type=int, default=20, help="seeds 1 to this: %(default)s")
    parser.add_argument("--rounds", type=int, default=1000, help="%(default)s")
    parser.add_argument("--first", type=int, default=100, help="round from which slopes are taken: %(default)s")
    parser.add_argument("--simulated", type=int, default=2000, help="runs by NumPy alone: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time: %(default)s")
    options = parser.parse_args()
    asked = options.seeds, options.rounds, options.first, options.out, options.jobs, options.output, options.simulated
    print(json.dumps(figures(*asked)))


if __name__ == "__main__":
    main()
