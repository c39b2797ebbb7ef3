"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 32 x 32 colour images, from the binary version.

A record is one byte per kind of label and 3072 bytes of pixels, red before green before blue.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.formats.files import check_labels, folder, reading
from hpcfl.data.pooled import Pool, Pooled

SHAPE, PIXELS, PEAK = (3, 32, 32), 3072, 255
Samples = tuple[NDArray[np.uint8], Ints]


class Layout(NamedTuple):
    """How a data set is laid out."""

    folder: str
    train: tuple[str, ...]  # files, with suffix .bin
    test: tuple[str, ...]
    label_bytes: int  # labels before the pixels of a record; the last of them is read
    classes: int


class Cifar(Pooled):
    """What both data sets have in common."""

    name: str
    layout: ClassVar[Layout]

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, self.layout.folder)
        files = [[home / f"{name}.bin" for name in names] for names in (self.layout.train, self.layout.test)]
        train, test = map(self._joined, files)
        return Pool(*train, *test, PEAK, self.layout.classes)

    def _joined(self, paths: list[Path]) -> Samples:
        """Return images and labels of files that should hold equally many."""
        pixels, labels = zip(*(self._read(path) for path in paths))
        counts = list(map(len, labels))
        if min(counts) < max(counts):
            short, full = paths[counts.index(min(counts))], paths[counts.index(max(counts))]
            raise UsageError(
                f"{short}: truncated or damaged, {min(counts)} records; expected {max(counts)} as in {full.name}"
            )
        return np.concatenate(pixels).reshape(-1, *SHAPE), np.concatenate(labels)

    def _read(self, path: Path) -> Samples:
        length = self.layout.label_bytes + PIXELS
        with reading(path, "whole records"):
            size = path.stat().st_size
            if not size or size % length:
                raise UsageError(f"{path}: truncated or damaged, {size} bytes; expected whole records of {length}")
            records = np.fromfile(path, dtype=np.uint8).reshape(-1, length)
        labels = records[:, self.layout.label_bytes - 1].astype(np.int64)
        check_labels(str(path), labels, 0, self.layout.classes)
        return records[:, self.layout.label_bytes :], labels


class Cifar10(Cifar):
    """CIFAR-10, in the folder ``cifar-10-batches-bin/`` of the data folder."""

    name: Literal["cifar10"] = "cifar10"
    layout: ClassVar[Layout] = Layout(
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        label_bytes=1,
        classes=10,
    )


class Cifar100(Cifar):
    """CIFAR-100, fine labels, in the folder ``cifar-100-binary/`` of the data folder."""

    name: Literal["cifar100"] = "cifar100"
    layout: ClassVar[Layout] = Layout(
        folder="cifar-100-binary",
        train=("train",),
        test=("test",),
        label_bytes=2,  # coarse, fine
        classes=100,
    )
