"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 32 x 32 colour images, from the binary or the python version.

A record of the binary version is one byte per kind of label and 3072 bytes of pixels, red before green before blue.
The python version pickles a dictionary with ``data``, uint8 ``[n, 3072]``, and a list of labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.formats import pickles
from hpcfl.data.formats.files import check_labels, folder, reading
from hpcfl.data.pooled import Pool, Pooled

SHAPE, PIXELS, PEAK = (3, 32, 32), 3072, 255
Samples = tuple[NDArray[np.uint8], Ints]


class Layout(NamedTuple):
    """How a data set is laid out."""

    folders: tuple[str, str]  # of the binary and of the python version
    train: tuple[str, ...]  # files, in the binary version with suffix .bin
    test: tuple[str, ...]
    label_bytes: int  # labels before the pixels of a record; the last of them is read
    key: bytes  # the same label in the python version
    classes: int


class Cifar(Pooled):
    """What both data sets have in common. Where both versions are there, the binary one is read."""

    name: str
    layout: ClassVar[Layout]

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, *self.layout.folders)
        suffix = ".bin" if home.name == self.layout.folders[0] else ""
        files = [[home / f"{name}{suffix}" for name in names] for names in (self.layout.train, self.layout.test)]
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
        layout = self.layout
        pixels, labels = _binary(path, layout.label_bytes) if path.suffix else _pickled(path, layout.key)
        check_labels(str(path), labels, 0, layout.classes)
        return pixels, labels


class Cifar10(Cifar):
    """CIFAR-10, in the folder ``cifar-10-batches-bin/`` or ``cifar-10-batches-py/`` of the data folder."""

    name: Literal["cifar10"] = "cifar10"
    layout: ClassVar[Layout] = Layout(
        folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        label_bytes=1,
        key=b"labels",
        classes=10,
    )


class Cifar100(Cifar):
    """CIFAR-100, fine labels, in the folder ``cifar-100-binary/`` or ``cifar-100-python/`` of the data folder."""

    name: Literal["cifar100"] = "cifar100"
    layout: ClassVar[Layout] = Layout(
        folders=("cifar-100-binary", "cifar-100-python"),
        train=("train",),
        test=("test",),
        label_bytes=2,  # coarse, fine
        key=b"fine_labels",
        classes=100,
    )


def _binary(path: Path, label_bytes: int) -> Samples:
    length = label_bytes + PIXELS
    with reading(path, "whole records"):
        size = path.stat().st_size
        if not size or size % length:
            raise UsageError(f"{path}: truncated or damaged, {size} bytes; expected whole records of {length}")
        content = np.fromfile(path, dtype=np.uint8)
    records = content.reshape(-1, length)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _pickled(path: Path, key: bytes) -> Samples:
    content = pickles.read(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: holds a {type(content).__name__}, expected a dictionary")
    pixels, labels = (content.get(name, content.get(name.decode())) for name in (b"data", key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        what = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UsageError(f"{path}: 'data' is {what}, expected uint8 of shape (n, {PIXELS})")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise UsageError(f"{path}: '{key.decode()}' is no list of integers in the range of labels")
    if not 0 < len(labels) == len(pixels):
        raise UsageError(f"{path}: {len(pixels)} images, but {len(labels)} labels; expected as many, at least 1")
    return pixels, np.array(labels, dtype=np.int64)
