"""Reader of GloVe's word vectors (Pennington et al. 2014): per line a word and its numbers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Features
from hpcfl.data.formats.files import opened_lines


def read(path: Path, words: Collection[str]) -> dict[str, Features]:
    """Return the vectors of those of `words` that the file has, float32 ``[dim]`` each.

    Raises
    ------
    UsageError
        If the file is missing, empty or breaks off within a line, if a line is no word with as many numbers as the
        first one has, or if none of the words is there.
    """
    dim: int | None = None
    found: dict[str, Features] = {}
    # only a line feed ends a line: words may hold what Unicode counts as line ends
    with opened_lines(path, "text in UTF-8", "utf-8", "\n") as lines:
        for number, line in enumerate(lines, start=1):
            word, _, values = line.rstrip(" \r\n").partition(" ")
            count = values.count(" ") + 1 if values else 0
            if dim is None and not word:
                break
            if count != (count if dim is None else dim):
                raise UsageError(f"{path}: line {number} has {count} values, expected {dim} as in line 1")
            if dim is None or word in words:
                vector = _vector(f"{path}: line {number} ({word[:40]!r})", values)
                found |= {word: vector} if word in words else {}
            dim = count
    if dim is None:
        raise UsageError(f"{path}: has no word vectors, expected lines of a word and its numbers")
    if not found:
        raise UsageError(f"{path}: vocabulary mismatch, none of the {len(words)} words of the texts has a vector")
    return found


def _vector(where: str, values: str) -> Features:
    try:
        vector = np.array([float(value) for value in values.split(" ")], dtype=np.float32)
    except ValueError:
        vector = np.array([np.nan], dtype=np.float32)
    if not np.isfinite(vector).all():
        raise UsageError(f"{where}: expected a word and finite numbers")
    return vector
