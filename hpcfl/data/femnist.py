"""FEMNIST (Caldas et al. 2018): EMNIST's images by their writers, from LEAF's JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.data.base import Header, Scale, Source, check_clients, check_order
from hpcfl.data.formats import leaf
from hpcfl.data.formats.files import folder
from hpcfl.data.formats.leaf import User
from hpcfl.data.partition import Parts, follow, iid, keep, shards
from hpcfl.data.pooled import Pool, PooledFederation

CLASSES, SIDE = 62, 28
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
        train, test = (leaf.read(home / part, SIDE * SIDE, CLASSES) for part in ("train", "test"))
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
