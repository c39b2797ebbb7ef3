"""Clients of whom a run has recorded what their samples are like, but whose samples are not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints, Shape
from hpcfl.data.base import ClientData, Federation, Header, Piece, Samples, Source

FEW = 3  # samples that are made up


@dataclass(frozen=True, eq=False)
class Absent(Federation):
    """What models are made for without any data; `why` is said to whom asks for samples."""

    why: str = field(kw_only=True)
    tokens: bool = field(kw_only=True)
    label_shape: Shape = field(kw_only=True)
    targets: bool = field(kw_only=True)

    @classmethod
    def of(cls, recorded: Mapping[str, Any], train_sizes: Ints, test_sizes: Ints, why: str) -> Absent:
        """Return the clients that `about_samples` has described."""
        shapes = [tuple(shape) for shape in recorded["shapes"]]
        shapes = shapes * len(train_sizes) if len(shapes) == 1 else shapes
        pieces = tuple(Piece(tuple(shape), tokens) for shape, tokens in recorded["pieces"])
        labels = {"label_shape": tuple(recorded["label_shape"]), "targets": recorded["targets"]}
        sizes = train_sizes, test_sizes, shapes
        return cls(recorded["classes"], *sizes, pieces=pieces, why=why, tokens=recorded["tokens"], **labels)

    def client(self, i: int) -> ClientData:
        raise UsageError(self.why)

    def server_train(self) -> Samples | None:
        raise UsageError(self.why)

    def server_test(self) -> Samples | None:
        raise UsageError(self.why)

    def made_up(self, shape: Shape) -> ClientData:
        """Return a few samples of this shape that nobody holds; UsageError where they are no plain real numbers."""
        if self.tokens or self.pieces:
            raise UsageError(self.why)
        x = np.linspace(-1, 1, FEW * prod(shape), dtype=np.float32).reshape(FEW, *shape)
        y = np.zeros((FEW, *self.label_shape), np.float32 if self.targets else np.int64)
        return ClientData(x, y, x, y)


class AbsentSource(Source):
    """What stands in a config for a source that is not here."""

    name: str

    def check(self, clients: int, data_dir: Path | None) -> Header:
        raise UsageError(f"data.name = '{self.name}' is not here")

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        raise UsageError(f"data.name = '{self.name}' is not here")


def about_samples(federation: Federation) -> dict[str, Any]:
    """Return what a run records of its samples, as JSON holds it: with that its models can be made without them."""
    some = federation.client(int(np.argmax(federation.train_sizes > 0)))
    shapes = [[int(length) for length in shape] for shape in federation.shapes]
    return {
        "classes": int(federation.classes),
        "shapes": shapes[:1] if all(shape == shapes[0] for shape in shapes) else shapes,
        "pieces": federation.pieces,
        "tokens": some.train_features.dtype.kind == "i" and not federation.pieces,
        "label_shape": some.train_labels.shape[1:],
        "targets": some.train_labels.dtype.kind == "f",
    }
