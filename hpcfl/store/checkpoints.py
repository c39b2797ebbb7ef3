"""Checkpoints: one immutable file each, written under another name and made visible at one stroke."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.base.errors import RunError
from hpcfl.store import fault
from hpcfl.store.atomic import created, number_of, numbered, replace
from hpcfl.store.columns import Array
from hpcfl.store.integrity import USER_BLOCK, damage, stamp, told
from hpcfl.store.personal import Tensors, checked_name, read_chunks, read_clients, read_shapes, write_chunks

_log = logging.getLogger(__name__)

EARLIER = "server."
"""What began the names of `Checkpoint.extras` among the shared state in files of earlier versions."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after `round` rounds.

    `personal` has an entry ``(client_ids [c], tensors {name: [c, ...]})`` for each set of clients whose
    tensors have equal names, shapes and dtypes. `stale` has the clients whose personal state is older than the rest,
    and the rounds after which it was theirs (0: before the first visit). `extras` never leave the server: arrays,
    numbers (0-d arrays) and strings.
    """

    round: int
    shared: dict[str, Array]
    personal: list[tuple[Array, dict[str, Array]]]
    clock: dict[str, float]
    memory: dict[str, Array] = field(default_factory=dict)
    stale: dict[int, int] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


def save(
    run_dir: Path,
    round: int,
    shared: Tensors,
    personal: Iterable[tuple[Any, Tensors]],
    clock: Mapping[str, float],
    keep: int,
    memory: Mapping[str, Array] | None = None,
    stale: Callable[[], Mapping[int, int]] = dict,
    extras: Mapping[str, Any] | None = None,
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
    memory : mapping
        what the server remembers of earlier rounds beside its state.
    stale : callable
        returns, when `personal` is exhausted, the clients whose state is older, and the rounds it is from.
    extras : mapping
        what never leaves the server: arrays, numbers and strings.

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
    with replace(path) as new:
        with created(new, userblock_size=USER_BLOCK) as file:
            file.attrs["round"] = round
            file.create_group("clock").attrs.update({name: float(value) for name, value in clock.items()})
            _write_shared(file.create_group("shared"), shared)
            _write_shared(file.create_group("extras"), extras or {})
            _write_shared(file.create_group("memory"), memory or {})
            fault.reach("checkpoint")
            write_chunks(file.create_group("personal"), personal)
            if found := stale():
                file.create_group("stale").update({"ids": [*found], "rounds": [*found.values()]})
        stamp(new)
    older = [old for old in numbered(path.parent, "round") if number_of(old) < round]
    for old in older[: 1 - keep or None]:
        old.unlink(missing_ok=True)
    return path


def latest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint that is whole, None where there is none at all; warn of those passed over.

    Every byte of it is read, as long as that may take.

    Raises
    ------
    RunError
        if there are checkpoints, and none of them is whole.
    """
    passed: list[tuple[Path, str]] = []
    for path in reversed(numbered(run_dir / "checkpoints", "round")):
        reason = damage(path)
        if not reason:
            for other, why in passed:
                _log.warning("hpcfl: checkpoint %s cannot be read whole and is passed over: %s", other, why)
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
    """Read a checkpoint, with the clients' personal state or without.

    Raises
    ------
    RunError
        if it is not there or damaged.
    """
    with _opened(path) as file:
        shared = {name: np.asarray(item[()]) for name, item in file["shared"].items()}
        extras = {name: _read(item) for name, item in file.get("extras", {}).items()}
        for name in [name for name in shared if name.startswith(EARLIER)]:  # where earlier versions had them
            extras[name.removeprefix(EARLIER)] = shared.pop(name)
        return Checkpoint(
            round=int(file.attrs["round"]),
            shared=shared,
            personal=read_chunks(file["personal"]) if personal else [],
            clock={name: float(value) for name, value in file["clock"].attrs.items()},
            memory={name: np.asarray(item[()]) for name, item in file.get("memory", {}).items()},
            stale=_read_stale(file),
            extras=extras,
        )


def load_personal(path: Path, client_ids: Iterable[int]) -> dict[int, dict[str, Array]]:
    """Read the personal state of some clients only: ``{client: {name: [...]}}``.

    A client that the checkpoint does not hold is not in the result.

    Raises
    ------
    RunError
        if the checkpoint is not there or damaged.
    """
    with _opened(path) as file:
        return read_clients(file["personal"], client_ids)


def personal_rounds(path: Path, client_ids: Iterable[int]) -> dict[int, int]:
    """Return how many rounds were done when the personal state of some clients was as the checkpoint has it.

    Raises
    ------
    RunError
        if the checkpoint is not there or damaged.
    """
    with _opened(path) as file:
        stale, done = _read_stale(file), int(file.attrs["round"])
    return {client: stale.get(client, done) for client in client_ids}


def personal_shapes(path: Path, client_ids: Iterable[int]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the shapes of some clients' personal state: ``{client: {name: shape}}``, of those that are there.

    Raises
    ------
    RunError
        if the checkpoint is not there or damaged.
    """
    with _opened(path) as file:
        return read_shapes(file["personal"], client_ids)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            yield file
    except Exception as error:  # h5py raises almost anything on a damaged file
        raise RunError(f"checkpoint {path} cannot be read: {told(error)}") from error


def _read_stale(file: h5py.File) -> dict[int, int]:
    """Return the clients with older state, and its rounds; none where nothing was late."""
    group = file.get("stale")
    return {} if group is None else dict(zip(group["ids"][:].tolist(), group["rounds"][:].tolist()))


def _write_shared(group: h5py.Group, shared: Mapping[str, Any]) -> None:
    """Write the server's tensors, whatever their shapes, numbers and strings."""
    for name, value in shared.items():
        data = value if isinstance(value, str) else np.asarray(value)
        group.create_dataset(checked_name(name), data=data, fletcher32=np.size(value) > 1)


def _read(item: h5py.Dataset) -> Any:
    return item.asstr()[()] if h5py.check_string_dtype(item.dtype) else np.asarray(item[()])
