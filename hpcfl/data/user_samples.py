"""Whether samples that a source of the user's has made are what they are said to be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Federation, InMemory, Labels, Pixels
from hpcfl.data.pooled import PooledFederation

Part = tuple[str, Pixels, Labels]
"""What some samples are called, their features and labels ``[n, …]``."""


def check_samples(where: str, made: Federation, any_features: bool, any_labels: bool) -> None:
    """Raise UsageError where samples that are there already do not fit one another, or what is said of them.

    With `any_features` a model of the user's knows what they mean, with `any_labels` a loss.
    """
    if not isinstance(made, Federation):
        raise UsageError(f"{where}: federate returned a {type(made).__name__}, expected a Federation, such as InMemory")
    if not made.train_sizes.any():
        raise UsageError(f"{where}: no client has training samples, expected some")
    for number, (part, x, y) in enumerate(_parts(made)):
        shape = made.shapes[number // 2 if isinstance(made, InMemory) else 0]
        if len(x) != len(y) or tuple(x.shape[1:]) != tuple(shape):
            raise UsageError(f"{where}: {part}: {len(y)} labels for features {[*x.shape]}, expected {[len(y), *shape]}")
        if not any_features and not np.isfinite(x).all():
            raise UsageError(f"{where}: {part}: features are not finite")
        if not any_labels and (wrong := _wrong_labels(y, made.classes)):
            raise UsageError(f"{where}: {part}: labels {wrong}")


def _parts(made: Federation) -> Iterator[Part]:
    """Yield training and test samples, of each client or of a pool."""
    if isinstance(made, PooledFederation):
        yield "training samples", made.pool.train_pixels, made.pool.train_labels
        yield "test samples", made.pool.test_pixels, made.pool.test_labels
    for number, own in enumerate(made.parts if isinstance(made, InMemory) else ()):
        yield f"training samples of client {number}", own.train_features, own.train_labels
        yield f"test samples of client {number}", own.test_features, own.test_labels


def _wrong_labels(y: Labels, classes: int) -> str:
    """Return what is wrong with labels ``[n, …]`` where there are so many classes, "" if nothing is."""
    if y.dtype.kind == "f":
        wanted = y.shape[-1] if y.ndim > 1 else 1
        if classes != wanted:
            return f"are real numbers, hence targets: expected classes = {wanted}, got {classes}; or integers"
        return "" if np.isfinite(y).all() else "are not finite"
    least, most = int(y.min(initial=0)), int(y.max(initial=-1))
    return f"are {least} … {most}, expected 0 … {classes - 1}" if least < 0 or most >= classes else ""
