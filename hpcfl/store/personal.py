"""The personal state of clients within a checkpoint.

It is stored by equal shapes: all clients whose tensors have the same names, shapes and dtypes are rows of the
same datasets, however they were cut into chunks. So any rank can read any clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from hpcfl.store.columns import Array

Tensors = Mapping[str, Array]
Chunk = tuple[Array, dict[str, Array]]
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]

_CHUNK_BYTES = 1 << 20
_LEAST_BYTES = 1 << 12


def write_chunks(group: h5py.Group, personal: Iterable[tuple[Any, Tensors]]) -> None:
    """Write chunk after chunk, each to the group of its shapes."""
    groups: dict[Shapes, h5py.Group] = {}
    for clients, tensors in _batches(_checked(personal)):
        shapes = _shapes(tensors)
        if shapes not in groups:
            groups[shapes] = group.create_group(f"{len(groups):03d}")
        _append(groups[shapes], "ids", clients)
        tensor_group = groups[shapes].require_group("tensors")
        for name, data in tensors.items():
            _append(tensor_group, name, data)


def read_chunks(group: h5py.Group) -> list[Chunk]:
    """Return all clients: ``(client_ids [c], {name: [c, ...]})`` for each set of equal shapes."""
    return [(same["ids"][:], {name: item[:] for name, item in same["tensors"].items()}) for same in group.values()]


def read_clients(group: h5py.Group, client_ids: Iterable[int]) -> dict[int, dict[str, Array]]:
    """Return those of some clients that are there: ``{client: {name: [...]}}``."""
    wanted = np.unique(np.fromiter(client_ids, np.int64))
    result: dict[int, dict[str, Array]] = {}
    for same in group.values():
        clients = same["ids"][:]
        rows = np.flatnonzero(np.isin(clients, wanted))
        tensors = {name: _take(item, rows) for name, item in same["tensors"].items()}
        for place, client in enumerate(clients[rows]):
            result[int(client)] = {name: np.asarray(values[place]) for name, values in tensors.items()}
    return result


def read_shapes(group: h5py.Group, client_ids: Iterable[int]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the shapes of those of some clients that are there: ``{client: {name: shape}}``."""
    wanted = np.unique(np.fromiter(client_ids, np.int64))
    result: dict[int, dict[str, tuple[int, ...]]] = {}
    for same in group.values():
        shapes = {name: item.shape[1:] for name, item in same["tensors"].items()}
        result |= dict.fromkeys(np.intersect1d(same["ids"][:], wanted).tolist(), shapes)
    return result


def _shapes(tensors: Tensors) -> Shapes:
    """Return what chunks have in common that are rows of the same datasets."""
    return tuple(sorted((name, data.shape[1:], data.dtype.str) for name, data in tensors.items()))


def _batches(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small neighbours of equal shapes: writing clients one by one is ten times slower."""
    held: list[Chunk] = []
    size = 0
    for clients, tensors in chunks:
        if held and _shapes(tensors) != _shapes(held[0][1]):
            yield _concatenated(held)
            held, size = [], 0
        size += sum(data.nbytes for data in tensors.values()) + clients.nbytes
        if size < _CHUNK_BYTES:  # copied, as the caller may fill the same arrays again
            clients, tensors = clients.copy(), {name: data.copy() for name, data in tensors.items()}
        held.append((clients, tensors))
        if size >= _CHUNK_BYTES:
            yield _concatenated(held)
            held, size = [], 0
    if held:
        yield _concatenated(held)


def _concatenated(chunks: list[Chunk]) -> Chunk:
    """Return several chunks of equal shapes as one."""
    if len(chunks) == 1:
        return chunks[0]
    names = chunks[0][1]
    clients = np.concatenate([ids for ids, _ in chunks])
    return clients, {name: np.concatenate([tensors[name] for _, tensors in chunks]) for name in names}


def _checked(personal: Iterable[tuple[Any, Tensors]]) -> Iterator[Chunk]:
    """Pass the chunks on as arrays, and raise at the first that cannot be stored."""
    seen: set[int] = set()
    for ids, given in personal:
        clients = np.asarray(ids, np.int64)
        tensors = {checked_name(name): np.asarray(value) for name, value in given.items()}
        _check_clients(clients, tensors, seen)
        yield clients, tensors


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


def checked_name(name: str) -> str:
    """Return a tensor's name if HDF5 takes it as one name."""
    if not name or "/" in name or name == ".":
        raise ValueError(f"no tensor can be named '{name}'")
    return name
