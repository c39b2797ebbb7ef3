"""Which axes of a model's tensors become shorter where its hidden layers become narrower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from hpcfl.base.errors import UsageError
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.module import Whole

Axes = dict[str, dict[int, int]]
"""Of each tensor the axes of hidden units, and how many units each has: one or several numbers long."""
ACTIVATIONS = {"Identity", "ReLU", "LeakyReLU", "Tanh", "Sigmoid", "GELU", "SiLU", "Softmax"}
BETWEEN = {*ACTIVATIONS, "Dropout", "Flatten", "MaxPool2d", "AvgPool2d"}
"""Modules that may stand between layers: whatever number of units they are given, they give as many in this order."""
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


def hidden_axes(layers: Sequence[Layer] | Sequence[Whole]) -> Axes:
    """Return the axes; UsageError where a model is no chain of linear layers and convolutions.

    Between them batch normalisations may stand, of which buffers are narrowed too.
    """
    axes: Axes = {}
    before, last = 0, layers[-1].groups[-1]
    for layer, module, names in _modules(layers):
        if not names and type(module).__name__ in BETWEEN:
            continue
        weight = layer.tensors.get(names.get("weight", ""))
        shape = () if weight is None else tuple(weight.shape)
        normal = isinstance(module, NORMS) and names.get("weight") not in last
        plain = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        if not shape or not (plain or normal) or (before and shape[plain] % before):
            where = f"layer {layer.name}" if isinstance(layer, Layer) else f"{type(module).__name__} in '{layer.name}'"
            between = "activations, batch normalisation, dropout or pooling, as in model.name = 'mlp', 'cnn' and 'vgg'"
            wanted = f"linear layers or convolutions, and between them {between}"
            raise UsageError(f"model: {where} cannot be made narrower: expected {wanted}")
        if plain:
            own = {} if names["weight"] in last else {0: shape[0]}
            axes |= dict.fromkeys(names.values(), own) | {names["weight"]: own | ({1: before} if before else {})}
            before = shape[0]
        else:
            own = {0: before} if before else {}
            axes |= {name: {} if key == "num_batches_tracked" else own for key, name in names.items()}
    return axes


def divided(layers: Sequence[Layer] | Sequence[Whole]) -> set[str]:
    """Return the names of what a scaler divides: weights and biases of all layers but the last, no normalisation's."""
    pairs = ((module, names) for _, module, names in _modules(layers) if not isinstance(module, NORMS))
    return {name for _, names in pairs for name in names.values()}.difference(layers[-1].groups[-1])


def _modules(layers: Sequence[Layer] | Sequence[Whole]) -> Iterator[tuple[Layer | Whole, nn.Module, dict[str, str]]]:
    """Yield each module, the layer that it is in, and full names of its tensors by its own."""
    for layer in layers:
        pairs = list(zip(layer.modules, layer.names)) if isinstance(layer, Layer) else layer.chain()
        if not pairs:
            raise UsageError(f"model.name = '{layer.name}' cannot be made narrower: expected modules without hooks")
        for module, names in pairs:
            yield layer, module, names
