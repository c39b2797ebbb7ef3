"""Theorem 1 and Figure 2 of FLIC: FLIC-FedRep beside FedRep on the true embedding, and the rate of the theorem.

    python analysis/flic_linear.py [--seeds 1 2 3 4 5] [--rounds 100] --out runs/flic-linear

FLIC-FedRep (Algorithm S3) is the preset flic-linear with the largest step of the theorem, ``η = 1/(4 σ²_max)``; A is
read after each round. FedRep is NumPy, here, on φ*(x), which FLIC-FedRep cannot see. Prediction errors of both are
mean squares on fresh samples, with heads solved for on each client's own. σ² are eigenvalues of the mean of β*β*ᵀ over
the clients of a round, the extremes over rounds. A's distance is to fall at least like ``√(1 − κ)`` to the power of
the round: ``κ = η (1 − E0²) σ²_min / 2`` with E0 the first distance, as in the theorem of Collins et al. that the proof
rests on. ``above`` counts rounds above that bound, ``printed`` rounds above the bound with κ as printed,
``1 − η E0 σ²_min / 2``; ``reached`` are the rounds after which the errors are at most 5e-5. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import hpcfl
from hpcfl import store
from hpcfl.algorithms.linear_fedrep import B
from hpcfl.base.types import Floats, Ints
from hpcfl.config import load
from hpcfl.data.linear_federation import SpacesFederation, whitening

PRESET = "flic-linear"
TEST = 1_000_000  # the "round" whose samples both are tested on
LEVEL = 5e-5  # of Figure 2's errors


class Clients:
    """Clients' samples as FLIC-FedRep embeds them, by known moments, or by φ*."""

    def __init__(self, data: SpacesFederation, true: bool) -> None:
        self.data, self.signs = data, data.signs if true else np.ones(len(data.signs))
        self.target = self.signs[:, None] * data.target
        self.maps = [whitening(*data.moments(client), len(data.signs)) for client in range(data.clients)]

    def drawn(self, client: int, round_: int) -> tuple[Floats, Floats]:
        """Return a client's embedded samples of a round, and their targets."""
        (x, y), (weight, bias) = self.data.drawn(client, round_), self.maps[client]
        return (x @ weight.T + bias) * self.signs, y

    def distance(self, basis: Floats) -> float:
        """Return the principal angle distance of A ``[k, d]`` to the truth."""
        return float(np.linalg.norm(basis - self.target @ (self.target.T @ basis), 2))

    def error(self, basis: Floats) -> float:
        """Return the mean squared error on fresh samples, with heads by the samples of round 0."""
        found = []
        for client in range(self.data.clients):
            (x, y), (fresh, wanted) = self.drawn(client, 0), self.drawn(client, TEST)
            head = np.linalg.lstsq(x @ basis, y, rcond=None)[0]
            found.append(np.mean((fresh @ basis @ head - wanted) ** 2))
        return float(np.mean(found))


def fedrep(clients: Clients, cohorts: list[Ints], rate: float) -> list[Floats]:
    """Return A after each round of FedRep; the first is spent on moments, by all."""
    every = [clients.drawn(client, 0) for client in range(clients.data.clients)]
    moment = np.mean([(y * y * x.T) @ x / len(y) for x, y in every], axis=0)
    found = [np.linalg.eigh(moment)[1][:, -clients.target.shape[1] :]]
    for round_, cohort in enumerate(cohorts[1:], start=1):
        moved = []
        for client in cohort:
            x, y = clients.drawn(client, round_)
            head = np.linalg.lstsq(x @ found[-1], y, rcond=None)[0]
            moved.append(found[-1] - rate / len(y) * np.outer(x.T @ (x @ found[-1] @ head - y), head))
        found.append(np.linalg.qr(np.mean(moved, axis=0))[0])
    return found


def figures(seed: int, rounds: int, out: Path) -> dict[str, Any]:
    """Return what is said of one seed."""
    config = load(PRESET, {"seed": seed})
    data: Any = config.data.federate(config.clients, seed, None)
    cohorts = [config.participation.cohort(seed, round_, config.clients) for round_ in range(rounds)]
    squares = np.array([np.linalg.svd(data.heads[cohort], compute_uv=False) ** 2 / len(cohort) for cohort in cohorts])
    rate, lowest = float(1 / (4 * squares[1:].max())), float(squares[1:].min())
    settings = {"seed": seed, "rounds": rounds, "algorithm.lr": rate, "checkpoint.every": 1, "checkpoint.keep": rounds}
    hpcfl.run(PRESET, settings=settings, out=out, quiet=True)
    known, true = Clients(data, False), Clients(data, True)
    ours = [store.load(path, personal=False).shared[B].T for path in store.saved(out)]
    errors = np.array([[known.error(basis) for basis in ours], [true.error(a) for a in fedrep(true, cohorts, rate)]])
    distances = np.array([known.distance(basis) for basis in ours])
    first, t = distances[0], np.arange(rounds)
    kappa = rate * (1 - first**2) * lowest / 2
    bound, printed = (first * factor ** (t / 2) for factor in (1 - kappa, rate * first * lowest / 2))
    reached = [int(np.argmax(curve <= LEVEL)) if (curve <= LEVEL).any() else None for curve in errors]
    return {
        "seed": seed,
        "rate": rate,
        "distance": [float(first), float(distances[-1])],
        "error": [float(curve[0]) for curve in errors],
        "last_error": [float(curve[-1]) for curve in errors],
        "apart": float(np.abs(errors[0] - errors[1]).max()),
        "reached": reached,
        "bound": float(bound[-1]),
        "factor": float((distances[-1] / first) ** (1 / (rounds - 1))),
        "bound_factor": float(np.sqrt(1 - kappa)),
        "above": int((distances > bound * (1 + 1e-12)).sum()),
        "printed": int((distances > printed * (1 + 1e-12)).sum()),
    }


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="%(default)s")
    parser.add_argument("--rounds", type=int, default=100, help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/flic-linear"), help="folder of the runs: %(default)s")
    options = parser.parse_args()
    rows = [figures(seed, options.rounds, options.out / f"seed={seed}") for seed in options.seeds]
    worst = {
        "apart": max(row["apart"] for row in rows),
        "error": max(max(row["last_error"]) for row in rows),
        "above": sum(row["above"] for row in rows),
        "printed": sum(row["printed"] for row in rows),
        "rounds": options.rounds * len(rows),
        "factor": max(row["factor"] for row in rows),
        "bound_factor": min(row["bound_factor"] for row in rows),
    }
    print(json.dumps({"worst": worst, "seeds": rows}))


if __name__ == "__main__":
    main()
