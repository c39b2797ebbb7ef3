"""Reader of LEAF's JSON files (Caldas et al. 2018): samples by user, some users per file.

A file holds ``users``, ``num_samples`` in the same order, and ``user_data: {user: {"x": [...], "y": [...]}}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import reading

KEYS = {"users": list, "num_samples": list, "user_data": dict}


class User(NamedTuple):
    """One user's samples: features float32 ``[n, length]`` from 0 to 1, labels int64 ``[n]``."""

    features: Features
    labels: Ints


def read(folder: Path, length: int, classes: int) -> dict[str, User]:
    """Return the users of all JSON files of a folder, files in order of their names, users as each file lists them.

    A sample has `length` numbers and a label ``0 .. classes - 1``.

    Raises
    ------
    UsageError
        If there are no such files, or if one is malformed; the line names the file and the user.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError(f"{folder}: has no files *.json")
    found: dict[str, User] = {}
    for path in paths:
        content = _content(path)
        for name, size in zip(content["users"], content["num_samples"]):
            where = f"{path}: user {_short(name)}"
            if name in found:
                raise UsageError(f"{where}: comes a second time")
            found[name] = _user(where, content["user_data"].get(name), length, classes)
            if type(size) is not int:
                raise UsageError(f"{where}: num_samples is {_short(size)}, expected an integer")
            if size != len(found[name].labels):
                raise UsageError(f"{where}: {len(found[name].labels)} samples, but num_samples says {_short(size)}")
    return found


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
