"""Any user's own data, in one HDF5 file: per client, or as one pool that is cut like that of any other source.

The file holds ``clients/<id>/{train,test}/{features,labels}`` and, if there is a global test set,
``test/{features,labels}``. A pool has no clients, but ``train/{features,labels}``, and ``test/{features,labels}`` if
there are test samples. Features are finite numbers ``[n, ...]``. Labels ``[n, ...]`` are integers from 0 in the whole
file, or floating-point numbers in the whole file: targets of a regression, or flags of several labels. All of it is in
the file itself: links to other names, external storage and virtual data sets of other files are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import no_meaning, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints, Shape
from hpcfl.data.base import ClientData, Federation, Header, Pixels, Samples, Scale, check_clients, check_largest
from hpcfl.data.formats import hdf5_file
from hpcfl.data.formats.files import found
from hpcfl.data.formats.hdf5_file import PEAK, Reading, Survey
from hpcfl.data.pooled import CUT, Pool, Pooled, only_defaults

VERIFIED = 256 << 20  # bytes of features, as float32, up to which `Hdf5.check` reads them all


@dataclass(frozen=True, eq=False)
class Hdf5Federation(Federation):
    """Clients read from the file when they are asked for.

    UsageError if a feature is not finite, or no pixel, or if the file is no more what it was when it was surveyed.
    """

    path: Path
    contents: Survey
    kept: list[Ints] | None  # which features of each client are kept; None: all
    scale: Reading | None  # what features become

    def client(self, i: int) -> ClientData:
        kept = None if self.kept is None else self.kept[i]
        with hdf5_file.opened(self.path) as file:
            both = self.contents.train[i], self.contents.test[i]
            train, test = (hdf5_file.read(file, part, kept, self.scale) for part in both)
        return ClientData(*train, *test)

    def server_test(self) -> Samples | None:
        if self.contents.server is None:
            return None
        with hdf5_file.opened(self.path) as file:
            return hdf5_file.read(file, self.contents.server, None, self.scale)


class Hdf5(Pooled):
    """One HDF5 file with the samples of every client, whose features may differ in shape, or with a pool to be cut.

    A pool has samples in ``train`` and no ``clients``; keys that say how it is cut are for such a file alone.
    """

    name: Literal["hdf5"] = "hdf5"
    file: str = Field(min_length=1)
    """The file, in the data folder or the working directory."""
    labels: int | None = Field(None, ge=1, le=2**24)
    """Number of classes, counted from 0. By default one more than the largest label, below 2^18 or the number of
    samples."""
    prune: float = Field(0.0, ge=0, lt=1)
    """Up to this share of a client's features, drawn by key, is removed (FLIC: 0.1), none of a pool's."""
    scale: Scale | None = None
    """Range to which pixels of 0 to 255 are brought. ``unit``: [0, 1]. ``centred``: [-1, 1]. ``mnist``:
    (``unit`` − 0.1307) / 0.3081. By default features stay as they are."""
    tokens: bool = False
    """Features are integers from 0, such as numbers of words, for models from outside."""

    @property
    def reading(self) -> Reading | None:
        """What becomes of the features."""
        if self.tokens and self.scale is not None:
            raise no_meaning("data.scale", self.scale, "data.tokens = true")
        return "tokens" if self.tokens else self.scale

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header after reading all labels, and small files to their ends.

        Which features are pruned follows from the seed, which is not known here. Shapes are those of the file; where
        these are equal, but need not stay so, all but the first are given as small as they may become.
        """
        path = found("data.file", self.file, data_dir)
        if hdf5_file.is_pool(path):
            return super().check(clients, data_dir)
        contents = self._survey(path, clients)
        shapes = list(contents.shapes)
        if len(set(shapes)) == 1:
            smallest = (shapes[0][0] - self._most(shapes[0][0]),) if self.prune else shapes[0]
            shapes = shapes[:1] if smallest == shapes[0] else shapes[:1] + [smallest] * (len(shapes) - 1)
        return self._header(path, contents, clients, tuple(shapes))

    def _header(self, path: Path, contents: Survey, clients: int | None, shapes: tuple[Shape, ...]) -> Header:
        """Return the header after reading all features where they are few."""
        ranges = hdf5_file.verify(path, contents, self.reading) if 4 * contents.features <= VERIFIED else ()
        ranges = () if self.prune or clients is None else ranges  # which features are left, the seed decides
        train, test = (sum(part.size for part in parts) for parts in (contents.train, contents.test))
        classes, first = self.labels or contents.classes, contents.parts[0]
        header = Header(clients, train, test, shapes, classes, first.real, ranges=ranges)
        return replace(header, label_shape=first.label_shape, tokens=self.tokens)

    def number_of_clients(self, data_dir: Path | None) -> int | None:
        path = found("data.file", self.file, data_dir)
        return super().number_of_clients(data_dir) if hdf5_file.is_pool(path) else hdf5_file.number_of_clients(path)

    def pool_header(self, data_dir: Path | None) -> Header:
        path, contents = self._survey_pool(data_dir)
        return self._header(path, contents, None, (contents.train[0].shape,))

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the pool; bytes stay bytes, all else is read as features, which are scaled already."""
        path, contents = self._survey_pool(data_dir)
        with hdf5_file.opened(path) as file:
            stored = [hdf5_file.dataset(file, f"{part.group}/features") for part in contents.parts]
            raw = all(features.dtype == np.uint8 for features in stored)
            x: list[Pixels] = [each[()] if raw else hdf5_file.features_of(each, self.reading) for each in stored]
            y = [hdf5_file.labels_of(file, part.group) for part in contents.parts]
        test, tests = (x[1], y[1]) if len(x) > 1 else (x[0][:0], y[0][:0])
        return Pool(x[0], y[0], test, tests, PEAK if raw else 0, self.labels or contents.classes)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        """Return the clients of the file in natural order of their ids; `seed` decides which features are pruned.

        Those of a pool are cut as by any other source.
        """
        path = found("data.file", self.file, data_dir)
        if hdf5_file.is_pool(path):
            return super().federate(clients, seed, data_dir)
        contents = self._survey(path, clients)
        shapes, kept = contents.shapes, list[Ints]()
        for i, (width, *_) in enumerate(shapes if self.prune else ()):
            rng = keyed(seed, "prune", client=i)
            removed = int(rng.integers(self._most(width), endpoint=True))
            kept.append(np.sort(rng.permutation(width)[removed:]))
        both = contents.train, contents.test
        train, test = (np.array([part.size for part in parts], dtype=np.int64) for parts in both)
        shapes, classes = [(len(indices),) for indices in kept] or shapes, self.labels or contents.classes
        names = tuple(part.group.split("/")[1] for part in contents.train)
        names = () if names == tuple(map(str, range(clients))) else names
        return Hdf5Federation(classes, train, test, shapes, path, contents, kept or None, self.reading, names=names)

    def _most(self, width: int) -> int:
        """Return how many of so many features may be pruned, never all."""
        return min(floor(self.prune * width + 1e-9), width - 1)  # 0.29 * 100 is a little less than 29

    def _survey_pool(self, data_dir: Path | None) -> tuple[Path, Survey]:
        """Return the file and what is in it, a pool, after checking it against the keys."""
        path = found("data.file", self.file, data_dir)
        contents = hdf5_file.survey_pool(path)
        only_defaults(self, ["prune"], f"since {path} is a pool, whose clients have features of equal shapes")
        self._check_labels(path, contents)
        if self.augment and len(contents.train[0].shape) != 3:
            text = f"false, since {path} holds {contents.train[0].features} and no images [channels, height, width]"
            raise refusal("data.augment", text, True, False)
        return path, contents

    def _survey(self, path: Path, clients: int) -> Survey:
        """Return what is in a file of clients, after checking it against the keys."""
        contents = hdf5_file.survey(path)
        keys = ("partition", "partition_file", *CUT, "augment")
        only_defaults(self, keys, f"since {path} is no pool, but has clients")
        self._check_labels(path, contents)
        why = ["has a global test set, which needs clients of equal shapes"] if contents.server else []
        why += [f"has {part.features} in {part.group}, not one axis" for part in contents.parts if len(part.shape) != 1]
        if self.prune and why:
            raise refusal("data.prune", f"0, since {path} {why[0]}", self.prune, 0.0)
        check_clients(clients, len(contents.train), f"data.file = {self.file!r}")
        return contents

    def _check_labels(self, path: Path, contents: Survey) -> None:
        first, last = contents.parts[0], max(contents.parts, key=lambda part: part.largest)
        if self.labels is None and not first.real:
            samples = sum(part.size for part in contents.parts)
            check_largest(f"{path}: {last.group}/labels", last.largest, samples, " or data.labels")
        elif self.labels is not None and first.real:
            text = f"nothing, since {path}: {first.group}/labels are {first.dtype}, which count no classes"
            raise refusal("data.labels", text, self.labels)
        elif self.labels is not None and last.largest >= self.labels:
            text = f"at least {contents.classes}, since {path}: {last.group}/labels hold {last.largest}"
            raise refusal("data.labels", text, self.labels, contents.classes)
