"""Reader of the IDX format of MNIST and its relatives: unsigned bytes, plain or gzipped.

A file is the magic number ``00 00 08 ndim``, ndim big-endian 32-bit sizes, then the bytes.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Shape
from hpcfl.data.base import Integers

CHUNK = 1 << 20


def find(folder: Path, part: str) -> tuple[Path, Path]:
    """Return the files of images and labels of `part` (``"train"`` or ``"t10k"``), plain or ``.gz``.

    Raises
    ------
    UsageError
        If the folder or one of the files does not exist.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    return _existing(folder / f"{part}-images-idx3-ubyte"), _existing(folder / f"{part}-labels-idx1-ubyte")


def read_sizes(images: Path, labels: Path) -> Shape:
    """Return ``(n, rows, columns)`` from the headers of both files.

    Raises
    ------
    UsageError
        If a header is wrong, a file's length is not what its header says, or the numbers of samples differ.
    """
    sizes, (count,) = _sizes(images, 3), _sizes(labels, 1)
    if count != sizes[0]:
        raise UsageError(f"{labels}: {count} labels, but {images.name} holds {sizes[0]} images")
    return sizes


def read_images(path: Path) -> NDArray[np.uint8]:
    """Return the images, uint8 ``[n, rows, columns]``.

    Raises
    ------
    UsageError
        If the file is not a sound IDX file of images.
    """
    return _read(path, 3)


def read_labels(path: Path, classes: int, first: int = 0) -> Integers:
    """Return the labels, int64 ``[n]``, counted from 0; in the file they count from `first`.

    Raises
    ------
    UsageError
        If the file is not a sound IDX file of labels, or holds labels beyond `classes` of them.
    """
    labels = _read(path, 1).astype(np.int64)
    wrong = np.flatnonzero((labels < first) | (labels >= first + classes))
    if wrong.size:
        where = int(wrong[0])
        raise UsageError(f"{path}: label {labels[where]} of sample {where}, expected {first} to {first + classes - 1}")
    return labels - first


def verify(path: Path) -> None:
    """Read the file to its end, which is where gzip notices damage; nothing is kept.

    Raises
    ------
    UsageError
        If the file cannot be read to its end.
    """
    _length(path)


def _existing(plain: Path) -> Path:
    zipped = plain.with_name(plain.name + ".gz")
    for path in (plain, zipped):
        if path.is_file():
            return path
    raise UsageError(f"{plain.parent}: has neither {plain.name} nor {zipped.name}")


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open for reading; what goes wrong inside, the file being damaged, becomes a UsageError."""
    try:
        with path.open("rb") as raw:
            # Not by suffix: browsers unpack downloads and leave the name.
            if raw.peek(2)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield stream
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: truncated or damaged ({error}); expected a whole IDX file") from error


def _sizes(path: Path, ndim: int) -> Shape:
    """Return the sizes in the header, checked against the length of the file."""
    start = 4 + 4 * ndim
    with _opened(path) as stream:
        head = stream.read(start)
        zipped = isinstance(stream, gzip.GzipFile)
    if len(head) < start:
        raise UsageError(f"{path}: truncated, {len(head)} bytes; the header alone takes {start}")
    if head[:4] != bytes((0, 0, 8, ndim)):
        kind = {1: "labels", 3: "images"}[ndim]
        raise UsageError(f"{path}: magic number 0x{head[:4].hex()}, expected 0x000008{ndim:02x} (IDX {kind})")
    sizes = tuple(int(size) for size in np.frombuffer(head, dtype=">u4", offset=4))
    expected = start + math.prod(sizes)
    found = expected if zipped and _promises(path, expected) else _length(path)
    if found != expected:
        wrong = "truncated" if found < expected else "too long"
        raise UsageError(f"{path}: {wrong}, {found} bytes; its header says {expected}")
    return sizes


def _promises(path: Path, length: int) -> bool:
    """Tell whether a gzip file ends with that length; where not, it is damaged or has several members."""
    with path.open("rb") as raw:
        raw.seek(-4, io.SEEK_END)
        return int.from_bytes(raw.read(), "little") == length % 2**32


def _length(path: Path) -> int:
    """Return the number of bytes after unpacking."""
    with _opened(path) as stream:
        if not isinstance(stream, gzip.GzipFile):
            return path.stat().st_size
        length = 0
        while chunk := stream.read(CHUNK):
            length += len(chunk)
        return length


def _read(path: Path, ndim: int) -> NDArray[np.uint8]:
    sizes = _sizes(path, ndim)
    with _opened(path) as stream:
        content = stream.read()
    start = 4 + 4 * ndim
    if len(content) != start + math.prod(sizes):
        raise UsageError(f"{path}: {len(content)} bytes; its header says {start + math.prod(sizes)}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes)
