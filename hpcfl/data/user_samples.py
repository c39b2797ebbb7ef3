"""Whether samples that a source of the user's has made are what they are said to be."""

from __future__ import annotations

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Shape
from hpcfl.data.base import Federation, InMemory, Labels, Pixels
from hpcfl.data.pooled import PooledFederation


def check_samples(where: str, made: Federation, any_features: bool, any_labels: bool) -> None:
    """Raise UsageError where samples that are there already do not fit one another, or what is said of them.

    With `any_features` a model of the user's knows what they mean, with `any_labels` a loss.
    """
    if not isinstance(made, Federation):
        raise UsageError(f"{where}: federate returned a {type(made).__name__}, expected a Federation, such as InMemory")
    if not made.train_sizes.any():
        raise UsageError(f"{where}: no client has training samples, expected some")
    parts: list[tuple[str, Pixels, Labels, Shape]] = []
    if isinstance(made, PooledFederation):
        pool, shape = made.pool, made.shapes[0]
        parts = [("training samples", pool.train_pixels, pool.train_labels, shape)]
        parts.append(("test samples", pool.test_pixels, pool.test_labels, shape))
    for number, own in enumerate(made.parts if isinstance(made, InMemory) else ()):
        whose, shape = f"samples of client {number}", made.shapes[number]
        parts.append((f"training {whose}", own.train_features, own.train_labels, shape))
        parts.append((f"test {whose}", own.test_features, own.test_labels, shape))
    for part, x, y, shape in parts:
        if len(x) != len(y) or tuple(x.shape[1:]) != tuple(shape):
            raise UsageError(f"{where}: {part}: {len(y)} labels for features {[*x.shape]}, expected {[len(y), *shape]}")
        if not any_features and not np.isfinite(x).all():
            raise UsageError(f"{where}: {part}: features are not finite")
        if any_labels:
            continue
        wanted, least, most = y.shape[-1] if y.ndim > 1 else 1, y.min(initial=0), y.max(initial=-1)
        if y.dtype.kind == "f" and made.classes != wanted:
            why = f"expected classes = {wanted}, got {made.classes}; or integers"
            raise UsageError(f"{where}: {part}: labels are real numbers, hence targets: {why}")
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise UsageError(f"{where}: {part}: labels are not finite")
        if y.dtype.kind != "f" and (least < 0 or most >= made.classes):
            raise UsageError(f"{where}: {part}: labels are {least} … {most}, expected 0 … {made.classes - 1}")
