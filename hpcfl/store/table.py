"""run.h5, one table over all segments of a run, and what begins and ends segments.

The table is made of virtual datasets and holds no rows of its own: those are in the segments. One that is being
written, or was left by a kill, opens only in SWMR mode and is not in the table's datasets yet; a sealed one is a closed
file of its acknowledged rows, column by column, and opens anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.store.atomic import clean, created, number_of, replace
from hpcfl.store.columns import (
    Array,
    Column,
    Coords,
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
from hpcfl.store.owner import owned, running
from hpcfl.store.reading import (
    INTERNAL,
    Part,
    ends,
    merged_columns,
    merged_coords,
    open_segment,
    read_facts,
    read_part,
    read_rows,
    run_attributes,
    run_folder,
    segment_paths,
)
from hpcfl.store.segment import Segment

_BLOCK_BYTES = 1 << 26


def create(run_dir: Path, attributes: Mapping[str, str], facts: Sequence[Fact] = ()) -> None:
    """Make the run folder, with a run.h5 that has no rows yet; UsageError if it already holds a run.

    `attributes` are what is known for the whole run: config, versions, hosts, git_commit.
    """
    if (run_dir / "run.h5").exists():
        raise UsageError(f"'{run_dir}' already holds a run")
    for folder in ("metrics", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    _write(run_dir / "run.h5", attributes, facts, [])


def begin(run_dir: Path, columns: Sequence[Column], coords: Coords, first: int, rounds: int) -> Segment:
    """Open the next segment of a run and put it into run.h5; what earlier starts left behind is tidied up.

    Parameters are those of `Segment`. Call it only when no other process runs this run.
    """
    run_dir = run_folder(run_dir)
    for folder in (run_dir, run_dir / "metrics", run_dir / "checkpoints"):
        clean(folder)
    earlier = segment_paths(run_dir)
    for path in earlier:
        _seal_segment(path)
    number = number_of(earlier[-1]) + 1 if earlier else 0
    segment = Segment(run_dir / "metrics" / f"segment-{number:03d}.h5", columns, coords, first, rounds)
    rebuild(run_dir)
    return segment


def seal(run_dir: Path, force: bool = False) -> None:
    """Make every file of a run readable by any HDF5 or netCDF-4 program; does nothing where it is so already.

    The last segment may have been left by a kill. `force` seals even if the run seems to be running on another host:
    rows that it writes from then on are lost.

    Raises
    ------
    UsageError
        If another process owns the folder or is running the run: a segment replaced under it would take its rows along.
    """
    run_dir = run_folder(run_dir)
    if other := running(run_dir, force):
        doubt = "" if other.here else ", or was killed there"
        raise UsageError(f"'{run_dir}' is still running as process {other.pid} on {other.host}{doubt}")
    with owned(run_dir, force):
        paths = segment_paths(run_dir)
        changed = [_seal_segment(path) for path in paths]
        table = run_attributes(run_dir)
        if any(changed) or not table["sealed"] or json.loads(table["segments"]) != [path.name for path in paths]:
            rebuild(run_dir)


def rebuild(run_dir: Path, changed: Mapping[str, str] | None = None) -> None:
    """Write run.h5 anew from the segments that are there; its attributes stay, and what it knows of the clients.

    `changed` are attributes that take the place of those that are there.

    Sealed segments are mapped with the rows that count; of one that is not, only axes and columns are there. UsageError
    if a segment is missing, or they do not belong together.
    """
    run_dir = run_folder(run_dir)
    parts = [read_part(path) for path in segment_paths(run_dir)]
    kept = {name: value for name, value in run_attributes(run_dir).items() if name not in INTERNAL}
    _write(run_dir / "run.h5", kept | dict(changed or {}), read_facts(run_dir), parts)


def _write(path: Path, attributes: Mapping[str, str], facts: Sequence[Fact], parts: Sequence[Part]) -> None:
    with replace(path) as new, created(new) as file:
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
    """Return the sealed parts that count, with how many of their first rows do."""
    sealed = [part for part in parts if part.sealed]
    limits = ends([part.first for part in sealed], [part.rounds.size > 0 for part in sealed])
    counted = [(part, int(np.count_nonzero(part.rounds < limit))) for part, limit in zip(sealed, limits)]
    return [(part, rows) for part, rows in counted if rows]


def _map_rounds(file: h5py.File, counted: Sequence[tuple[Part, int]]) -> None:
    """Create the dimension scale of the rounds, itself virtual."""
    rows = sum(n for _, n in counted)
    if rows:
        layout, start = h5py.VirtualLayout((rows,), np.int64), 0
        for part, n in counted:
            layout[start : start + n] = _source(part, "round", (), np.dtype(np.int64))[:n]
            start += n
        dataset = file.create_virtual_dataset("round", layout, fillvalue=-1)
    else:
        dataset = file.create_dataset("round", (0,), np.int64)
    make_scale(dataset, "round")


def _map_column(
    file: h5py.File, column: Column, coords: Mapping[str, Array], counted: Sequence[tuple[Part, int]]
) -> None:
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
            layout[(slice(start, start + n), *(slice(size) for size in inner))] = source[:n]
        start += n
    dataset = file.create_virtual_dataset(column.name, layout, fillvalue=fill_of(column.stored))
    label(file, dataset, column)


def _source(part: Part, name: str, inner: tuple[int, ...], dtype: np.dtype[np.generic]) -> h5py.VirtualSource:
    """Return a dataset of a segment; its path is relative to run.h5, so that the folder can be moved."""
    return h5py.VirtualSource(f"metrics/{part.path.name}", name, (len(part.rounds), *inner), dtype)


def _seal_segment(path: Path) -> bool:
    """Rewrite one segment as a closed file of its acknowledged rows; return False where it is one already."""
    part = read_part(path)
    if part.sealed:
        return False
    with open_segment(path) as source, replace(path) as new, created(new) as target:
        target.attrs.update({"first": part.first, "rounds": part.total, "sealed": 1})
        make_scale(target.create_dataset("round", data=part.rounds), "round")
        add_scales(target, part.coords)
        for column in part.columns:
            add_column(target, column, shape_of(column, part.coords, len(part.rounds)))
        _copy_rows(source, target, part)
        name_axes(target, part.columns)
        count = source["log/count"][:]
        target.create_dataset("log/events", data=source["log/events"][: int(count[0])])
        target.create_dataset("log/count", data=count)
    return True


def _copy_rows(source: h5py.File, target: h5py.File, part: Part) -> None:
    """Copy the acknowledged rows, a block at a time so that memory stays small."""
    rows = part.rounds - part.first
    step = max(1, _BLOCK_BYTES * len(rows) // max(1, sum(target[column.name].nbytes for column in part.columns)))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        for name, values in read_rows(source, part.columns, part.coords, block).items():
            if values.size:
                target[name][start : start + len(block)] = values
