"""Starting and ending segments: a new one for each start of a run, closed ordinary files when it is over.

A segment that is being written, or was left by a kill, opens only in SWMR mode; a sealed one opens anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.store.atomic import clean, created, number_of, replace
from hpcfl.store.columns import Array, Column, add_column, add_scales, make_scale, name_axes
from hpcfl.store.events import copy_log
from hpcfl.store.metrics import Segment
from hpcfl.store.owner import owned, running
from hpcfl.store.segments import Part, open_segment, read_part, run_folder, segment_paths
from hpcfl.store.table import is_sealed, rebuild

_BLOCK_BYTES = 1 << 26


def begin(
    run_dir: Path,
    columns: Sequence[Column],
    coords: Mapping[str, Sequence[int | str]],
    first: int,
    rounds: int,
) -> Segment:
    """Open the next segment of a run and put it into run.h5; what earlier starts left behind is tidied up.

    Parameters are those of `Segment`. Call it only when no other process runs this run.
    """
    run_dir = run_folder(run_dir)
    for folder in (run_dir, run_dir / "metrics", run_dir / "checkpoints"):
        clean(folder)
    earlier = segment_paths(run_dir)
    for path in earlier:
        seal_segment(path)
    number = number_of(earlier[-1]) + 1 if earlier else 0
    segment = Segment(run_dir / "metrics" / f"segment-{number:03d}.h5", columns, coords, first, rounds)
    rebuild(run_dir)
    return segment


def seal(run_dir: Path, force: bool = False) -> None:
    """Make every file of a run readable by any HDF5 or netCDF-4 program; does nothing where it is so already.

    Parameters
    ----------
    run_dir : Path
        the folder of a run that is over; its last segment may have been left by a kill.
    force : bool
        seal even if the run seems to be running on another host: rows that it writes from then on are lost.

    Raises
    ------
    UsageError
        if another process owns the folder or is running the run: a segment replaced under it would take its rows along.
    """
    run_dir = run_folder(run_dir)
    if other := running(run_dir, force):
        doubt = "" if other.here else ", or was killed there"
        raise UsageError(f"'{run_dir}' is still running as process {other.pid} on {other.host}{doubt}")
    with owned(run_dir, force):
        changed = [seal_segment(path) for path in segment_paths(run_dir)]
        if any(changed) or not is_sealed(run_dir):
            rebuild(run_dir)


def seal_segment(path: Path) -> bool:
    """Rewrite one segment as a closed file of its acknowledged rows; return False where it is one already."""
    part = read_part(path)
    if part.sealed:
        return False
    with open_segment(path) as source, replace(path) as new, created(new) as target:
        _copy(source, target, part)
    return True


def _copy(source: h5py.File, target: h5py.File, part: Part) -> None:
    """Fill the new file."""
    target.attrs.update({"first": part.first, "rounds": part.total, "sealed": 1})
    make_scale(target.create_dataset("round", data=part.rounds), "round")
    add_scales(target, part.coords)
    for column in part.columns:
        old = source[column.name]
        new = add_column(target, column, (len(part.rounds), *old.shape[1:]))
        _copy_rows(old, new, part.rounds - part.first)
    name_axes(target, part.columns)
    copy_log(source, target)


def _copy_rows(old: h5py.Dataset, new: h5py.Dataset, rows: Array) -> None:
    """Copy the given rows, a block at a time so that memory stays small."""
    if not new.size:
        return
    step = max(1, _BLOCK_BYTES * len(rows) // max(1, new.nbytes))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        low, high = int(block[0]), int(block[-1]) + 1
        new[start : start + len(block)] = old[low:high][np.asarray(block) - low]
