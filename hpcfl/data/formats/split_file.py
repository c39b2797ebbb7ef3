"""HDF5 files that say which samples of a pool each client holds, so that a split can be done again elsewhere.

``clients/<id>/train`` and, if the client tests, ``clients/<id>/test`` are integers ``[n]``: places in the training pool
and in the test pool of a source, counted from 0. ``server/train`` are those of the server itself, if it holds any.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from hpcfl.base.errors import UsageError, listed
from hpcfl.base.types import Ints
from hpcfl.data.base import check_clients
from hpcfl.data.formats.hdf5_file import client_ids, dataset, linked, opened
from hpcfl.data.partition import Split

NAMES = ("train", "test")


def read(path: Path, clients: int, pool: tuple[int, int]) -> Split:
    """Return the split in a file, clients in natural order of their ids; `pool` are the sizes of both pools.

    Raises
    ------
    UsageError
        If the file is damaged or has another number of clients, a part is not what it should be, a client has no
        training samples, or a training sample is held twice.
    """
    with opened(path) as file:
        ids = client_ids(file)
        check_clients(clients, len(ids), str(path))
        for group in (f"clients/{name}" for name in ids):
            client = linked(file, group)
            if not isinstance(client, h5py.Group):
                raise UsageError(f"{path}: {group} is no group, expected {group}/train and {group}/test")
            if others := sorted(client.keys() - set(NAMES)):
                raise UsageError(f"{path}: {group} has {listed(others)}, expected train and test")
        train, test = (
            [_indices(file, f"clients/{name}/{part}", size) for name in ids] for part, size in zip(NAMES, pool)
        )
        server = _indices(file, "server/train", pool[0])
    for name, held in zip(ids, train):
        if not len(held):
            raise UsageError(f"{path}: clients/{name}/train is missing or empty, expected at least 1 training sample")
    if (twice := _repeated(np.concatenate([*train, server]))) is not None:
        owners = zip([*(f"clients/{name}" for name in ids), "server"], [*train, server])
        one, other = [owner for owner, part in owners if twice in part][:2]
        raise UsageError(f"{path}: {one} and {other} both hold training sample {twice}, expected each in one of them")
    return Split(train, test, server)


def write(path: Path, split: Split) -> None:
    """Write a split so that `read` returns it, clients by their numbers."""
    with h5py.File(path, "w") as file:
        for client, parts in enumerate(zip(split.train, split.test)):
            for name, part in zip(NAMES, parts):
                file[f"clients/{client}/{name}"] = part
        if len(split.server):
            file["server/train"] = split.server


def _indices(file: h5py.File, name: str, size: int) -> Ints:
    """Return the places in a pool of that size that a part holds, none where there is no such part."""
    if linked(file, name) is None:
        return np.zeros(0, dtype=np.int64)
    data, where = dataset(file, name), f"{file.filename}: {name}"
    if data.dtype.kind not in "iu" or data.ndim != 1:
        raise UsageError(f"{where} is {data.dtype} of shape {data.shape}, expected integers of one axis")
    pool = f"the pool of {size} {'test' if name.endswith('/test') else 'training'} samples"
    if len(data) > size:  # of any size: nothing is read
        raise UsageError(f"{where} has {len(data)} indices, expected at most {size}, each once, of {pool}")
    values = data[()]
    wrong = np.flatnonzero((values < 0) | (values >= size))
    if wrong.size:
        place = wrong[0]
        raise UsageError(f"{where}: index {values[place]} at place {place}, expected 0 to {size - 1} of {pool}")
    held: Ints = values.astype(np.int64)
    if (twice := _repeated(held)) is not None:
        raise UsageError(f"{where} names sample {twice} twice, expected each index once")
    return held


def _repeated(values: Ints) -> int | None:
    """Return the least value that occurs more than once, None where there is none."""
    ordered = np.sort(values)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeated[0]) if repeated.size else None
