"""run.h5, one table over all segments of a run, and what begins and ends segments.

Once all segments are sealed it has their rows too, if these are not many, and can be mailed alone. Until then, or where
they are many, it is made of virtual datasets: the rows are in the segments. One that is being written, or was left by a
kill, is not in the table's datasets yet; a sealed one has its acknowledged rows column by column. The manifest has the
digests of run.h5 and of the sealed segments, each before the file gets its name.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.base.errors import RunError, UsageError
from hpcfl.store import inside, manifest, reading
from hpcfl.store.atomic import clean, created, number_of, numbered
from hpcfl.store.attributes import RUN_FORMAT
from hpcfl.store.checkpoints import saved
from hpcfl.store.columns import AXES, CLIENT, Column, Coords, Fact, add_scales, described, fill_of, shape_of
from hpcfl.store.growing_file import FORMAT, Segment
from hpcfl.store.inside import RUN, run_of, tell
from hpcfl.store.owner import owned, running
from hpcfl.store.reading import INTERNAL, Part, read_facts, read_part, run_attributes, run_folder, segment_paths

MOST_ROWS = 64 << 20
"""Bytes of rows below which run.h5 has them itself."""
_BLOCK_BYTES, _CHUNK_BYTES = 1 << 26, 1 << 20


def create(run_dir: Path, attributes: Mapping[str, str], facts: Sequence[Fact] = ()) -> None:
    """Make the run folder, with a run.h5 that has no rows yet; UsageError if it holds a run, or what is left of one.

    `attributes` are what is known for the whole run: config, versions, hosts, git_commit.
    """
    inside.check_folder(run_dir)
    if (run_dir / "run.h5").exists():
        raise UsageError(f"'{run_dir}' already holds a run")
    if left := [*numbered(run_dir / "metrics", "segment", ".h5"), *saved(run_dir)]:
        raise UsageError(f"'{run_dir}' has no run.h5, but {left[0]} of an earlier run: expected an empty folder")
    for folder in ("metrics", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    _write(run_dir, {**attributes, RUN: uuid.uuid4().hex}, facts, [])


def begin(run_dir: Path, columns: Sequence[Column], coords: Coords, first: int, rounds: int) -> Segment:
    """Open the next segment of a run and put it into run.h5; what earlier starts left behind is tidied up.

    Parameters are those of `Segment`. Call it only when no other process runs this run.
    """
    run_dir = run_folder(run_dir)
    for folder in ("metrics", "checkpoints"):
        (run_dir / folder).mkdir(exist_ok=True)
    earlier, _ = _tidied(run_dir)
    number = number_of(earlier[-1]) + 1 if earlier else 0
    path = run_dir / "metrics" / f"segment-{number:03d}.h5"
    segment = Segment(path, columns, coords, first, rounds, run_of(run_dir))
    rebuild(run_dir)
    return segment


def seal(run_dir: Path, force: bool = False) -> None:
    """Make every file of a run readable by any HDF5 or netCDF-4 program, and remove what a kill left half written.

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
        paths, changed = _tidied(run_dir)
        table = run_attributes(run_dir)
        if any(changed) or not table["sealed"] or json.loads(table["segments"]) != [path.name for path in paths]:
            rebuild(run_dir)


def rebuild(run_dir: Path, changed: Mapping[str, str] | None = None) -> None:
    """Write run.h5 anew from the segments that are there; its attributes stay, and what it knows of the clients.

    `changed` are attributes that take the place of those that are there.

    Once all segments are sealed it has the rows that count, if they are less than `MOST_ROWS`. Else those of sealed
    segments are mapped; of one that is not, only axes and columns are there. UsageError if a segment is missing, or
    they do not belong together.
    """
    run_dir = run_folder(run_dir)
    paths = segment_paths(run_dir)
    _list(run_dir, paths)
    parts = [read_part(path) for path in paths]
    kept = {name: value for name, value in run_attributes(run_dir).items() if name not in INTERNAL}
    _write(run_dir, kept | dict(changed or {}), read_facts(run_dir), parts)


def _tidied(run_dir: Path) -> tuple[list[Path], list[bool]]:
    """Remove what a kill left half written, and seal all segments; return these, and which were rewritten."""
    paths = segment_paths(run_dir)
    for folder in (run_dir, run_dir / "metrics", run_dir / "checkpoints"):
        clean(folder)
    _list(run_dir, paths)
    return paths, [_seal_segment(path) for path in paths]


def _list(run_dir: Path, segments: Sequence[Path]) -> None:
    """Make the manifest anew where it is damaged or gone."""
    try:
        manifest.read(run_dir)
    except RunError as error:
        if (run_dir / manifest.NAME).exists():
            if not isinstance(error, manifest.DamagedError):
                raise
            tell(f"{error}; it is made anew from the files as they are")
        manifest.write(run_dir, ["run.h5", *[f"metrics/{path.name}" for path in segments if reading.is_closed(path)]])


def _write(run_dir: Path, attributes: Mapping[str, str], facts: Sequence[Fact], parts: Sequence[Part]) -> None:
    with manifest.replaced(run_dir, "run.h5") as new, created(new, libver=FORMAT) as file:
        file.attrs.update(attributes)
        file.attrs["format"] = RUN_FORMAT
        file.attrs["segments"] = json.dumps([part.path.name for part in parts])
        sealed = [part for part in parts if part.layout is None]
        file.attrs["sealed"] = int(len(sealed) == len(parts))
        known: dict[str, Any] = {}  # of a segment, if it cannot be read one day
        for part in parts:
            rows = [] if part.layout else reading.packed(part.rounds)
            known[part.path.name] = {"first": part.first, "rounds": part.total, "rows": rows}
        file.attrs["parts"] = json.dumps(known)
        columns, coords = reading.merged_columns(parts), reading.merged_coords(parts, facts)
        done = reading.reached(reading.promises(run_dir), parts)
        counted = [(part, n) for part, n in reading.counts(sealed, done) if n]
        rounds = np.concatenate([np.empty(0, np.int64), *(part.rounds[:n] for part, n in counted)])
        add_scales(file, {"round": rounds, **coords})
        rows_too = len(sealed) == len(parts) > 0 and reading.size(columns, coords, len(rounds)) < MOST_ROWS
        file.attrs["rows"] = reading.HERE if rows_too else reading.BESIDE
        if len(lost := reading.lost_rounds(counted)):
            file.attrs["lost"] = json.dumps(reading.packed(lost))
        if rows_too:
            counted = [(read_part(part.path, with_data=True), n) for part, n in counted]
        for column in columns:
            if rows_too:
                values = reading.joined(column, coords, counted)
                dataset = _add_checked(file, column.name, values.shape, column.stored, values)
            else:
                dataset = _map_column(file, column, coords, counted)
            for axis, label in enumerate(("round", *column.dims)):
                dataset.dims[axis].attach_scale(file[label])
            dataset.attrs.update(column.attributes)
        for fact in facts:
            text = fact.values.dtype.kind == "U"
            given = (
                {"data": fact.values.astype(object), "dtype": h5py.string_dtype()} if text else {"data": fact.values}
            )
            dataset = file.create_dataset(fact.name, **given)
            dataset.dims[0].attach_scale(file[CLIENT])
            dataset.attrs["long_name"] = fact.long_name
        single = {column.name for column in columns if not column.dims}
        file.attrs["coordinates"] = " ".join(name for name in AXES if name in single)  # as the CF conventions say it


def _map_column(file: h5py.File, column: Column, coords: Coords, counted: Sequence[tuple[Part, int]]) -> h5py.Dataset:
    """Create one column over the segments; where one lacks it, or has fewer ranks, it reads as "not recorded"."""
    shape, fill = shape_of(column, coords, sum(n for _, n in counted)), fill_of(column.stored)
    if not all(shape):
        return file.create_dataset(column.name, shape, column.stored, fillvalue=fill)
    layout, start = h5py.VirtualLayout(shape, column.stored), 0
    for part, n in counted:
        rows = min(n, part.stored)
        if rows and column.name in {known.name for known in part.columns}:
            inner = tuple(len(part.coords[dim]) for dim in column.dims)
            name = f"metrics/{part.path.name}"  # relative to run.h5, so that the folder can be moved
            source = h5py.VirtualSource(name, column.name, (part.stored, *inner), column.stored)
            layout[(slice(start, start + rows), *(slice(size) for size in inner))] = source[:rows]
        start += n
    return file.create_virtual_dataset(column.name, layout, fillvalue=fill)


def _seal_segment(path: Path) -> bool:
    """Rewrite one segment as a closed file of its acknowledged rows; return False where it is one, or is damaged."""
    part = read_part(path)
    reading.tell_of(part)
    if part.layout is None:
        return False
    with manifest.replaced(path.parents[1], f"metrics/{path.name}") as new, created(new, libver=FORMAT) as file:
        file.attrs.update({"first": part.first, "rounds": part.total, "sealed": 1, RUN: part.layout.run})
        if len(part.lost):
            file.attrs["lost"] = json.dumps(reading.packed(part.lost))
        if part.reason:
            file.attrs["damage"] = part.reason
        text = np.frombuffer(json.dumps(described(part.columns, part.coords)).encode(), np.uint8)
        events = reading.read_events(path)
        for name, data in ((reading.HEADER, text), ("round", part.rounds), ("log/events", events)):
            _add_checked(file, name, data.shape, data.dtype, data)
        for column in part.columns:
            _add_checked(file, column.name, shape_of(column, part.coords, len(part.rounds)), column.stored)
        rows = len(part.rounds)  # copied a block at a time so that memory stays small
        step = max(1, _BLOCK_BYTES * rows // max(1, sum(file[column.name].nbytes for column in part.columns)))
        with path.open("rb", buffering=0) as raw:
            for start in range(0, rows, step):
                for name, values in reading.live_rows(part, raw, start, min(start + step, rows)).items():
                    if values.size:
                        file[name][start : start + len(values)] = values
    return True


def _add_checked(file: h5py.File, name: str, shape: tuple[int, ...], dtype: Any, data: Any = None) -> h5py.Dataset:
    """Create a dataset that is compressed, where that makes it smaller, and whose checksums every reader verifies."""
    if 0 in shape:
        return file.create_dataset(name, shape, dtype)
    row = prod(shape[1:]) * np.dtype(dtype).itemsize
    chunk = (min(shape[0], max(1, _CHUNK_BYTES // row)), *shape[1:])
    filters = {"shuffle": True, "compression": "gzip", "compression_opts": 1, "fletcher32": True}
    return file.create_dataset(name, shape, dtype, data=data, chunks=chunk, **filters)
