"""A sweep read as one labelled data set: what was recorded, with the swept keys and the seed as dimensions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.base.config import recorded
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import pandas, xarray
from hpcfl.config.presets import flat
from hpcfl.results.run_table import FIRST, run_folders

SEED = "seed"


def open_sweep(folder: Path | str) -> xarray.Dataset:
    """Return what all runs of a sweep have recorded, as one data set.

    Parameters
    ----------
    folder : Path or str
        The folder that ``hpcfl sweep --out`` was given: each run is a folder in it.

    Returns
    -------
    xarray.Dataset
        The variables of `hpcfl.open_run`, with a dimension for the seed and for each key in which the runs differ, by
        its dotted name, as in ``sel({"algorithm.lr": 0.1})``. A key that follows from others (an overlay sets many)
        is no dimension; where some runs lack a key its labels are text. Where a combination was not run, or a run has
        fewer rounds, values are missing (NaN).

    Raises
    ------
    UsageError
        If the folder holds no run, or two runs with the same keys and seed.
    """
    folders = list(run_folders([Path(folder)]))
    configs = [dict(flat(recorded(store.run_attributes(each)["config"]))) for each in folders]
    keys = [*_telling(configs), SEED]
    places = [tuple(config.get(key) for key in keys) for config in configs]
    for number, place in enumerate(places):
        if place in places[:number]:
            twin = folders[places.index(place)]
            raise UsageError(f"'{twin}' and '{folders[number]}' have the same config and seed: expected each run once")
    index = pandas.MultiIndex.from_arrays([_labels(values) for values in zip(*places)], names=keys)
    parts = [store.open_run(each) for each in folders]
    how: dict[str, Any] = {"join": "outer", "coords": "different", "compat": "equals", "data_vars": "all"}
    whole = xarray.concat(parts, pandas.RangeIndex(len(parts), name="run"), combine_attrs="drop_conflicts", **how)
    return whole.assign_coords(xarray.Coordinates.from_pandas_multiindex(index, "run")).unstack("run")


def _telling(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the fewest keys that tell all configs apart, but for the seed: names of classes first, then sections."""
    known = dict.fromkeys(key for config in configs for key in config if key != SEED)
    chosen: list[str] = []
    kinds = 1  # that the chosen keys tell apart
    for key in sorted(known, key=lambda key: (key not in FIRST, "." not in key)):
        told = {json.dumps([config.get(each) for each in (*chosen, key)]) for config in configs}
        if len(told) > kinds:
            chosen.append(key)
            kinds = len(told)
    return chosen


def _labels(values: Sequence[Any]) -> list[Any]:
    """Return an axis' labels; as text where some runs lack the key, or have lists."""
    if all(isinstance(value, int | float) for value in values) or all(isinstance(value, str) for value in values):
        return list(values)
    return ["" if value is None else json.dumps(value) for value in values]
