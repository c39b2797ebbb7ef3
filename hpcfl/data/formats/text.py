"""Readers of text files: LEAF's JSON, GloVe's word vectors, LIBSVM's lines."""

from __future__ import annotations

import bz2
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import opened_lines, reading

KEYS = {"users": list, "num_samples": list, "user_data": dict}
LINE = re.compile(rb"[+-]?\d{1,9}(?:[ \t]+\d{1,9}:[^\s:]+)*\s*")  # LIBSVM's; float() tells whether values are numbers


class User(NamedTuple):
    """One user's samples: features float32 ``[n, length]`` from 0 to 1, labels int64 ``[n]``."""

    features: Features
    labels: Ints


def read_leaf(folder: Path, length: int, classes: int) -> dict[str, User]:
    """Return the users of all JSON files of a folder (Caldas et al. 2018), in order of the files' names and lists.

    A file holds ``users``, ``num_samples`` in the same order, and ``user_data: {user: {"x": [...], "y": [...]}}``.
    A sample has `length` numbers and a label ``0 .. classes - 1``.
    UsageError names the file and the user where one is malformed.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError(f"{folder}: has no files *.json")
    users: dict[str, User] = {}
    for path in paths:
        content = _content(path)
        for name, size in zip(content["users"], content["num_samples"]):
            where = f"{path}: user {_short(name)}"
            if name in users:
                raise UsageError(f"{where}: comes a second time")
            users[name] = _user(where, content["user_data"].get(name), length, classes)
            if type(size) is not int:
                raise UsageError(f"{where}: num_samples is {_short(size)}, expected an integer")
            if size != len(users[name].labels):
                raise UsageError(f"{where}: {len(users[name].labels)} samples, but num_samples says {_short(size)}")
    return users


def _content(path: Path) -> dict[str, Any]:
    with reading(path, "JSON", ValueError, RecursionError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise UsageError(f"{path}: holds a {type(content).__name__}, expected an object with {', '.join(KEYS)}")
    for key, kind in KEYS.items():
        if not isinstance(content.get(key), kind):
            raise UsageError(f"{path}: '{key}' is missing or no {kind.__name__}; expected {', '.join(KEYS)}")
    users, sizes = content["users"], content["num_samples"]
    if len(users) != len(sizes):
        raise UsageError(f"{path}: {len(users)} users, but {len(sizes)} entries in 'num_samples'")
    if not all(isinstance(name, str) for name in users):
        raise UsageError(f"{path}: 'users' holds other things than names")
    return content


def _short(value: Any) -> str:
    """Return what a file says such that it fits into a line."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:40]


def _user(where: str, data: Any, length: int, classes: int) -> User:
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in "xy"):
        raise UsageError(f"{where}: expected lists 'x' and 'y' in 'user_data'")
    x, y = data["x"], data["y"]
    if len(x) != len(y):
        raise UsageError(f"{where}: {len(x)} samples in 'x', but {len(y)} labels in 'y'")
    for i, label in enumerate(y):
        if type(label) is not int or not 0 <= label < classes:
            raise UsageError(f"{where}: label {_short(label)} of sample {i}, expected an integer 0 to {classes - 1}")
    rows = [_row(f"{where}: sample {i}", row, length) for i, row in enumerate(x)]
    return User(np.array(rows, dtype=np.float32).reshape(-1, length), np.array(y, dtype=np.int64))


def _row(where: str, row: Any, length: int) -> Features:
    size = len(row) if isinstance(row, list) else 0
    if size != length:
        raise UsageError(f"{where} has {size} values, expected {length}")
    if not set(map(type, row)) <= {int, float}:
        odd = next(value for value in row if type(value) not in (int, float))
        raise UsageError(f"{where} holds {_short(odd)}, expected numbers")
    low, high = min(row), max(row)
    if not (low >= 0 and high <= 1) or np.isnan(values := np.array(row, dtype=np.float32)).any():
        raise UsageError(f"{where} has values from {_short(low)} to {_short(high)} or NaN, expected 0 to 1")
    return values


def read_glove(path: Path, words: Collection[str]) -> dict[str, Features]:
    """Return the vectors of those of `words` that a file of GloVe's has (Pennington et al. 2014), float32 ``[dim]``.

    A line is a word and its numbers, as many as in the first line. UsageError also if none of the words is there.
    """
    dim, vectors = 0, {}
    # only a line feed ends a line: words may hold what Unicode counts as line ends
    with opened_lines(path, "text in UTF-8", "utf-8", "\n") as lines:
        for number, line in enumerate(lines, start=1):
            word, _, values = line.rstrip(" \r\n").partition(" ")
            count = values.count(" ") + 1 if values else 0
            dim = count if number == 1 else dim
            if count != dim:
                raise UsageError(f"{path}: line {number} has {count} values, expected {dim} as in line 1")
            if number == 1 or word in words:
                vectors[word] = _vector(f"{path}: line {number} ({word[:40]!r})", values)
    if not dim:
        raise UsageError(f"{path}: has no word vectors, expected lines of a word and its numbers")
    vectors = {word: vector for word, vector in vectors.items() if word in words}
    if not vectors:
        raise UsageError(f"{path}: vocabulary mismatch, none of the {len(words)} words of the texts has a vector")
    return vectors


def _vector(where: str, values: str) -> Features:
    try:
        vector = np.array([float(value) for value in values.split(" ")], dtype=np.float32)
    except ValueError:
        vector = np.array([np.nan], dtype=np.float32)
    if not np.isfinite(vector).all():
        raise UsageError(f"{where}: expected a word and finite numbers")
    return vector


def read_libsvm(path: Path, width: int) -> tuple[Features, Ints]:
    """Return the samples, float32 ``[n, width]``, zero where the file says nothing, and labels int64 ``[n]``.

    A line is a label, then pairs ``index:value`` by indices from 1; all is packed by bzip2.
    """
    with reading(path, "a whole bzip2 file"), bz2.open(path) as lines:
        samples = [_sample(f"{path}: line {number}", line, width) for number, line in enumerate(lines, start=1)]
    if not samples:
        raise UsageError(f"{path}: has no lines, expected a sample in each")
    return np.stack([values for _, values in samples]), np.array([label for label, _ in samples], dtype=np.int64)


def _sample(where: str, line: bytes, width: int) -> tuple[int, Features]:
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
