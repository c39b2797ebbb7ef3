"""Scikit-learn's bundled data in few dimensions: principal components, scaled to the unit cube."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.base import Header, Integers
from hpcfl.data.pooled import Pool, Pooled

MOST = 30
"""Most dimensions that are offered: what breast_cancer has."""


class Size(NamedTuple):
    """What a data set is known to hold."""

    samples: int
    train: int
    features: int
    classes: int


SIZES = {"breast_cancer": Size(569, 455, 30, 2), "digits": Size(1797, 1437, 64, 10)}


class Reduced(Pooled):
    """Tables split 80/20 by key, reduced by principal components to d dimensions, and scaled to [0, 1]^d.

    Components, minima and maxima are those of all training samples; test samples are clipped to the cube. The 30
    features of ``breast_cancer`` (569 samples, 2 classes) are standardised first; those of ``digits`` (1797 samples,
    10 classes), 64 pixels, are not.
    """

    name: Literal["reduced"] = "reduced"
    set: Literal["breast_cancer", "digits"] = Field("breast_cancer", description="scikit-learn's table")
    dimension: int = Field(2, ge=1, le=MOST, description="principal components that are kept, d")

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the known sizes; UsageError where what are no images are to be cropped."""
        if self.augment:
            raise UsageError(
                "data.augment = true: expected images, data.name = 'reduced' has none; did you mean false?"
            )
        size = SIZES[self.set]
        return Header(None, size.train, size.samples - size.train, ((self.dimension,),), size.classes)

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the table, split by `seed` and reduced.

        Raises
        ------
        UsageError
            If this scikit-learn bundles other data than the header says.
        """
        from sklearn import datasets

        size = SIZES[self.set]
        table, labels = getattr(datasets, f"load_{self.set}")(return_X_y=True)
        if table.shape != (size.samples, size.features) or labels.max() != size.classes - 1:
            expected = (size.samples, size.features)
            raise UsageError(f"data.set = '{self.set}': scikit-learn has {table.shape}, expected {expected}")
        order = keyed(seed, "split").permutation(size.samples)
        train, test = np.sort(order[: size.train]), np.sort(order[size.train :])
        features = reduced(table.astype(np.float64), train, self.dimension, self.set == "breast_cancer")
        pixels, labels = features.astype(np.float32), labels.astype(np.int64)
        return Pool(pixels[train], labels[train], pixels[test], labels[test], peak=1)


def reduced(table: Floats, train: Integers, dimension: int, standardised: bool) -> Floats:
    """Return the first principal components of the rows, scaled to [0, 1] and clipped, ``[n, dimension]``.

    Parameters
    ----------
    table : float64 [n, features]
        All samples.
    train : int64 [t]
        The rows that decide about means, deviations, components and ranges.
    dimension : int
        Components, at most the rank of the training rows.
    standardised : bool
        Whether features are divided by their standard deviations first.
    """
    centred = table - table[train].mean(axis=0)
    if standardised:
        centred /= table[train].std(axis=0)
    # nothing depends on a component's sign but the side from which it is scaled: the largest weight is positive
    components = np.linalg.svd(centred[train], full_matrices=False)[2][:dimension]
    largest = np.abs(components).argmax(axis=1)
    components *= np.sign(components[np.arange(dimension), largest])[:, None]
    scores = centred @ components.T
    low, high = scores[train].min(axis=0), scores[train].max(axis=0)
    unit: Floats = np.clip((scores - low) / (high - low), 0, 1)
    return unit
