"""FedRep for linear regression: SRPFL's Algorithm 2, and FLIC's Algorithm S3, which embeds the features first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Draws = Callable[[int, int], tuple[Array, Array]]
"""Fresh features [m, d] and targets [m] of a client in a round."""


def by_moments(draws: Draws, clients: Sequence[int], k: int) -> Array:
    """The k largest eigenvectors of the mean over all clients of ``1/m Σ y² x xᵀ``."""
    each = [(x.T * y**2) @ x / len(y) for x, y in (draws(i, 0) for i in clients)]
    return np.linalg.eigh(sum(each) / len(each))[1][:, -k:]


def fedrep(draws: Draws, basis: Array, rounds: dict[int, Sequence[int]], eta: float) -> tuple[Array, dict[int, Array]]:
    """Return the representation and each client's last head; a basis is that of a QR with a positive diagonal."""
    heads = {}
    for t, active in rounds.items():
        moved = []
        for i in active:
            x, y = draws(i, t)
            w = np.linalg.solve((x @ basis).T @ (x @ basis), (x @ basis).T @ y)
            heads[i] = w
            moved.append(basis - eta / len(y) * np.outer(x.T @ (x @ basis @ w - y), w))
        if moved:
            basis = orthonormal(sum(moved) / len(moved))
    return basis, heads


def orthonormal(B: Array) -> Array:
    q, r = np.linalg.qr(B)
    return q * np.sign(np.diag(r))


def distance(found: Array, truth: Array) -> float:
    """Principal angle distance ``‖(I − B* B*ᵀ) B‖₂``."""
    return float(np.linalg.norm(found - truth @ (truth.T @ found), 2))


def embedded(x: Array, mean: Array, covariance: Array, k: int) -> Array:
    """``D^(k)-½ P^(k)ᵀ (x − m)``, eigenvalues descending; an eigenvector's largest entry is positive."""
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(-values)[:k]
    vectors = vectors[:, order] * np.sign(vectors[np.abs(vectors).argmax(0), range(len(values))])[order]
    return (x - mean) @ vectors / np.sqrt(values[order])
