"""For one weight q of a network, ``M_q[i, j] = ∂f/∂θ_q(x_i; θ^(j))``: a row per sample, a column per parameter vector.

A derivative by a weight is a product of what goes into its layer and of what comes back to the layer's output, so
single entries cost next to nothing once a whole batch has gone forward and back: no gradient is ever formed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gradient_ranks.network import KERNEL, Array, Network, tensor
from hpcfl.base.rng import keyed

SHARE = 0.9
"""Part of the squared Frobenius norm that the counted singular values hold (77)."""
TRIVIAL = 0.005
"""Weights nearer to zero are trivial."""


def drawn_samples(seed: int, count: int, k: int) -> Array:
    """Return `k` of `count` test samples, int64 ``[k]``, rising: each subset is as likely as any other."""
    return np.sort(keyed(seed, "samples").permutation(count)[:k])


def drawn_weights(seed: int, theta: Array, count: int, least: float) -> tuple[Array, int]:
    """Return places of weights with ``|θ_q| >= least``, int64 ``[at most count]``, rising, and how many such there are.

    The biases are weights too (those of bias nodes).
    """
    there = np.flatnonzero(np.abs(theta.astype(np.float64)) >= least)
    return np.sort(there[keyed(seed, "weights").permutation(len(there))[:count]]), len(there)


def perturbed(seed: int, theta: Array, j: int, times: float = 1.0) -> Array:
    """Return ``θ^(j) = θ + times · ‖θ‖₁/p · N(0, I)``, float64 ``[p]`` ((75): once).

    The same for the same `seed` and `j` anywhere.
    """
    noise: Array = keyed(seed, "perturbation", client=j).standard_normal(theta.size)
    noise *= times * spread(theta)
    noise += theta
    return noise


def spread(theta: Array) -> float:
    """Return ``‖θ‖₁/p``."""
    return float(np.abs(theta.astype(np.float64)).mean())


def derivatives(network: Network, theta: Array, x: Array, y: Array, places: Array) -> Array:
    """Return ``∂f/∂θ_q(x_i; θ)`` of chosen weights, float64 ``[m, k]`` (76): a column of each of m matrices.

    Each number comes of the same operations whatever other weights are asked for.

    Parameters
    ----------
    theta : float64 [p]
    x : float64 [k, channels, height, width]
    y : int64 [k]
    places : int64 [m]
        Places of the weights in `theta`.
    """
    inputs, outputs = network.passed(tensor(theta).requires_grad_(), tensor(x))
    loss = F.cross_entropy(outputs[-1], tensor(y), reduction="sum")  # sample by sample, as none touches another
    deltas = torch.autograd.grad(loss, outputs)
    found = np.empty((len(places), len(y)))
    for number, layer in enumerate(network.layers):
        before, delta = inputs[number].detach(), deltas[number]
        if len(layer.shape) == 4:
            before = F.pad(before, [KERNEL // 2] * 4)
        for row in np.flatnonzero((layer.start <= places) & (places < layer.end)):
            found[row] = _derivative(before, delta, layer.indices(int(places[row]))).numpy()
    return found


def _derivative(before: Tensor, delta: Tensor, indices: tuple[int, ...]) -> Tensor:
    """Return the derivatives ``[k]`` by one weight or bias: its input times what comes back, summed over positions."""
    out, *into = indices
    back = delta[:, out]
    if delta.dim() == 2:
        return back * before[:, into[0]] if into else back
    if into:
        channel, row, column = into
        height, width = back.shape[1:]
        back = back * before[:, channel, row : row + height, column : column + width]
    return back.sum((1, 2))


def approximate_ranks(singular: Array, share: float = SHARE) -> Array:
    """Return how many of the largest singular values hold `share` of their squared sum, int64 ``[m]`` (77).

    Parameters
    ----------
    singular : float64 [m, k]
        Falling along k. Of a zero matrix, all zero: 0 is returned, it has no approximate rank.
    """
    largest = singular[:, :1]
    scaled = np.divide(singular, largest, out=np.zeros_like(singular), where=largest > 0)  # squares may underflow
    held = np.cumsum(scaled**2, axis=1)
    ranks: Array = (held < share * held[:, -1:]).sum(axis=1) + 1
    return np.where(held[:, -1] > 0, ranks, 0)


def rows_needed(slices: Array, share: float = SHARE) -> Array:
    """Return how many rows of each matrix ``[m, k, k]`` hold `share` of its squared norm, int64 ``[m]``; zero: 0.

    Never less than the approximate rank (Eckart and Young). Where it is no more, the rank is low because few samples
    have a gradient worth speaking of, not because the rows of many are alike.
    """
    norms: Array = np.linalg.norm(slices, axis=2)
    return approximate_ranks(-np.sort(-norms, axis=1), share)
