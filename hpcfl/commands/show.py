"""What a run came to, in one row; and the digest that says whether two runs ended in the same state."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl import store
from hpcfl.base.errors import RunError

LAST = 10  # evaluations that accuracy_last is the mean of
LOG_WIDTH = 120
NOTHING: dict[str, Any] = {
    "rounds": 0,
    "accuracy": None,  # of the last evaluation
    "accuracy_last": None,
    "client_accuracy": None,  # mean over clients, of the last evaluation
    "arrived": None,  # share of the invited
    "void": 0,  # rounds
    "repeats": 0,  # void attempts at rounds
    "sim_seconds": None,
    "wall_seconds": None,
    "oracle": None,  # federated oracle complexity so far, where it was recorded
    "lost": [],  # clients, and how
    "rejected": 0,  # visits, in whole or part
    "state_sha256": None,  # of the newest whole checkpoint
}
"""A run that was killed before its first segment was there; keys as in `summary`."""
HEADINGS = {
    "rounds": "rounds",
    "accuracy": "accuracy",
    "last 10": "accuracy_last",
    "clients": "client_accuracy",
    "arrived": "arrived",
    "void": "void",
    "simulated s": "sim_seconds",
    "wall s": "wall_seconds",
    "state": "state_sha256",
}


def digest(shared: Mapping[str, Any]) -> str:
    """SHA-256 of the shared state, in the order of the names."""
    sha256 = hashlib.sha256()
    for name in sorted(shared):
        sha256.update(np.ascontiguousarray(shared[name]).tobytes())
    return sha256.hexdigest()


def summary(path: Path) -> dict[str, Any]:
    """One run's figures: run, status, and the keys of `NOTHING`."""
    folder = store.run_folder(path)
    data = store.open_run(folder)
    row = {"run": str(folder), "status": store.read_status(folder).state, **NOTHING}
    if "cohort" not in data:
        return row
    lost = {event["client"]: event["text"] for event in store.events(folder) if event["kind"] == "lost"}
    scores = data["accuracy"].dropna("round").values
    invited = float((data["cohort"] == 1).sum())
    return row | {
        "rounds": int(data.sizes["round"]),
        "accuracy": _last(scores, 1),
        "accuracy_last": _last(scores, LAST),
        "client_accuracy": _last(data["client_accuracy"].mean("client").dropna("round").values, 1),
        "arrived": float((data["arrived"] == 1).sum()) / invited if invited else None,
        "void": int((data["void"] == 1).sum()),
        "repeats": int(data["repeats"].clip(min=0).sum()) if "repeats" in data else 0,
        "sim_seconds": _last(data["sim_seconds"].values, 1),
        "wall_seconds": _last(data["wall_seconds"].values, 1),
        "oracle": float(data["oracle"].sum()) if "oracle" in data else None,
        "lost": sorted(lost.items()),
        "rejected": int((data["rejected"] == 1).sum()) if "rejected" in data else 0,
        "state_sha256": _state(folder),
    }


def _state(folder: Path) -> str | None:
    try:
        newest = store.latest(folder)
    except RunError as error:  # the other figures are there all the same
        print(f"hpcfl: {error}", file=sys.stderr, flush=True)
        return None
    return digest(store.load(newest, personal=False).shared) if newest else None


def _last(values: Any, count: int) -> float | None:
    return float(np.mean(values[-count:])) if len(values) else None


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a `rich` table."""
    from rich.table import Column, Table

    shown = Table(
        Column("run", no_wrap=True, min_width=14), "status", *(Column(name, justify="right") for name in HEADINGS)
    )
    for row in rows:
        shown.add_row(Path(row["run"]).name, row["status"], *(_cell(key, row[key]) for key in HEADINGS.values()))
    return shown


def print_table(table: Any) -> None:
    """Print a `rich` table; a log has no width of its own."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else LOG_WIDTH).print(table)


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What does not fit into a table: who was lost on the way, and how much was rejected."""
    for row in rows:
        for client, how in row["lost"]:
            yield f"{Path(row['run']).name}: client {client} was lost {how}"
        if row["rejected"]:
            yield f"{Path(row['run']).name}: {row['rejected']} visits were rejected, in whole or in part"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "state_sha256":
        return str(value)[:12]
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if key.endswith("seconds") else f"{value:.4f}"
