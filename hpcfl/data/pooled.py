"""Sources that are one pool of samples, cut into clients by a partition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import check_within, refusal, toml
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints, Shape
from hpcfl.data import base, partition
from hpcfl.data.base import ClientData, Federation, Header, Pixels, Samples, Scale, Served, check_clients, lengths
from hpcfl.data.formats.files import found
from hpcfl.data.formats.hdf5_file import number_of_clients
from hpcfl.data.partition import Parts, Split

BLACK: dict[Scale | None, float] = {"unit": 0.0, "centred": -1.0, "mnist": -0.1307 / 0.3081, None: 0.0}


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples: pixels uint8 (or float32) ``[n, *shape]`` of value ``0 .. peak``, and labels ``[n]``."""

    train_pixels: Pixels
    train_labels: base.Labels
    test_pixels: Pixels
    test_labels: base.Labels
    peak: int  # 0: features of any range, which no scale changes
    classes: int
    pieces: tuple[base.Piece, ...] = ()

    @property
    def header(self) -> Header:
        x, y = self.train_pixels, self.train_labels
        header = Header(None, len(y), len(self.test_labels), (x.shape[1:],), self.classes, y.dtype.kind == "f")
        return replace(header, label_shape=y.shape[1:], tokens=x.dtype == np.int64, pieces=self.pieces)

    @property
    def kinds(self) -> tuple[Ints, Ints]:
        """Classes of the training and of the test samples; all are of one kind where a label is not one class."""
        both = self.train_labels, self.test_labels
        single = self.train_labels.dtype.kind != "f" and self.train_labels.ndim == 1
        train, test = ((labels if single else np.zeros(len(labels))).astype(np.int64) for labels in both)
        return train, test


@dataclass(frozen=True, eq=False)
class PooledFederation(Federation):
    """Clients, and the server's own samples, as index lists into a pool, which stays in its own dtype.

    `rows` are the places of the pool's training samples in the source's whole pool; None: there is no such pool.
    """

    pool: Pool
    train_parts: Parts
    test_parts: Parts
    scale: Scale | None
    server_part: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64), kw_only=True)
    rows: Ints | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, pool: Pool, train: Parts, test: Parts, scale: Scale | None, **more: Any) -> PooledFederation:
        """Return the federation of some clients' parts; `more` are fields that have a default."""
        shapes = [pool.train_pixels.shape[1:]] * len(train)
        sizes = lengths(train), lengths(test)
        return cls(pool.classes, *sizes, shapes, pool, train, test, scale, pieces=pool.pieces, **more)

    def client(self, i: int) -> ClientData:
        return ClientData(*self._train(self.train_parts[i]), *self._test(self.test_parts[i]))

    def server_test(self) -> Samples:
        return self._test(slice(None))

    def server_train(self) -> Samples | None:
        return self._train(self.server_part) if len(self.server_part) else None

    def loaded_samples(self) -> Iterator[tuple[str, Pixels, base.Labels, Shape]]:
        yield "training samples", self.pool.train_pixels, self.pool.train_labels, self.shapes[0]
        yield "test samples", self.pool.test_pixels, self.pool.test_labels, self.shapes[0]

    def save_split(self, path: Path | str) -> None:
        if self.rows is None:
            super().save_split(path)
        else:
            train = [self.rows[part] for part in self.train_parts]
            partition.write_split(Path(path), Split(train, self.test_parts, self.rows[self.server_part]))

    def _train(self, part: Ints) -> Samples:
        return base.scaled(self.pool.train_pixels[part], self.pool.peak, self.scale), self.pool.train_labels[part]

    def _test(self, part: Ints | slice) -> Samples:
        return base.scaled(self.pool.test_pixels[part], self.pool.peak, self.scale), self.pool.test_labels[part]


CUT = ("classes", "label_groups", "alpha", "train_samples", "sizes", "spread", "server", "deal")
"""Keys by which samples are chosen, beside the partition."""


class Pooled(Served):
    """Keys of all sources that are cut from a pool.

    The client's test part follows the law of its training part: equal shares (``iid``), the same classes
    (``shards``), the same proportions (``dirichlet``). It may be empty where there are fewer test samples
    than clients; the global test set is the whole test pool. The server's own samples, if it has any, are drawn from
    the pool before it is partitioned. A file of a split says all of this itself.
    """

    paths: ClassVar[tuple[str, ...]] = ("partition_file",)
    only_for: ClassVar[Mapping[str, tuple[str, str]]] = {
        "partition_file": ("partition", "file"),
        "classes": ("partition", "shards"),
        "label_groups": ("partition", "shards"),
        "alpha": ("partition", "dirichlet"),
    }

    partition: Literal["iid", "shards", "dirichlet", "file"] = "iid"
    """How clients share the pool. ``iid``: without regard to classes. ``shards``: each has `classes` of them.
    ``dirichlet``: in proportions of its own, drawn by `alpha`. ``file``: as `partition_file` says."""
    partition_file: str | None = Field(None, min_length=1)
    """HDF5 file in the data folder or the working directory (``file``, which needs it): ``clients/<id>/train`` and
    ``clients/<id>/test`` hold each client's places in the training and the test pool, from 0."""
    classes: int | None = Field(None, ge=1)
    """Distinct classes per client (``shards``, which needs it)."""
    label_groups: int = Field(1, ge=1)
    """Cut classes and clients into so many groups; a group's clients hold only its classes (``shards``)."""
    alpha: float = Field(0.5, gt=0)
    """Concentration of the class proportions (``dirichlet`` only)."""
    train_samples: int | None = Field(None, ge=1)
    """Use only so many training samples of the pool. By default all."""
    sizes: Literal["equal", "log-normal", "uniform"] = "equal"
    """Law of the shares of their training parts that clients keep; the largest is all."""
    spread: float | None = Field(None, gt=0)
    """Standard deviation of the log of the shares (log-normal), or 1 - the least share (uniform: at most 1)."""
    scale: Scale | None = "unit"
    """Range of the pixels. ``unit``: [0, 1]. ``centred``: [-1, 1]. ``mnist``: (``unit`` − 0.1307) / 0.3081."""
    augment: bool = False
    """Training images are cropped (black padding of 4) and flipped at random."""

    @abstractmethod
    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the whole pool; `seed` matters where the source has no training and test part of its own."""

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the whole pool's header; sources override this that know it without loading anything."""
        return self.load(0, data_dir).header

    def check(self, clients: int, data_dir: Path | None) -> Header:
        header = self.pool_header(data_dir)
        if self.partition != "file":
            return self._checked(clients, header)
        split = self._split(clients, header, data_dir)
        train, test = (int(lengths(parts).sum()) for parts in (split.train, split.test))
        return replace(header, train=train, test=test, server=len(split.server))

    def number_of_clients(self, data_dir: Path | None) -> int | None:
        """Return how many are in the file of a split; of a pool any number can be cut."""
        if self.partition_file is None:
            return None
        return number_of_clients(found("data.partition_file", self.partition_file, data_dir))

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        return self.cut(clients, seed, data_dir)

    def cut(self, clients: int, seed: int, data_dir: Path | None, place: int = 0) -> PooledFederation:
        """Federate one of several pools of the same seed: those of different `place` are cut independently."""
        pool = self.load(seed, data_dir)
        rows = np.arange(len(pool.train_labels))
        if self.partition == "file":
            split = self._split(clients, pool.header, data_dir)
        else:
            header = self._checked(clients, pool.header)
            if (used := header.train + header.server) < len(rows):
                rows = np.sort(keyed(seed, "subset").permutation(len(rows))[:used])
                pool = replace(pool, train_pixels=pool.train_pixels[rows], train_labels=pool.train_labels[rows])
            split = self._cut(*pool.kinds, clients, seed, place)
        more = {"server_part": split.server, "rows": rows, "augment": BLACK[self.scale] if self.augment else None}
        return PooledFederation.of(pool, split.train, split.test, self.scale, **more)

    def _split(self, clients: int, header: Header, data_dir: Path | None) -> Split:
        """Return the split in the file, after checking that no other key says how to split."""
        if self.partition_file is None:
            raise refusal("data.partition_file", "an HDF5 file, with data.partition = 'file'", None)
        only_defaults(self, CUT, "with data.partition = 'file', which says who holds what")
        path = found("data.partition_file", self.partition_file, data_dir)
        return partition.read_split(path, clients, (header.train, header.test))

    def _cut(self, kinds: Ints, tests: Ints, clients: int, seed: int, place: int) -> Split:
        """Return who holds which of the training and the test samples with these labels."""
        reserved = partition.turns(kinds, self.server, keyed(seed, "server samples", place))
        rest = np.delete(np.arange(len(kinds)), reserved)
        labels, rng, test_rng = kinds[rest], keyed(seed, "partition", place), keyed(seed, "partition", place, step=1)
        if self.partition == "iid":
            train, test = partition.iid(labels, clients, rng), partition.iid(tests, clients, test_rng)
        else:
            if self.partition == "shards":
                train = partition.grouped(labels, clients, self.classes or 1, self.label_groups, rng)
            else:
                train = partition.dirichlet(labels, clients, self.alpha, rng)
            test = partition.follow(tests, [labels[part] for part in train], test_rng)
        if self.sizes != "equal":
            train = partition.thin(labels, train, self.sizes, self.spread or 0.0, keyed(seed, "sizes", place))
        train = [rest[part] for part in train]
        if self.deal:
            train = [np.sort(np.append(part, reserved[i::clients])) for i, part in enumerate(train)]
        return Split(train, test, reserved[:0] if self.deal else reserved)

    def _checked(self, clients: int, header: Header) -> Header:
        """Return the header of what is used of a pool, after checking that it can be partitioned."""
        if (header.targets or header.label_shape) and self.partition != "iid":
            why = "labels are real numbers and no classes" if header.targets else "a sample has several labels"
            text = f"'iid' or 'file', since {why}"
            raise refusal("data.partition", text, self.partition, "data.partition = 'iid'")
        only_defaults(self, ["partition_file"], f"with data.partition = '{self.partition}'", "data.partition = 'file'")
        used = header.train if self.train_samples is None else self.train_samples
        check_within("data.train_samples", used, 0, header.train)
        self.check_server(used)
        check_clients(clients)
        if (self.sizes == "equal") != (self.spread is None):
            expected = "nothing" if self.sizes == "equal" else "a number above 0"
            raise refusal("data.spread", f"{expected} with data.sizes = '{self.sizes}'", self.spread)
        if self.sizes == "uniform":
            check_within("data.spread", self.spread or 0.0, 0.0, 1.0, ", the least share being 1 - spread")
        left = used - self.server  # dealt out or not, the server's samples are not partitioned
        check_within("clients", clients, 1, left, ", one per training sample")
        if self.partition == "shards":
            groups, limit = self.label_groups, min(header.classes, clients)
            check_within("data.label_groups", groups, 1, limit, f", for {header.classes} classes and {clients} clients")
            most = min(header.classes // groups, left // clients)
            if not 1 <= (self.classes or 0) <= most:
                there = f"data.label_groups = {groups}, clients = {clients} and {left} training samples"
                text = f"1 to {most} per client, for {header.classes} classes, {there}"
                raise refusal("data.classes", text, self.classes, self.classes and most)
        else:
            why = f"with data.partition = '{self.partition}'"
            only_defaults(self, ("label_groups", "classes"), why, "data.partition = 'shards'")
        return replace(header, train=used - self.keeps, server=self.keeps)


def only_defaults(section: Served, keys: Iterable[str], why: str, nearest: str | None = None) -> None:
    """Refuse the first of a section's keys that is not as by default."""
    for key in keys:
        default, value = type(section).model_fields[key].default, getattr(section, key)
        if value != default:
            raise refusal(f"data.{key}", f"{toml(default)} {why}", value, nearest)
