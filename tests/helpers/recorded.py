"""Run folders that no run has made: what they have recorded is known to the last digit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import save
from hpcfl import store
from hpcfl.engine.record import ARRIVALS, COLUMNS, STEPS
from hpcfl.store import status

KNOWN = (
    *("accuracy", "client_accuracy", "cohort", "arrived", "blocks", "visit_seconds", "void"),
    *("sim_seconds", "wall_seconds", "message_bytes"),
)
ARRIVED = "arrival_staleness"
BASE: dict[str, Any] = {
    "rounds": 4,
    "seed": 1,
    "clock": "simulated",
    "algorithm": {"name": "salf", "lr": 0.1, "missing": "exact"},
    "speed": {"model": "exponential", "rate": 1.0},
    "data": {"name": "digits", "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [16]},
}


def config(**sections: Any) -> dict[str, Any]:
    """Return `BASE` with some values, or keys of some sections, replaced; a section that changes its name is new."""
    table = dict(BASE)
    for key, value in sections.items():
        new = isinstance(value, dict) and value.get("name", BASE[key].get("name")) == BASE[key].get("name")
        table[key] = {**BASE[key], **value} if new else value
    return table


def write_run(folder: Path, table: Any, rows: Sequence[dict[str, Any]], **attributes: str) -> Path:
    """Write a finished run whose rounds 0, 1, … have recorded `rows`; a text as `table` is taken as it is."""
    text = table if isinstance(table, str) else json.dumps(table)
    store.create(folder, {"config": text, "data_dir": "", **attributes})
    widest = max((np.size(row.get("client_accuracy", row.get("visit_seconds", 0))) for row in rows), default=1)
    sizes = {name: max((np.size(row.get(name, 0)) for row in rows), default=1) for name in ("wait_seconds", ARRIVED)}
    coords = {"client": range(widest), "layer": ["layer1"], "rank": range(sizes["wait_seconds"])}
    coords["arrival"] = range(sizes[ARRIVED])
    if rows:
        names = {*KNOWN, *(name for row in rows for name in row)}
        columns = [column for column in (*COLUMNS, STEPS, *ARRIVALS) if column.name in names]
        segment = store.begin(folder, columns, coords, 0, len(rows))
        for round_, row in enumerate(rows):
            segment.write(round_, {"cohort": True, "arrived": True, "void": False, **row})
        segment.close()
        save(folder, len(rows), {}, [], {}, keep=1)
    store.write_status(folder, "done")
    return folder


def curve(accuracy: Sequence[float], seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of a run that was evaluated where the accuracy is no NaN."""
    return [{"accuracy": value, "sim_seconds": time, "wall_seconds": 2.0} for value, time in zip(accuracy, seconds)]


def restated(folder: Path, was: str, now: str) -> None:
    """Change what the status of a run says, as if it had been written so."""
    lines = (folder / "status").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("check: "))
    assert was in text
    (folder / "status").write_text(status._checked(text.replace(was, now)))
