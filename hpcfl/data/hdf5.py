"""Any user's own data per client, in one HDF5 file.

The file holds ``clients/<id>/{train,test}/{features,labels}`` and, if there is a global test set,
``test/{features,labels}``. Features are numbers ``[n, ...]``, labels integers ``[n]`` from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from pydantic import Field

from hpcfl.data.base import ClientData, Features, Federation, Header, Integers, Shape, Source
from hpcfl.errors import UsageError


@dataclass(frozen=True)
class Part:
    """Number of samples, shape of one sample's features and largest label (-1 where there are no samples)."""

    size: int
    shape: Shape
    largest: int


@dataclass(frozen=True)
class Survey:
    """What a file holds: clients in natural order of their ids, and the global test set or None."""

    ids: list[str]
    train: list[Part]
    test: list[Part]
    server: Part | None

    @property
    def shapes(self) -> list[Shape]:
        """Shape of one sample's features, per client."""
        return [part.shape for part in self.train]

    @property
    def classes(self) -> int:
        """One more than the largest label of all."""
        parts = [*self.train, *self.test, *([self.server] if self.server else [])]
        return 1 + max(part.largest for part in parts)


@dataclass(frozen=True, eq=False)
class Hdf5Federation(Federation):
    """Clients read from the file when they are asked for."""

    path: Path
    ids: list[str]
    has_server_test: bool

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`, reading no others."""
        with _opened(self.path) as file:
            group = f"clients/{self.ids[i]}"
            return ClientData(*_read(file, f"{group}/train"), *_read(file, f"{group}/test"))

    def server_test(self) -> tuple[Features, Integers] | None:
        """Return the group ``test`` of the file, or None where it has none."""
        if not self.has_server_test:
            return None
        with _opened(self.path) as file:
            return _read(file, "test")


class Hdf5(Source):
    """One HDF5 file with the samples of every client; clients may differ in the shape of their features."""

    name: Literal["hdf5"] = "hdf5"
    file: str = Field(min_length=1, description="the file, in the data folder or the working directory")

    def header(self, data_dir: Path | None) -> Header:
        """Return the sizes; reads all labels, but no features."""
        survey = _survey(self._path(data_dir))
        shapes = survey.shapes if len(set(survey.shapes)) > 1 else survey.shapes[:1]
        train, test = (sum(part.size for part in parts) for parts in (survey.train, survey.test))
        return Header(len(survey.ids), train, test, tuple(shapes), survey.classes)

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header after checking that the file holds so many clients."""
        header = self.header(data_dir)
        self._check_clients(clients, header.clients or 0)
        return header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Hdf5Federation:
        """Return the clients of the file in natural order of their ids; `seed` has no effect."""
        path = self._path(data_dir)
        survey = _survey(path)
        self._check_clients(clients, len(survey.ids))
        return Hdf5Federation(
            classes=survey.classes,
            train_sizes=np.array([part.size for part in survey.train], dtype=np.int64),
            test_sizes=np.array([part.size for part in survey.test], dtype=np.int64),
            shapes=survey.shapes,
            path=path,
            ids=survey.ids,
            has_server_test=survey.server is not None,
        )

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


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        # Parallel file systems may offer no locks; for reading, none are needed.
        file = h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        raise UsageError(f"{path}: not a readable HDF5 file ({_first_line(error)})") from error
    with file:
        try:
            yield file
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{path}: damaged HDF5 file ({_first_line(error)})") from error


def _survey(path: Path) -> Survey:
    """Look at all of the file but the features."""
    with _opened(path) as file:
        clients = file.get("clients")
        if not isinstance(clients, h5py.Group) or len(clients) == 0:
            raise UsageError(f"{path}: no clients, expected groups clients/<id>/train and clients/<id>/test")
        ids = sorted(clients, key=_natural)
        train = [_part(file, f"clients/{name}/train") for name in ids]
        test = [_part(file, f"clients/{name}/test") for name in ids]
        survey = Survey(ids, train, test, _part(file, "test") if "test" in file else None)
    _check_survey(path, survey)
    return survey


def _part(file: h5py.File, group: str) -> Part:
    """Return the sizes of one pair of features and labels, checking them."""
    features, labels = _dataset(file, f"{group}/features"), _dataset(file, f"{group}/labels")
    if features.dtype.kind not in "fiu":
        raise UsageError(f"{file.filename}: {features.name[1:]} are {features.dtype}, expected numbers")
    if labels.dtype.kind not in "iu":
        raise UsageError(f"{file.filename}: {labels.name[1:]} are {labels.dtype}, expected integers")
    if features.ndim < 2 or labels.ndim != 1:
        raise UsageError(
            f"{file.filename}: {group} has features {features.shape} and labels {labels.shape}, "
            "expected [samples, ...] and [samples]"
        )
    if len(features) != len(labels):
        raise UsageError(f"{file.filename}: {group} has {len(features)} features, but {len(labels)} labels")
    values = labels[()]
    if values.min(initial=0) < 0:
        raise UsageError(f"{file.filename}: {labels.name[1:]} hold {values.min()}, expected labels from 0")
    largest = int(values.max()) if values.size else -1
    return Part(len(labels), tuple(int(size) for size in features.shape[1:]), largest)


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        raise UsageError(f"{file.filename}: {name} is missing")
    return found


def _check_survey(path: Path, survey: Survey) -> None:
    """Check what a part alone does not show."""
    for name, train, test in zip(survey.ids, survey.train, survey.test):
        if train.size == 0:
            raise UsageError(f"{path}: clients/{name}/train has no samples, expected at least 1")
        if test.shape != train.shape:
            raise UsageError(f"{path}: clients/{name}/test has features of shape {test.shape}, its train {train.shape}")
        if survey.server is not None and survey.server.shape != train.shape:
            raise UsageError(
                f"{path}: test has features of shape {survey.server.shape}, clients/{name} {train.shape}; "
                "a global test set needs equal shapes"
            )


def _read(file: h5py.File, group: str) -> tuple[Features, Integers]:
    features = _dataset(file, f"{group}/features").astype(np.float32)[()]
    return features, _dataset(file, f"{group}/labels")[()].astype(np.int64)


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sort key under which ``c2`` comes before ``c10``, and numbers come in their order."""
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)], name


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
