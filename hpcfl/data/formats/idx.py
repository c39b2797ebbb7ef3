"""Reader of the IDX format of MNIST and its relatives: unsigned bytes, plain or gzipped.

A file is the magic number ``00 00 08 ndim``, ndim big-endian 32-bit sizes, then the bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.formats.files import check_labels, check_unpacked, reading

PART = 1 << 16  # bytes


def read_pair(folder: Path, part: str, side: int, classes: int, first: int = 0) -> tuple[NDArray[np.uint8], Ints]:
    """Return images uint8 ``[n, side, side]`` and labels int64 ``[n]`` of a part, such as "train" or "t10k".

    Labels are counted from 0; in the file they count from `first`. UsageError if a file is not sound, or if they do
    not fit together.
    """
    files = []
    for plain in (f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")):
        there = [folder / name for name in (plain, f"{plain}.gz") if (folder / name).is_file()]
        if not there:
            raise UsageError(f"{folder}: has neither {plain} nor {plain}.gz")
        files.append(there[0])
    image_file, label_file = files
    pixels, labels = read(image_file, 3), read(label_file, 1)
    if len(labels) != len(pixels):
        raise UsageError(f"{label_file}: {len(labels)} labels, but {image_file.name} holds {len(pixels)} images")
    if pixels.shape[1:] != (side, side):
        raise UsageError(f"{image_file}: {pixels.shape[1]} x {pixels.shape[2]} pixels, expected {side} x {side}")
    check_labels(str(label_file), labels, first, classes)
    return pixels, labels.astype(np.int64) - first


def read(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Return the bytes, in as many dimensions as there should be; UsageError if the file is not sound."""
    with reading(path, "a whole IDX file", zlib.error, ValueError), path.open("rb") as file:
        zipped = file.peek(2)[:2] == b"\x1f\x8b"  # not by suffix: browsers unpack downloads and leave the name
        source: BufferedIOBase = gzip.GzipFile(fileobj=file) if zipped else file
        start, size = 4 + 4 * ndim, path.stat().st_size
        header = source.read(start)
        if len(header) < start:
            raise UsageError(f"{path}: truncated, {len(header)} bytes; the header alone takes {start}")
        if header[:4] != bytes((0, 0, 8, ndim)):
            kind = {1: "labels", 3: "images"}[ndim]
            raise UsageError(f"{path}: magic number 0x{header[:4].hex()}, expected 0x000008{ndim:02x} (IDX {kind})")
        sizes = np.frombuffer(header, dtype=">u4", offset=4).tolist()
        expected = start + math.prod(sizes)
        if zipped:
            check_unpacked(str(path), expected, size)
        elif size != expected:
            raise UsageError(f"{path}: {_wrong(size, expected)}, {size} bytes; its header says {expected}")
        values, count = np.empty(expected - start, dtype=np.uint8), 0
        # a part at a time: gzip unpacks as much as it is asked for, and copies it
        while count < len(values) and (got := source.readinto(values[count : count + PART].data)):
            count += got
        there = start + count + len(source.read(1))
        if there != expected:
            raise UsageError(f"{path}: {_wrong(there, expected)}, at least {there} bytes; its header says {expected}")
        return values.reshape(sizes)


def _wrong(size: int, expected: int) -> str:
    return "truncated" if size < expected else "too long"
