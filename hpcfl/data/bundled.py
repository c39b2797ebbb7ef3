"""Data that come with scikit-learn and need no download: digits as images, and tables in few dimensions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints, Shape
from hpcfl.data.base import Header, Pixels
from hpcfl.data.pooled import Pool, Pooled


class Table(NamedTuple):
    """What scikit-learn is known to bundle: a file of numbers, labels last, below `skip` lines of a head."""

    shape: Shape
    train: int
    classes: int
    peak: float
    file: str
    skip: int = 0

    def header(self, shape: Shape) -> Header:
        return Header(None, self.train, self.shape[0] - self.train, (shape,), self.classes)


TABLES = {
    "breast_cancer": Table((569, 30), 455, 2, 4254, "breast_cancer.csv", 1),
    "digits": Table((1797, 64), 1437, 10, 16, "digits.csv.gz"),
}


class Digits(Pooled):
    """1797 handwritten digits, split 80/20 by key into 1437 training and 360 test samples; trains in seconds."""

    name: Literal["digits"] = "digits"
    side: Literal[4, 8] = 8
    """Pixels per side. 4: means of 2 x 2 of the 8 x 8."""

    def pool_header(self, data_dir: Path | None) -> Header:
        return TABLES["digits"].header((1, self.side, self.side))

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        table, labels, train, test = loaded("digits", seed)
        times = 8 // self.side
        blocks = table.astype(np.uint8).reshape(-1, 1, self.side, times, self.side, times)
        sums: Pixels = blocks.sum(axis=(3, 5), dtype=np.uint8)  # at most 64, four times the peak
        return Pool(sums[train], labels[train], sums[test], labels[test], 16 * times**2, 10)


class Reduced(Pooled):
    """Tables split 80/20 by key, reduced by principal components to d dimensions, and scaled to [0, 1]^d.

    Components, minima and maxima are those of all training samples; test samples are clipped to the cube. The 30
    features of ``breast_cancer`` (569 samples, 2 classes) are standardised first; those of ``digits`` (1797 samples,
    10 classes), 64 pixels, are not.
    """

    name: Literal["reduced"] = "reduced"
    set: Literal["breast_cancer", "digits"] = "breast_cancer"
    """The table, of those that scikit-learn bundles."""
    dimension: int = Field(2, ge=1, le=30)
    """Principal components that are kept, d."""

    def pool_header(self, data_dir: Path | None) -> Header:
        if self.augment:
            raise refusal("data.augment", "false, since data.name = 'reduced' has no images", True, False)
        return TABLES[self.set].header((self.dimension,))

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        classes = self.pool_header(data_dir).classes
        table, labels, train, test = loaded(self.set, seed)
        features = reduced(table, train, self.dimension, self.set == "breast_cancer").astype(np.float32)
        return Pool(features[train], labels[train], features[test], labels[test], 1, classes)


def loaded(name: str, seed: int) -> tuple[Floats, Ints, Ints, Ints]:
    """Return a table float64 ``[n, features]`` and its labels, and the rows for training and testing.

    The file is read where scikit-learn keeps it: importing scikit-learn takes as long as importing torch. UsageError
    where there is none, or another one.
    """
    spec, known = find_spec("sklearn"), TABLES[name]
    path = Path(spec.origin if spec and spec.origin else "sklearn").parent / "datasets" / "data" / known.file
    if not path.is_file():
        raise UsageError(f"scikit-learn's {name}: expected the file {path}, which is not there")
    whole = np.loadtxt(path, delimiter=",", skiprows=known.skip)
    table, labels = whole[:, :-1], whole[:, -1].astype(np.int64)
    if (table.shape, labels.max() + 1, table.max()) != (known.shape, known.classes, known.peak):
        raise UsageError(f"scikit-learn's {name}: expected {known}, got {table.shape} up to {table.max()}")
    order = keyed(seed, "split").permutation(len(table))
    train, test = np.sort(order[: known.train]), np.sort(order[known.train :])
    return np.ascontiguousarray(table), labels, train, test


def reduced(table: Floats, train: Ints, dimension: int, standardised: bool) -> Floats:
    """Return the first principal components of the rows, scaled to [0, 1] and clipped, ``[n, dimension]``.

    The rows `train` decide about means, deviations, components and ranges; if `standardised`, features are divided by
    their standard deviations first. `dimension` is at most the rank of these rows.
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
