"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Literal

from hpcfl.base.lazy import torch
from hpcfl.models import Chance, Model, Width


class Mlp(Model):
    """A multilayer perceptron with ReLU: fc1, fc2, …."""

    name: Literal["mlp"] = "mlp"
    hidden: tuple[Width, ...] = (32, 16)
    """Widths of the hidden layers; empty for a linear model."""
    dropout: Chance = 0.0
    """Chance that a hidden unit is dropped while training."""
    softmax: bool = False
    """The outputs go through a softmax before the loss applies its own (SRPFL's released code)."""

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        layers = dense([prod(shape), *self.hidden, classes], self.dropout)
        if self.softmax:
            layers[-1][1].append(torch.nn.Softmax(dim=-1))
        return layers


def dense(widths: list[int], dropout: Chance) -> list[tuple[str, torch.nn.Sequential]]:
    """Return linear layers fc1 … fcn for these widths, the input flattened, ReLU between them."""
    layers = []
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        modules: list[torch.nn.Module] = [torch.nn.Flatten()] if number == 1 else []
        modules.append(torch.nn.Linear(inputs, outputs))
        if number < len(widths) - 1:
            modules += [torch.nn.ReLU(), *([torch.nn.Dropout(dropout)] if dropout else [])]
        layers.append((f"fc{number}", torch.nn.Sequential(*modules)))
    return layers
