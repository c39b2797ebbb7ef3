"""Readers of text files: GloVe's word vectors, LIBSVM's lines."""

from __future__ import annotations

import bz2
import re
from array import array
from collections.abc import Collection
from pathlib import Path

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import check_unpacked, lines, opened_lines, reading

SAMPLE = re.compile(rb"[+-]?\d{1,9}(?:[ \t]+\d{1,9}:[^\s:]+)*\s*")  # LIBSVM's; float() tells whether values are numbers


def read_glove(path: Path, words: Collection[str]) -> dict[str, Features]:
    """Return the vectors of those of `words` that a file of GloVe's has (Pennington et al. 2014), float32 ``[dim]``.

    A line is a word and its numbers, as many as in the first line. UsageError also if none of the words is there.
    """
    dim, vectors = 0, {}
    # only a line feed ends a line: words may hold what Unicode counts as line ends
    with opened_lines(path, "text in UTF-8", "utf-8", "\n") as found:
        for number, line in enumerate(found, start=1):
            word, _, values = line.rstrip(" \r\n").partition(" ")
            count = values.count(" ") + 1 if values else 0
            dim = count if number == 1 else dim
            if count != dim:
                raise UsageError(f"{path}: line {number} has {count} values, expected {dim} as in line 1")
            if number == 1 or word in words:
                try:
                    vectors[word] = np.array([float(value) for value in values.split(" ")], dtype=np.float32)
                except ValueError:
                    vectors[word] = np.full(1, np.nan, dtype=np.float32)
                if not np.isfinite(vectors[word]).all():
                    raise UsageError(f"{path}: line {number} ({word[:40]!r}): expected a word and finite numbers")
    if not dim:
        raise UsageError(f"{path}: has no word vectors, expected lines of a word and its numbers")
    vectors = {word: vector for word, vector in vectors.items() if word in words}
    if not vectors:
        raise UsageError(f"{path}: vocabulary mismatch, none of the {len(words)} words of the texts has a vector")
    return vectors


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
