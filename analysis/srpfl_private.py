"""Remark 4.11 of SRPFL: what the start of Algorithm 2 costs where the clients' moments are private.

    python analysis/srpfl_private.py [--clients 64 1024 16384] [--seeds 5] [--set KEY=VALUE ...]

Clients draw their samples as with the preset srpfl-linear, the settings on top. Each clips its moment ``1/m Σ y² x xᵀ``
to Frobenius norm ``k d``; Gaussian noise makes what is revealed (ε, δ)-differentially private, ε = 1 and δ = 1e-5, for
one client more or less: with the deviation ``√(2 ln(1.25/δ))/ε`` times the norm in each entry of a symmetric matrix.
``sum``: the sum is revealed, and noisy. ``each``: each client's own moment is. Prints one JSON line: by the number of
clients the distance to B* at which the run would start, a mean over seeds, also from ``plain`` and from ``clipped``
moments, and the share of clients that clip. What later rounds reveal is in no account here. Costs half a second per
seed and 1000 clients of 100 features.
"""

from __future__ import annotations

import argparse
import json
from math import log, sqrt
from typing import cast

import numpy as np

from hpcfl.algorithms.linear_fedrep import LinearFedRep
from hpcfl.base.types import Floats
from hpcfl.config import load
from hpcfl.data.linear_federation import LinearFederation

EPSILON, DELTA, AT_ONCE = 1.0, 1e-5, 256
DEVIATION = sqrt(2 * log(1.25 / DELTA)) / EPSILON  # of the Gaussian mechanism, for sensitivity 1


def moments(x: Floats, y: Floats, most: float) -> tuple[Floats, Floats, int]:
    """Return the sum of some clients' moments, of ``x [c, m, d]`` and ``y [c, m]``; that of clipped ones; how many."""
    scaled = x * y[:, :, None] / sqrt(y.shape[1])
    norms = np.linalg.norm(scaled @ scaled.transpose(0, 2, 1), axis=(1, 2))
    shares = np.minimum(1, most / norms)
    rows = scaled.reshape(-1, scaled.shape[2])
    return rows.T @ rows, (rows * shares.repeat(scaled.shape[1])[:, None]).T @ rows, int((shares < 1).sum())


def distance(moment: Floats, truth: Floats) -> float:
    """Return the principal angle distance of the largest eigenvectors to B* ``[d, k]``."""
    start = np.linalg.eigh(moment)[1][:, -truth.shape[1] :]
    return float(np.linalg.norm(start - truth @ (truth.T @ start), 2))


def starts(clients: int, seed: int, settings: list[str]) -> dict[str, float]:
    """Return the distances of one seed, and the share of clients that clip."""
    config = load("srpfl-linear", [*settings, f"clients={clients}", f"seed={seed}"])
    assert isinstance(config.algorithm, LinearFedRep)
    federation = cast("LinearFederation", config.data.federate(clients, seed, None))
    dimension, rank = federation.truth.shape
    most, clips = float(rank * dimension), 0
    plain, clipped = np.zeros((2, dimension, dimension))
    for first in range(0, clients, AT_ONCE):
        found = moments(*federation.drawn_by(np.arange(first, min(first + AT_ONCE, clients)), 0), most)
        plain, clipped, clips = plain + found[0], clipped + found[1], clips + found[2]
    noise = np.triu(np.random.default_rng([seed, clients]).standard_normal(plain.shape)) * DEVIATION * most
    noise += np.triu(noise, 1).T
    sums = {"plain": plain, "clipped": clipped, "sum": clipped + noise, "each": clipped + sqrt(clients) * noise}
    return {name: distance(each, federation.truth) for name, each in sums.items()} | {"clips": clips / clients}


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 1024, 16384], help="%(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for hpcfl run")
    asked = parser.parse_args()
    told: dict[str, dict[str, float]] = {}
    for clients in asked.clients:
        found = [starts(clients, seed, asked.set) for seed in range(1, asked.seeds + 1)]
        told[str(clients)] = {name: float(f"{np.mean([each[name] for each in found]):.5g}") for name in found[0]}
    print(json.dumps({"seeds": asked.seeds, "deviation": round(DEVIATION, 3), **told}))


if __name__ == "__main__":
    main()
