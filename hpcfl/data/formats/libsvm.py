"""Reader of LIBSVM's text format, packed by bzip2: a line is a label, then pairs ``index:value`` by indices from 1."""

from __future__ import annotations

import bz2
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Features, Integers

LINE = re.compile(rb"[+-]?\d{1,9}(?:[ \t]+\d{1,9}:[^\s:]+)*\s*")
"""A line's form; whether the values are numbers is left to ``float``."""
EMPTY = "has no lines, expected a sample in each"


def count(path: Path) -> int:
    """Return the number of lines; UsageError where there are none or the file cannot be read to its end."""
    with _opened(path) as lines:
        number = sum(1 for _ in lines)
    if number == 0:
        raise UsageError(f"{path}: {EMPTY}")
    return number


def read(path: Path, width: int) -> tuple[Features, Integers]:
    """Return the samples, float32 ``[n, width]``, zero where the file says nothing, and labels int64 ``[n]``.

    Raises
    ------
    UsageError
        If the file cannot be read to its end, or a line is not as it should be.
    """
    with _opened(path) as lines:
        samples = [_parsed(path, i + 1, line, width) for i, line in enumerate(lines)]
    if not samples:
        raise UsageError(f"{path}: {EMPTY}")
    return np.stack([values for _, values in samples]), np.array([label for label, _ in samples], dtype=np.int64)


def _parsed(path: Path, number: int, line: bytes, width: int) -> tuple[int, Features]:
    """Return label and values ``[width]`` of a line."""
    if not LINE.fullmatch(line):
        raise UsageError(f"{path}: line {number}: expected a label and index:value pairs")
    label, *words = line.replace(b":", b" ").split()
    indices = np.array([int(word) for word in words[::2]], dtype=np.int64)
    if len(indices) and (indices.min() < 1 or indices.max() > width or (np.diff(indices) < 1).any()):
        raise UsageError(
            f"{path}: line {number} has indices {indices.min()} to {indices.max()}, expected 1 to {width} ascending"
        )
    values: Features = np.zeros(width, dtype=np.float32)
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is for the caller to refuse
            values[indices - 1] = np.array([float(word) for word in words[1::2]])
    except ValueError:
        raise UsageError(f"{path}: line {number}: expected numbers after the indices") from None
    return int(label), values


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[bytes]]:
    """Open for reading lines; what goes wrong inside, the file being damaged, becomes a UsageError."""
    try:
        with bz2.open(path) as lines:
            yield lines
    except (OSError, EOFError) as error:
        raise UsageError(f"{path}: truncated or damaged ({error}); expected a whole bzip2 file") from error
