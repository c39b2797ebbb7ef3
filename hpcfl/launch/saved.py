"""Data that a script has, as a file that ``data.file`` takes: arrays, PyTorch datasets, a table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from hpcfl.base.digests import copy_of, origin
from hpcfl.base.errors import UsageError, did_you_mean
from hpcfl.base.lazy import pandas
from hpcfl.base.rng import keyed
from hpcfl.config import Config
from hpcfl.data.dataset import read
from hpcfl.data.formats.hdf5_file import natural
from hpcfl.launch.request import check_writable
from hpcfl.learning.task import Task
from hpcfl.store.atomic import created, replace, write_text

MOST = 100 << 20
"""Bytes of data that a run folder keeps."""
HDF5 = (".h5", ".hdf5")
TABLES = (".csv", ".parquet", ".feather")
Array = NDArray[Any]
Parts = dict[str, tuple[Array, Array]]
"""Features and labels by client; those of a pool, which is still to be cut into clients, at "". """


def save_data(
    path: Path | str, data: Any, *, by: str | None = None, label: str | None = None, test_share: float = 0.2
) -> list[str]:
    """Write data as an HDF5 file for ``data.name = "hdf5"``, and return the clients' names in the order of their ids.

    Parameters
    ----------
    path : Path or str
        The file; it becomes visible whole.
    data : arrays, datasets or DataFrame
        ``(x, y, client)``: features ``[n, ...]``, labels ``[n, ...]`` and each sample's client, a number or a name; or
        a list of PyTorch datasets or of ``(x, y)``, one per client, or a dict of them by name; or a pandas DataFrame.
        ``(x, y)``, one dataset, and a table without `by`, are a pool, which keys such as ``data.partition`` cut.
        Labels that are text become classes, in the order of the alphabet.
    by : str, optional
        The column of a table that names each row's client.
    label : str, optional
        The column that holds the labels; all others are features.
    test_share : float
        Share of each client's samples, or of a pool, that is its test part: drawn once, the same for the same data.

    Raises
    ------
    UsageError
        If a table lacks a column, or what should be numbers is none, or lengths differ.

    Examples
    --------
    >>> x, y = [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [0, 1, 1, 0]
    >>> hpcfl.save_data("hospitals.h5", (x, y, ["Oslo", "Bern", "Oslo", "Bern"]))
    ['Bern', 'Oslo']
    """
    return _write(Path(path), parts_of(data, by, label), test_share)


def _write(path: Path, parts: Parts, test_share: float) -> list[str]:
    for name in parts:
        if "/" in name or name in (".", ".."):
            raise UsageError(f"data: client '{name}': expected a name without '/'")
    if not 0 <= test_share < 1:
        raise UsageError(f"test_share: expected a number from 0 to below 1, got {test_share}")
    with replace(path) as new, created(new) as file:
        for number, (name, (x, y)) in enumerate(parts.items()):
            rows = keyed(0, "test", client=number).permutation(len(y))
            split = np.split(rows, [floor(test_share * len(y) + 1e-9)])
            for kind, own in zip(("test", "train"), map(np.sort, split)):
                if len(own) or name:
                    group = file.create_group(f"clients/{name}/{kind}" if name else kind)
                    group["features"], group["labels"] = x[own], y[own]
    return [name for name in parts if name]


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Remove what was written to a run folder within the block, if it fails."""
    check_writable(folder)
    before, there = folder.exists(), {*folder.glob("*")}
    try:
        yield
    except BaseException:
        for path in {*folder.glob("*")} - there:
            path.unlink()
        if not before and folder.exists():
            folder.rmdir()
        raise


def data_section(
    folder: Path, data: Any, by: str | None, label: str | None, test_share: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the section ``data`` for what a script gives, and its clients' names: it is kept in a run folder.

    A path, or a name that a config may have, stays where it is.
    """
    if isinstance(data, str | Path):
        if (kind := Path(data).suffix) in TABLES:
            table = f"the table, as data=pandas.read_{kind[1:]}('{data}') with by and label"
            raise UsageError(f"data: '{data}' is a table's file: expected {table}")
        is_file = kind in HDF5
        return ({"name": "hdf5", "file": str(data)} if is_file else {"name": str(data)}), []
    parts = parts_of(data, by, label)
    if (size := sum(x.nbytes + y.nbytes for x, y in parts.values())) > MOST:
        instead = "write them with hpcfl.save_data, and give the file's path"
        raise UsageError(f"data: {size >> 20} MB, of which a run folder keeps at most {MOST >> 20}: {instead}")
    known = sha256(repr((test_share, [(name, x.shape, x.dtype, y.dtype) for name, (x, y) in parts.items()])).encode())
    for each in chain(*parts.values()):
        known.update(np.ascontiguousarray(each).data)
    path = folder.resolve() / f"data-{known.hexdigest()[:8]}.h5"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, parts, test_share)
    return {"name": "hdf5", "file": str(path)}, [name for name in parts if name]


def kept_data(config: Config, folder: Path) -> dict[str, dict[str, str]]:
    """Return the file of data that a run folder keeps, as `Config.files` has others."""
    file = Path(getattr(config.data, "file", ""))
    return {"data.file": origin(file)} if file.parent == folder.resolve() else {}


def keep_initial(task: Task, files: dict[str, dict[str, str]], folder: Path) -> None:
    """Keep in a run folder what the model begins with, and note it among the run's `files`.

    It is a copy of ``model.initial``, or what was drawn: what is frozen is in no checkpoint.
    """
    drawn = {name: value.detach().cpu().contiguous().numpy() for name, value in (task.initial() | task.frozen).items()}
    content = b"" if "model.initial" in files else save(drawn)
    drew = {"file": "drawn.safetensors", "sha256": sha256(content).hexdigest()}
    known = files.get("model.initial", drew)
    path = folder.resolve() / copy_of("model.initial", known)
    with replace(path) as new:
        new.write_bytes(content) if known is drew else shutil.copyfile(known["file"], new)
    files.setdefault("model.initial", drew | {"file": str(path)})


def speed_section(folder: Path, speeds: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the section ``speed`` for what a script gives, as `data_section`; clients may have `names`.

    UsageError where a table has other columns than ``speed.file`` may have, or another client.
    """
    if isinstance(speeds, str | Path):
        is_file = Path(speeds).suffix in (".csv", *HDF5)
        return {"model": "table", "file": str(speeds)} if is_file else {"model": str(speeds)}
    if isinstance(speeds, Mapping):
        speeds = pandas.DataFrame({"client": [*speeds], "seconds": [*speeds.values()]})
    if not hasattr(speeds, "columns"):
        raise UsageError(f"speeds: expected a DataFrame, a dict by client, or a path, got {type(speeds).__name__}")
    table = speeds.copy()
    if "client" in table.columns and table["client"].dtype.kind not in "iu":
        places = {name: place for place, name in enumerate(names)}
        for name in table["client"].astype(str):
            if name not in places:
                raise UsageError(f"speeds: there is no client '{name}'{did_you_mean(name, names)}")
        table["client"] = [places[name] for name in table["client"].astype(str)]
    if "client" in table.columns and (lost := {*range(len(names))} - {*table["client"]}):
        raise UsageError(f"speeds: expected seconds of each client, got none of '{names[min(lost)]}'")
    text = table.to_csv(index=False)
    path = folder.resolve() / f"speeds-{sha256(text.encode()).hexdigest()[:8]}.csv"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return {"model": "table", "file": str(path)}


def parts_of(data: Any, by: str | None = None, label: str | None = None) -> Parts:
    """Return what `save_data` writes, clients in the order of their ids; errors as there."""
    if hasattr(data, "columns"):
        parts = _of_table(data, by, label)
    elif by is not None or label is not None:
        raise UsageError("data: by and label name columns of a table: expected a pandas DataFrame with them")
    elif isinstance(data, Mapping):
        parts = {str(name): _samples(each, f"data of client '{name}'") for name, each in data.items()}
    elif isinstance(data, list):
        parts = {str(number): _samples(each, f"data of client {number}") for number, each in enumerate(data)}
    elif isinstance(data, tuple) and len(data) == 3:
        parts = _divided(*_samples(data[:2], "data"), np.asarray(data[2]))
    else:
        parts = {"": _samples(data, "data")}
    if not parts:
        raise UsageError("data: there are no clients, expected at least 1")
    labels = [y for _, y in parts.values()]
    if any(y.dtype.kind in "OUS" for y in labels):
        names = np.unique(np.concatenate([y.astype(str) for y in labels]))
        labels = [np.searchsorted(names, y.astype(str)) for y in labels]
    kind = np.float32 if any(y.dtype.kind == "f" for y in labels) else np.int64
    typed = {name: (x, y.astype(kind)) for (name, (x, _)), y in zip(parts.items(), labels)}
    return {name: typed[name] for name in natural(typed)}


def _divided(x: Array, y: Array, client: Array) -> Parts:
    """Return the samples of each client."""
    if client.shape != (len(y),):
        raise UsageError(f"data: expected the client of each of {len(y)} samples, got an array of shape {client.shape}")
    if client.dtype.kind not in "iuOUS":
        raise UsageError(f"data: expected clients that are numbers from 0 on or names, got {client.dtype}")
    names = np.array([str(each) for each in client.tolist()])
    return {name: (x[names == name], y[names == name]) for name in np.unique(names).tolist()}


def _samples(data: Any, where: str) -> tuple[Array, Array]:
    """Return features and labels of arrays or a dataset."""
    if not isinstance(data, tuple):
        if not hasattr(data, "__getitem__"):
            raise UsageError(
                f"{where}: expected arrays (x, y), a PyTorch Dataset or a DataFrame, got {type(data).__name__}"
            )
        x, y, pieces = read(data, where)
        if pieces:
            raise UsageError(f"{where}: expected samples of one tensor each, got {len(pieces)}")
        return x, y
    if len(data) != 2:
        raise UsageError(f"{where}: expected (x, y) or (x, y, client), got {len(data)} of them")
    x, y = map(np.asarray, data)
    if len(x) != len(y):
        raise UsageError(f"{where}: expected as many labels as samples, got {len(y)} for {len(x)}")
    if x.dtype.kind not in "fiub":
        raise UsageError(f"{where}: expected features that are numbers, got {x.dtype}")
    x = x.astype({"f": np.float32, "b": np.uint8}.get(x.dtype.kind, x.dtype), copy=False)
    return x if x.ndim > 1 else x[:, None], y


def _of_table(table: Any, by: str | None, label: str | None) -> Parts:
    """Return what the columns of a DataFrame hold."""
    known = [str(name) for name in table.columns]
    if label is None:
        raise UsageError(f"data: expected label, the column of the labels, one of {', '.join(known)}")
    for key, name in (("label", label), ("by", by)):
        if name is not None and name not in table.columns:
            raise UsageError(f"data: the table has no column {key} = '{name}'{did_you_mean(name, known)}")
    features = table.drop(columns=[name for name in (label, by) if name is not None])
    for name in features.columns:
        if not pandas.api.types.is_numeric_dtype(features[name].dtype):
            instead = "pandas.get_dummies makes some of text"
            raise UsageError(f"data: column '{name}' holds {features[name].dtype}, expected numbers; {instead}")
    x, y = features.to_numpy(np.float32), np.asarray(table[label])
    return {"": (x, y)} if by is None else _divided(x, y, np.asarray(table[by].astype(str)))
