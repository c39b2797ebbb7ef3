"""Which axes of a model's tensors become shorter where its hidden layers become narrower."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpcfl.base.errors import UsageError
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.whole import Whole

Axes = dict[str, dict[int, int]]
"""Of each tensor the axes of hidden units, and how many units each has: one or several numbers long."""
ACTIVATIONS = {"Identity", "ReLU", "LeakyReLU", "Tanh", "Sigmoid", "GELU", "SiLU", "Softmax"}
BETWEEN = {*ACTIVATIONS, "Dropout", "Flatten", "MaxPool2d"}
"""Modules that may stand between layers: whatever number of units they are given, they give as many in this order."""


def hidden_axes(layers: Sequence[Layer] | Sequence[Whole]) -> Axes:
    """Return the axes; UsageError where a model is no chain of linear layers and convolutions."""
    axes: Axes = {}
    before = 0
    for layer in layers:
        if not isinstance(layer, Layer):
            raise UsageError(f"model.name = '{layer.name}' cannot be made narrower: expected a chain of layers")
        (module, names), *others = [each for each in zip(layer.modules, layer.names) if each[1]]
        between = {type(each).__name__ for each, own in zip(layer.modules, layer.names) if not own}
        units, inputs, *_ = layer.tensors[names["weight"]].shape if "weight" in names else (0, 0)
        plain = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        if others or not plain or not between <= BETWEEN or (before and inputs % before):
            raise UsageError(
                f"model: layer {layer.name} cannot be made narrower: expected linear layers or convolutions, and "
                "between them activations, dropout or max-pooling, as in model.name = 'mlp' and 'cnn'"
            )
        own = {} if layer is layers[-1] else {0: units}
        axes |= dict.fromkeys(names.values(), own) | {names["weight"]: own | ({1: before} if before else {})}
        before = units
    return axes
