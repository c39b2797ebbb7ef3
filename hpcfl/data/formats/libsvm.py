"""Reader of LIBSVM's text format, packed by bzip2: a line is a label, then pairs ``index:value`` by indices from 1."""

from __future__ import annotations

import bz2
import re
from pathlib import Path

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import reading

LINE = re.compile(rb"[+-]?\d{1,9}(?:[ \t]+\d{1,9}:[^\s:]+)*\s*")  # whether the values are numbers is left to float()


def read(path: Path, width: int) -> tuple[Features, Ints]:
    """Return the samples, float32 ``[n, width]``, zero where the file says nothing, and labels int64 ``[n]``.

    Raises
    ------
    UsageError
        If the file cannot be read to its end, or a line is not as it should be.
    """
    with reading(path, "a whole bzip2 file"), bz2.open(path) as lines:
        samples = [_parsed(f"{path}: line {number}", line, width) for number, line in enumerate(lines, start=1)]
    if not samples:
        raise UsageError(f"{path}: has no lines, expected a sample in each")
    return np.stack([values for _, values in samples]), np.array([label for label, _ in samples], dtype=np.int64)


def _parsed(where: str, line: bytes, width: int) -> tuple[int, Features]:
    """Return label and values ``[width]`` of a line."""
    if not LINE.fullmatch(line):
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
