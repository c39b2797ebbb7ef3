"""FEMNIST (Caldas et al. 2018): EMNIST's images by their writers, from LEAF's JSON files.

Rows of pixels are arrays as soon as they are read: as lists of Python they take eight times the memory.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, check_within, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.data.base import Features, Header, Scale, Source, check_clients, check_order
from hpcfl.data.formats.files import folder, reading
from hpcfl.data.partition import Parts, follow, iid, keep, shards
from hpcfl.data.pooled import Pool, PooledFederation

CLASSES, SIDE = 62, 28
KEYS = {"users": list, "num_samples": list, "user_data": dict}
VALUE = 4 << 20
"""Bytes of text that a list of numbers may have, such as the labels of a user."""
TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\[[^"\[\]{}]*\]', re.DOTALL)
"""A string, or a list of neither strings nor lists nor objects."""


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
        check_within("clients", clients, 1, there, f", the {what}")
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
        with reading(path, "JSON", ValueError, RecursionError, IndexError):
            content = parsed(path.read_bytes(), length)
        if not isinstance(content, dict):
            raise UsageError(f"{path}: holds a {type(content).__name__}, expected an object with {', '.join(KEYS)}")
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
            data = content["user_data"].pop(name, None)
            x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
            if not isinstance(x, list) or not isinstance(y, list):
                raise UsageError(f"{where}: expected lists 'x' and 'y' in 'user_data'")
            if len(x) != len(y):
                raise UsageError(f"{where}: {len(x)} samples in 'x', but {len(y)} labels in 'y'")
            for i, label in enumerate(y):
                if type(label) is not int or not 0 <= label < classes:
                    expected = f"an integer 0 to {classes - 1}"
                    raise UsageError(f"{where}: label {_short(label)} of sample {i}, expected {expected}")
            rows = [_row(f"{where}: sample {i}", row, length) for i, row in enumerate(x)]
            features = np.array(rows, dtype=np.float32).reshape(-1, length)
            users[name] = User(features, np.array(y, dtype=np.int64))
            if type(size) is not int:
                raise UsageError(f"{where}: num_samples is {_short(size)}, expected an integer")
            if size != len(y):
                raise UsageError(f"{where}: {len(y)} samples, but num_samples says {_short(size)}")
    return users


def parsed(content: bytes, length: int) -> Any:
    """Return what a text in JSON says, lists of so many numbers as float32 arrays; ValueError where it is no JSON.

    These are taken out one by one before all the rest is parsed.
    """
    lists = deque[Any]()

    def taken(found: re.Match[bytes]) -> bytes:
        text = found[0]
        if text.startswith(b'"'):
            return text
        if len(text) > VALUE:
            raise ValueError(f"a value of {len(text)} bytes, expected at most {VALUE}")
        values = json.loads(text)
        real = len(values) == length and {float} <= set(map(type, values)) <= {int, float}  # not labels
        fits = real and min(values) >= 0 and max(values) <= 1  # all else is told of as it is
        lists.append(np.array(values, dtype=np.float32) if fits else values)
        return b"NaN"

    return json.loads(TOKEN.sub(taken, content), parse_constant=lambda _: lists.popleft())


def _short(value: Any) -> str:
    """Return what a file says such that it fits into a line."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)[:40]


def _row(where: str, row: Any, length: int) -> Features:
    size = len(row) if isinstance(row, list | np.ndarray) else 0
    if size != length:
        raise UsageError(f"{where} has {size} values, expected {length}")
    if isinstance(row, list) and (odd := [value for value in row if type(value) not in (int, float)]):
        raise UsageError(f"{where} holds {_short(odd[0])}, expected numbers")
    low, high = (min(row), max(row)) if isinstance(row, list) else (row.min().item(), row.max().item())
    if not (low >= 0 and high <= 1) or np.isnan(values := np.asarray(row, dtype=np.float32)).any():
        raise UsageError(f"{where} has values from {_short(low)} to {_short(high)} or NaN, expected 0 to 1")
    return values
