"""Reader of HDF5 files that hold the clients' samples: what is in them without their features, and then these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcfl.data.base import Features, Integers, Labels, Shape
from hpcfl.errors import UsageError

PIECE = 16 << 20
"""Bytes of features that are read at a time."""


@dataclass(frozen=True)
class Part:
    """One pair of features and labels.

    Attributes
    ----------
    group : str
        Where it lies in the file.
    size : int
        Number of samples.
    shape : tuple of int
        Shape of one sample's features.
    dtype : numpy.dtype
        Type of the labels: integers for classes, floating-point numbers for targets.
    largest : int
        Largest class; -1 where there are no samples, 0 for targets.
    """

    group: str
    size: int
    shape: Shape
    dtype: np.dtype[np.generic]
    largest: int

    @property
    def real(self) -> bool:
        """Whether labels are targets."""
        return self.dtype.kind == "f"


@dataclass(frozen=True)
class Survey:
    """What a file holds: clients in natural order of their ids, and the global test set or None."""

    ids: list[str]
    train: list[Part]
    test: list[Part]
    server: Part | None

    @property
    def parts(self) -> list[Part]:
        """All parts, the global test set last."""
        pairs = [part for pair in zip(self.train, self.test) for part in pair]
        return pairs + ([self.server] if self.server else [])

    @property
    def shapes(self) -> list[Shape]:
        """Shape of one sample's features, per client."""
        return [part.shape for part in self.train]

    @property
    def classes(self) -> int:
        """One more than the largest label of all; 1 for targets."""
        return 1 + max(part.largest for part in self.parts)

    @property
    def features(self) -> int:
        """Number of features in the whole file."""
        return sum(part.size * int(np.prod(part.shape)) for part in self.parts)


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading; what goes wrong inside, the file being damaged, becomes a UsageError."""
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


def dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the data set of that name; UsageError where there is none."""
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        raise UsageError(f"{file.filename}: {name} is missing")
    return found


def survey(path: Path) -> Survey:
    """Return what is in a file after looking at all of it but the features.

    Raises
    ------
    UsageError
        If the file cannot be read, or if something is missing or not as it should be.
    """
    with opened(path) as file:
        clients = file.get("clients")
        if not isinstance(clients, h5py.Group) or len(clients) == 0:
            raise UsageError(f"{path}: no clients, expected groups clients/<id>/train and clients/<id>/test")
        ids = sorted(clients, key=_natural)
        train = [_part(file, f"clients/{name}/train") for name in ids]
        test = [_part(file, f"clients/{name}/test") for name in ids]
        found = Survey(ids, train, test, _part(file, "test") if "test" in file else None)
    _check_kinds(path, found)
    _check_shapes(path, found)
    return found


def unchanged(file: h5py.File, part: Part) -> Part:
    """Return a part as it was surveyed; UsageError where there are other sizes or other labels by now."""
    now = _part(file, part.group)
    for before, after in ((_worded(part.shape), _worded(now.shape)), (f"{part.size} samples", f"{now.size} samples")):
        if before != after:
            raise UsageError(
                f"{file.filename}: {part.group} has {after}, but {before} when it was checked; expected a file that "
                "stays as it is"
            )
    if now.real != part.real or now.largest != part.largest:
        raise UsageError(
            f"{file.filename}: {part.group} has other labels than when it was checked; expected a file that stays as "
            "it is"
        )
    return now


def read(file: h5py.File, group: str, kept: Integers | None = None) -> tuple[Features, Labels]:
    """Return the features and labels of a group, float32 ``[n, ...]`` and int64 (or float32) ``[n]``.

    Parameters
    ----------
    kept : int64 [k], optional
        Which features of one axis are returned; None: all.

    Raises
    ------
    UsageError
        If a feature is not finite.
    """
    found, labels = dataset(file, f"{group}/features"), dataset(file, f"{group}/labels")
    shape = found.shape[1:] if kept is None else (len(kept),)
    features = np.empty((len(found), *shape), dtype=np.float32)
    for start, piece in pieces(found):
        features[start : start + len(piece)] = piece if kept is None else piece[:, kept]
    return features, labels[()].astype(np.float32 if labels.dtype.kind == "f" else np.int64)


def pieces(features: h5py.Dataset) -> Iterator[tuple[int, Features]]:
    """Yield first row and float32 rows of a data set, a few at a time; UsageError where a number is not finite."""
    rows = max(1, PIECE // max(1, 4 * int(np.prod(features.shape[1:]))))
    numbers = features.astype(np.float32)
    for start in range(0, len(features), rows):
        piece = numbers[start : start + rows]
        finite = np.isfinite(piece)
        if not finite.all():
            where = np.argwhere(~finite)[0]
            raise UsageError(
                f"{features.file.filename}: {features.name[1:]}: sample {start + where[0]} holds "
                f"{piece[tuple(where)]}, expected finite 32-bit numbers"
            )
        yield start, piece


def verify(path: Path, found: Survey) -> None:
    """Read all features; UsageError where one is not finite."""
    with opened(path) as file:
        for part in found.parts:
            for _ in pieces(dataset(file, f"{part.group}/features")):
                pass


def _part(file: h5py.File, group: str) -> Part:
    """Return the sizes of one pair of features and labels, checking them."""
    features, labels = dataset(file, f"{group}/features"), dataset(file, f"{group}/labels")
    if features.dtype.kind not in "fiu":
        raise UsageError(f"{file.filename}: {features.name[1:]} are {features.dtype}, expected numbers")
    if labels.dtype.kind not in "fiu":
        raise UsageError(f"{file.filename}: {labels.name[1:]} are {labels.dtype}, expected integers or real targets")
    if features.ndim < 2 or labels.ndim != 1:
        raise UsageError(
            f"{file.filename}: {group} has features {features.shape} and labels {labels.shape}, "
            "expected [samples, ...] and [samples]"
        )
    if 0 in features.shape[1:]:
        raise UsageError(f"{file.filename}: {features.name[1:]} are {features.shape}, expected at least 1 per sample")
    if len(features) != len(labels):
        raise UsageError(f"{file.filename}: {group} has {len(features)} features, but {len(labels)} labels")
    shape = tuple(int(size) for size in features.shape[1:])
    return Part(group, len(labels), shape, labels.dtype, _largest(file, labels))


def _largest(file: h5py.File, labels: h5py.Dataset) -> int:
    """Return the largest class, 0 for targets; UsageError where a class is below 0, or a target not finite."""
    values = labels[()]
    if labels.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
            wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
        if wrong.size:
            raise UsageError(
                f"{file.filename}: {labels.name[1:]}: sample {wrong[0]} has {values[wrong[0]]}, "
                "expected finite 32-bit numbers"
            )
        return 0
    if values.min(initial=0) < 0:
        raise UsageError(f"{file.filename}: {labels.name[1:]} hold {values.min()}, expected labels from 0")
    return int(values.max()) if values.size else -1


def _check_kinds(path: Path, found: Survey) -> None:
    """Refuse classes beside targets."""
    first = found.parts[0]
    other = next((part for part in found.parts if part.real != first.real), None)
    if other is not None:
        raise UsageError(
            f"{path}: {first.group}/labels are {first.dtype}, but {other.group}/labels {other.dtype}; "
            "expected integers in all (classes) or floating-point numbers in all (targets)"
        )


def _check_shapes(path: Path, found: Survey) -> None:
    """Refuse clients without samples, and parts that do not fit together."""
    for name, train, test in zip(found.ids, found.train, found.test):
        if train.size == 0:
            raise UsageError(f"{path}: {train.group} has no samples, expected at least 1")
        if test.shape != train.shape:
            raise UsageError(
                f"{path}: client '{name}' has {_worded(train.shape)} in train and {_worded(test.shape)} in test; "
                "expected the same in both"
            )
        if found.server is not None and found.server.shape != train.shape:
            raise UsageError(
                f"{path}: test has {_worded(found.server.shape)}, client '{name}' {_worded(train.shape)}; "
                "a global test set needs equal shapes"
            )


def _worded(shape: Shape) -> str:
    return f"{shape[0]} features" if len(shape) == 1 else f"features of shape {shape}"


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sort key under which ``c2`` comes before ``c10``, and numbers come in their order."""
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)], name


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
