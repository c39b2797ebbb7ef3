"""A personal embedding into a latent space, shared hidden layers, a classifier (FLIC: φ_i, α, β_i)."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Literal

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import torch
from hpcfl.models import Model, Width

EMBED = "embed"
"""What the names of the embedding's layers begin with."""


class Latent(Model):
    """Embedding, hidden layers, classifier: ``embed1 … embedn``, ``hidden1 …``, ``head``.

    Only the embedding knows the shape of the features. All else has the same initial values for every shape.
    """

    name: Literal["latent"] = "latent"
    embedding: Literal["dense", "convolutions", "identity"] = "dense"
    """``dense``: linear layers, ReLU between them. ``convolutions``: two with max-pooling and a sigmoid each, then one
    linear layer. ``identity``: none; features must have `dimension` coordinates."""
    widths: tuple[Width, ...] = (64, 64)
    """Widths of the dense embedding's hidden layers."""
    channels: tuple[Width, Width] = (8, 16)
    """Filters of the two convolutions, 5 x 5 with the input's size kept."""
    dimension: Width = 64
    """Dimension of the latent space, k."""
    rectify: bool = False
    """A ReLU at the end of the embedding; what is never negative is no Gaussian."""
    hidden: tuple[Width, ...] = ()
    """Widths of the layers between embedding and classifier, with a LeakyReLU of slope 0.01: empty for FLIC-Class, one
    for FLIC-HL."""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        if self.embedding == "identity" and prod(shape) != self.dimension:
            kept = f"embedding = 'identity' keeps the {prod(shape)} features"
            raise UsageError(f"model.dimension: {kept}, got {self.dimension}; did you mean {prod(shape)}?")
        if self.embedding == "convolutions" and (len(shape) != 3 or min(shape[1:]) < 4):
            needed = "features of shape (channels, height, width), both sides at least 4"
            raise UsageError(f"model.embedding = 'convolutions' needs {needed}, got {shape}; did you mean 'dense'?")

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        widths = (self.dimension, *self.hidden)
        layers = [
            (f"hidden{number}", torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.LeakyReLU(0.01)))
            for number, (inputs, outputs) in enumerate(pairwise(widths), start=1)
        ]
        head = torch.nn.Sequential(torch.nn.Linear(widths[-1], classes))
        embedding: list[torch.nn.Sequential] = []
        if self.embedding == "dense":
            sizes = (prod(shape), *self.widths, self.dimension)
            embedding = [torch.nn.Sequential(torch.nn.Linear(inputs, outputs)) for inputs, outputs in pairwise(sizes)]
            embedding[0].insert(0, torch.nn.Flatten())
            for layer in embedding[:-1]:
                layer.append(torch.nn.ReLU())
        elif self.embedding == "convolutions":
            sizes = (shape[0], *self.channels)
            filters = [torch.nn.Conv2d(inputs, outputs, 5, padding="same") for inputs, outputs in pairwise(sizes)]
            embedding = [torch.nn.Sequential(each, torch.nn.MaxPool2d(2), torch.nn.Sigmoid()) for each in filters]
            flat = self.channels[-1] * (shape[1] // 4) * (shape[2] // 4)
            embedding.append(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(flat, self.dimension)))
        if not embedding and len(shape) > 1:
            (layers[0][1] if layers else head).insert(0, torch.nn.Flatten())
        if embedding and self.rectify:
            embedding[-1].append(torch.nn.ReLU())
        named = [(f"{EMBED}{number}", layer) for number, layer in enumerate(embedding, start=1)]
        return [*named, *layers, ("head", head)]
