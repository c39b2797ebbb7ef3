"""FEMNIST (Caldas et al. 2018): EMNIST's images by their writers, from LEAF's JSON files.

These are read row by row: as lists of Python they take eight times the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.data.base import Features, Header, Scale, Source, check_clients, check_order
from hpcfl.data.formats.files import folder, reading
from hpcfl.data.partition import Parts, follow, iid, keep, shards
from hpcfl.data.pooled import Pool, PooledFederation

CLASSES, SIDE = 62, 28
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


Users = list[tuple[User, User]]
"""Training and test samples of each user."""


class Femnist(Source):
    """FEMNIST, LEAF's JSON files: ``train/`` and ``test/`` in ``femnist/`` or ``femnist/data/`` of the data folder.

    Each client is one user, the first ones that hold enough classes, unless `merge` deals their samples anew: a
    writer's own are too few for SRPFL's 150 samples of 3 classes.
    """

    name: Literal["femnist"] = "femnist"
    first_classes: int = Field(CLASSES, ge=1, le=CLASSES)
    """Use only the classes below this number (SRPFL: 10)."""
    merge: bool = False
    """Clients draw from all users' samples instead of being one user each."""
    classes: int | None = Field(None, ge=1)
    """Distinct classes per client, drawn at random. By default all that are held."""
    samples: int | None = Field(None, ge=1)
    """Training samples that a client keeps. By default all."""
    imbalance: int = Field(0, ge=0)
    """A client keeps up to so many samples more, drawn uniformly."""
    scale: Scale = "unit"
    """Range of the pixels. ``unit``: [0, 1]. ``centred``: [-1, 1]. ``mnist``: (``unit`` − 0.1307) / 0.3081."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        users = self._chosen(clients, data_dir)
        train, test = (sum(len(user.labels) for user in part) for part in zip(*users))
        return Header(None, train, test, ((1, SIDE, SIDE),), self.first_classes)

    def number_of_clients(self, data_dir: Path | None) -> int | None:
        return None if self.merge else len(self._users(data_dir))

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> PooledFederation:
        """Return the clients; `seed` decides about the classes and samples that they keep."""
        users = self._chosen(clients, data_dir)
        (x, y), (test_x, test_y) = (map(np.concatenate, zip(*part)) for part in zip(*users))
        shape = (-1, 1, SIDE, SIDE)
        pool = Pool(x.reshape(shape), y, test_x.reshape(shape), test_y, 1, self.first_classes)
        labels, tests = pool.kinds
        if self.merge:
            rng = keyed(seed, "partition")
            train = iid(labels, clients, rng) if self.classes is None else shards(labels, clients, self.classes, rng)
            test = follow(tests, [labels[part] for part in train], keyed(seed, "partition", step=1))
        else:
            sizes = ([len(user.labels) for user in part] for part in zip(*users))
            train, test = (np.split(np.arange(sum(each)), np.cumsum(each)[:-1]) for each in sizes)
            for i in range(len(users) if self.classes is not None else 0):
                rng = keyed(seed, "classes", client=i)
                kept = rng.choice(np.unique(labels[train[i]]), self.classes, replace=False)
                train[i], test[i] = train[i][np.isin(labels[train[i]], kept)], test[i][np.isin(tests[test[i]], kept)]
        return PooledFederation.of(pool, self._limited(labels, train, seed), test, self.scale)

    def _chosen(self, clients: int, data_dir: Path | None) -> Users:
        """Return the users whose samples are used."""
        check_clients(clients)
        users = self._users(data_dir)
        if self.merge:
            there, what = sum(len(train.labels) for train, _ in users), "training samples"
        else:
            there, needed = len(users), self.classes or 1
            what = f"users with training samples of {needed} of the first {self.first_classes} classes"
        if clients > there:
            raise refusal("clients", f"at most {there}, the {what}", clients, there)
        return users if self.merge else users[:clients]

    def _users(self, data_dir: Path | None) -> Users:
        """Return all users that have training samples of as many of the first classes as needed; to be merged, all."""
        check_order("data.classes", self.classes or 1, "data.first_classes", self.first_classes)
        if self.imbalance and self.samples is None:
            raise refusal("data.samples", f"the least that a client keeps, for data.imbalance = {self.imbalance}", None)
        home = folder(self.name, data_dir, "femnist/data", "femnist")
        train, test = (read_leaf(home / part, SIDE * SIDE, CLASSES) for part in ("train", "test"))
        if not self.merge and train.keys().isdisjoint(test):
            raise UsageError(f"{home / 'test'}: none of its users is in train/; expected LEAF's split by sample")
        nobody = User(np.zeros((0, SIDE * SIDE), dtype=np.float32), np.zeros(0, dtype=np.int64))
        names = train | test if self.merge else train  # who wrote a sample to be dealt anew does not matter
        pairs = [(self._first(train.get(name, nobody)), self._first(test.get(name, nobody))) for name in names]
        return [pair for pair in pairs if self.merge or len(np.unique(pair[0].labels)) >= (self.classes or 1)]

    def _first(self, user: User) -> User:
        kept = user.labels < self.first_classes
        return user if kept.all() else User(user.features[kept], user.labels[kept])

    def _limited(self, labels: Ints, parts: Parts, seed: int) -> Parts:
        """Cut each part down to the samples that a client keeps."""
        if self.samples is None:
            return parts
        kept = []
        for i, part in enumerate(parts):
            rng = keyed(seed, "samples", client=i)
            count = self.samples + int(rng.integers(self.imbalance + 1))
            if count > len(part):
                least, key = min(map(len, parts)), "data.samples + data.imbalance"
                text = f"at most {least} training samples{'' if self.merge else ' or data.merge = true'}"
                raise refusal(key, f"{text}, since client {i} has {len(part)}", self.samples + self.imbalance, least)
            kept.append(keep(labels, part, count, rng))
        return kept


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


def read_leaf(folder: Path, length: int, classes: int) -> dict[str, User]:
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
