"""USPS (Hull 1994): 7291 training and 2007 test images of digits, 16 x 16, from HDF5 or from LIBSVM's text files."""

from __future__ import annotations

import bz2
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Lazy
from hpcfl.base.types import Ints
from hpcfl.data.base import UNSTATED, Features, Published
from hpcfl.data.formats.files import check_all, check_labels, check_unpacked, folder, reading, unpacked
from hpcfl.data.formats.hdf5_file import dataset, opened
from hpcfl.data.pooled import Pool, Pooled

CLASSES, PIXELS, SHAPE = 10, 256, (1, 16, 16)
TEXTS = {"train": "usps.bz2", "test": "usps.t.bz2"}
datasets = Lazy("sklearn.datasets")


class Usps(Pooled):
    """USPS, in the folder ``usps/`` of the data folder: ``usps.h5``, or else LIBSVM's ``usps.bz2`` and ``usps.t.bz2``.

    The HDF5 file holds ``data [n, 256]`` of 0 to 1 and ``target [n]`` of 0 to 9 in the groups train and test. LIBSVM's
    values are -1 to 1, and its labels 1 to 10 stand for the digits 0 to 9.
    """

    name: Literal["usps"] = "usps"
    published = Published(
        tuple(f"usps/usps.h5 or usps/{text}" for text in TEXTS.values()),
        ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",),
        UNSTATED,
    )

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, "usps")
        return Pool(*_read(home, "train"), *_read(home, "test"), 1, CLASSES)


def _read(home: Path, part: str) -> tuple[Features, Ints]:
    """Return images float32 ``[n, 1, 16, 16]`` of 0 to 1, and labels."""
    if (path := home / "usps.h5").is_file():
        with opened(path) as file:
            stored, targets = dataset(file, f"{part}/data"), dataset(file, f"{part}/target")
            where, numbers = f"{path}: {part}", stored.dtype.kind in "fiu" and targets.dtype.kind in "iu"
            if not numbers or stored.shape[1:] != (PIXELS,) or targets.shape != stored.shape[:1] or not len(stored):
                kinds = " and ".join(f"{data.dtype} of shape {data.shape}" for data in (stored, targets))
                expected = f"numbers (n, {PIXELS}) and integers (n,), at least one"
                raise UsageError(f"{where}/data and {part}/target are {kinds}, expected {expected}")
            pixels, labels, low, first = stored[()], targets[()], 0, 0
    elif (path := home / TEXTS[part]).is_file():
        pixels, labels = read_libsvm(path, PIXELS)
        low, first, where = -1, 1, str(path)
    else:
        raise UsageError(f"{home}: has neither usps.h5 nor {TEXTS[part]}")
    check_all(where, pixels, (pixels >= low) & (pixels <= 1), f"{low} to 1")
    check_labels(where, labels, first, CLASSES)
    images: Features = pixels.astype(np.float32, copy=False)
    images -= low
    images /= 1 - low
    return images.reshape(-1, *SHAPE), labels.astype(np.int64) - first


def read_libsvm(path: Path, width: int) -> tuple[Features, NDArray[np.float64]]:
    """Return the samples, float32 ``[n, width]``, zero where the file says nothing, and labels ``[n]``.

    A line is a label, then pairs ``index:value`` by indices from 1; all is packed by bzip2.
    """
    with reading(path, "LIBSVM's lines in a whole bzip2 file", ValueError, OverflowError), bz2.open(path) as file:
        text = unpacked(path, file)
        check_unpacked(f"{path}: as a table", 4 * width * text.count(b"\n"), path.stat().st_size)
        table, labels = datasets.load_svmlight_file(BytesIO(text), n_features=width, dtype=np.float32, zero_based=False)
    if not len(labels):
        raise UsageError(f"{path}: has no lines, expected a sample in each")
    return table.toarray(), labels
