"""run.h5: one table over all segments of a run, made of virtual datasets; it holds no rows of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.store.atomic import created, replace
from hpcfl.store.columns import (
    Array,
    Column,
    Fact,
    add_column,
    add_facts,
    add_scales,
    fill_of,
    label,
    make_scale,
    name_axes,
    shape_of,
)
from hpcfl.store.segments import (
    Part,
    ends,
    merged_columns,
    merged_coords,
    read_facts,
    read_part,
    run_attributes,
    run_folder,
    segment_paths,
)

_OWN = ("segments", "sealed", "coordinates")

Counted = Sequence[tuple[Part, int]]


def create(run_dir: Path, attributes: Mapping[str, str], facts: Sequence[Fact] = ()) -> None:
    """Make the run folder, with a run.h5 that has no rows yet.

    Parameters
    ----------
    run_dir : Path
        the new folder.
    attributes : mapping of str to str
        what is known for the whole run: config, versions, hosts, git_commit.
    facts : sequence of Fact
        what is known of each client for the whole run.

    Raises
    ------
    UsageError
        if the folder already holds a run.
    """
    if (run_dir / "run.h5").exists():
        raise UsageError(f"'{run_dir}' already holds a run")
    for folder in ("metrics", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    _write(run_dir / "run.h5", attributes, facts, [])


def rebuild(run_dir: Path) -> None:
    """Write run.h5 anew from the segments that are there; its attributes stay, and what it knows of the clients.

    Sealed segments are mapped with the rows that count; an open one with all it has room for, so that run.h5
    needs no change while rows arrive.

    Raises
    ------
    UsageError
        if this is no run folder, a segment is missing, or the segments do not belong together.
    """
    run_dir = run_folder(run_dir)
    parts = [read_part(path) for path in segment_paths(run_dir)]
    kept = {name: value for name, value in run_attributes(run_dir).items() if name not in _OWN}
    _write(run_dir / "run.h5", kept, read_facts(run_dir), parts)


def is_sealed(run_dir: Path) -> bool:
    """Whether run.h5 was built from these very segments, all of them sealed."""
    attributes = run_attributes(run_dir)
    return bool(attributes["sealed"]) and json.loads(attributes["segments"]) == [
        path.name for path in segment_paths(run_dir)
    ]


def _write(path: Path, attributes: Mapping[str, str], facts: Sequence[Fact], parts: Sequence[Part]) -> None:
    """Replace run.h5 at one stroke."""
    with replace(path, "table") as new, created(new) as file:
        file.attrs.update(attributes)
        file.attrs["segments"] = json.dumps([part.path.name for part in parts])
        file.attrs["sealed"] = int(all(part.sealed for part in parts))
        columns, coords = merged_columns(parts), merged_coords(parts, facts)
        counted = _counted(parts)
        _map_rounds(file, counted)
        add_scales(file, coords)
        for column in columns:
            _map_column(file, column, coords, counted)
        add_facts(file, facts)
        name_axes(file, columns)


def _counted(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Return the parts that count, with how many of their first rows do."""
    limits = ends([part.first for part in parts], [not part.sealed or part.rounds.size > 0 for part in parts])
    result = []
    for part, limit in zip(parts, limits):
        open_rows = int(max(0, min(limit, part.total) - part.first))
        rows = int(np.count_nonzero(part.rounds < limit)) if part.sealed else open_rows
        if rows:
            result.append((part, rows))
    return result


def _map_rounds(file: h5py.File, counted: Counted) -> None:
    """Create the dimension scale of the rounds, itself virtual."""
    rows = sum(n for _, n in counted)
    if rows:
        layout = h5py.VirtualLayout((rows,), np.int64)
        start = 0
        for part, n in counted:
            layout[start : start + n] = _source(part, "round", (), np.dtype(np.int64))[:n]
            start += n
        dataset = file.create_virtual_dataset("round", layout, fillvalue=-1)
    else:
        dataset = file.create_dataset("round", (0,), np.int64)
    make_scale(dataset, "round")


def _map_column(file: h5py.File, column: Column, coords: Mapping[str, Array], counted: Counted) -> None:
    """Create one column; where a segment lacks it, or has fewer ranks, it reads as "not recorded"."""
    shape = shape_of(column, coords, sum(n for _, n in counted))
    if not all(shape):
        add_column(file, column, shape)
        return
    layout, start = h5py.VirtualLayout(shape, column.stored), 0
    for part, n in counted:
        if column.name in {known.name for known in part.columns}:
            inner = tuple(len(part.coords[dim]) for dim in column.dims)
            source = _source(part, column.name, inner, column.stored)
            where = (slice(start, start + n), *(slice(size) for size in inner))
            layout[where] = source[:n]
        start += n
    dataset = file.create_virtual_dataset(column.name, layout, fillvalue=fill_of(column.stored))
    label(file, dataset, column)


def _source(part: Part, name: str, inner: tuple[int, ...], dtype: np.dtype[np.generic]) -> h5py.VirtualSource:
    """Return a dataset of a segment; its path is relative to run.h5, so that the folder can be moved."""
    rows = len(part.rounds) if part.sealed else part.total - part.first
    return h5py.VirtualSource(f"metrics/{part.path.name}", name, (rows, *inner), dtype)
