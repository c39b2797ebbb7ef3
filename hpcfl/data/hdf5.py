"""Any user's own data per client, in one HDF5 file.

The file holds ``clients/<id>/{train,test}/{features,labels}`` and, if there is a global test set,
``test/{features,labels}``. Features are finite numbers ``[n, ...]``; labels are integers ``[n]`` from 0 in the whole
file, or floating-point numbers ``[n]`` in the whole file: targets of a regression. All of it is in the file itself:
links to other names, external storage and virtual data sets of other files are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Shape
from hpcfl.data.base import ClientData, Features, Federation, Header, Integers, Labels, Source
from hpcfl.data.formats import hdf5_file
from hpcfl.data.formats.hdf5_file import Part, Survey
from hpcfl.data.pixels import Scale

VERIFIED = 256 << 20
"""Bytes of features, as float32, up to which `Hdf5.check` reads them all."""


@dataclass(frozen=True, eq=False)
class Hdf5Federation(Federation):
    """Clients read from the file when they are asked for.

    Attributes
    ----------
    found : Survey
        What was in the file when it was looked at.
    kept : list of int64 [k_i], or None
        Which features of each client are kept; None: all.
    scale : {"unit", "centred"} or None
        How features are scaled that are pixels.
    """

    path: Path
    found: Survey
    kept: list[Integers] | None
    scale: Scale | None

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`, reading no others.

        Raises
        ------
        UsageError
            If a feature is not finite, or no pixel, or the client is no more what it was.
        """
        kept = None if self.kept is None else self.kept[i]
        with hdf5_file.opened(self.path) as file:
            parts = self.found.train[i], self.found.test[i]
            train, test = (self._read(file, part, kept) for part in parts)
        return ClientData(*train, *test)

    def server_test(self) -> tuple[Features, Labels] | None:
        """Return the group ``test`` of the file, or None where it has none."""
        if self.found.server is None:
            return None
        with hdf5_file.opened(self.path) as file:
            return self._read(file, self.found.server, None)

    def _read(self, file: h5py.File, part: Part, kept: Integers | None) -> tuple[Features, Labels]:
        return hdf5_file.read(file, hdf5_file.unchanged(file, part).group, kept, self.scale)


class Hdf5(Source):
    """One HDF5 file with the samples of every client; clients may differ in the shape of their features."""

    name: Literal["hdf5"] = "hdf5"
    file: str = Field(min_length=1, description="the file, in the data folder or the working directory")
    labels: int | None = Field(
        None, ge=1, description="how many classes there are, counted from 0; none: one more than the largest label"
    )
    prune: float = Field(
        0.0, ge=0, lt=1, description="up to this share of a client's features, drawn by key, is removed (FLIC: 0.1)"
    )
    scale: Scale | None = Field(
        None, description="pixels of 0 to 255 to [0, 1] (unit) or [-1, 1] (centred); none: features as they are"
    )

    def header(self, data_dir: Path | None) -> Header:
        """Return the sizes; reads all labels, but no features.

        Which features are pruned follows from the seed, which is not known here. Shapes are those of the file; where
        these are equal, but need not stay so, all but the first are given as small as they may become.
        """
        return self._header(self._survey(data_dir))

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header after checking that the file holds so many clients; reads small files to their ends."""
        found = self._survey(data_dir)
        self._check_clients(clients, len(found.ids))
        header = self._header(found)
        if 4 * found.features > VERIFIED:
            return header
        ranges = hdf5_file.verify(self._path(data_dir), found, self.scale)
        return header if self.prune else replace(header, ranges=ranges)  # which features are left, the seed decides

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Hdf5Federation:
        """Return the clients of the file in natural order of their ids; `seed` decides which features are pruned."""
        found = self._survey(data_dir)
        self._check_clients(clients, len(found.ids))
        kept = [self._kept(shape[0], seed, i) for i, shape in enumerate(found.shapes)] if self.prune else None
        return Hdf5Federation(
            classes=self.labels or found.classes,
            train_sizes=np.array([part.size for part in found.train], dtype=np.int64),
            test_sizes=np.array([part.size for part in found.test], dtype=np.int64),
            shapes=found.shapes if kept is None else [(len(own),) for own in kept],
            path=self._path(data_dir),
            found=found,
            kept=kept,
            scale=self.scale,
        )

    def _header(self, found: Survey) -> Header:
        shapes = list(found.shapes)
        if len(set(shapes)) == 1:
            smallest = self._smallest(shapes[0])
            shapes = shapes[:1] if smallest == shapes[0] else shapes[:1] + [smallest] * (len(shapes) - 1)
        train, test = (sum(part.size for part in parts) for parts in (found.train, found.test))
        classes, targets = self.labels or found.classes, found.parts[0].real
        return Header(len(found.ids), train, test, tuple(shapes), classes, targets)

    def _smallest(self, shape: Shape) -> Shape:
        return (shape[0] - self._most(shape[0]),) if self.prune else shape

    def _most(self, width: int) -> int:
        """Return how many of so many features may be pruned, never all."""
        return min(floor(self.prune * width + 1e-9), width - 1)  # 0.29 * 100 is a little less than 29

    def _kept(self, width: int, seed: int, client: int) -> Integers:
        """Return which of a client's features are kept, int64, ascending."""
        rng = keyed(seed, "prune", client=client)
        removed = int(rng.integers(self._most(width), endpoint=True))
        return np.sort(rng.permutation(width)[removed:])

    def _survey(self, data_dir: Path | None) -> Survey:
        path = self._path(data_dir)
        found = hdf5_file.survey(path)
        self._check_labels(path, found)
        if self.prune:
            self._check_prune(path, found)
        return found

    def _path(self, data_dir: Path | None) -> Path:
        places = [Path(self.file)] if data_dir is None else [data_dir / self.file, Path(self.file)]
        for path in places:
            if path.is_file():
                return path.resolve()
        tried = " or ".join(str(place.parent) for place in dict.fromkeys(places))
        raise UsageError(f"data.file = {self.file!r}: no such file in {tried}")

    def _check_clients(self, clients: int, found: int) -> None:
        if clients != found:
            raise UsageError(f"clients = {clients}, but data.file = {self.file!r} holds {found}: set clients = {found}")

    def _check_labels(self, path: Path, found: Survey) -> None:
        if self.labels is None:
            return
        if found.parts[0].real:
            raise UsageError(
                f"data.labels = {self.labels} counts classes, but {path}: {found.parts[0].group}/labels are "
                f"{found.parts[0].dtype}; expected integers, or no data.labels"
            )
        wrong = next((part for part in found.parts if part.largest >= self.labels), None)
        if wrong is not None:
            raise UsageError(
                f"{path}: {wrong.group}/labels hold {wrong.largest}, expected 0 to {self.labels - 1} as "
                f"data.labels = {self.labels}; did you mean {found.classes}?"
            )

    def _check_prune(self, path: Path, found: Survey) -> None:
        if found.server is not None:
            raise UsageError(
                f"data.prune = {self.prune}: {path} has a global test set, which needs clients of equal shapes; "
                "did you mean 0.0?"
            )
        wrong = next((part for part in found.parts if len(part.shape) != 1), None)
        if wrong is not None:
            raise UsageError(
                f"data.prune = {self.prune}: {path}: {wrong.group} has features of shape {wrong.shape}, "
                "expected one axis; did you mean 0.0?"
            )
