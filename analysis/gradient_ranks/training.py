"""Training on a whole training set, without any federation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from gradient_ranks.files import Setting
from gradient_ranks.network import Array, Network, tensor
from hpcfl.base.rng import keyed

TESTED = 1000
"""Samples that are classified at a time."""
OPTIMIZERS: dict[str, Callable[[Tensor, float], torch.optim.Optimizer]] = {
    "adam": lambda theta, rate: torch.optim.Adam([theta], lr=rate, eps=1e-7),
    "rmsprop": lambda theta, rate: torch.optim.RMSprop([theta], lr=rate, alpha=0.9, eps=1e-7),
}
"""With Keras' constants."""


def trained(network: Network, pixels: Array, labels: Array, peak: int, how: Setting) -> Iterator[tuple[float, Array]]:
    """Minimise the empirical risk; yield the mean loss during each epoch and θ float32 ``[p]`` after it.

    Parameters
    ----------
    pixels : array [n, channels, height, width]
        Of value ``0 .. peak``; they are divided by `peak`.
    labels : int64 [n]
    """
    theta = torch.from_numpy(network.initial(how.training_seed)).requires_grad_()
    optimizer, images, targets = OPTIMIZERS[how.optimizer](theta, how.lr), tensor(pixels), tensor(labels)
    for epoch in range(how.epochs):
        order, total = tensor(keyed(how.training_seed, "batch", epoch).permutation(len(labels))), 0.0
        for rows in torch.split(order, how.batch):
            scores = network.passed(theta, images[rows].float() / peak)[1][-1]
            loss = F.cross_entropy(scores, targets[rows])
            theta.grad = torch.autograd.grad(loss, theta)[0]
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        yield total / len(labels), theta.detach().numpy().copy()


def accuracy(network: Network, theta: Array, pixels: Array, labels: Array, peak: int) -> float:
    """Return the share of samples that are classified as labelled; arguments as of `trained`."""
    correct, parameters = 0, tensor(theta)
    for images, targets in zip(torch.split(tensor(pixels), TESTED), torch.split(tensor(labels), TESTED)):
        scores = network.passed(parameters, images.float() / peak)[1][-1]
        correct += int((scores.argmax(1) == targets).sum())
    return correct / len(labels)
