"""FEMNIST (Caldas et al. 2018): EMNIST's images by their writers, from LEAF's JSON files."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import FailFast, Field, ValidationError

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import VALUE, UsageError, check_within, cut, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.data.base import UNSTATED, Features, Header, Published, Scale, Source, check_clients, check_order
from hpcfl.data.formats.files import folder, reading
from hpcfl.data.partition import Parts, follow, iid, keep, shards
from hpcfl.data.pooled import Pool, PooledFederation

CLASSES, SIDE = 62, 28
M = TypeVar("M", bound=ConfigBase)
Label = Annotated[int, Field(ge=0, lt=CLASSES)]
Pixel = Annotated[float, Field(ge=0, le=1)]
Row = Annotated[list[Pixel], Field(min_length=SIDE * SIDE, max_length=SIDE * SIDE), FailFast()]


class Leaf(ConfigBase, extra="ignore"):
    """What a file holds; a user's data are looked at one by one, so that one error is all that is made of them."""

    users: Annotated[list[str], FailFast()]
    """Names, in the order in which the users come."""
    num_samples: Annotated[list[int], FailFast()]
    """How many samples each of them has."""
    user_data: dict[str, Any]
    """What `LeafUser` describes, by name."""


class LeafUser(ConfigBase, extra="ignore"):
    """One user's samples in a file."""

    x: Annotated[list[Row], FailFast()]
    """Pixels of each sample, from 0 to 1."""
    y: Annotated[list[Label], FailFast()]
    """Label of each sample."""


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
    published = Published(
        tuple(f"femnist/data/{part}/*.json or femnist/{part}/*.json" for part in ("train", "test")),
        (
            "https://leaf.cmu.edu",
            "https://github.com/TalwalkarLab/leaf (data/femnist/preprocess.sh makes the files)",
        ),
        f"{UNSTATED}; the code that makes them: BSD 2-Clause",
    )
    first_classes: int = Field(CLASSES, ge=1, le=CLASSES)
    """Use only the classes below this number (SRPFL: 10). By default all."""
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
        train, test = (read_leaf(home / part) for part in ("train", "test"))
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


def read_leaf(folder: Path) -> dict[str, User]:
    """Return the users of all JSON files of a folder, in order of the files' names and lists.

    A file holds ``users``, ``num_samples`` in the same order, and ``user_data: {user: {"x": [...], "y": [...]}}``.
    UsageError names the file and the user where one is malformed.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError(f"{folder}: has no files *.json")
    users: dict[str, User] = {}
    for path in paths:
        with reading(path, "JSON", ValueError, RecursionError):
            content = json.loads(path.read_bytes())
        leaf = _valid(Leaf, content, str(path))
        if (names := len(leaf.users)) != (sizes := len(leaf.num_samples)):
            raise UsageError(f"{path}: {names} users, but {sizes} entries in 'num_samples'")
        for name, size in zip(leaf.users, leaf.num_samples):
            where = f"{path}: user {cut(repr(name), VALUE)}"
            if name in users:
                raise UsageError(f"{where}: comes a second time")
            found = _valid(LeafUser, leaf.user_data.pop(name, None), where)
            if not len(found.x) == len(found.y) == size:
                counts = f"{len(found.x)} samples in 'x', {len(found.y)} labels in 'y'"
                raise UsageError(f"{where}: {counts}, but num_samples says {cut(str(size), VALUE)}")
            features = np.array(found.x, dtype=np.float32).reshape(-1, SIDE * SIDE)
            users[name] = User(features, np.array(found.y, dtype=np.int64))
    return users


def _valid(model: type[M], content: Any, where: str) -> M:
    """Return what a part of a file says; UsageError tells what is wrong first."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
    place = "".join(f"{part}: " for part in first["loc"])
    raise UsageError(f"{where}: {place}{first['msg']}, got {cut(reprlib.repr(first['input']), VALUE)}")
