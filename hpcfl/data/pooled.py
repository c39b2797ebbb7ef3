"""Sources that are one pool of images, cut into clients by a partition."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.data.base import ClientData, Features, Federation, Header, Integers
from hpcfl.data.partition import Parts, dirichlet, follow, grouped, iid, thin
from hpcfl.data.pixels import BLACK, Pixels, Scale, scaled
from hpcfl.data.server import Served, dealt, turns


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples: pixels uint8 (or float32) ``[n, *shape]`` of value ``0 .. peak``, labels int64 ``[n]``."""

    train_pixels: Pixels
    train_labels: Integers
    test_pixels: Pixels
    test_labels: Integers
    peak: int


@dataclass(frozen=True, eq=False)
class PooledFederation(Federation):
    """Clients, and the server's own samples, as index lists into a pool, which stays in its own dtype."""

    pool: Pool
    train_parts: list[Integers]
    test_parts: list[Integers]
    scale: Scale
    server_part: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64), kw_only=True)

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`."""
        train, test, pool = self.train_parts[i], self.test_parts[i], self.pool
        return ClientData(
            self._scaled(pool.train_pixels[train]),
            pool.train_labels[train],
            self._scaled(pool.test_pixels[test]),
            pool.test_labels[test],
        )

    def server_test(self) -> tuple[Features, Integers]:
        """Return the whole test pool."""
        return self._scaled(self.pool.test_pixels), self.pool.test_labels

    def server_train(self) -> tuple[Features, Integers] | None:
        """Return the server's own samples, in the order in which classes take turns; None where it has none."""
        own, pool = self.server_part, self.pool
        return (self._scaled(pool.train_pixels[own]), pool.train_labels[own]) if len(own) else None

    def _scaled(self, pixels: Pixels) -> Features:
        return scaled(pixels, self.pool.peak, self.scale)


class Pooled(Served):
    """Keys of all sources that are cut from a pool.

    The client's test part follows the law of its training part: equal shares (``iid``), the same classes
    (``shards``), the same proportions (``dirichlet``). It may be empty where there are fewer test samples
    than clients; the global test set is the whole test pool. The server's own samples, if it has any, are drawn from
    the pool before it is partitioned.
    """

    partition: Literal["iid", "shards", "dirichlet"] = Field("iid", description="how clients share the pool")
    classes: int | None = Field(None, ge=1, description="distinct classes per client (shards)")
    label_groups: int = Field(
        1,
        ge=1,
        description="cut classes and clients into so many groups; a group's clients hold only its classes (shards)",
    )
    alpha: float = Field(0.5, gt=0, description="concentration of the class proportions (dirichlet)")
    train_samples: int | None = Field(None, ge=1, description="use only so many training samples of the pool")
    sizes: Literal["equal", "log-normal", "uniform"] = Field(
        "equal", description="law of the shares of their training parts that clients keep; the largest keeps all"
    )
    spread: float | None = Field(
        None, gt=0, description="deviation of the log of the shares (log-normal), or least share = 1 - spread (uniform)"
    )
    scale: Scale = Field("unit", description="pixels to [0, 1] (unit) or [-1, 1] (centred)")
    augment: bool = Field(False, description="training images are cropped (black padding of 4) and flipped at random")

    @abstractmethod
    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the header of the whole pool."""

    @abstractmethod
    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the whole pool; `seed` matters where the source has no training and test part of its own."""

    def verify(self, data_dir: Path | None) -> None:
        """Raise UsageError where the files hold what their headers do not show."""

    def header(self, data_dir: Path | None) -> Header:
        """Return the header, with the training samples that are used."""
        header = self.pool_header(data_dir)
        used = header.train if self.train_samples is None else self.train_samples
        if used > header.train:
            raise UsageError(f"data.train_samples = {used}, but there are {header.train}; did you mean {header.train}?")
        self.check_server(used)
        return replace(header, train=used - self.keeps, server=self.keeps)

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header after reading all files and checking that the partition exists."""
        header = super().check(clients, data_dir)
        self._check_partition(clients, header)
        self.verify(data_dir)
        return header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> PooledFederation:
        """Return the pool cut into `clients` clients, less what the server holds."""
        return self.cut(clients, seed, data_dir)

    def cut(self, clients: int, seed: int, data_dir: Path | None, place: int = 0) -> PooledFederation:
        """Return the pool cut into `clients` clients, where it is one of several pools that are cut by the same seed.

        Parameters
        ----------
        clients, seed, data_dir
            As of `federate`.
        place : int
            Place of the pool among the others: they are cut independently of each other.
        """
        header = super().check(clients, data_dir)
        self._check_partition(clients, header)
        pool = self._subset(header.train + header.server, self.load(seed, data_dir), seed)
        own = turns(pool.train_labels, self.server, keyed(seed, "server samples", place))
        train, test = self._parts(pool, np.delete(np.arange(len(pool.train_labels)), own), clients, seed, place)
        if self.deal:
            train, own = dealt(train, own), own[:0]
        return PooledFederation(
            classes=header.classes,
            train_sizes=np.array([len(part) for part in train], dtype=np.int64),
            test_sizes=np.array([len(part) for part in test], dtype=np.int64),
            shapes=list(header.shapes) * clients,
            pool=pool,
            train_parts=train,
            test_parts=test,
            scale=self.scale,
            augment=BLACK[self.scale] if self.augment else None,
            server_part=own,
        )

    def _subset(self, used: int, pool: Pool, seed: int) -> Pool:
        if used == len(pool.train_labels):
            return pool
        kept = np.sort(keyed(seed, "subset").permutation(len(pool.train_labels))[:used])
        return replace(pool, train_pixels=pool.train_pixels[kept], train_labels=pool.train_labels[kept])

    def _parts(self, pool: Pool, rest: Integers, clients: int, seed: int, place: int) -> tuple[Parts, Parts]:
        """Return the clients' training samples, out of `rest`, and their test samples."""
        labels = pool.train_labels[rest]
        train, test = self._cut(labels, pool.test_labels, clients, seed, place)
        if self.sizes != "equal":
            train = thin(labels, train, self.sizes, self.spread or 0.0, keyed(seed, "sizes", place))
        return [rest[part] for part in train], test

    def _cut(self, labels: Integers, tests: Integers, clients: int, seed: int, place: int) -> tuple[Parts, Parts]:
        rng, test_rng = keyed(seed, "partition", place), keyed(seed, "partition", place, step=1)
        if self.partition == "iid":
            return iid(labels, clients, rng), iid(tests, clients, test_rng)
        if self.partition == "shards":
            train = grouped(labels, clients, self.classes or 1, self.label_groups, rng)
        else:
            train = dirichlet(labels, clients, self.alpha, rng)
        return train, follow(tests, [labels[part] for part in train], test_rng)

    def _check_sizes(self) -> None:
        if self.sizes == "equal" and self.spread is not None:
            raise UsageError(
                f"data.spread = {self.spread} has no meaning with data.sizes = 'equal': "
                "remove it, or set data.sizes = 'log-normal' or 'uniform'"
            )
        if self.sizes != "equal" and self.spread is None:
            raise UsageError(f"data.sizes = '{self.sizes}' needs data.spread, a number above 0")
        if self.sizes == "uniform" and (self.spread or 0) > 1:
            raise UsageError(
                f"data.spread = {self.spread}: the least share is 1 - spread, at least 0; did you mean 1.0?"
            )

    def _check_partition(self, clients: int, header: Header) -> None:
        self._check_sizes()
        # dealt out or not, the server's samples are not partitioned
        header = replace(header, train=header.train + header.server - self.server)
        if clients > header.train:
            raise UsageError(
                f"clients = {clients}, but there are {header.train} training samples; did you mean {header.train}?"
            )
        if self.partition == "shards":
            self._check_shards(clients, header)
        elif self.label_groups > 1:
            raise UsageError(
                f"data.label_groups = {self.label_groups} has no meaning with data.partition = '{self.partition}': "
                "remove it, or set data.partition = 'shards'"
            )
        elif self.classes is not None:
            raise UsageError(
                f"data.classes = {self.classes} has no meaning with data.partition = '{self.partition}': "
                "remove it, or set data.partition = 'shards'"
            )

    def _check_shards(self, clients: int, header: Header) -> None:
        limit = min(header.classes, clients)
        if self.label_groups > limit:
            raise UsageError(
                f"data.label_groups = {self.label_groups}: there are {header.classes} classes and {clients} clients "
                f"to be grouped; did you mean {limit}?"
            )
        most = min(header.classes // self.label_groups, header.train // clients)
        if self.classes is None:
            raise UsageError(f"data.partition = 'shards' needs data.classes (per client), 1 to {most}")
        there = header.classes // self.label_groups
        if self.classes > there:
            where = "there are" if self.label_groups == 1 else f"each of {self.label_groups} label groups has at least"
            raise UsageError(f"data.classes = {self.classes}: {where} {there}; did you mean {most}?")
        if self.classes > most:
            raise UsageError(
                f"data.classes = {self.classes}: clients = {clients} have {header.train} training samples "
                f"between them, too few for one of each class; did you mean {most}?"
            )
