"""USPS (Hull 1994): 7291 training and 2007 test images of digits, 16 x 16, from HDF5 or from LIBSVM's text files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Features, Header, Integers
from hpcfl.data.formats import libsvm
from hpcfl.data.formats.folder import folder
from hpcfl.data.formats.hdf5_file import dataset, opened
from hpcfl.data.pooled import Pool, Pooled

CLASSES, SIDE, PIXELS = 10, 16, 256
SHAPE = (1, SIDE, SIDE)
TEXTS = {"train": "usps.bz2", "test": "usps.t.bz2"}
Samples = tuple[Features, Integers]


class Usps(Pooled):
    """The folder ``usps/`` of the data folder: ``usps.h5``, or else LIBSVM's ``usps.bz2`` and ``usps.t.bz2``.

    The HDF5 file holds ``data [n, 256]`` of 0 to 1 and ``target [n]`` of 0 to 9 in the groups train and test. LIBSVM's
    values are -1 to 1, and its labels 1 to 10 stand for the digits 0 to 9.
    """

    name: Literal["usps"] = "usps"

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the sizes: those that the HDF5 file states, or the numbers of lines."""
        home = folder(self.name, data_dir, "usps")
        train, test = (_count(home, part) for part in TEXTS)
        return Header(None, train, test, (SHAPE,), CLASSES)

    def verify(self, data_dir: Path | None) -> None:
        """Read all of both parts."""
        self.load(0, data_dir)

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the images as distributed, float32 of 0 to 1; `seed` has no effect."""
        home = folder(self.name, data_dir, "usps")
        return Pool(*_read(home, "train"), *_read(home, "test"), 1)


def _count(home: Path, part: str) -> int:
    """Return the number of samples of a part, without reading them from HDF5."""
    path = _find(home, part)
    if path.suffix != ".h5":
        return libsvm.count(path)
    with opened(path) as file:
        pixels, _ = _datasets(file, part)
        return len(pixels)


def _read(home: Path, part: str) -> Samples:
    """Return images ``[n, 1, 16, 16]`` and labels of a part."""
    path = _find(home, part)
    if path.suffix == ".h5":
        with opened(path) as file:
            pixels, labels = (found[()] for found in _datasets(file, part))
        low, first, where = 0, 0, f"{part}: "
    else:
        pixels, labels = libsvm.read(path, PIXELS)
        low, first, where = -1, 1, ""
    _check(f"{path}: {where}", pixels, labels, low, first)
    scaled = (pixels.astype(np.float32) - low) / (1 - low)
    return scaled.reshape(-1, *SHAPE), labels.astype(np.int64) - first


def _find(home: Path, part: str) -> Path:
    """Return the file of a part: the HDF5 file holds both."""
    for path in (home / "usps.h5", home / TEXTS[part]):
        if path.is_file():
            return path
    raise UsageError(f"{home}: has neither usps.h5 nor {TEXTS[part]}")


def _datasets(file: h5py.File, part: str) -> tuple[h5py.Dataset, h5py.Dataset]:
    """Return pixels and labels of a part, checking what can be seen without reading them."""
    pixels, labels = dataset(file, f"{part}/data"), dataset(file, f"{part}/target")
    if pixels.dtype.kind not in "fiu" or labels.dtype.kind not in "iu":
        raise UsageError(
            f"{file.filename}: {part}/data and {part}/target are {pixels.dtype} and {labels.dtype}, "
            "expected numbers and integers"
        )
    if pixels.shape[1:] != (PIXELS,) or labels.shape != pixels.shape[:1] or not len(pixels):
        raise UsageError(
            f"{file.filename}: {part}/data and {part}/target are of shapes {pixels.shape} and {labels.shape}, "
            f"expected (n, {PIXELS}) and (n,)"
        )
    return pixels, labels


def _check(place: str, pixels: Features, labels: Integers, low: int, first: int) -> None:
    """Refuse pixels beyond `low` to 1, which NaN is too, and labels beyond those of the digits."""
    wrong = np.flatnonzero(~((pixels >= low) & (pixels <= 1)).all(axis=1))
    if wrong.size:
        values = pixels[wrong[0]]
        raise UsageError(
            f"{place}sample {wrong[0]} has values from {values.min():g} to {values.max():g}, expected {low} to 1"
        )
    wrong = np.flatnonzero((labels < first) | (labels >= first + CLASSES))
    if wrong.size:
        raise UsageError(
            f"{place}label {labels[wrong[0]]} of sample {wrong[0]}, expected {first} to {first + CLASSES - 1}"
        )
