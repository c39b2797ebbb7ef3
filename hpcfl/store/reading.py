"""What offline study starts from: a run, in whatever state it is, as one xarray Dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfl.store.atomic import number_of
from hpcfl.store.columns import AXES, CLIENT, LABELS, Array, Column, fill_of
from hpcfl.store.events import read_log
from hpcfl.store.segments import (
    Part,
    ends,
    merged_columns,
    merged_coords,
    open_segment,
    read_facts,
    read_part,
    run_attributes,
    run_folder,
    segment_paths,
)
from hpcfl.store.status import read_status

if TYPE_CHECKING:
    import xarray

_INTERNAL = ("segments", "sealed", "coordinates")


def open_run(path: Path | str) -> xarray.Dataset:
    """Return the acknowledged rounds of a finished, running or killed run, in memory, its files closed.

    Parameters
    ----------
    path : Path or str
        the run folder, or the run.h5 in it.

    Returns
    -------
    xarray.Dataset
        dims round, client, layer, rank (those there are); NaN and -1 say "not recorded". What is known of each
        client has no round. Simulated seconds, wall seconds and message bytes are coordinates over the round. The
        attributes are those of the run (config, versions, ...) and its status and reason.

    Raises
    ------
    UsageError
        if this is no run folder, or a segment that run.h5 names is missing or cannot be read.
    """
    import xarray

    run_dir = run_folder(path)
    parts = [read_part(segment, with_data=True) for segment in segment_paths(run_dir)]
    chosen, facts = _chosen(parts), read_facts(run_dir)
    coords = merged_coords(parts, facts)
    variables: dict[str, Any] = {name: (name, labels) for name, labels in coords.items()}
    rounds = [part.rounds[:n] for part, n in chosen]
    variables["round"] = ("round", np.concatenate([np.empty(0, np.int64), *rounds]))
    for column in merged_columns(parts):
        values = _joined(column, coords, chosen)
        variables[column.name] = (("round", *column.dims), values, _attributes(column))
    variables |= {fact.name: (CLIENT, fact.values, {"long_name": fact.long_name}) for fact in facts}
    for name in variables.keys() & LABELS.keys():
        variables[name] = (*variables[name], {"long_name": LABELS[name]})
    dataset: xarray.Dataset = xarray.Dataset(variables, attrs=_run_attributes(run_dir))
    dataset = dataset.set_coords([name for name in AXES if name in dataset])
    return dataset


def events(path: Path | str) -> list[dict[str, Any]]:
    """Return the log, oldest first: segment, round, time (s since 1970), kind, client (-1: none) and text.

    Events of rounds that a later segment superseded are among them: they did happen.

    Raises
    ------
    UsageError
        as `open_run`.
    """
    result = []
    for segment in segment_paths(run_folder(path)):
        with open_segment(segment) as file:
            result += [{"segment": number_of(segment), **event} for event in read_log(file)]
    return result


def _chosen(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Return each part with the number of its first rows that no later part supersedes."""
    limits = ends([part.first for part in parts], [part.rounds.size > 0 for part in parts])
    return [(part, int(np.count_nonzero(part.rounds < limit))) for part, limit in zip(parts, limits)]


def _joined(column: Column, coords: dict[str, Array], chosen: Sequence[tuple[Part, int]]) -> Array:
    """Return a column [round, ...] over all parts; what a part lacks reads as "not recorded"."""
    shape = (sum(n for _, n in chosen), *(len(coords[dim]) for dim in column.dims))
    whole = np.full(shape, fill_of(column.stored), column.stored)
    start = 0
    for part, n in chosen:
        if column.name in part.data:
            rows = part.data[column.name][:n]
            where = (slice(start, start + n), *(slice(size) for size in rows.shape[1:]))
            whole[where] = rows
        start += n
    return whole


def _attributes(column: Column) -> dict[str, str]:
    """Return what the file says about a column."""
    return {"long_name": column.long_name} | ({"units": column.units} if column.units else {})


def _run_attributes(run_dir: Path) -> dict[str, Any]:
    """Return the attributes of the run and how it stands."""
    kept = {name: value for name, value in run_attributes(run_dir).items() if name not in _INTERNAL}
    status = read_status(run_dir)
    return {**kept, "status": status.state, "reason": status.reason}
