"""Reading segments back: growing, killed, closed or sealed, and which of their rows count.

A segment that holds rows supersedes the earlier ones from its first round on: what an earlier start recorded
after the checkpoint that was resumed belongs to a past that was given up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.store.atomic import numbered
from hpcfl.store.columns import CLIENT, LABELS, Array, Column, Fact, columns_of, facts_of


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


def run_folder(path: Path | str) -> Path:
    """Return the run folder for a folder or its run.h5.

    Raises
    ------
    UsageError
        if there is no such folder, or it has no run.h5.
    """
    given = Path(path)
    folder = given.parent if given.name == "run.h5" else given
    if not (folder / "run.h5").is_file():
        raise UsageError(f"'{given}' is no run folder: {folder / 'run.h5'} does not exist")
    return folder


def run_attributes(run_dir: Path) -> dict[str, Any]:
    """Return the attributes of run.h5."""
    try:
        with h5py.File(run_dir / "run.h5", "r") as file:
            found = {name: file.attrs[name] for name in file.attrs}
    except OSError as error:
        raise UsageError(f"{run_dir / 'run.h5'} cannot be read: {error}") from error
    if "config" not in found or "segments" not in found:
        raise UsageError(f"{run_dir / 'run.h5'} cannot be read: it is no run's table")
    return found


def data_folder(attributes: Mapping[str, str], data_dir: Path | None) -> Path | None:
    """Return the folder of the data sets that is asked for, or where the run with these attributes found them."""
    return data_dir or (Path(attributes["data_dir"]) if attributes["data_dir"] else None)


def read_facts(run_dir: Path) -> list[Fact]:
    """Return what run.h5 knows of each client; nothing where it was written before there was such a thing."""
    try:
        with h5py.File(run_dir / "run.h5", "r") as file:
            return facts_of(file)
    except OSError as error:
        raise UsageError(f"{run_dir / 'run.h5'} cannot be read: {error}") from error


def segment_paths(run_dir: Path) -> list[Path]:
    """Return the segments of a run, oldest first.

    Raises
    ------
    UsageError
        if run.h5 names a segment that is not there (its rows would read as "not recorded" in silence).
    """
    present = numbered(run_dir / "metrics", "segment")
    names = {path.name for path in present}
    missing = [name for name in json.loads(run_attributes(run_dir)["segments"]) if name not in names]
    if missing:
        raise UsageError(f"run folder '{run_dir}' lacks metrics/{', metrics/'.join(missing)}")
    return present


def open_segment(path: Path) -> h5py.File:
    """Open a segment for reading, whether it is closed, growing, or was left by a killed process.

    Raises
    ------
    UsageError
        if it is not there or cannot be read.
    """
    try:
        try:
            return h5py.File(path, "r")
        except FileNotFoundError:
            raise
        except OSError:  # still, or for ever, marked as being written
            return h5py.File(path, "r", swmr=True)
    except OSError as error:
        raise UsageError(f"segment {path} cannot be read: {error}") from error


def read_part(path: Path, with_data: bool = False) -> Part:
    """Read what a segment holds, and its acknowledged rows if wanted."""
    with open_segment(path) as file:
        # The rounds first: a row that is acknowledged now is complete in whatever is opened from now on.
        rounds = file["round"][:]
        rows = np.flatnonzero(rounds >= 0)
        columns = columns_of(file)
        data = {column.name: take(file[column.name], rows) for column in columns} if with_data else {}
        return Part(
            path=path,
            first=int(file.attrs["first"]),
            total=int(file.attrs["rounds"]),
            sealed=bool(file.attrs["sealed"]),
            rounds=rounds[rows],
            columns=columns,
            coords={name: _labels(file[name]) for name in LABELS if name in file and name != "round"},
            data=data,
        )


def take(dataset: h5py.Dataset, rows: Array) -> Array:
    """Return the given rows (ascending) of a dataset."""
    if not rows.size:
        return np.empty((0, *dataset.shape[1:]), dataset.dtype)
    start, stop = int(rows[0]), int(rows[-1]) + 1
    block: Array = dataset[start:stop]
    return block if len(block) == len(rows) else block[rows - start]


def _labels(scale: h5py.Dataset) -> Array:
    """Return the labels of an axis, as integers or str."""
    is_text = h5py.check_string_dtype(scale.dtype) is not None
    return np.asarray(scale.asstr()[:], dtype=np.str_) if is_text else np.asarray(scale[:])


def ends(firsts: Sequence[int], holds: Sequence[bool]) -> list[float]:
    """Return for each segment the round from which on it is superseded (infinity: it is not).

    Parameters
    ----------
    firsts : sequence of int
        the first round of each segment.
    holds : sequence of bool
        whether the segment holds rows; one without supersedes nothing.
    """
    limit, result = float("inf"), []
    for first, held in zip(reversed(firsts), reversed(holds)):
        result.append(limit)
        limit = min(limit, first) if held else limit
    return result[::-1]


def merged_columns(parts: Sequence[Part]) -> list[Column]:
    """Return the columns of all parts, each once; the newest part says what a column is."""
    return list({column.name: column for part in parts for column in part.columns}.values())


def merged_coords(parts: Sequence[Part], facts: Sequence[Fact] = ()) -> dict[str, Array]:
    """Return the labels of every axis: the longest of all parts (the number of ranks may have changed).

    Before there is any part, clients that something is known of have their numbers as labels.

    Raises
    ------
    UsageError
        if one part's labels do not begin the longest ones: its rows then belong to other clients or layers.
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
