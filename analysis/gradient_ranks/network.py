"""Networks as functions of one flat vector θ of parameters, which show what goes into and comes out of every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hpcfl.base.rng import keyed

Array = NDArray[Any]

KERNEL = 3
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"logistic": torch.sigmoid, "relu": torch.relu}


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
        parts = torch.split(theta, sizes)
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


def tensor(values: Array) -> Tensor:
    """Return an array as a tensor, of the same memory where that may be written."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))
