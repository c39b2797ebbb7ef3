"""FedLRGD's descent beside the bound of Lemma 2, step by step (Jadbabaie, Makur & Shah, Section V).

    python analysis/fedlrgd_descent.py --rank 4 8 16 24 32

Runs a preset with each rank, takes the weights that it has found, and takes its steps again, one by one, which end at
the run's own parameters. At each step the error of the re-weighted gradient and the gap F - F* are known; the lemma
bounds the gap by the errors of all steps before. L1 is 1/lr, at which the step size is the lemma's.

Of each rank: how many steps there are and at how many the bound holds; the gap and the bound after the last, and what
of the bound the errors make (`errors`); the largest share of the bound that the gap has; the gap when it was least; and
α, the least exponent for which assumption 5, |(G^(i))^-1| ≤ r^α, holds at the run's ϑ and samples. Costs seconds per
rank. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import hpcfl
from hpcfl.algorithms.fedlrgd import FedLrgd
from hpcfl.algorithms.fedlrgd.low_rank import Bound, Surrogates, flat
from hpcfl.contrib.theory.optimum import PooledObjective, optimum
from hpcfl.results.trained import Models

MEMORY = 2**28
Floats = npt.NDArray[np.float64]


def surrogates(models: Models) -> Surrogates:
    """Return a run's surrogate samples."""
    task, keys = models.task, models.config.algorithm
    assert isinstance(keys, FedLrgd)
    held = task.server_batch()
    assert held is not None  # no run of FedLRGD's begins without
    bare = task.without_penalty() if keys.penalty == "exact" else task
    return Surrogates(bare, held, keys.rank, Bound.of(MEMORY, task.parameter_count, keys.rank, held.x.itemsize))


def descended(models: Models, steps: int) -> tuple[Floats, Floats, Floats]:
    """Return F - F* before and after each step, ‖∇F̂ - ∇F‖² at each, and where the steps end."""
    task, keys = models.task, models.config.algorithm
    assert isinstance(keys, FedLrgd)
    objective, least, own = PooledObjective(task), optimum(task).value, surrogates(models)
    theta, weights = flat(task.initial()), torch.from_numpy(models.extras["weights"])
    gaps, errors = [objective.value(theta.double().numpy()) - least], []
    for _ in range(steps):
        slope = own.gradient(theta, weights) + (task.penalty - own.task.penalty) * theta
        errors.append(float(np.square(slope.double().numpy() - objective.gradient(theta.double().numpy())).sum()))
        theta = (theta - keys.lr * slope).to(theta)
        gaps.append(objective.value(theta.double().numpy()) - least)
    return np.array(gaps), np.array(errors), theta.double().numpy()


def bounds(start: float, errors: Floats, smooth: float, convex: float) -> tuple[Floats, Floats]:
    """Return Lemma 2's bound after each step, and of it what the errors make."""
    kept, sums = 1 - convex / smooth, [0.0]
    for error in errors:
        sums.append(kept * sums[-1] + error / (2 * smooth))
    made = np.array(sums[1:])
    return kept ** np.arange(1, len(errors) + 1) * start + made, made


def exponent(models: Models) -> float:
    """Return the least α of assumption 5, at the run's ϑ."""
    own, points = surrogates(models), torch.from_numpy(models.shared["points"])
    least = float(torch.linalg.svdvals(own.matrices(points, slice(None)))[:, -1].min())
    return -log(least) / log(own.rank)


def of_run(folder: Path) -> dict[str, Any]:
    """Return what is found of a run of FedLRGD's, which was not halted."""
    models, taken = hpcfl.open_models(folder), int(hpcfl.open_run(folder)["taken"][-1])
    keys = models.config.algorithm
    assert isinstance(keys, FedLrgd)
    gaps, errors, end = descended(models, taken)
    bound, made = bounds(gaps[0], errors, 1 / keys.lr, models.task.penalty)
    apart = np.abs(end - flat({name: torch.from_numpy(models.shared[name]) for name in models.task.initial()}).numpy())
    found = {"rank": keys.rank, "steps": taken, "held": int((gaps[1:] <= bound).sum()), "apart": float(apart.max())}
    found |= {"gap": float(gaps[-1]), "least": float(gaps.min()), "bound": float(bound[-1]), "errors": float(made[-1])}
    return found | {"share": float((gaps[1:] / bound).max()), "alpha": exponent(models)}


def main() -> None:
    """Run, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="fedlrgd-logistic", help="default: %(default)s")
    parser.add_argument("--rank", nargs="+", type=int, default=[16], help="ranks of at least 2 (default: 16)")
    options, found = parser.parse_args(), []
    for rank in options.rank:
        with TemporaryDirectory() as folder:
            keys = {"algorithm.rank": rank, "evaluate.every": 1000}
            hpcfl.run(options.preset, settings=keys, out=Path(folder) / "run", quiet=True)
            found.append(of_run(Path(folder) / "run"))
    print(json.dumps({"descents": found}, allow_nan=False))


if __name__ == "__main__":
    main()
