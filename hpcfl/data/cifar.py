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
from hpcfl.data.base import UNSTATED, Published
from hpcfl.data.formats.files import check_labels, folder, reading
from hpcfl.data.pooled import Pool, Pooled

SHAPE, PIXELS, PEAK = (3, 32, 32), 3072, 255


class Layout(NamedTuple):
    """How a data set is laid out."""

    folder: str
    train: tuple[str, ...]  # files, with suffix .bin
    test: tuple[str, ...]
    label_bytes: int  # labels before the pixels of a record; the last of them is read
    classes: int

    def published(self, archive: str) -> Published:
        files = tuple(f"{self.folder}/{name}.bin" for name in (*self.train, *self.test))
        page = "https://www.cs.toronto.edu/~kriz/cifar.html"
        return Published(files, (page, f"https://www.cs.toronto.edu/~kriz/{archive}"), UNSTATED)


class Cifar(Pooled):
    """What both data sets have in common."""

    name: str
    layout: ClassVar[Layout]

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, self.layout.folder)
        train, test = self._read(home, self.layout.train), self._read(home, self.layout.test)
        return Pool(*train, *test, PEAK, self.layout.classes)

    def _read(self, home: Path, names: tuple[str, ...]) -> tuple[NDArray[np.uint8], Ints]:
        """Return images and labels of files that should hold equally many."""
        paths, pixels, labels = [home / f"{name}.bin" for name in names], list[NDArray[np.uint8]](), list[Ints]()
        length = self.layout.label_bytes + PIXELS
        for path in paths:
            with reading(path, "whole records"):
                size = path.stat().st_size
                if not size or size % length:
                    raise UsageError(f"{path}: truncated or damaged, {size} bytes; expected whole records of {length}")
                records = np.fromfile(path, dtype=np.uint8).reshape(-1, length)
            pixels.append(records[:, self.layout.label_bytes :])
            labels.append(records[:, self.layout.label_bytes - 1].astype(np.int64))
            check_labels(str(path), labels[-1], 0, self.layout.classes)
        counts = list(map(len, labels))
        if min(counts) < max(counts):
            short, full = paths[counts.index(min(counts))], paths[counts.index(max(counts))]
            said = f"{min(counts)} records; expected {max(counts)} as in {full.name}"
            raise UsageError(f"{short}: truncated or damaged, {said}")
        return np.concatenate(pixels).reshape(-1, *SHAPE), np.concatenate(labels)


class Cifar10(Cifar):
    """CIFAR-10, in the folder ``cifar-10-batches-bin/`` of the data folder."""

    name: Literal["cifar10"] = "cifar10"
    layout = Layout("cifar-10-batches-bin", tuple(f"data_batch_{n}" for n in range(1, 6)), ("test_batch",), 1, 10)
    published = layout.published("cifar-10-binary.tar.gz")


class Cifar100(Cifar):
    """CIFAR-100, fine labels, in the folder ``cifar-100-binary/`` of the data folder."""

    name: Literal["cifar100"] = "cifar100"
    layout = Layout("cifar-100-binary", ("train",), ("test",), 2, 100)  # labels: coarse, fine
    published = layout.published("cifar-100-binary.tar.gz")
