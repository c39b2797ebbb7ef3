"""Reader of HDF5 files that hold the clients' samples: what is in them without their features, and then these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints, Shape
from hpcfl.data.base import Inputs, Labels, Range, Samples, Scale, scaled
from hpcfl.data.formats.files import check_all, check_unpacked, reading

FINITE = "finite 32-bit numbers"
PEAK = 255  # largest pixel
Reading = Scale | Literal["tokens"]
"""What features become: pixels of some range, or integers."""
LARGEST = 2**31 - 1
"""Largest label or token."""
NAME = 255
"""Characters of a client's id."""
NESTED = 3
"""Virtual data sets that may be maps of one another."""
DAMAGED = (RuntimeError, KeyError, ValueError, TypeError, OverflowError)
"""What h5py raises where a file is damaged, or of types that NumPy lacks, beside OSError."""
LINKS = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "an external link"}


class Part(NamedTuple):
    """One pair of features and labels."""

    group: str  # where it lies in the file
    size: int
    shape: Shape  # of one sample's features
    dtype: np.dtype[np.generic]  # of the labels: integers for classes, floating-point numbers for targets
    largest: int  # class; -1 where there are no samples; of targets one less than a label has numbers in its last axis
    label_shape: Shape = ()  # of one sample's labels

    @property
    def real(self) -> bool:
        """True where labels are targets."""
        return self.dtype.kind == "f"

    @property
    def bytes(self) -> int:
        """Bytes of features and labels as they are read."""
        return 4 * self.size * prod(self.shape) + self.dtype.itemsize * self.size * prod(self.label_shape)

    @property
    def features(self) -> str:
        return f"{self.shape[0]} features" if len(self.shape) == 1 else f"features of shape {self.shape}"


class Survey(NamedTuple):
    """What a file holds: clients in natural order of their ids, and the global test set or None.

    A pool is the one pair of a training and a test part, or a training part alone.
    """

    train: list[Part]
    test: list[Part]
    server: Part | None

    @property
    def parts(self) -> list[Part]:
        """All parts, the global test set last."""
        return [*self.train, *self.test, *([] if self.server is None else [self.server])]

    @property
    def shapes(self) -> list[Shape]:
        return [part.shape for part in self.train]

    @property
    def classes(self) -> int:
        """One more than the largest label of all; see `Header`."""
        return 1 + max(part.largest for part in self.parts)

    @property
    def features(self) -> int:
        """Number of features in the whole file."""
        return sum(part.size * prod(part.shape) for part in self.parts)


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open a file for reading; what goes wrong inside, the file being damaged, becomes a UsageError."""
    # parallel file systems may offer no locks; for reading, none are needed
    with reading(path, "an HDF5 file", *DAMAGED), h5py.File(path, "r", locking="best-effort") as file:
        yield file


def dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the data set of that name; UsageError where there is none, or not all its numbers are in this file.

    It can be read: its size, and that of the pieces in which it is packed, are held against the bytes that it has.
    """
    data = linked(file, name)
    if not isinstance(data, h5py.Dataset):
        raise UsageError(f"{file.filename}: {name} is missing")
    if data.shape is None:  # HDF5's null data space
        raise UsageError(f"{file.filename}: {name} is empty, expected numbers")
    _check_place(file, data)
    size = file.id.get_filesize()
    packed = size if data.is_virtual else min(data.id.get_storage_size(), size)
    for what, shape in ((name, data.shape), (f"{name}: a chunk", data.chunks or ())):
        check_unpacked(f"{file.filename}: {what}", prod(shape) * data.dtype.itemsize, packed)
    return data


def linked(file: h5py.File, name: str) -> Any:
    """Return the object of that name, or None; UsageError where any part of the name is a link to another name."""
    way = ""
    for part in (part for part in name.split("/") if part not in ("", ".")):
        way += f"/{part}"
        try:
            kind = file.id.links.get_info(way.encode(errors="surrogateescape")).type
        except (KeyError, RuntimeError):  # the latter below a data set
            return None
        if kind != h5py.h5l.TYPE_HARD:
            what = LINKS.get(kind, "a user-defined link")
            raise UsageError(f"{file.filename}: {way[1:]} is {what}, expected the data themselves")
    return file.get(way)


def _check_place(file: h5py.File, data: h5py.Dataset, above: tuple[h5py.Dataset, ...] = ()) -> None:
    """Refuse a data set that keeps numbers in other files, or maps what is not there.

    `above` are the virtual data sets that it is a source of: HDF5 would follow a circle of them until the process dies.
    """
    where = f"{file.filename}: {data.name[1:]}"
    if data.external:
        raise UsageError(f"{where} keeps its numbers in {data.external[0][0]!r}, expected them in the file itself")
    if not data.is_virtual:
        return
    if len(above) >= NESTED:
        raise UsageError(f"{where} is virtual, as are {NESTED} that lead to it; expected fewer within one another")
    covered = data.id.get_space()
    covered.select_none()
    known = set[h5py.Dataset]()
    for target, path, name, taken in data.virtual_sources():
        if path != ".":
            raise UsageError(f"{where} is virtual and maps {name!r} of {path!r}, expected sources in the file itself")
        source = linked(file, name.replace("%%", "%"))  # HDF5's escape
        if not isinstance(source, h5py.Dataset) or source in (*above, data):
            raise UsageError(f"{where} is virtual, but its source {name!r} is missing or the data set itself")
        if source not in known:
            _check_place(file, source, (*above, data))
            known.add(source)
        _check_mapping(where, source, target, taken)
        if target.get_select_type() == h5py.h5s.SEL_ALL:
            covered.select_all()
        elif target.is_regular_hyperslab():
            start, stride, count, block = target.get_regular_hyperslab()
            covered.select_hyperslab(start, count, stride, block, op=h5py.h5s.SELECT_OR)
        else:
            for first, last in target.get_select_hyper_blocklist():
                covered.select_hyperslab(tuple(first), tuple(last - first + 1), op=h5py.h5s.SELECT_OR)
    if missing := data.size - covered.get_select_npoints():
        raise UsageError(f"{where} is virtual, but no source is mapped to {missing} of its {data.size} numbers")


def _check_mapping(where: str, source: h5py.Dataset, target: Any, taken: Any) -> None:
    """Refuse a mapping of more than the source has: HDF5 would return anything for it."""
    try:
        count = target.get_select_npoints()
        whole = taken.get_select_type() == h5py.h5s.SEL_ALL
        ends = () if whole else taken.get_select_bounds()[1]
    except RuntimeError:
        raise UsageError(f"{where} is virtual and maps {source.name[1:]} without limit, expected a limit") from None
    there = source.size == count if whole else source.ndim == len(ends) and all(np.array(ends) < source.shape)
    if not there:
        raise UsageError(f"{where} is virtual, but its source {source.name[1:]} is {source.shape}, not what is mapped")


def survey(path: Path) -> Survey:
    """Return what is in a file after looking at all of it but the features; UsageError if anything is wrong."""
    with opened(path) as file:
        ids = client_ids(file)
        train, test = list[Part](), list[Part]()
        for parts, kind in ((train, "train"), (test, "test")):
            unpacked = 0
            for group in (f"clients/{name}/{kind}" for name in ids):
                parts.append(_part(file, group))
                unpacked += parts[-1].bytes
                check_unpacked(f"{path}, up to {group}", unpacked, file.id.get_filesize())
        return _checked(path, Survey(train, test, _part(file, "test") if "test" in file else None))


def client_ids(file: h5py.File) -> list[str]:
    """Return the names in the group ``clients`` in natural order; UsageError where there are none."""
    clients = linked(file, "clients")
    if not isinstance(clients, h5py.Group) or len(clients) == 0:
        raise UsageError(f"{file.filename}: no clients, expected groups clients/<id>/train and clients/<id>/test")
    names = list(clients)
    if long := next((name for name in names if len(name) > NAME), None):
        raise UsageError(f"{file.filename}: clients/{long[:40]}…: expected ids of at most {NAME} characters")
    return natural(names)


def natural(names: Iterable[str]) -> list[str]:
    """Return names in their natural order: c2 comes before c10, and numbers come in their order."""
    pieces = {name: re.split(r"(\d+)", name) for name in names}
    return sorted(pieces, key=lambda name: ([int(p) if i % 2 else p for i, p in enumerate(pieces[name])], name))


def number_of_clients(path: Path) -> int:
    with opened(path) as file:
        return len(client_ids(file))


def is_pool(path: Path) -> bool:
    """Whether a file has samples in ``train``, and no clients."""
    with opened(path) as file:
        return linked(file, "clients") is None and linked(file, "train") is not None


def survey_pool(path: Path) -> Survey:
    """Return what is in a file that is a pool, as `survey`."""
    with opened(path) as file:
        test = [] if linked(file, "test") is None else [_part(file, "test")]
        return _checked(path, Survey([_part(file, "train")], test, None))


def _checked(path: Path, contents: Survey) -> Survey:
    """Return what is in a file, after refusing parts that do not go together, and clients without samples."""
    first = contents.parts[0]
    for part in contents.parts:
        here, there = f"{first.group}/labels", f"{part.group}/labels"
        if (part.real, part.label_shape) != (first.real, first.label_shape):
            kinds = "integers (classes) or floating-point numbers (targets) of one shape in all"
            said = f"{here} are {first.dtype} {first.label_shape}, but {there} {part.dtype} {part.label_shape}"
            raise UsageError(f"{path}: {said}; expected {kinds}")
    for train, test in zip_longest(contents.train, contents.test):
        if train.size == 0:
            raise UsageError(f"{path}: {train.group} has no samples, expected at least 1")
        for other, where in ((test, "both"), (contents.server, "all, for a global test set")):
            if other is not None and other.shape != train.shape:
                said = f"{train.group} has {train.features}, {other.group} {other.features}"
                raise UsageError(f"{path}: {said}; expected the same in {where}")
    return contents


def read(file: h5py.File, part: Part, kept: Ints | None = None, scale: Reading | None = None) -> Samples:
    """Return a part's features and labels, float32 (tokens: int64) and int64 (or float32), ``[n, ...]`` each.

    `kept` are the features of one axis that are returned; None: all. Otherwise as `features_of`. UsageError also where
    there are other sizes or other labels than were surveyed.
    """
    if (now := _part(file, part.group)) != part:
        changed = f"{now.size} samples with {now.features}, but {part.size} with {part.features}, or other labels,"
        where = f"{file.filename}: {part.group}"
        raise UsageError(f"{where} has {changed} when it was checked; expected a file that stays as it is")
    features = features_of(dataset(file, f"{part.group}/features"), scale)
    return features if kept is None else features.take(kept, axis=1), labels_of(file, part.group)


def features_of(stored: h5py.Dataset, scale: Reading | None = None) -> Inputs:
    """Return a data set as float32 (tokens: int64).

    Given a `scale`, they are pixels of 0 to `PEAK`, and are scaled. UsageError if a number is not finite, or no pixel,
    or if tokens are no integers from 0.
    """
    name, tokens = f"{stored.file.filename}: {stored.name[1:]}", scale == "tokens"
    if tokens and stored.dtype.kind not in "iu":
        raise UsageError(f"{name}: data.tokens = true: expected integers, got {stored.dtype}")
    features: Inputs = stored.astype(np.int64 if tokens else np.float32)[()]
    if scale is None:
        check_all(name, features, np.isfinite(features), FINITE)
        return features
    most, key = (LARGEST, "tokens = true") if tokens else (PEAK, f"scale = '{scale}'")
    expected = f"{'integers from ' * tokens}0 to {most} as data.{key}"
    check_all(name, features, (features >= 0) & (features <= most), expected)
    return features if scale == "tokens" else scaled(features, PEAK, scale)


def labels_of(file: h5py.File, group: str) -> Labels:
    labels = dataset(file, f"{group}/labels")
    return np.asarray(labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)[()])


def verify(path: Path, contents: Survey, scale: Reading | None = None) -> tuple[Range, ...]:
    """Read all features as `features_of`; return the range of each client's training features, as scaled.

    It is 0 and 0 where there are none.
    """
    ranges: dict[str, Range] = {}
    with opened(path) as file:
        for part in contents.parts:
            features = features_of(dataset(file, f"{part.group}/features"), scale)
            ranges[part.group] = (float(features.min()), float(features.max())) if features.size else (0.0, 0.0)
    return tuple(ranges[part.group] for part in contents.train)


def _part(file: h5py.File, group: str) -> Part:
    """Return the sizes of one pair of features and labels, checking them."""
    features, labels = dataset(file, f"{group}/features"), dataset(file, f"{group}/labels")
    shape, where = features.shape[1:], f"{file.filename}: {group}"
    for name, data, expected in (("features", features, "numbers"), ("labels", labels, "integers or real targets")):
        if data.dtype.kind not in "fiu":
            raise UsageError(f"{where}/{name} are {data.dtype}, expected {expected}")
        if 0 in data.shape[1:]:
            raise UsageError(f"{where}/{name} are {data.shape}, expected at least 1 per sample")
    if features.ndim < 2 or labels.ndim < 1:
        shapes = f"features {features.shape} and labels {labels.shape}"
        raise UsageError(f"{where} has {shapes}, expected [samples, ...] in both")
    if len(features) != len(labels):
        raise UsageError(f"{where} has {len(features)} features, but {len(labels)} labels")
    largest, per_sample = _largest(f"{where}/labels", labels), tuple(map(int, labels.shape[1:]))
    return Part(group, len(labels), tuple(map(int, shape)), labels.dtype, largest, per_sample)


def _largest(where: str, labels: h5py.Dataset) -> int:
    """Return `Part.largest`; UsageError where a class is below 0, or a target not finite."""
    if labels.dtype.kind == "f":
        targets = labels.astype(np.float32)[()]  # what is too large becomes infinite, and is refused
        check_all(where, targets, np.isfinite(targets), FINITE)
        return int(labels.shape[-1]) - 1 if labels.ndim > 1 else 0
    classes = labels[()]
    least, most = (int(classes.min()), int(classes.max())) if classes.size else (0, -1)
    if least < 0 or most > LARGEST:
        raise UsageError(f"{where} hold {least if least < 0 else most}, expected labels from 0 to {LARGEST}")
    return most
