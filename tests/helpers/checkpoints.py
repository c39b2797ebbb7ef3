"""Checkpoints as tests need them: written at once by one process, or as earlier versions wrote them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py

from hpcfl import store
from hpcfl.store.atomic import number_of
from hpcfl.store.integrity import SERVER, USER_BLOCK, user_block

MOST = 2000  # clients


def save(
    run_dir: Path,
    round: int,
    shared: Mapping[str, Any],
    personal: Iterable[tuple[Any, Mapping[str, Any]]],
    clock: Mapping[str, float],
    keep: int,
    **more: Any,
) -> Path:
    """Write a checkpoint, `more` being what else the server holds; return where it is."""
    new = store.draft(run_dir, round, "1")
    store.write_rank(new, 0, personal)
    store.write_server(new, round, shared, clock, homes=[0] * MOST, **more)
    return store.publish(new, [0], lambda scores: sorted(scores)[-keep:])[0]


def as_one_file(path: Path, stamped: bool = True) -> Path:
    """Make the file of a checkpoint that earlier versions wrote, in place of the folder; the first had no digest."""
    old = path.with_suffix(".h5")
    with h5py.File(old, "w", userblock_size=USER_BLOCK if stamped else 0) as file:
        with h5py.File(path / SERVER) as server:
            file.attrs["round"] = server.attrs["round"]
            for name in set(server) - {"homes"}:
                server.copy(name, file)
        for part in sorted(path.glob("rank-*.h5")):
            with h5py.File(part) as rank:
                for group in rank["personal"].values():
                    personal = file.require_group("personal")
                    rank.copy(group, personal, f"{len(personal):03d}")
        file.require_group("personal")
    if stamped:
        with old.open("r+b") as raw:
            block = user_block(raw)
            raw.seek(0)
            raw.write(block)
    assert number_of(old) == number_of(path)
    shutil.rmtree(path)
    return old
