"""Table II of the SALF paper (MNIST; MLP or CNN), from run folders.

    python analysis/salf_table2.py runs/table2/*

What a run is, its config says: model, method, the server's rule and the share of stragglers. Per such case: the mean
over seeds of each run's mean accuracy over its last 10 rounds, beside the published figure for that share; none where
the paper has no such share. Costs seconds. Prints one JSON line last.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import hpcfl

# Lang, Cohen & Shlezinger, Table II
SHARES = (0.3, 0.5, 0.7, 0.9)
PUBLISHED = {
    ("mlp", "drop"): (0.87, 0.84, 0.77, 0.49),
    ("mlp", "salf"): (0.88, 0.85, 0.85, 0.81),
    ("cnn", "drop"): (0.93, 0.90, 0.83, 0.28),
    ("cnn", "salf"): (0.94, 0.93, 0.92, 0.90),
}
WITHOUT_STRAGGLERS = {"mlp": 0.90, "cnn": 0.95}
LAST = 10


class Case(NamedTuple):
    """What seeds of one entry have in common; without stragglers there is no rule."""

    model: str
    method: str
    rule: str | None
    stragglers: float

    @property
    def published(self) -> float | None:
        """Return the paper's accuracy; None where it has none."""
        if self.method == "vanilla":
            return WITHOUT_STRAGGLERS.get(self.model)
        row = PUBLISHED.get((self.model, self.method))
        return row[SHARES.index(self.stragglers)] if row and self.stragglers in SHARES else None


def read(folder: Path) -> tuple[Case, float]:
    """Return what a run is, and its mean test accuracy over the last rounds."""
    data = hpcfl.open_run(folder)
    config = json.loads(data.attrs["config"])
    accuracy = float(data["accuracy"].dropna("round")[-LAST:].mean())
    model, waits = config["model"]["name"], config["participation"]["close"] == "all"
    if waits:
        return Case(model, "vanilla", None, 0.0), accuracy
    method = "drop" if config["participation"]["partial"] == "discard" else config["algorithm"]["name"]
    return Case(model, method, config["algorithm"].get("rule"), config["speed"].get("stragglers")), accuracy


def collected(folders: list[Path]) -> dict[Case, list[float]]:
    """Return the accuracies of all seeds by case."""
    found: dict[Case, list[float]] = defaultdict(list)
    for case, accuracy in map(read, sorted(folders)):
        found[case].append(accuracy)
    return dict(found)


def main() -> None:
    """Print the table and the JSON line."""
    found = collected([Path(name) for name in sys.argv[1:]])
    table = Table("model", "method", "rule", "stragglers", "seeds", "mean", "min", "max", "published", "difference")
    rows = []
    for case, values in found.items():
        mean, published = statistics.fmean(values), case.published
        figures = {"accuracy": mean, "min": min(values), "max": max(values), "published": published}
        rows.append({**case._asdict(), "seeds": len(values), **figures})
        shown = (*figures.values(), None if published is None else mean - published)
        cells = ("–" if figure is None else f"{figure:.3f}" for figure in shown)
        table.add_row(case.model, case.method, case.rule or "–", f"{case.stragglers:g}", str(len(values)), *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(json.dumps({"table2": rows}))


if __name__ == "__main__":
    main()
