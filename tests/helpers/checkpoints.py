"""Checkpoints as tests need them: written at once by one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcfl import store

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
    score = more.pop("score", float("nan"))
    store.write_server(new, store.Checkpoint(round, shared, clock=dict(clock), **more), [0] * MOST, score)
    return store.publish(new, [0], lambda scores: sorted(scores)[-keep:])[0]
