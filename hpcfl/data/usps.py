"""USPS (Hull 1994): 7291 training and 2007 test images of digits, 16 x 16, from HDF5 or from LIBSVM's text files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import check_labels, folder
from hpcfl.data.formats.hdf5_file import dataset, opened
from hpcfl.data.formats.text import read_libsvm
from hpcfl.data.pooled import Pool, Pooled

CLASSES, PIXELS, SHAPE = 10, 256, (1, 16, 16)
TEXTS = {"train": "usps.bz2", "test": "usps.t.bz2"}


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
