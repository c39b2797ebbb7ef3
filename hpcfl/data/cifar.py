"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 32 x 32 colour images, from the binary or the python version.

A record of the binary version is one byte per kind of label and 3072 bytes of pixels, red before green before blue.
The python version pickles a dictionary with ``data``, uint8 ``[n, 3072]``, and a list of labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Header, Integers
from hpcfl.data.formats import pickles
from hpcfl.data.formats.folder import folder
from hpcfl.data.pooled import Pool, Pooled

SHAPE, PIXELS, PEAK = (3, 32, 32), 3072, 255
Samples = tuple[NDArray[np.uint8], Integers]


@dataclass(frozen=True)
class Layout:
    """How a data set is laid out.

    Attributes
    ----------
    binary, python : str
        Folder of either version.
    train, test : tuple of str
        Files without the binary version's suffix ``.bin``.
    label_bytes : int
        Labels before the pixels of a record; the last of them is read.
    key : bytes
        The same label in the python version.
    classes : int
        Labels are ``0 .. classes - 1``.
    """

    binary: str
    python: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    key: bytes
    classes: int


class Cifar(Pooled):
    """What both data sets have in common. Where both versions are there, the binary one is read."""

    name: str
    layout: ClassVar[Layout]

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the sizes: of binary files by their lengths; pickles are read to their ends."""
        train, test = (self._counts(names, data_dir) for names in (self.layout.train, self.layout.test))
        return Header(None, sum(train), sum(test), (SHAPE,), self.layout.classes)

    def verify(self, data_dir: Path | None) -> None:
        """Read all files that `pool_header` has not read."""
        for path in self._files(self.layout.train + self.layout.test, data_dir):
            if path.suffix:
                self._read(path)

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the images as distributed; `seed` has no effect."""
        layout = self.layout
        return Pool(*self._joined(layout.train, data_dir), *self._joined(layout.test, data_dir), PEAK)

    def _files(self, names: tuple[str, ...], data_dir: Path | None) -> list[Path]:
        found = folder(self.name, data_dir, self.layout.binary, self.layout.python)
        suffix = ".bin" if found.name == self.layout.binary else ""
        return [found / f"{file}{suffix}" for file in names]

    def _joined(self, names: tuple[str, ...], data_dir: Path | None) -> Samples:
        pixels, labels = zip(*(self._read(path) for path in self._files(names, data_dir)))
        return np.concatenate(pixels).reshape(-1, *SHAPE), np.concatenate(labels)

    def _counts(self, names: tuple[str, ...], data_dir: Path | None) -> list[int]:
        """Return the records of each file; UsageError where one has lost some of those that the others have."""
        paths = self._files(names, data_dir)
        counts = [self._count(path) for path in paths]
        short, full = counts.index(min(counts)), counts.index(max(counts))
        if short != full:
            raise UsageError(
                f"{paths[short]}: truncated or damaged, {counts[short]} records; "
                f"expected {counts[full]} as in {paths[full].name}"
            )
        return counts

    def _count(self, path: Path) -> int:
        return _records(path, self.layout.label_bytes + PIXELS) if path.suffix else len(self._read(path)[1])

    def _read(self, path: Path) -> Samples:
        """Return pixels uint8 ``[n, 3072]`` and labels of one file."""
        layout = self.layout
        pixels, labels = _binary(path, layout.label_bytes) if path.suffix else _pickled(path, layout.key)
        wrong = np.flatnonzero((labels < 0) | (labels >= layout.classes))
        if wrong.size:
            raise UsageError(
                f"{path}: label {labels[wrong[0]]} of sample {wrong[0]}, expected 0 to {layout.classes - 1}"
            )
        return pixels, labels


def _records(path: Path, length: int) -> int:
    """Return how many records of `length` bytes a file holds."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    size = path.stat().st_size
    if size == 0 or size % length:
        raise UsageError(f"{path}: truncated or damaged, {size} bytes; expected whole records of {length}")
    return size // length


def _binary(path: Path, label_bytes: int) -> Samples:
    length = label_bytes + PIXELS
    records = np.fromfile(path, dtype=np.uint8, count=_records(path, length) * length).reshape(-1, length)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _pickled(path: Path, key: bytes) -> Samples:
    found = pickles.read(path)
    if not isinstance(found, dict):
        raise UsageError(f"{path}: holds a {type(found).__name__}, expected a dictionary")
    pixels, labels = (found.get(name, found.get(name.decode())) for name in (b"data", key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        what = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise UsageError(f"{path}: 'data' is {what}, expected uint8 of shape (n, {PIXELS})")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise UsageError(f"{path}: '{key.decode()}' is no list of integers in the range of labels")
    if not 0 < len(labels) == len(pixels):
        raise UsageError(f"{path}: {len(pixels)} images, but {len(labels)} labels; expected as many, at least 1")
    return pixels, np.array(labels, dtype=np.int64)
