"""MNIST (LeCun et al. 1998) and EMNIST (Cohen et al. 2017): handwritten digits and letters, 28 x 28, from IDX files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import refusal
from hpcfl.base.types import Ints
from hpcfl.data.base import Pixels
from hpcfl.data.formats import idx
from hpcfl.data.formats.files import folder
from hpcfl.data.pooled import Pool, Pooled

CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
SIDE, PEAK = 28, 255


class Mnist(Pooled):
    """MNIST, in the folder ``mnist/`` of the data folder, as distributed: four IDX files, plain or gzipped."""

    name: Literal["mnist"] = "mnist"

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, "mnist")
        (images, labels), (tests, test_labels) = (idx.read_pair(home, part, SIDE, 10) for part in ("train", "t10k"))
        return Pool(images[:, None], labels, tests[:, None], test_labels, PEAK, 10)


class Mnist32(Mnist):
    """MNIST as images like CIFAR-10's: padded with black to 32 x 32, and grey in each of three colours."""

    name: Literal["mnist32"] = "mnist32"  # type: ignore[assignment]

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        pool = super().load(seed, data_dir)
        return replace(pool, train_pixels=_coloured(pool.train_pixels), test_pixels=_coloured(pool.test_pixels))


class Emnist(Pooled):
    """EMNIST, in the folder ``emnist/`` of the data folder: the IDX files of a split, plain or gzipped."""

    name: Literal["emnist"] = "emnist"
    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced"
    """Which of the published subsets: files ``emnist-<split>-train-images-idx3-ubyte`` and so on."""
    first_classes: int | None = Field(None, ge=1)
    """Use only the classes below this number (SRPFL: 10). By default all."""

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        most = CLASSES[self.split]
        if self.first_classes is not None and self.first_classes > most:
            raise refusal("data.first_classes", f"at most {most} in split '{self.split}'", self.first_classes, most)
        home = folder(self.name, data_dir, "emnist")
        return Pool(*self._read(home, "train"), *self._read(home, "test"), PEAK, self.first_classes or most)

    def _read(self, home: Path, part: str) -> tuple[Pixels, Ints]:
        """Return a part's images, upright as MNIST's, of the first classes."""
        most, first = CLASSES[self.split], 1 if self.split == "letters" else 0
        images, labels = idx.read_pair(home, f"emnist-{self.split}-{part}", SIDE, most, first)
        kept = slice(None) if self.first_classes is None else labels < self.first_classes
        # the files hold columns before rows
        return np.ascontiguousarray(images[kept].transpose(0, 2, 1))[:, None], labels[kept]


def _coloured(images: Pixels) -> Pixels:
    """Return images ``[n, 1, 28, 28]`` as ``[n, 3, 32, 32]``."""
    edge = (32 - SIDE) // 2
    return np.repeat(np.pad(images, ((0, 0), (0, 0), (edge, edge), (edge, edge))), 3, axis=1)
