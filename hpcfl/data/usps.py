"""USPS (Hull 1994): 7291 training and 2007 test images of digits, 16 x 16, from HDF5 or from LIBSVM's text files."""

from __future__ import annotations

import bz2
import re
from array import array
from pathlib import Path
from typing import Literal

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import check_labels, check_unpacked, folder, lines, reading
from hpcfl.data.formats.hdf5_file import dataset, opened
from hpcfl.data.pooled import Pool, Pooled

CLASSES, PIXELS, SHAPE = 10, 256, (1, 16, 16)
TEXTS = {"train": "usps.bz2", "test": "usps.t.bz2"}
SAMPLE = re.compile(rb"[+-]?\d{1,9}(?:[ \t]+\d{1,9}:[^\s:]+)*\s*")  # LIBSVM's; float() tells whether values are numbers


class Usps(Pooled):
    """USPS, in the folder ``usps/`` of the data folder: ``usps.h5``, or else LIBSVM's ``usps.bz2`` and ``usps.t.bz2``.

    The HDF5 file holds ``data [n, 256]`` of 0 to 1 and ``target [n]`` of 0 to 9 in the groups train and test. LIBSVM's
    values are -1 to 1, and its labels 1 to 10 stand for the digits 0 to 9.
    """

    name: Literal["usps"] = "usps"

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, "usps")
        return Pool(*_read(home, "train"), *_read(home, "test"), 1, CLASSES)


def _read(home: Path, part: str) -> tuple[Features, Ints]:
    """Return images float32 ``[n, 1, 16, 16]`` of 0 to 1, and labels."""
    if (path := home / "usps.h5").is_file():
        with opened(path) as file:
            stored, targets = dataset(file, f"{part}/data"), dataset(file, f"{part}/target")
            where, said = f"{path}: {part}", f"{path}: {part}/data and {part}/target are"
            if stored.dtype.kind not in "fiu" or targets.dtype.kind not in "iu":
                raise UsageError(f"{said} {stored.dtype} and {targets.dtype}, expected numbers and integers")
            if stored.shape[1:] != (PIXELS,) or targets.shape != stored.shape[:1] or not len(stored):
                shapes, expected = f"{stored.shape} and {targets.shape}", f"(n, {PIXELS}) and (n,)"
                raise UsageError(f"{said} of shapes {shapes}, expected {expected}, at least one")
            pixels, labels, low, first = stored[()], targets[()], 0, 0
    elif (path := home / TEXTS[part]).is_file():
        pixels, labels = read_libsvm(path, PIXELS)
        low, first, where = -1, 1, str(path)
    else:
        raise UsageError(f"{home}: has neither usps.h5 nor {TEXTS[part]}")
    wrong = np.flatnonzero(~((pixels >= low) & (pixels <= 1)).all(axis=1))  # so is NaN
    if wrong.size:
        values = pixels[wrong[0]]
        got = f"values from {values.min():g} to {values.max():g}"
        raise UsageError(f"{where}: sample {wrong[0]} has {got}, expected {low} to 1")
    check_labels(where, labels, first, CLASSES)
    images: Features = pixels.astype(np.float32, copy=False)
    images -= low
    images /= 1 - low
    return images.reshape(-1, *SHAPE), labels.astype(np.int64) - first


def read_libsvm(path: Path, width: int) -> tuple[Features, Ints]:
    """Return the samples, float32 ``[n, width]``, zero where the file says nothing, and labels int64 ``[n]``.

    A line is a label, then pairs ``index:value`` by indices from 1; all is packed by bzip2.
    """
    numbers, labels, unpacked = bytearray(), array("q"), 0
    with reading(path, "a whole bzip2 file"), bz2.open(path) as file:
        packed = path.stat().st_size
        for number, line in enumerate(lines(path, file, "bytes"), start=1):
            unpacked += max(len(line), 4 * width)
            check_unpacked(str(path), unpacked, packed)
            label, values = _sample(f"{path}: line {number}", line, width)
            labels.append(label)
            numbers += values.tobytes()
    if not labels:
        raise UsageError(f"{path}: has no lines, expected a sample in each")
    return np.frombuffer(numbers, dtype=np.float32).reshape(-1, width), np.array(labels, dtype=np.int64)


def _sample(where: str, line: bytes, width: int) -> tuple[int, Features]:
    """Return label and values ``[width]`` of a line."""
    if not SAMPLE.fullmatch(line):
        raise UsageError(f"{where}: expected a label and index:value pairs")
    label, *words = line.replace(b":", b" ").split()
    indices = np.array([int(word) for word in words[::2]], dtype=np.int64)
    if len(indices) and (indices.min() < 1 or indices.max() > width or (np.diff(indices) < 1).any()):
        raise UsageError(f"{where} has indices {indices.min()} to {indices.max()}, expected 1 to {width} ascending")
    values: Features = np.zeros(width, dtype=np.float32)
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is for the caller to refuse
            values[indices - 1] = np.array([float(word) for word in words[1::2]])
    except ValueError:
        raise UsageError(f"{where}: expected numbers after the indices") from None
    return int(label), values
