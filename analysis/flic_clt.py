"""Theorem S2 of FLIC: the variance of W2² to an anchor, computed from n samples of a Gaussian, beside its limit.

    python analysis/flic_clt.py [--samples 100 1000] [--draws 4000]

n times the variance of ``W2²(N(v, S), N(m̂, Σ̂))`` over draws of n samples of N(m, Σ) is held against three limits:

- ``printed``: s of the theorem, ``4 δᵀΣδ + 2 tr ΣS − 4 Σ_j κ_j^½ r_jᵀ S^-½ Σ S^½ r_j`` with ``δ = m − v``, where the
  κ_j and r_j are said to be eigenvalues and eigenvectors of Σ;
- ``inner``: the same with those of ``S^½ Σ S^½``;
- ``whole``: the same with ``2 tr Σ²`` on top. That is what the derivative of W2² by m and Σ gives.

Prints one JSON line last, with the limits as well where Σ = S = I and δ = 0: W2² is then of order 1/n, and s is 0.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from hpcfl.base.types import Floats
from hpcfl.math import gaussian

DIMENSION, PART = 4, 200  # of the latent space; draws at once


def limits(gap: Floats, own: Floats, anchor: Floats) -> dict[str, float]:
    """Return the three limits for δ `gap` [k], Σ `own` [k, k] and S `anchor` [k, k]."""
    values, vectors = np.linalg.eigh(anchor)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    turned = inverse @ own @ root
    found = {}
    for name, matrix in (("printed", own), ("inner", root @ own @ root)):
        values, vectors = np.linalg.eigh(matrix)
        last = (np.sqrt(values) * np.einsum("ij,ik,kj->j", vectors, turned, vectors)).sum()
        found[name] = float(4 * gap @ own @ gap + 2 * np.trace(own @ anchor) - 4 * last)
    return found | {"whole": found["inner"] + 2 * float(np.trace(own @ own))}


def distances(gap: Floats, own: Floats, anchor: Floats, samples: int, draws: int) -> Floats:
    """Return W2² of as many draws, float64 [draws]; the anchor is at 0."""
    rng, factor, found = np.random.default_rng(samples), torch.from_numpy(np.linalg.cholesky(anchor)), []
    for first in range(0, draws, PART):
        noise = rng.standard_normal((min(PART, draws - first), samples, len(gap)))
        points = torch.from_numpy(gap + noise @ np.linalg.cholesky(own).T)
        each = gaussian.moments(points, torch.ones(points.shape[:2], dtype=torch.bool))
        found.append(each.mean.square().sum(-1) + gaussian.bures_factor_squared(factor, each.centred, samples))
    return torch.cat(found).numpy()


def figures(samples: list[int], draws: int) -> dict[str, Any]:
    """Return what the JSON line says, of one δ, Σ and S."""
    rng = np.random.default_rng(0)
    roots, gap = rng.standard_normal((2, DIMENSION, DIMENSION)), rng.standard_normal(DIMENSION)
    own, anchor = roots @ roots.mT / DIMENSION + 0.2 * np.eye(DIMENSION)
    rows = []
    for number in samples:
        scaled = np.sqrt(number) * distances(gap, own, anchor, number, draws)
        variance = float(scaled.var(ddof=1))
        half = 1.96 * variance * np.sqrt(2 / draws)
        centred = (scaled - scaled.mean()) / scaled.std()
        rows.append({"samples": number, "variance": variance, "half": half, "skewness": float((centred**3).mean())})
    one = np.eye(DIMENSION)
    return {"draws": draws, "limits": limits(gap, own, anchor), "measured": rows, "equal": limits(0 * gap, one, one)}


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 1000], help="n: %(default)s")
    parser.add_argument("--draws", type=int, default=4000, help="of each n: %(default)s")
    options = parser.parse_args()
    print(json.dumps(figures(options.samples, options.draws)))


if __name__ == "__main__":
    main()
