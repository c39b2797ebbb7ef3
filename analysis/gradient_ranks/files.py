"""What a study found, and the HDF5 file that holds it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpcfl.base.errors import UsageError
from hpcfl.data.formats.hdf5_file import dataset, opened
from hpcfl.store.atomic import replace

Array = npt.NDArray[Any]
BOUNDS = (5, 10)
FIGURES = ("median", "most", "rows_median", "rank_is_rows")
TIMES = ("training_seconds", "seconds")


@dataclass(frozen=True)
class Setting:
    """What theta* depends on."""

    data: str
    hidden: tuple[int, ...]
    activation: str
    optimizer: str
    epochs: int
    batch: int
    lr: float
    training_seed: int


@dataclass(frozen=True)
class Trained:
    """A trained network: theta* float32 ``[p]``, its accuracies, and the seconds that training took."""

    setting: Setting
    theta: Array
    train_accuracy: float
    test_accuracy: float
    training_seconds: float


@dataclass(frozen=True)
class Case:
    """One study: its attributes as in the file; approximate ranks and rows needed, int64 ``[q]``."""

    attributes: dict[str, Any]
    ranks: Array
    rows: Array


def write(path: Path, case: Case, arrays: dict[str, Array], names: list[str]) -> None:
    """Write a study as one file, whole or not at all.

    Parameters
    ----------
    arrays : dict
        What else it holds: slices, singular_values, theta, samples, weights.
    names : list of str
        Of the weights.
    """
    with replace(path) as new, h5py.File(new, "w") as file:
        file.attrs.update(case.attributes)
        for name, values in (arrays | {"approximate_ranks": case.ranks, "rows_needed": case.rows}).items():
            file[name] = values
        file.create_dataset("names", data=names, dtype=h5py.string_dtype())


def attributes(file: h5py.File) -> dict[str, Any]:
    """Return a file's attributes as Python's own values, lists as tuples."""
    found = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in file.attrs.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def read(path: Path) -> Case:
    """Return the study in an output file."""
    with opened(path) as file:
        return Case(attributes(file), dataset(file, "approximate_ranks")[()], dataset(file, "rows_needed")[()])


def trained(path: Path) -> Trained:
    """Return theta* of a file and how it was trained; UsageError where it does not say so."""
    with opened(path) as file:
        theta, found = dataset(file, "theta")[()], attributes(file)
    try:
        how = Setting(**{field.name: found[field.name] for field in fields(Setting)})
        return Trained(how, theta, *(found[name] for name in ("train_accuracy", "test_accuracy", "training_seconds")))
    except KeyError as error:
        raise UsageError(f"{path}: {error} is missing; expected a file that --out has written") from None


def summary(case: Case) -> dict[str, Any]:
    """Return the attributes but for times, and how many ranks are small; null: all matrices are zero."""
    there = case.ranks > 0
    ranks, rows = case.ranks[there], case.rows[there]
    figures: dict[str, Any] = dict.fromkeys([*(f"at_most_{bound}" for bound in BOUNDS), *FIGURES])
    if len(ranks):
        shares = [float((ranks <= bound).mean()) for bound in BOUNDS]
        rest = [float(np.median(ranks)), int(ranks.max()), float(np.median(rows)), float((ranks == rows).mean())]
        figures = dict(zip(figures, [*shares, *rest]))
    told = {name: value for name, value in case.attributes.items() if name not in TIMES}
    return told | {"zero": int((~there).sum())} | figures
