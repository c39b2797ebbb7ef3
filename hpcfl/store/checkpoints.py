"""Checkpoints: one immutable file each, written under another name and made visible at one stroke.

The personal state of clients is stored by equal shapes: all clients whose tensors have the same names, shapes
and dtypes are rows of the same datasets, however they were cut into chunks. So any rank can read any clients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.errors import RunError
from hpcfl.store import fault
from hpcfl.store.atomic import replace
from hpcfl.store.columns import Array

Tensors = Mapping[str, Array]

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20
_LEAST_BYTES = 1 << 12


@dataclass(frozen=True)
class Checkpoint:
    """A run after `round` rounds.

    `personal` has an entry ``(client_ids [c], tensors {name: [c, ...]})`` for each set of clients whose
    tensors have equal names, shapes and dtypes.
    """

    round: int
    shared: dict[str, Array]
    personal: list[tuple[Array, dict[str, Array]]]
    clock: dict[str, float]


def save(
    run_dir: Path,
    round: int,  # noqa: A002
    shared: Tensors,
    personal: Iterable[tuple[Any, Tensors]],
    clock: Mapping[str, float],
    keep: int,
) -> Path:
    """Write the checkpoint after `round` rounds, then delete all but the last `keep` up to this one.

    Parameters
    ----------
    run_dir : Path
        the run folder.
    round : int
        how many rounds are done.
    shared : mapping
        the server's state by name; dtypes are kept to the bit.
    personal : iterable
        ``(client_ids [c], {name: [c, ...]})`` for one chunk of clients after the other; taken one at a
        time, so that memory holds one chunk.
    clock : mapping
        times and counts to go on from.
    keep : int
        how many checkpoints stay, at least 1.

    Raises
    ------
    ValueError
        for a name with a slash, a client given twice, tensors without the client axis, or `keep` below 1; the
        checkpoint does not appear then.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    path = run_dir / "checkpoints" / f"round-{round:06d}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace(path) as new, h5py.File(new, "w") as file:
        file.attrs["round"] = round
        file.create_group("clock").attrs.update({name: float(value) for name, value in clock.items()})
        _write_shared(file.create_group("shared"), shared)
        fault.reach("checkpoint")
        _write_personal(file.create_group("personal"), personal)
    for old in [old for old in _present(run_dir) if old.name < path.name][: 1 - keep or None]:
        old.unlink(missing_ok=True)
    return path


def latest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint that can be opened, None if there is none; warn of those that cannot."""
    for path in reversed(_present(run_dir)):
        try:
            with h5py.File(path, "r") as file:
                int(file.attrs["round"])
        except (OSError, KeyError) as error:
            _log.warning("checkpoint %s cannot be read and is passed over: %s", path, error)
        else:
            return path
    return None


def load(path: Path) -> Checkpoint:
    """Read a whole checkpoint.

    Raises
    ------
    RunError
        if it is not there or damaged.
    """
    try:
        with h5py.File(path, "r") as file:
            return Checkpoint(
                round=int(file.attrs["round"]),
                shared={name: np.asarray(item[()]) for name, item in file["shared"].items()},
                personal=[
                    (group["ids"][:], {name: item[:] for name, item in group["tensors"].items()})
                    for group in file["personal"].values()
                ],
                clock={name: float(value) for name, value in file["clock"].attrs.items()},
            )
    except (OSError, KeyError) as error:
        raise RunError(f"checkpoint {path} cannot be read: {error}") from error


def load_personal(path: Path, client_ids: Iterable[int]) -> dict[int, dict[str, Array]]:
    """Read the personal state of some clients only: ``{client: {name: [...]}}``.

    A client that the checkpoint does not hold is not in the result.

    Raises
    ------
    RunError
        if the checkpoint is not there or damaged.
    """
    wanted = np.unique(np.fromiter(client_ids, np.int64))
    result: dict[int, dict[str, Array]] = {}
    try:
        with h5py.File(path, "r") as file:
            for group in file["personal"].values():
                rows = np.flatnonzero(np.isin(group["ids"][:], wanted))
                tensors = {name: _take(item, rows) for name, item in group["tensors"].items()}
                for place, client in enumerate(group["ids"][:][rows]):
                    result[int(client)] = {name: values[place] for name, values in tensors.items()}
    except (OSError, KeyError) as error:
        raise RunError(f"checkpoint {path} cannot be read: {error}") from error
    return result


def _present(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("round-*.h5"))


def _write_shared(group: h5py.Group, shared: Tensors) -> None:
    """Write the server's tensors, whatever their shapes."""
    for name, value in shared.items():
        data = np.asarray(value)
        group.create_dataset(_named(name), data=data, fletcher32=data.size > 1)


def _write_personal(group: h5py.Group, personal: Iterable[tuple[Any, Tensors]]) -> None:
    """Write chunk after chunk, each to the group of its shapes."""
    groups: dict[tuple[Any, ...], h5py.Group] = {}
    seen: set[int] = set()
    for ids, given in personal:
        clients = np.asarray(ids, np.int64)
        tensors = {_named(name): np.asarray(value) for name, value in given.items()}
        _check_clients(clients, tensors, seen)
        shapes = tuple(sorted((name, data.shape[1:], data.dtype.str) for name, data in tensors.items()))
        if shapes not in groups:
            groups[shapes] = group.create_group(f"{len(groups):03d}")
        _append(groups[shapes], "ids", clients)
        tensor_group = groups[shapes].require_group("tensors")
        for name, data in tensors.items():
            _append(tensor_group, name, data)


def _check_clients(clients: Array, tensors: Tensors, seen: set[int]) -> None:
    """Raise if the chunk's clients were there before, or its tensors do not have one row for each."""
    twice = seen.intersection(clients.tolist())
    if twice or len(set(clients.tolist())) < len(clients):
        some = sorted(twice or clients.tolist())[:5]
        raise ValueError(f"the personal state of a client is given twice, among {some}")
    for name, data in tensors.items():
        if data.shape[:1] != clients.shape:
            raise ValueError(f"'{name}' has shape {data.shape} for {len(clients)} clients")
    seen.update(clients.tolist())


def _append(group: h5py.Group, name: str, data: Array) -> None:
    """Add rows to a dataset, or make it."""
    if name in group:
        dataset = group[name]
        dataset.resize(len(dataset) + len(data), axis=0)
        if data.size:
            dataset[-len(data) :] = data
        return
    row = max(1, data.nbytes // max(1, len(data)))
    rows = max(1, _LEAST_BYTES // row, min(len(data), _CHUNK_BYTES // row))
    chunks = (rows, *(max(1, size) for size in data.shape[1:]))
    group.create_dataset(name, data=data, chunks=chunks, maxshape=(None,) * data.ndim, fletcher32=True)


def _take(dataset: h5py.Dataset, rows: Array) -> Array:
    """Return some rows (ascending), read in runs of neighbours."""
    runs = [run for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if run.size]
    blocks = [dataset[int(run[0]) : int(run[-1]) + 1] for run in runs]
    return np.concatenate([np.empty((0, *dataset.shape[1:]), dataset.dtype), *blocks])


def _named(name: str) -> str:
    """Return a tensor's name if HDF5 takes it as one name."""
    if not name or "/" in name or name == ".":
        raise ValueError(f"no tensor can be named '{name}'")
    return name
