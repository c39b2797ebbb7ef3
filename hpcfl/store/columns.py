"""What a table of rounds is made of: columns, dimension scales, fill values; the same in every file of a run.

A column has the round as its first axis, then any of client, layer, rank and arrival; the axes carry attached
dimension scales, so that netCDF-4 readers see named dimensions and coordinates.

A file may come from somebody else: what is read is what it is expected to be, or a ValueError says which part is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Coords = Mapping[str, Sequence[int | str] | Array]
"""The labels of each axis: client ids, layer names, ranks."""

AXES = ("sim_seconds", "wall_seconds", "message_bytes")
"""Columns that readers get as coordinates over the round: a curve may be drawn against any of them."""
CLIENT = "client"
NAMES = "client_name"
LABELS = {"round": "round", "client": "client id", "layer": "layer", "rank": "MPI rank", "arrival": "arrival"}
KINDS = {"i": "integers", "u": "unsigned integers", "f": "floating-point", "c": "complex", "b": "truth values"}

_TIME_UNITS = {f"{unit}{s}" for unit in ("day", "hour", "minute", "second", "millisecond") for s in ("", "s")}


@dataclass(frozen=True)
class Column:
    """One quantity recorded every round.

    `dims` are the axes after the round: any of ``client``, ``layer``, ``rank``, ``arrival``; `dtype` is NumPy's,
    ``bool`` being stored as int8, so that -1 can say "not recorded". Where the numbers from 0 on are `flags`, these are
    their meanings. ValueError for a name that HDF5 or xarray would misread, and for units that xarray would turn into
    time deltas: seconds are ``s``.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    long_name: str
    units: str = ""
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", *LABELS):
            raise ValueError(f"no column can be named '{self.name}'")
        if self.units in _TIME_UNITS:
            raise ValueError(f"column {self.name}: units '{self.units}' read as a time delta, write 's'")

    @property
    def stored(self) -> np.dtype[Any]:
        given = np.dtype(self.dtype)
        return np.dtype("int8") if given.kind == "b" else given

    @property
    def attributes(self) -> dict[str, Any]:
        """What describes it in files, named as the CF conventions have it."""
        about: dict[str, Any] = {"long_name": self.long_name} | ({"units": self.units} if self.units else {})
        if self.flags:
            about["flag_values"] = np.arange(len(self.flags), dtype=self.stored)
            about["flag_meanings"] = " ".join(self.flags)
        return about


@dataclass(frozen=True, eq=False)
class Fact:
    """One quantity of each client that no round changes: `values` [clients], numbers or, of `NAMES`, text."""

    name: str
    values: Array
    long_name: str


def fill_of(dtype: np.dtype[Any]) -> Any:
    """What stands for "not recorded": NaN, -1, the largest unsigned number, or an empty string."""
    if dtype.kind == "f":
        return dtype.type(np.nan)
    if dtype.kind == "S":
        return b""
    if dtype.kind not in "iu":
        raise ValueError(f"a column cannot hold {dtype}")
    return dtype.type(-1) if dtype.kind == "i" else np.iinfo(dtype).max


def shape_of(column: Column, coords: Coords, rows: int) -> tuple[int, ...]:
    """The extents ``(rows, ...)`` of a column; ValueError if it has an axis without coordinates."""
    for dim in column.dims:
        if dim not in coords:
            raise ValueError(f"column {column.name}: no coordinates for its axis '{dim}'")
    return (rows, *(len(coords[dim]) for dim in column.dims))


def row_type(columns: Iterable[Column], coords: Coords) -> np.dtype[Any]:
    """One row of a growing segment: the ``values`` of the columns; without a field where all of them are empty."""
    shapes = [(column, shape_of(column, coords, 1)[1:]) for column in columns]
    values = [(column.name, column.stored, shape) for column, shape in shapes if 0 not in shape]
    return np.dtype([("values", values)] if values else [])  # HDF5 takes nothing empty


def values_of(rows: Array, columns: Iterable[Column], coords: Coords) -> dict[str, Array]:
    """The columns' values in `rows` [n] of `row_type`, ``[n, ...]`` each: views of them."""
    shapes = [(column, shape_of(column, coords, len(rows))) for column in columns]
    return {
        column.name: np.empty(shape, column.stored) if 0 in shape[1:] else rows["values"][column.name]
        for column, shape in shapes
    }


def add_scales(file: h5py.File, coords: Coords) -> None:
    """Write the coordinates (integers or strings) as dimension scales."""
    for name, values in coords.items():
        labels = np.asarray(values)
        if labels.dtype.kind in "UO" or not labels.size:
            labels = labels.astype(object if name == "layer" else np.int64)
        dtype = h5py.string_dtype() if labels.dtype.kind == "O" else labels.dtype
        dataset = file.create_dataset(name, data=labels, dtype=dtype)
        dataset.attrs["long_name"] = LABELS.get(name, name)
        dataset.make_scale(name)


def check_table(columns: Sequence[Column], coords: Mapping[str, Array]) -> None:
    """Raise ValueError or TypeError where a file describes columns or labels that cannot be."""
    for name, labels in coords.items():
        if name not in LABELS or labels.ndim != 1 or labels.dtype.kind not in "iuU":
            raise ValueError(f"axis {name}: expected a list of integers or of names, got {labels.dtype} {labels.shape}")
    for column in columns:
        texts = (column.name, column.dtype, column.long_name, column.units, *column.dims, *column.flags)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"column {column.name}: expected text for all that describes it, got {texts}")
        if len({*column.dims}) < len(column.dims):
            raise ValueError(f"column {column.name}: expected each axis once, got {column.dims}")
        fill_of(column.stored)
        shape_of(column, coords, 0)
    if len({column.name for column in columns}) < len(columns):
        raise ValueError("columns: expected each once")


def values(group: h5py.Group, name: str, kinds: str, shape: tuple[int | None, ...] | None = None) -> Array:
    """The numbers of a dataset; ValueError where it is none of such a shape (None: any, or any length), or type."""
    item = group.get(name)
    where = f"{group.name.rstrip('/')}/{name}"
    if not isinstance(item, h5py.Dataset):
        raise ValueError(f"{where}: expected a dataset, got {'nothing' if item is None else 'a group'}")
    there = item.shape or ()
    if shape is not None and (
        len(there) != len(shape) or any(want not in (None, got) for want, got in zip(shape, there))
    ):
        raise ValueError(f"{where}: expected the shape {shape}, got {there}".replace("None", "n"))
    if item.dtype.kind not in kinds:
        raise ValueError(f"{where}: expected {' or '.join(KINDS[kind] for kind in kinds)}, got {item.dtype}")
    found: Array = item[()]
    return found


def whole(item: Any, name: str) -> int:
    """An attribute that is a number of rounds, rows or the like; ValueError where it is none."""
    value = item.attrs.get(name)
    if not isinstance(value, np.integer) or value < 0:
        raise ValueError(f"attribute {name}: expected an integer of at least 0, got {value!r:.80}")
    return int(value)


def _axes(item: h5py.Dataset) -> list[str]:
    """The names of a dataset's axes, by their scales; ValueError where one has none."""
    try:
        return [axis[0].name.lstrip("/") for axis in item.dims]
    except Exception:  # h5py raises almost anything where a scale is gone
        raise ValueError(f"{item.name}: expected a dimension scale on each of its axes, got others") from None


def facts_of(file: h5py.File) -> list[Fact]:
    """The datasets of run.h5 whose axis is that of the clients; ValueError where one is neither such nor a column."""
    facts = []
    for name, item in file.items():
        if not isinstance(item, h5py.Dataset):
            raise ValueError(f"/{name}: expected a dataset, got a group")
        axes = ["round"] if item.is_scale else _axes(item)
        if axes[:1] != ["round"]:
            text = name == NAMES and h5py.check_string_dtype(item.dtype) is not None and item.ndim == 1
            found = np.asarray(item.asstr()[()], np.str_) if text else values(file, name, "iuf", (None,))
            facts.append(Fact(name, found, str(item.attrs.get("long_name", ""))))
    return facts


def table_of(file: h5py.File) -> tuple[tuple[Column, ...], dict[str, Array]]:
    """The columns of run.h5, its datasets with the round as first axis, and the labels; errors as `table_in`."""
    columns, coords = list[Column](), dict[str, Array]()
    for name, item in file.items():
        if isinstance(item, h5py.Dataset) and not item.is_scale and _axes(item)[:1] == ["round"]:
            long_name, units = (str(item.attrs.get(about, "")) for about in ("long_name", "units"))
            flags = str(item.attrs.get("flag_meanings", "")).split()
            columns.append(Column(name, tuple(_axes(item)[1:]), item.dtype.str, long_name, units, tuple(flags)))
    for name in (name for name in LABELS if name in file and name != "round"):
        text = isinstance(file[name], h5py.Dataset) and h5py.check_string_dtype(file[name].dtype) is not None
        found = file[name].asstr()[()] if text else values(file, name, "iu", (None,))
        coords[name] = np.asarray(found, np.str_) if text else found
    check_table(columns, coords)
    return tuple(columns), coords


def described(columns: Iterable[Column], coords: Coords) -> dict[str, Any]:
    """Columns and labels as JSON takes them."""
    labels = {name: np.asarray(each).tolist() for name, each in coords.items()}
    return {"columns": [asdict(column) for column in columns], "coords": labels}


def table_in(description: Mapping[str, Any]) -> tuple[tuple[Column, ...], dict[str, Array]]:
    """The columns and labels of a text of `described`; ValueError, TypeError or KeyError where they cannot be."""
    tuples = [{name: tuple(each.get(name, ())) for name in ("dims", "flags")} for each in description["columns"]]
    columns = tuple(Column(**{**each, **some}) for each, some in zip(description["columns"], tuples))
    labels = description["coords"].items()
    coords = {name: np.asarray(each, np.str_ if name == "layer" else np.int64) for name, each in labels}
    check_table(columns, coords)
    return columns, coords
