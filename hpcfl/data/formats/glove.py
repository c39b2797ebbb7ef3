"""Reader of GloVe's word vectors (Pennington et al. 2014): per line a word and its numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Features
from hpcfl.data.formats.folder import check_last_line


def _width(path: Path) -> int:
    """Return how many numbers a vector has, by the first line."""
    _, line = next(_lines(path), (0, ""))
    if not line.strip():
        raise UsageError(f"{path}: has no word vectors, expected lines of a word and its numbers")
    _numbers(path, 1, line)
    return line.count(" ")


def read(path: Path, words: Collection[str]) -> dict[str, Features]:
    """Return the vectors of those of `words` that the file has, float32 ``[dim]`` each.

    Raises
    ------
    UsageError
        If the file is missing, empty or breaks off within a line, if a line is no word with as many numbers as the
        first one has, or if none of the words is there.
    """
    dim, found = _width(path), {}
    for number, line in _lines(path):
        if line.count(" ") != dim:
            raise UsageError(f"{path}: line {number} has {line.count(' ')} values, expected {dim} as in line 1")
        word = line[: line.index(" ")]
        if word in words:
            found[word] = _numbers(path, number, line)
    if not found:
        raise UsageError(f"{path}: vocabulary mismatch, none of the {len(words)} words of the texts has a vector")
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; only a line feed ends one, since words may hold what Unicode counts as line ends."""
    try:
        check_last_line(path)
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.rstrip(" \r\n")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: truncated or damaged, expected text in UTF-8 ({error})") from None


def _numbers(path: Path, number: int, line: str) -> Features:
    word, *values = line.split(" ")
    try:
        vector = np.array([float(value) for value in values], dtype=np.float32)
    except ValueError:
        vector = np.array([np.nan], dtype=np.float32)
    if not values or not np.isfinite(vector).all():
        raise UsageError(f"{path}: line {number} ({word[:40]!r}): expected a word and finite numbers")
    return vector
