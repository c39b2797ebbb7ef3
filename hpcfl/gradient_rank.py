"""Approximate rank of a loss's gradient as a matrix over samples and parameters (Jadbabaie et al., appendix C).

For one weight q of a network, ``M_q[i, j] = ∂f/∂θ_q(x_i; θ^(j))`` has a row per sample and a column per parameter
vector. A derivative by a weight is a product of what goes into its layer and of what comes back to the layer's output,
so single entries cost next to nothing once a whole batch has gone forward and back: no gradient is ever formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hpcfl.rng import keyed

Array = NDArray[Any]

SHARE = 0.9
"""Part of the squared Frobenius norm that the counted singular values hold (77)."""
TRIVIAL = 0.005
"""Weights nearer to zero are trivial."""
KERNEL = 3
TESTED = 1000
"""Samples that are classified at a time."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"logistic": torch.sigmoid, "relu": torch.relu}
OPTIMIZERS: dict[str, Callable[[Tensor, float], torch.optim.Optimizer]] = {
    "adam": lambda theta, rate: torch.optim.Adam([theta], lr=rate, eps=1e-7),
    "rmsprop": lambda theta, rate: torch.optim.RMSprop([theta], lr=rate, alpha=0.9, eps=1e-7),
}
"""With Keras' constants."""


@dataclass(frozen=True)
class Layer:
    """A dense or convolutional layer: its place in θ, first the weights row by row, then a bias per output.

    Attributes
    ----------
    name : str
    start : int
        Where its weights begin in θ.
    shape : tuple of int
        ``[out, in]``, or ``[out, in, 3, 3]`` of a convolution with stride 1 and zero padding.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def weights(self) -> int:
        """Number of weights without biases."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Where the next layer begins in θ."""
        return self.start + self.weights + self.shape[0]

    def indices(self, place: int) -> tuple[int, ...]:
        """Return the indices of a place in θ: those of a weight in `shape`, or the output of a bias."""
        inside = place - self.start
        if inside >= self.weights:
            return (inside - self.weights,)
        return tuple(int(index) for index in np.unravel_index(inside, self.shape))

    def called(self, place: int) -> str:
        """Return the name of one weight or bias, such as ``fc1.weight[3,200]``."""
        indices = self.indices(place)
        kind = "bias" if len(indices) == 1 else "weight"
        return f"{self.name}.{kind}[{','.join(map(str, indices))}]"


class Network:
    """Convolutions, 2 x 2 max-pooling after the last of them, dense layers; softmax and cross-entropy follow.

    Parameters
    ----------
    shape : tuple of int
        Of one sample, ``[channels, height, width]``.
    filters : sequence of int
        Outputs of the convolutions; without any, nothing is pooled.
    hidden : sequence of int
        Widths of the hidden dense layers.
    classes : int
    activation : str
        A key of `ACTIVATIONS`: after every layer but the last.
    """

    def __init__(
        self, shape: Sequence[int], filters: Sequence[int], hidden: Sequence[int], classes: int, activation: str
    ) -> None:
        channels, height, width = shape
        flat = filters[-1] * (height // 2) * (width // 2) if filters else channels * height * width
        convolutions = [(after, before, KERNEL, KERNEL) for before, after in pairwise([channels, *filters])]
        dense = [(after, before) for before, after in pairwise([flat, *hidden, classes])]
        self.layers: list[Layer] = []
        for number, form in enumerate([*convolutions, *dense], start=1):
            name = f"conv{number}" if len(form) == 4 else f"fc{number - len(convolutions)}"
            self.layers.append(Layer(name, self.layers[-1].end if self.layers else 0, form))
        self.convolutions, self.activation = len(convolutions), ACTIVATIONS[activation]

    @property
    def size(self) -> int:
        """Number p of parameters."""
        return self.layers[-1].end

    def initial(self, seed: int) -> Array:
        """Return θ float32 ``[p]`` as Keras begins: Glorot uniform weights, zero biases."""
        theta = np.zeros(self.size, dtype=np.float32)
        for number, layer in enumerate(self.layers):
            outputs, inputs, *kernel = layer.shape
            limit = sqrt(6 / ((inputs + outputs) * prod(kernel)))
            drawn = keyed(seed, "init", step=number).uniform(-limit, limit, layer.weights)
            theta[layer.start : layer.start + layer.weights] = drawn
        return theta

    def passed(self, theta: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return what goes into each layer and what comes out of it before the activation, for samples ``[n, …]``."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        sizes = [size for layer in self.layers for size in (layer.weights, layer.shape[0])]
        parts = theta.split(sizes)
        for number, (layer, weight, bias) in enumerate(zip(self.layers, parts[::2], parts[1::2])):
            if number:
                x = self.activation(outputs[-1])
            if number < self.convolutions:
                inputs.append(x)
                outputs.append(F.conv2d(x, weight.view(layer.shape), bias, padding=KERNEL // 2))
                continue
            if number == self.convolutions > 0:
                x = F.max_pool2d(x, 2)
            inputs.append(x.flatten(1))
            outputs.append(F.linear(inputs[-1], weight.view(layer.shape), bias))
        return inputs, outputs

    def names(self, places: Array) -> list[str]:
        """Return the names of weights by their places in θ ``[m]``."""
        return [self._layer(place).called(place) for place in places.tolist()]

    def _layer(self, place: int) -> Layer:
        return next(layer for layer in self.layers if place < layer.end)


@dataclass(frozen=True)
class Training:
    """How θ* is found.

    Attributes
    ----------
    optimizer : str
        A key of `OPTIMIZERS`.
    epochs, batch : int
    rate : float
        Learning rate.
    seed : int
        Of the initial parameters and the order of the samples.
    """

    optimizer: str
    epochs: int
    batch: int
    rate: float
    seed: int


def trained(network: Network, pixels: Array, labels: Array, peak: int, how: Training) -> Iterator[tuple[float, Array]]:
    """Minimise the empirical risk; yield the mean loss during each epoch and θ float32 ``[p]`` after it.

    Parameters
    ----------
    pixels : array [n, channels, height, width]
        Of value ``0 .. peak``; they are divided by `peak`.
    labels : int64 [n]
    """
    theta = torch.from_numpy(network.initial(how.seed)).requires_grad_()
    optimizer, images, targets = OPTIMIZERS[how.optimizer](theta, how.rate), tensor(pixels), tensor(labels)
    for epoch in range(how.epochs):
        order, total = tensor(keyed(how.seed, "batch", epoch).permutation(len(labels))), 0.0
        for rows in order.split(how.batch):
            scores = network.passed(theta, images[rows].float() / peak)[1][-1]
            loss = F.cross_entropy(scores, targets[rows])
            theta.grad = torch.autograd.grad(loss, theta)[0]
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        yield total / len(labels), theta.detach().numpy().copy()


def accuracy(network: Network, theta: Array, pixels: Array, labels: Array, peak: int) -> float:
    """Return the share of samples that are classified as labelled; arguments as of `trained`."""
    correct, parameters = 0, tensor(theta)
    for images, targets in zip(tensor(pixels).split(TESTED), tensor(labels).split(TESTED)):
        scores = network.passed(parameters, images.float() / peak)[1][-1]
        correct += int((scores.argmax(1) == targets).sum())
    return correct / len(labels)


def drawn_samples(seed: int, count: int, k: int) -> Array:
    """Return `k` of `count` test samples, int64 ``[k]``, rising: each subset is as likely as any other."""
    return np.sort(keyed(seed, "samples").permutation(count)[:k])


def drawn_weights(seed: int, theta: Array, count: int, least: float) -> tuple[Array, int]:
    """Return places of weights with ``|θ_q| >= least``, int64 ``[at most count]``, rising, and how many such there are.

    The biases are weights too (those of bias nodes).
    """
    there = np.flatnonzero(np.abs(theta.astype(np.float64)) >= least)
    return np.sort(there[keyed(seed, "weights").permutation(len(there))[:count]]), len(there)


def perturbed(seed: int, theta: Array, j: int) -> Array:
    """Return ``θ^(j) = θ + ‖θ‖₁/p · N(0, I)``, float64 ``[p]`` (75): the same for the same `seed` and `j` anywhere."""
    noise: Array = keyed(seed, "perturbation", client=j).standard_normal(theta.size)
    noise *= spread(theta)
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


def tensor(values: Array) -> Tensor:
    """Return an array as a tensor, of the same memory where that may be written."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))
