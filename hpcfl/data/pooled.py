"""Sources that are one pool of images, cut into clients by a partition."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import refusal, toml
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.data import partition
from hpcfl.data.base import (
    ClientData,
    Features,
    Federation,
    Header,
    Pixels,
    Scale,
    Served,
    check_clients,
    lengths,
    scaled,
)
from hpcfl.data.partition import Parts

BLACK: dict[Scale, float] = {"unit": 0.0, "centred": -1.0}


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples: pixels uint8 (or float32) ``[n, *shape]`` of value ``0 .. peak``, labels int64 ``[n]``."""

    train_pixels: Pixels
    train_labels: Ints
    test_pixels: Pixels
    test_labels: Ints
    peak: int
    classes: int

    @property
    def header(self) -> Header:
        shapes = (self.train_pixels.shape[1:],)
        return Header(None, len(self.train_labels), len(self.test_labels), shapes, self.classes)


@dataclass(frozen=True, eq=False)
class PooledFederation(Federation):
    """Clients, and the server's own samples, as index lists into a pool, which stays in its own dtype."""

    pool: Pool
    train_parts: Parts
    test_parts: Parts
    scale: Scale
    server_part: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64), kw_only=True)

    @classmethod
    def of(cls, pool: Pool, train: Parts, test: Parts, scale: Scale, augment: bool = False) -> PooledFederation:
        padding, shapes = BLACK[scale] if augment else None, [pool.train_pixels.shape[1:]] * len(train)
        return cls(pool.classes, lengths(train), lengths(test), shapes, pool, train, test, scale, augment=padding)

    def client(self, i: int) -> ClientData:
        return ClientData(*self._train(self.train_parts[i]), *self._test(self.test_parts[i]))

    def server_test(self) -> tuple[Features, Ints]:
        return self._test(slice(None))

    def server_train(self) -> tuple[Features, Ints] | None:
        return self._train(self.server_part) if len(self.server_part) else None

    def _train(self, part: Ints) -> tuple[Features, Ints]:
        return scaled(self.pool.train_pixels[part], self.pool.peak, self.scale), self.pool.train_labels[part]

    def _test(self, part: Ints | slice) -> tuple[Features, Ints]:
        return scaled(self.pool.test_pixels[part], self.pool.peak, self.scale), self.pool.test_labels[part]


class Pooled(Served):
    """Keys of all sources that are cut from a pool.

    The client's test part follows the law of its training part: equal shares (``iid``), the same classes
    (``shards``), the same proportions (``dirichlet``). It may be empty where there are fewer test samples
    than clients; the global test set is the whole test pool. The server's own samples, if it has any, are drawn from
    the pool before it is partitioned.
    """

    partition: Literal["iid", "shards", "dirichlet"] = "iid"
    """How clients share the pool. ``iid``: without regard to classes. ``shards``: each has `classes` distinct ones.
    ``dirichlet``: in proportions of its own, drawn by `alpha`."""
    classes: int | None = Field(None, ge=1)
    """Distinct classes per client (``shards`` only, which needs it)."""
    label_groups: int = Field(1, ge=1)
    """Cut classes and clients into so many groups; a group's clients hold only its classes (``shards`` only)."""
    alpha: float = Field(0.5, gt=0)
    """Concentration of the class proportions (``dirichlet`` only)."""
    train_samples: int | None = Field(None, ge=1)
    """Use only so many training samples of the pool. By default all."""
    sizes: Literal["equal", "log-normal", "uniform"] = "equal"
    """Law of the shares of their training parts that clients keep; the largest share is all."""
    spread: float | None = Field(None, gt=0)
    """Standard deviation of the log of the shares (log-normal), or 1 - the least share (uniform: at most 1)."""
    scale: Scale = "unit"
    """Range of the pixels. ``unit``: [0, 1]. ``centred``: [-1, 1]."""
    augment: bool = False
    """Training images are cropped (black padding of 4) and flipped at random."""

    @abstractmethod
    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the whole pool; `seed` matters where the source has no training and test part of its own."""

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the whole pool's header; sources override this that know it without loading anything."""
        return self.load(0, data_dir).header

    def check(self, clients: int, data_dir: Path | None) -> Header:
        return self._checked(clients, self.pool_header(data_dir))

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> PooledFederation:
        return self.cut(clients, seed, data_dir)

    def cut(self, clients: int, seed: int, data_dir: Path | None, place: int = 0) -> PooledFederation:
        """Federate one of several pools of the same seed: those of different `place` are cut independently."""
        pool = self.load(seed, data_dir)
        header = self._checked(clients, pool.header)
        pool = self._subset(header.train + header.server, pool, seed)
        reserved = partition.turns(pool.train_labels, self.server, keyed(seed, "server samples", place))
        rest = np.delete(np.arange(len(pool.train_labels)), reserved)
        train, test = self._parts(pool.train_labels[rest], pool.test_labels, clients, seed, place)
        train = [rest[part] for part in train]
        if self.deal:
            train = [np.sort(np.append(part, reserved[i::clients])) for i, part in enumerate(train)]
            reserved = reserved[:0]
        return replace(PooledFederation.of(pool, train, test, self.scale, self.augment), server_part=reserved)

    def _subset(self, used: int, pool: Pool, seed: int) -> Pool:
        if used == len(pool.train_labels):
            return pool
        kept = np.sort(keyed(seed, "subset").permutation(len(pool.train_labels))[:used])
        return replace(pool, train_pixels=pool.train_pixels[kept], train_labels=pool.train_labels[kept])

    def _parts(self, labels: Ints, tests: Ints, clients: int, seed: int, place: int) -> tuple[Parts, Parts]:
        """Return the clients' training and test parts of samples with these labels."""
        rng, test_rng = keyed(seed, "partition", place), keyed(seed, "partition", place, step=1)
        if self.partition == "iid":
            train = partition.iid(labels, clients, rng)
        elif self.partition == "shards":
            train = partition.grouped(labels, clients, self.classes or 1, self.label_groups, rng)
        else:
            train = partition.dirichlet(labels, clients, self.alpha, rng)
        if self.partition == "iid":
            test = partition.iid(tests, clients, test_rng)
        else:
            test = partition.follow(tests, [labels[part] for part in train], test_rng)
        if self.sizes != "equal":
            train = partition.thin(labels, train, self.sizes, self.spread or 0.0, keyed(seed, "sizes", place))
        return train, test

    def _checked(self, clients: int, header: Header) -> Header:
        """Return the header of what is used of a pool, after checking that it can be partitioned."""
        used = header.train if self.train_samples is None else self.train_samples
        if used > header.train:
            raise refusal("data.train_samples", f"at most {header.train}", used, header.train)
        self.check_server(used)
        check_clients(clients)
        if (self.sizes == "equal") != (self.spread is None):
            expected = "nothing" if self.sizes == "equal" else "a number above 0"
            raise refusal("data.spread", f"{expected} with data.sizes = '{self.sizes}'", self.spread)
        if self.sizes == "uniform" and (self.spread or 0) > 1:
            raise refusal("data.spread", "at most 1, the least share being 1 - spread", self.spread, 1.0)
        left = used - self.server  # dealt out or not, the server's samples are not partitioned
        if clients > left:
            raise refusal("clients", f"at most {left}, one per training sample", clients, left)
        if self.partition == "shards":
            self._check_shards(clients, left, header.classes)
            return replace(header, train=used - self.keeps, server=self.keeps)
        for key in ("label_groups", "classes"):
            default, value = Pooled.model_fields[key].default, getattr(self, key)
            if value != default:
                text = f"{toml(default)} with data.partition = '{self.partition}'"
                raise refusal(f"data.{key}", text, value, "data.partition = 'shards'")
        return replace(header, train=used - self.keeps, server=self.keeps)

    def _check_shards(self, clients: int, samples: int, classes: int) -> None:
        groups, limit = self.label_groups, min(classes, clients)
        if groups > limit:
            text = f"at most {limit}, for {classes} classes and {clients} clients"
            raise refusal("data.label_groups", text, groups, limit)
        most = min(classes // groups, samples // clients)
        if not 1 <= (self.classes or 0) <= most:
            there = (
                f"{classes} classes, data.label_groups = {groups}, clients = {clients} and {samples} training samples"
            )
            raise refusal("data.classes", f"1 to {most} per client, for {there}", self.classes, self.classes and most)
