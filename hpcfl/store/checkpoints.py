"""Checkpoints: a folder each, written under another name and made visible at one stroke.

``server.h5`` has what the server holds, ``rank-0003.h5`` the personal state of the clients of rank 3, and
``manifest.json``, written last, sizes and digests of these. All ranks write at once: each leaves a note beside its file
when that is on disk, rank 0 makes the manifest of the notes, and nothing else needs to be said between them.

The personal state of clients is stored by equal shapes: all clients of a file whose tensors have the same names, shapes
and dtypes are rows of the same datasets, however they were cut into chunks. So any rank can read any clients.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.base.errors import VALUE, RunError, UsageError, cut
from hpcfl.base.types import Ints, Shape
from hpcfl.store import inside, manifest
from hpcfl.store.atomic import PREFIX, created, number_of, numbered, read_text, sync, sync_folder
from hpcfl.store.columns import Array, values, whole
from hpcfl.store.inside import RUN, of_another, one_line, run_of, tell

Tensors = Mapping[str, Array]
Chunk = tuple[Array, dict[str, Array]]
"""Client ids [c], and their tensors ``{name: [c, …]}``."""
Shapes = Mapping[str, tuple[int, ...]]

NUMBERS = "fiubc"
SERVER = "server.h5"  # of a checkpoint: what the server holds
LEFT = "left-"
BESIDE = "beside.json"  # which other checkpoints there were when it became visible
_CHUNK_BYTES = 1 << 20
_LEAST_BYTES = 1 << 12
_LEAST_PAUSE, _MOST_PAUSE = 0.002, 0.2  # seconds between looks for what other ranks write


class WriteError(OSError):
    """A file of a checkpoint that the disk does not take, for whatever reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after `round` rounds.

    Attributes
    ----------
    personal : list
        ``(client_ids [c], {name: [c, ...]})`` for each set of clients whose tensors have equal names, shapes, dtypes.
    memory : dict
        What the server remembers of earlier rounds beside its state.
    stale : dict of int to int
        Clients whose personal state is older than the rest, and the rounds after which it was theirs (0: before the
        first visit).
    extras : dict
        What never leaves the server: arrays, numbers (0-d arrays) and strings.
    served : dict of int to dict
        Shared states of earlier rounds that clients have in their hands, by round.
    """

    round: int
    shared: dict[str, Any]
    personal: list[Chunk] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Array] = field(default_factory=dict)
    stale: dict[int, int] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    served: dict[int, dict[str, Array]] = field(default_factory=dict)


def saved(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run by rising round, whole or not."""
    return numbered(run_dir / "checkpoints", "round", "")


def draft(run_dir: Path, round: int, token: str) -> Path:
    """Make, if need be, and return the folder in which the checkpoint after `round` rounds is written.

    `token` is the same on all ranks of a start, and another one at each start.
    """
    folder = drafted(run_dir, round, token)
    folder.parent.mkdir(exist_ok=True)  # not the run's own: where that is gone, it stays gone
    folder.mkdir(exist_ok=True)
    return folder


def drafted(run_dir: Path, round: int, token: str) -> Path:
    """Return the same folder, made or not."""
    return run_dir / "checkpoints" / f"{PREFIX}{token}-round-{round:06d}"


def write_rank(folder: Path, rank: int, personal: Iterable[tuple[Any, Tensors]]) -> None:
    """Write the personal state of a rank's clients, chunk by chunk, and leave a note when it is on disk.

    Raises
    ------
    ValueError
        For a name with a slash, a client given twice, or tensors without the client axis.
    OSError
        If the file cannot be written; there is no note then.
    """
    path = folder / _rank_file(rank)
    with created(path) as file:
        _write_personal(file.create_group("personal"), personal)
    sync(path)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(manifest.entry(path)), encoding="utf-8")
    unfinished.replace(path.with_suffix(".json"))


def write_server(folder: Path, state: Checkpoint, homes: Sequence[int] | Ints = (), score: float = np.nan) -> None:
    """Write what the server holds, all of a checkpoint but the clients' personal state; dtypes are kept to the bit.

    Parameters
    ----------
    homes : int [clients]
        The rank in whose file each client's personal state is; empty where clients have none.
    score : float
        How good the state is, for `publish`; NaN: not known.

    Raises
    ------
    ValueError
        For a name with a slash.
    OSError
        If the file cannot be written.
    """
    path = folder / SERVER
    with created(path) as file:
        file.attrs.update({"round": state.round, "score": float(score), RUN: run_of(folder.parents[1])})
        file.create_group("clock").attrs.update({name: float(value) for name, value in state.clock.items()})
        groups = {"shared": state.shared, "extras": state.extras, "memory": state.memory}
        groups |= {f"served/{version}": tensors for version, tensors in state.served.items()}
        for group, tensors in groups.items():
            inner = file.create_group(group)
            for name, value in tensors.items():
                data = value if isinstance(value, str) else np.asarray(value)
                inner.create_dataset(_checked_name(name), data=data, fletcher32=np.size(value) > 1)
        file.create_dataset("homes", data=np.asarray(homes, np.int64))
        if state.stale:
            file.create_group("stale").update({"ids": [*state.stale], "rounds": [*state.stale.values()]})
    sync(path)


def publish(
    folder: Path, ranks: Iterable[int] = (), kept: Callable[[Mapping[int, float]], Collection[int]] | None = None
) -> tuple[Path, int]:
    """Wait for the files of some `ranks`, then make a checkpoint visible; return where it is, and its bytes.

    `kept` is then asked which checkpoints up to this one stay, given their scores by round (NaN: not known); all do
    without. OSError if the manifest cannot be written or the folder not be renamed.
    """
    path = folder.with_name(f"round-{number_of(folder):06d}")
    known = {number_of(old): old for old in saved(path.parents[1]) if number_of(old) < number_of(path)}
    scores = dict[int, float]()
    for number, each in {**known, number_of(path): folder}.items() if kept is not None else ():
        scores[number] = float("nan")  # also of one that cannot be read
        with suppress(RunError), _opened(each / SERVER) as file:
            scores[number] = float(file.attrs["score"])
    stay = {*known} if kept is None else {*kept(scores)}
    entries = dict[str, Any]()
    for name in map(_rank_file, ranks):
        note, pause = (folder / name).with_suffix(".json"), _LEAST_PAUSE
        while not note.exists():
            time.sleep(pause)
            pause = min(1.5 * pause, _MOST_PAUSE)
            os.utime(folder)  # a network file system may remember for a minute that a file is not there
        entries[name] = json.loads(note.read_text(encoding="utf-8"))
        note.unlink()
    (folder / BESIDE).write_text(json.dumps(sorted(stay & known.keys())))
    sync(folder / BESIDE)
    entries |= {name: manifest.entry(folder / name) for name in (SERVER, BESIDE)}
    manifest.write_entries(folder, entries)
    for old in saved(folder.parent.parent):
        if number_of(old) == number_of(path):  # damaged, or of a past that was given up
            _remove(old)
    folder.rename(path)
    sync_folder(path.parent)
    for number in known.keys() - stay:
        _remove(known[number])
    return path, sum(each["bytes"] for each in entries.values())


def damage(path: Path) -> str:
    """Return why a checkpoint cannot be read whole, "" where it can.

    Every byte is read; memory stays within a few MiB.
    """
    try:
        if SERVER not in manifest.read(path):
            return f"{path / manifest.NAME} lists no {SERVER}"
        reasons = [f"{name}: {reason}" for name, reason in manifest.damage(path).items()]
        if reasons:
            return "; ".join(reasons)
        with inside.opened(path / SERVER) as file:
            round_, run = whole(file, "round"), str(file.attrs.get(RUN, ""))
        if path in numbered(path.parent, "round", "") and round_ != number_of(path):
            return f"it is the state after round {round_}"
        return of_another(run, path.parents[1])
    except Exception as error:  # h5py raises almost anything on a damaged file
        return one_line(error)


def lacking(path: Path) -> list[str]:
    """Return the checkpoints that were kept beside one that is whole when it became visible, and are not there.

    None where the run has gone on to a newer one meanwhile.
    """
    try:
        kept = json.loads(read_text(path / BESIDE))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path / BESIDE} cannot be read: {one_line(error)}") from error
    if not isinstance(kept, list) or not all(type(number) is int for number in kept):
        raise RunError(f"{path / BESIDE}: expected numbers of checkpoints, got {cut(repr(kept), VALUE)}")
    there = [number_of(each) for each in saved(path.parents[1])]
    return [f"round-{number:06d}" for number in kept if number not in there] if there[-1:] == [number_of(path)] else []


def _rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.h5"


def _remove(path: Path) -> None:
    """Remove a checkpoint, out of sight at one stroke: a reader sees all of it or nothing.

    Of a folder those files go that its manifest lists. Others stay in it, under another name, and a line says where.
    """
    gone = path.with_name(f"{PREFIX}{os.getpid()}-gone-{path.name}")
    path.rename(gone)
    if not gone.is_dir():
        gone.unlink(missing_ok=True)
        return
    try:
        listed = {*manifest.read(gone), manifest.NAME}
    except RunError:
        listed = set()
    there = [*os.scandir(gone)]
    ours = [entry for entry in there if entry.name in listed and entry.is_file(follow_symlinks=False)]
    for entry in ours:
        Path(entry.path).unlink(missing_ok=True)
    if len(ours) == len(there):
        with suppress(OSError):  # a network file system may keep a file that somebody has open
            gone.rmdir()
        return
    left = next(name for name in (path.with_name(f"{LEFT}{n}-{path.name}") for n in count(1)) if not name.exists())
    gone.rename(left)
    tell(f"'{left}' holds what the manifest of {path.name} did not list: it is left there", again=True)


def latest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint that is whole, None where there is none at all; warn of those passed over.

    Every byte of it is read, as long as that may take. RunError if there are checkpoints, and none of them is whole.
    """
    passed: list[tuple[Path, str]] = []
    for path in reversed(saved(run_dir)):
        reason = damage(path)
        if not reason:
            for other, why in passed:
                tell(f"checkpoint {other} cannot be read whole and is passed over: {why}", again=True)
            return path
        if not os.path.lexists(path):  # the run goes on: a newer one is there, and this one is no more
            return latest(run_dir)
        passed.append((path, reason))
    if passed:
        newest, why = passed[0]
        raise RunError(
            f"'{run_dir}': none of its checkpoints can be read whole, the newest is {newest.name} ({why}); nothing was "
            "changed: put a copy of one back, or move them elsewhere to begin at round 0"
        )
    return None


def load(path: Path, personal: bool = True) -> Checkpoint:
    """Read a checkpoint, with the clients' personal state or without; RunError if it is not there or damaged."""
    groups = _personal(path) if personal else ()
    states = [(group["ids"][:], {name: item[:] for name, item in group["tensors"].items()}) for group in groups]
    with _opened(path / SERVER) as file:
        shared, memory = _tensors(file["shared"]), _tensors(file["memory"])
        clock = {name: float(value) for name, value in file["clock"].attrs.items()}
        extras = {
            name: item.asstr()[()] if h5py.check_string_dtype(item.dtype) else np.asarray(item[()])
            for name, item in file["extras"].items()
        }
        served = {int(version): _tensors(state) for version, state in file.get("served", {}).items()}
        return Checkpoint(whole(file, "round"), shared, states, clock, memory, _read_stale(file), extras, served)


def _tensors(group: h5py.Group) -> dict[str, Array]:
    return {name: np.asarray(values(group, name, NUMBERS)) for name in group}


def load_personal(path: Path, client_ids: Iterable[int], check: bool = False) -> dict[int, dict[str, Array]]:
    """Read the personal state of some clients, of those that are there: ``{client: {name: [...]}}``.

    Only the files of ranks that had them are opened, and with `check` only if their digests are right: for a checkpoint
    that is not known to be whole, see `latest`. RunError as `load`.
    """
    wanted = np.unique(np.fromiter(client_ids, np.int64))
    states: dict[int, dict[str, Array]] = {}
    for same in _personal(path, wanted, check):
        clients = same["ids"][:]
        rows = np.flatnonzero(np.isin(clients, wanted))
        for run in filter(len, np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)):  # of neighbours
            tensors = {name: item[run[0] : run[-1] + 1] for name, item in same["tensors"].items()}
            for place, client in enumerate(clients[run].tolist()):
                states[client] = {name: np.asarray(values[place]) for name, values in tensors.items()}
    return states


def personal_rounds(path: Path, client_ids: Iterable[int]) -> dict[int, int]:
    """Return after how many rounds some clients' personal state was as a checkpoint has it; RunError as `load`."""
    with _opened(path / SERVER) as file:
        stale, done = _read_stale(file), whole(file, "round")
    return {client: stale.get(client, done) for client in client_ids}


def check_shared(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UsageError where shared tensors of a checkpoint are not of the shapes of `wanted`."""
    _compare(_shapes(saved), _shapes(wanted), "data")


def check_personal(
    path: Path, clients: Iterable[int], like: Callable[[int], Mapping[str, Any]], shapes: Sequence[Shape]
) -> None:
    """Raise UsageError where clients' personal state in a checkpoint is not of the shapes that their data give.

    `like` gives a client's personal state, which follows from the shape of its samples' features, in `shapes`.
    """
    some, wanted = np.unique(np.fromiter(clients, np.int64)), dict[Shape, Shapes]()
    for same in _personal(path, some):
        saved = {name: item.shape[1:] for name, item in same["tensors"].items()}
        for client in np.intersect1d(same["ids"][:], some).tolist():
            shape = shapes[client]
            if shape not in wanted:
                wanted[shape] = _shapes(like(client))
            _compare(saved, wanted[shape], f"data: client {client} has features of shape {shape}")


def _compare(saved: Shapes, wanted: Shapes, whose: str) -> None:
    for name, shape in wanted.items():
        saved_shape = saved.get(name)
        if saved_shape != shape:
            there = "none" if saved_shape is None else list(saved_shape)
            said = f"'{name}' has shape {list(shape)} on these data, in the checkpoint {there}"
            raise UsageError(f"{whose}: {said}: expected the data of the run")


def _shapes(tensors: Mapping[str, Any]) -> Shapes:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _personal(path: Path, clients: Ints | None = None, check: bool = False) -> Iterator[h5py.Group]:
    """Yield the groups of clients of equal shapes, each while its file is open: all, or of files with some clients."""
    with _opened(path / SERVER, check) as file:
        homes = values(file, "homes", "i", (None,))
    homes = homes if clients is None else homes[clients[clients < len(homes)]]
    for rank in np.unique(homes).tolist():
        with _opened(path / _rank_file(rank), check) as file:
            for group in file["personal"].values():
                rows = len(values(group, "ids", "i", (None,)))
                for name, item in group["tensors"].items():
                    there = item.shape[:1] if isinstance(item, h5py.Dataset) and item.dtype.kind in NUMBERS else None
                    if there != (rows,):
                        raise ValueError(f"{group.name}/tensors/{name}: expected numbers of {rows} clients, got {item}")
                yield group


@contextmanager
def _opened(path: Path, check: bool = False) -> Iterator[h5py.File]:
    """Open a file of a checkpoint; with `check` only if its digest is right."""
    if check and (reason := manifest.damage_of(path.parent, path.name)):
        raise RunError(f"checkpoint {path} is damaged: {reason}")
    try:
        with inside.opened(path) as file:
            yield file
    except Exception as error:  # h5py raises almost anything on a damaged file
        raise RunError(f"checkpoint {path} cannot be read: {one_line(error)}") from error


def _read_stale(file: h5py.File) -> dict[int, int]:
    group = file.get("stale")
    return {} if group is None else dict(zip(group["ids"][:].tolist(), group["rounds"][:].tolist()))


def _write_personal(group: h5py.Group, personal: Iterable[tuple[Any, Tensors]]) -> None:
    """Write chunks, each to the group of its shapes, small ones together: one by one is ten times slower."""
    held, size = dict[Any, list[Chunk]](), 0  # by what chunks have in common that are rows of the same datasets
    names = dict[Any, str]()

    def write() -> None:
        for kind, chunks in held.items():
            inner = group.require_group(names.setdefault(kind, f"{len(names):03d}"))
            tensor_group = inner.require_group("tensors")
            _append(inner, "ids", [clients for clients, _ in chunks])
            for name in chunks[0][1]:
                _append(tensor_group, name, [tensors[name] for _, tensors in chunks])
        held.clear()

    for clients, tensors in _checked(personal):
        size += sum(data.nbytes for data in tensors.values()) + clients.nbytes
        if size < _CHUNK_BYTES:  # copied, as the caller may fill the same arrays again
            clients, tensors = clients.copy(), {name: data.copy() for name, data in tensors.items()}
        kind = tuple(sorted((name, data.shape[1:], data.dtype.str) for name, data in tensors.items()))
        held.setdefault(kind, []).append((clients, tensors))
        if size >= _CHUNK_BYTES:
            write()
            size = 0
    write()


def _checked(personal: Iterable[tuple[Any, Tensors]]) -> Iterator[Chunk]:
    """Pass the chunks on as arrays; ValueError at a client that was there before, or tensors without a row for each."""
    seen: set[int] = set()
    for ids, given in personal:
        clients = np.asarray(ids, np.int64)
        tensors = {_checked_name(name): np.asarray(value) for name, value in given.items()}
        twice = seen.intersection(clients.tolist())
        if twice or len(set(clients.tolist())) < len(clients):
            some = sorted(twice or clients.tolist())[:5]
            raise ValueError(f"the personal state of a client is given twice, among {some}")
        for name, data in tensors.items():
            if data.shape[:1] != clients.shape:
                raise ValueError(f"'{name}' has shape {data.shape} for {len(clients)} clients")
        seen.update(clients.tolist())
        yield clients, tensors


def _checked_name(name: str) -> str:
    """Return a tensor's name if HDF5 takes it as one name."""
    if not name or "/" in name or name == ".":
        raise ValueError(f"no tensor can be named '{name}'")
    return name


def _append(group: h5py.Group, name: str, parts: Sequence[Array]) -> None:
    """Add rows to a dataset, or make it."""
    data = np.concatenate(parts) if len(parts) > 1 else parts[0]
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
