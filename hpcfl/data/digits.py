"""Scikit-learn's bundled handwritten digits, 8 x 8 or pooled to 4 x 4: needs no download, trains in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.data.base import Header
from hpcfl.data.pooled import Pool, Pooled

SAMPLES, TRAIN, CLASSES, PEAK = 1797, 1437, 10, 16
SHAPE = (1, 8, 8)


class Digits(Pooled):
    """1797 images, split 80/20 by key into 1437 training and 360 test samples."""

    name: Literal["digits"] = "digits"
    side: Literal[4, 8] = Field(8, description="pixels per side; 4: means of 2 x 2 of the 8 x 8")

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the known sizes: importing scikit-learn takes more than a second."""
        return Header(None, TRAIN, SAMPLES - TRAIN, ((1, self.side, self.side),), CLASSES)

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the images, split by `seed`.

        Raises
        ------
        UsageError
            If this scikit-learn bundles other data than the header says.
        """
        from sklearn.datasets import load_digits

        bunch = load_digits()
        pixels, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
        if pixels.shape != (SAMPLES, *SHAPE[1:]) or pixels.max() != PEAK or labels.max() != CLASSES - 1:
            raise UsageError(f"data.name = 'digits': scikit-learn has {pixels.shape}, expected (1797, 8, 8)")
        times = SHAPE[1] // self.side
        pixels = _summed(pixels, times).reshape(SAMPLES, 1, self.side, self.side)
        order = keyed(seed, "split").permutation(SAMPLES)
        train, test = np.sort(order[:TRAIN]), np.sort(order[TRAIN:])
        return Pool(pixels[train], labels[train], pixels[test], labels[test], PEAK * times**2)


def _summed(pixels: NDArray[np.uint8], times: int) -> NDArray[np.uint8]:
    """Return the sums of `times` by `times` pixels of images ``[n, side, side]``: at most 64, four times the peak."""
    n, side, _ = pixels.shape
    blocks = pixels.reshape(n, side // times, times, side // times, times)
    sums: NDArray[np.uint8] = blocks.sum(axis=(2, 4), dtype=np.uint8)
    return sums
