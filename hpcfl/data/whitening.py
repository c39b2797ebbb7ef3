"""The embedding of FLIC's Algorithm S3: Gaussian features of known moments, whitened along their leading directions."""

from __future__ import annotations

import numpy as np

from hpcfl.base.types import Floats


def spectrum(covariance: Floats) -> tuple[Floats, Floats]:
    """Return eigenvalues ``[n]``, descending, and eigenvectors ``[n, n]`` in columns.

    An eigenvector's sign is not determined: here the entry of largest magnitude is positive (the first of equals).
    All who must agree on coordinates take their eigenvectors from this function.
    """
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1].copy(), vectors[:, ::-1].copy()
    largest = np.abs(vectors).argmax(axis=0)
    vectors *= np.where(vectors[largest, np.arange(len(values))] < 0, -1.0, 1.0)
    return values, vectors


def whitening(mean: Floats, covariance: Floats, dimension: int) -> tuple[Floats, Floats]:
    """Return W and b of ``W x + b = D^(k)-½ P^(k)ᵀ (x - m)``, which has mean 0 and covariance I.

    ``Σ = P D Pᵀ`` with descending eigenvalues, of which the first k must be distinct for W to be determined.

    Parameters
    ----------
    mean : float64 [n]
        m.
    covariance : float64 [n, n]
        Σ, symmetric.
    dimension : int
        k, at most n.

    Returns
    -------
    weight : float64 [k, n]
    bias : float64 [k]

    Raises
    ------
    ValueError
        If Σ has fewer than k positive eigenvalues.
    """
    values, vectors = spectrum(covariance)
    if dimension > (values > 0).sum():
        raise ValueError(f"expected a covariance of at least {dimension} positive eigenvalues, got {values}")
    weight = vectors[:, :dimension].T / np.sqrt(values[:dimension, None])
    return weight, -weight @ mean
