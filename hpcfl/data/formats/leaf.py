"""Reader of LEAF's JSON (Caldas et al. 2018), row by row: as lists of Python it takes eight times its memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.data.base import Features
from hpcfl.data.formats.files import reading

KEYS = {"users": list, "num_samples": list, "user_data": dict}
VALUE = 4 << 20
"""Bytes of text that one value may have, such as the labels of a user."""
DEPTH = 100
"""Values within one another."""
SPACE = re.compile(rb"[ \t\r\n]*")
STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
WHOLE = re.compile(STRING + rb'|\[[^"\[\]{}]*\]|[^ \t\r\n",:\[\]{}]+', re.DOTALL)  # a string, a flat list, a number
SIGN = re.compile(rb'[^"\[\]{}]*(?:' + STRING + rb"|[\[\]{}])", re.DOTALL)


class User(NamedTuple):
    """One user's samples: features float32 ``[n, length]`` from 0 to 1, labels int64 ``[n]``."""

    features: Features
    labels: Ints


class Json:
    """A text in JSON that is read from left to right; ValueError where it is none."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 3 if content.startswith(b"\xef\xbb\xbf") else 0

    def next(self) -> bytes:
        """Return the first byte of what comes next, none at the end."""
        self.place = SPACE.match(self.content, self.place).end()  # type: ignore[union-attr]
        return self.content[self.place : self.place + 1]

    def value(self) -> Any:
        """Return the value that comes next."""
        start = self.skip()
        if self.place - start > VALUE:
            raise ValueError(f"a value of {self.place - start} bytes, expected at most {VALUE}")
        return json.loads(self.content[start : self.place])

    def skip(self) -> int:
        """Go on after the value that comes next; return where it begins."""
        first, start = self.next(), self.place
        if found := WHOLE.match(self.content, start):
            self.place = found.end()
            return start
        if first not in (b"[", b"{"):
            raise ValueError(f"expected a value at byte {start}")
        depth = 0
        while found := SIGN.match(self.content, self.place):
            self.place = found.end()
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(self.content[self.place - 1 : self.place], 0)
            if depth > DEPTH:
                raise ValueError(f"more than {DEPTH} values within one another")
            if depth == 0:
                return start
        raise ValueError("it ends within a value")

    def _take(self, sign: bytes) -> bool:
        """Go on after a sign if it comes next; return whether it does."""
        there = self.next() == sign
        self.place += there
        return there

    def items(self, ends: bytes = b"{}") -> Iterator[str]:
        """Yield the keys of an object ('' for each element of a list); who asks for the next has taken the value."""
        if not self._take(ends[:1]):
            raise ValueError(f"expected {ends[:1].decode()} at byte {self.place}")
        if self._take(ends[1:]):
            return
        while True:
            key = self.value() if ends == b"{}" else ""
            if not isinstance(key, str) or (ends == b"{}" and not self._take(b":")):
                raise ValueError(f"expected a name and a colon before byte {self.place}")
            yield key
            if self._take(ends[1:]):
                return
            if not self._take(b","):
                raise ValueError(f"expected a comma at byte {self.place}")


def read(folder: Path, length: int, classes: int) -> dict[str, User]:
    """Return the users of all JSON files of a folder, in order of the files' names and lists.

    A file holds ``users``, ``num_samples`` in the same order, and ``user_data: {user: {"x": [...], "y": [...]}}``.
    A sample has `length` numbers and a label ``0 .. classes - 1``.
    UsageError names the file and the user where one is malformed.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError(f"{folder}: has no files *.json")
    users: dict[str, User] = {}
    for path in paths:
        with reading(path, "JSON", ValueError, RecursionError):
            content = _parsed(path, Json(path.read_bytes()), length)
        for key, kind in KEYS.items():
            if not isinstance(content.get(key), kind):
                raise UsageError(f"{path}: '{key}' is missing or no {kind.__name__}; expected {', '.join(KEYS)}")
        if (names := len(content["users"])) != (sizes := len(content["num_samples"])):
            raise UsageError(f"{path}: {names} users, but {sizes} entries in 'num_samples'")
        if not all(isinstance(name, str) for name in content["users"]):
            raise UsageError(f"{path}: 'users' holds other things than names")
        for name, size in zip(content["users"], content["num_samples"]):
            where = f"{path}: user {_short(name)}"
            if name in users:
                raise UsageError(f"{where}: comes a second time")
            data = content["user_data"].get(name)
            if not data or len(data) < 2:
                raise UsageError(f"{where}: expected lists 'x' and 'y' in 'user_data'")
            x, y = data["x"], data["y"]
            if len(x) != len(y):
                raise UsageError(f"{where}: {len(x)} samples in 'x', but {len(y)} labels in 'y'")
            for i, label in enumerate(y):
                if type(label) is not int or not 0 <= label < classes:
                    expected = f"an integer 0 to {classes - 1}"
                    raise UsageError(f"{where}: label {_short(label)} of sample {i}, expected {expected}")
            users[name] = User(x, np.array(y, dtype=np.int64))
            if type(size) is not int:
                raise UsageError(f"{where}: num_samples is {_short(size)}, expected an integer")
            if size != len(users[name].labels):
                raise UsageError(f"{where}: {len(users[name].labels)} samples, but num_samples says {_short(size)}")
    return users


def _parsed(path: Path, text: Json, length: int) -> dict[str, Any]:
    """Return what a file holds under `KEYS`, the samples of users as arrays; ValueError where it is no JSON."""
    if text.next() != b"{":
        nested = text.next() == b"["
        kind = "list" if nested else type(text.value()).__name__
        if nested:
            text.skip()
        raise UsageError(f"{path}: holds a {kind}, expected an object with {', '.join(KEYS)}")
    content: dict[str, Any] = {}
    for key in text.items():
        if key == "user_data" and text.next() == b"{":
            content[key] = {name: _data(f"{path}: user {_short(name)}", text, length) for name in text.items()}
        elif key in KEYS:
            content[key] = text.value()
        else:
            text.skip()
    if text.next():
        raise ValueError(f"it goes on after its end at byte {text.place}")
    return content


def _data(where: str, text: Json, length: int) -> dict[str, Any]:
    """Return a user's ``x``, float32 ``[n, length]``, and ``y``, a list as it is; nothing where they are no lists."""
    data: dict[str, Any] = {}
    if text.next() != b"{":
        text.skip()
        return data
    for key in text.items():
        if key not in ("x", "y") or text.next() != b"[":
            text.skip()
        elif key == "y":
            data[key] = text.value()
        else:
            numbers = bytearray()
            for number, _ in enumerate(text.items(b"[]")):
                numbers += _row(f"{where}: sample {number}", text.value(), length).tobytes()
            data[key] = np.frombuffer(numbers, dtype=np.float32).reshape(-1, length)
    return data


def _short(value: Any) -> str:
    """Return what a file says such that it fits into a line."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:40]


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
