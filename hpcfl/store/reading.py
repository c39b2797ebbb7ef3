"""A run read back, in whatever state it is: growing, killed, sealed, and which of the recorded rows count.

A segment that holds rows supersedes the earlier ones from its first round on: what an earlier start recorded
after the checkpoint that was resumed belongs to a past that was given up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.store.atomic import number_of, numbered
from hpcfl.store.columns import (
    AXES,
    CLIENT,
    LABELS,
    ROWS,
    Array,
    Column,
    Coords,
    Fact,
    columns_of,
    facts_of,
    fill_of,
    values_of,
)
from hpcfl.store.status import read_status

if TYPE_CHECKING:
    import xarray

INTERNAL = ("segments", "sealed", "coordinates")
"""Attributes of run.h5 that are about the file rather than the run."""


def open_run(path: Path | str) -> xarray.Dataset:
    """Return the acknowledged rounds of a finished, running or killed run, in memory, its files closed.

    Parameters
    ----------
    path : Path or str
        The run folder, or the run.h5 in it.

    Returns
    -------
    xarray.Dataset
        Dims round, client, layer, rank (those there are); NaN and -1 say "not recorded". What is known of each
        client has no round. Simulated seconds, wall seconds and message bytes are coordinates over the round. The
        attributes are those of the run (config, versions, ...) and its status and reason.

    Raises
    ------
    UsageError
        If this is no run folder, or a segment that run.h5 names is missing or cannot be read.
    """
    import xarray

    run_dir = run_folder(path)
    parts = [read_part(segment, with_data=True) for segment in segment_paths(run_dir)]
    limits = ends([part.first for part in parts], [part.rounds.size > 0 for part in parts])
    counted = [(part, int(np.count_nonzero(part.rounds < limit))) for part, limit in zip(parts, limits)]
    facts = read_facts(run_dir)
    coords = merged_coords(parts, facts)
    variables: dict[str, Any] = {name: (name, labels) for name, labels in coords.items()}
    rounds = [part.rounds[:n] for part, n in counted]
    variables["round"] = ("round", np.concatenate([np.empty(0, np.int64), *rounds]))
    for column in merged_columns(parts):
        about = {"long_name": column.long_name} | ({"units": column.units} if column.units else {})
        variables[column.name] = (("round", *column.dims), _joined(column, coords, counted), about)
    variables |= {fact.name: (CLIENT, fact.values, {"long_name": fact.long_name}) for fact in facts}
    for name in variables.keys() & LABELS.keys():
        variables[name] = (*variables[name], {"long_name": LABELS[name]})
    attributes = {name: value for name, value in run_attributes(run_dir).items() if name not in INTERNAL}
    status = read_status(run_dir)
    dataset = xarray.Dataset(variables, attrs={**attributes, "status": status.state, "reason": status.reason})
    return dataset.set_coords([name for name in AXES if name in dataset])


def events(path: Path | str) -> list[dict[str, Any]]:
    """Return the log, oldest first: segment, round, time (s since 1970), kind, client (-1: none) and text.

    Events of rounds that a later segment superseded are among them: they did happen. UsageError as `open_run`.
    """
    rows = []
    for segment in segment_paths(run_folder(path)):
        with open_segment(segment) as file:
            records = file["log/events"][: int(file["log/count"][0])]
        for record in records:
            plain = {name: record[name].item() for name in records.dtype.names}
            text = {name: plain[name].decode() for name in ("kind", "text")}
            rows.append({"segment": number_of(segment), **plain, **text})
    return rows


def run_folder(path: Path | str) -> Path:
    """Return the run folder for a folder or its run.h5; UsageError where there is no such, or no run.h5 in it."""
    given = Path(path)
    folder = given.parent if given.name == "run.h5" else given
    if not (folder / "run.h5").is_file():
        raise UsageError(f"'{given}' is no run folder: {folder / 'run.h5'} does not exist")
    return folder


def run_attributes(run_dir: Path) -> dict[str, Any]:
    """The attributes of run.h5; UsageError where it cannot be read."""
    try:
        with h5py.File(run_dir / "run.h5", "r") as file:
            attributes = {name: file.attrs[name] for name in file.attrs}
    except OSError as error:
        raise UsageError(f"{run_dir / 'run.h5'} cannot be read: {error}") from error
    if "config" not in attributes or "segments" not in attributes:
        raise UsageError(f"{run_dir / 'run.h5'} cannot be read: it is no run's table")
    return attributes


def data_folder(attributes: Mapping[str, str], data_dir: Path | None) -> Path | None:
    """The folder of the data sets that is asked for, or where the run with these attributes found them."""
    return data_dir or (Path(attributes["data_dir"]) if attributes["data_dir"] else None)


def read_facts(run_dir: Path) -> list[Fact]:
    """What run.h5 knows of each client; nothing where it was written before there was such a thing."""
    try:
        with h5py.File(run_dir / "run.h5", "r") as file:
            return facts_of(file)
    except OSError as error:
        raise UsageError(f"{run_dir / 'run.h5'} cannot be read: {error}") from error


def segment_paths(run_dir: Path) -> list[Path]:
    """Return the segments of a run, oldest first.

    UsageError if run.h5 names one that is not there: its rows would read as "not recorded" in silence.
    """
    present = numbered(run_dir / "metrics", "segment")
    names = {path.name for path in present}
    missing = [name for name in json.loads(run_attributes(run_dir)["segments"]) if name not in names]
    if missing:
        raise UsageError(f"run folder '{run_dir}' lacks metrics/{', metrics/'.join(missing)}")
    return present


def open_segment(path: Path) -> h5py.File:
    """Open a segment, whether it is closed, growing, or was left by a killed process; UsageError if it cannot be."""
    try:
        try:
            return h5py.File(path, "r")
        except FileNotFoundError:
            raise
        except OSError:  # still, or for ever, marked as being written
            return h5py.File(path, "r", swmr=True)
    except OSError as error:
        raise UsageError(f"segment {path} cannot be read: {error}") from error


@dataclass(frozen=True)
class Part:
    """What a segment holds: `rounds` [n] are its acknowledged rounds, `data` their rows, [n, ...] each."""

    path: Path
    first: int
    total: int
    sealed: bool
    rounds: Array
    columns: tuple[Column, ...]
    coords: dict[str, Array]
    data: dict[str, Array] = field(default_factory=dict)


def read_part(path: Path, with_data: bool = False) -> Part:
    """Read what a segment holds, and its acknowledged rows if wanted."""
    with open_segment(path) as file:
        # The rounds first: a row that is acknowledged now is complete in whatever is opened from now on.
        rounds = _rounds(file)
        rows = np.flatnonzero(rounds >= 0)
        columns = columns_of(file)
        coords = {name: _labels(file[name]) for name in LABELS if name in file and name != "round"}
        return Part(
            path=path,
            first=int(file.attrs["first"]),
            total=int(file.attrs["rounds"]),
            sealed=bool(file.attrs["sealed"]),
            rounds=rounds[rows],
            columns=columns,
            coords=coords,
            data=read_rows(file, columns, coords, rows) if with_data else {},
        )


def read_rows(file: h5py.File, columns: Sequence[Column], coords: Coords, rows: Array) -> dict[str, Array]:
    """Return some rows (ascending) of a segment, ``[n, ...]`` of each column."""
    if ROWS in file:
        return values_of(_rows(file[ROWS], rows), columns, coords)
    return {column.name: _rows(file[column.name], rows) for column in columns}  # sealed, or of an earlier version


def _rounds(file: h5py.File) -> Array:
    """Return the round of each row, -1 where none is acknowledged."""
    if ROWS not in file:
        found: Array = file["round"][:]
        return found
    done = file[ROWS].fields("done")[:]
    rounds = int(file.attrs["first"]) + np.arange(len(done))
    return np.where(done == rounds + 1, rounds, -1)  # a kill may have cut the number itself


def _rows(dataset: h5py.Dataset, rows: Array) -> Array:
    """Return the given rows (ascending) of a dataset."""
    if not rows.size:
        return np.empty((0, *dataset.shape[1:]), dataset.dtype)
    start, stop = int(rows[0]), int(rows[-1]) + 1
    block: Array = dataset[start:stop]
    return block if len(block) == len(rows) else block[rows - start]


def _labels(scale: h5py.Dataset) -> Array:
    is_text = h5py.check_string_dtype(scale.dtype) is not None
    return np.asarray(scale.asstr()[:], dtype=np.str_) if is_text else np.asarray(scale[:])


def ends(firsts: Sequence[int], holds: Sequence[bool]) -> list[float]:
    """Return for each segment the round from which on it is superseded (infinity: it is not).

    `firsts` are the segments' first rounds; one that `holds` no rows supersedes nothing.
    """
    limit, result = float("inf"), []
    for first, held in zip(reversed(firsts), reversed(holds)):
        result.append(limit)
        limit = min(limit, first) if held else limit
    return result[::-1]


def merged_columns(parts: Sequence[Part]) -> list[Column]:
    """The columns of all parts, each once; the newest part says what a column is."""
    return list({column.name: column for part in parts for column in part.columns}.values())


def merged_coords(parts: Sequence[Part], facts: Sequence[Fact] = ()) -> dict[str, Array]:
    """Return the labels of every axis: the longest of all parts (the number of ranks may have changed).

    Before there is any part, clients that something is known of have their numbers as labels. UsageError if one part's
    labels do not begin the longest ones: its rows then belong to other clients or layers.
    """
    longest: dict[str, Array] = {CLIENT: np.arange(len(facts[0].values))} if facts and not parts else {}
    for part in parts:
        for name, labels in part.coords.items():
            longest[name] = max(longest.get(name, labels), labels, key=len)
    for part in parts:
        for name, labels in part.coords.items():
            if not np.array_equal(longest[name][: len(labels)], labels):
                raise UsageError(f"{part.path} has other labels on axis '{name}' than other segments")
    return longest


def _joined(column: Column, coords: Mapping[str, Array], counted: Sequence[tuple[Part, int]]) -> Array:
    """Return a column [round, ...] over all parts; what a part lacks reads as "not recorded"."""
    shape = (sum(n for _, n in counted), *(len(coords[dim]) for dim in column.dims))
    whole = np.full(shape, fill_of(column.stored), column.stored)
    start = 0
    for part, n in counted:
        if column.name in part.data:
            rows = part.data[column.name][:n]
            whole[(slice(start, start + n), *(slice(size) for size in rows.shape[1:]))] = rows
        start += n
    return whole
