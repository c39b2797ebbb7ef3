"""MNIST (LeCun et al. 1998) and EMNIST (Cohen et al. 2017): handwritten digits and letters, 28 x 28, from IDX files.

An IDX file, plain or gzipped, is the magic number ``00 00 08 ndim``, ndim big-endian 32-bit sizes, then unsigned bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.errors import UsageError, check_within
from hpcfl.base.types import Ints
from hpcfl.data.base import UNSTATED, Pixels, Published
from hpcfl.data.formats.files import check_labels, folder, reading, unpacked
from hpcfl.data.pooled import Pool, Pooled

CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
SIDE, PEAK = 28, 255
KINDS = "images-idx3-ubyte", "labels-idx1-ubyte"


def files(folder: str, *parts: str) -> tuple[str, ...]:
    """Return the IDX files of some parts, as `Published` has them."""
    plain = (f"{folder}/{part}-{kind}" for part in parts for kind in KINDS)
    return tuple(f"{file} or {file}.gz" for file in plain)


class Mnist(Pooled):
    """MNIST, in the folder ``mnist/`` of the data folder, as distributed: four IDX files, plain or gzipped."""

    name: Literal["mnist"] = "mnist"
    published = Published(
        files("mnist", "train", "t10k"),
        (
            "http://yann.lecun.com/exdb/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/ (a mirror of the files)",
        ),
        f"{UNSTATED}; the documentation of Keras says CC BY-SA 3.0",
    )

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        home = folder(self.name, data_dir, "mnist")
        (images, labels), (tests, test_labels) = (read_pair(home, part, 10) for part in ("train", "t10k"))
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
    published = Published(
        files("emnist", "emnist-balanced-train", "emnist-balanced-test"),
        (
            "https://www.nist.gov/itl/products-and-services/emnist-dataset",
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip (all splits; here: balanced)",
        ),
        UNSTATED,
    )

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        most = CLASSES[self.split]
        classes = self.first_classes or most
        check_within("data.first_classes", classes, 1, most, f" in split '{self.split}'")
        home = folder(self.name, data_dir, "emnist")
        return Pool(*self._read(home, "train"), *self._read(home, "test"), PEAK, classes)

    def _read(self, home: Path, part: str) -> tuple[Pixels, Ints]:
        """Return a part's images, upright as MNIST's, of the first classes."""
        most, first = CLASSES[self.split], 1 if self.split == "letters" else 0
        images, labels = read_pair(home, f"emnist-{self.split}-{part}", most, first)
        kept = slice(None) if self.first_classes is None else labels < self.first_classes
        # the files hold columns before rows
        return np.ascontiguousarray(images[kept].transpose(0, 2, 1))[:, None], labels[kept]


def _coloured(images: Pixels) -> Pixels:
    """Return images ``[n, 1, 28, 28]`` as ``[n, 3, 32, 32]``."""
    edge = (32 - SIDE) // 2
    return np.repeat(np.pad(images, ((0, 0), (0, 0), (edge, edge), (edge, edge))), 3, axis=1)


def read_pair(folder: Path, part: str, classes: int, first: int = 0) -> tuple[NDArray[np.uint8], Ints]:
    """Return images uint8 ``[n, 28, 28]`` and labels int64 ``[n]`` of a part, such as "train" or "t10k".

    Labels are counted from 0; in the file they count from `first`. UsageError if a file is not sound, or if they do
    not fit together.
    """
    files = []
    for plain in (f"{part}-{kind}" for kind in KINDS):
        there = [folder / name for name in (plain, f"{plain}.gz") if (folder / name).is_file()]
        if not there:
            raise UsageError(f"{folder}: has neither {plain} nor {plain}.gz")
        files.append(there[0])
    image_file, label_file = files
    pixels, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(labels) != len(pixels):
        raise UsageError(f"{label_file}: {len(labels)} labels, but {image_file.name} holds {len(pixels)} images")
    if pixels.shape[1:] != (SIDE, SIDE):
        raise UsageError(f"{image_file}: {pixels.shape[1]} x {pixels.shape[2]} pixels, expected {SIDE} x {SIDE}")
    check_labels(str(label_file), labels, first, classes)
    return pixels, labels.astype(np.int64) - first


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Return the bytes, in as many dimensions as there should be; UsageError if the file is not sound."""
    with reading(path, "a whole IDX file", zlib.error), path.open("rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":  # not by suffix: browsers unpack downloads and leave the name
            content = np.frombuffer(unpacked(path, gzip.GzipFile(fileobj=file)), np.uint8)
        else:
            content = np.fromfile(file, np.uint8)
    head, values = np.split(content, [4 + 4 * ndim])
    if len(head) < 4 + 4 * ndim:
        raise UsageError(f"{path}: truncated, {len(head)} bytes; the header alone takes {4 + 4 * ndim}")
    if (magic := head[:4].tobytes()) != bytes((0, 0, 8, ndim)):
        kind = {1: "labels", 3: "images"}[ndim]
        raise UsageError(f"{path}: magic number 0x{magic.hex()}, expected 0x000008{ndim:02x} (IDX {kind})")
    sizes = head[4:].view(">u4").tolist()
    if len(content) != (expected := len(head) + math.prod(sizes)):
        wrong = "truncated" if len(content) < expected else "too long"
        raise UsageError(f"{path}: {wrong}, {len(content)} bytes; its header says {expected}")
    return values.reshape(sizes)
