"""EMNIST (Cohen et al. 2017): handwritten letters and digits, 28 x 28, from IDX files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Header, Integers
from hpcfl.data.formats import idx
from hpcfl.data.formats.folder import folder
from hpcfl.data.pixels import Pixels
from hpcfl.data.pooled import Pool, Pooled

CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
SIDE, PEAK = 28, 255


class Emnist(Pooled):
    """The folder ``emnist/`` of the data folder: the IDX files of a split as distributed, plain or gzipped."""

    name: Literal["emnist"] = "emnist"
    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = Field(
        "balanced", description="which of the published subsets: files emnist-<split>-train-images-idx3-ubyte, ..."
    )
    first_classes: int | None = Field(None, ge=1, description="use only the classes below this number (SRPFL: 10)")

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the sizes that the files' headers give; labels are read only where classes are left out."""
        classes, counts = self._classes(), {}
        for part in ("train", "test"):
            images, labels = self._find(part, data_dir)
            counts[part], *sides = idx.read_sizes(images, labels)
            if sides != [SIDE, SIDE]:
                raise UsageError(f"{images}: {sides[0]} x {sides[1]} pixels, expected {SIDE} x {SIDE}")
            if self.first_classes is not None:
                counts[part] = int((self._labels(labels) < classes).sum())
        return Header(None, counts["train"], counts["test"], ((1, SIDE, SIDE),), classes)

    def verify(self, data_dir: Path | None) -> None:
        """Read all files to their ends."""
        for part in ("train", "test"):
            images, labels = self._find(part, data_dir)
            idx.verify(images)
            self._labels(labels)

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the images, upright as MNIST's; `seed` has no effect."""
        return Pool(*self._read("train", data_dir), *self._read("test", data_dir), PEAK)

    def _classes(self) -> int:
        most = CLASSES[self.split]
        if self.first_classes is not None and self.first_classes > most:
            raise UsageError(
                f"data.first_classes = {self.first_classes}: split '{self.split}' has {most}; did you mean {most}?"
            )
        return self.first_classes or most

    def _find(self, part: str, data_dir: Path | None) -> tuple[Path, Path]:
        return idx.find(folder(self.name, data_dir, "emnist"), f"emnist-{self.split}-{part}")

    def _labels(self, path: Path) -> Integers:
        return idx.read_labels(path, CLASSES[self.split], first=1 if self.split == "letters" else 0)

    def _read(self, part: str, data_dir: Path | None) -> tuple[Pixels, Integers]:
        images, path = self._find(part, data_dir)
        labels = self._labels(path)
        kept = labels < self._classes()
        # the files hold columns before rows
        pixels = np.ascontiguousarray(idx.read_images(images).transpose(0, 2, 1))
        return pixels[kept, None], labels[kept]
