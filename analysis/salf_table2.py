"""Table II of the SALF paper at 90 % stragglers (MNIST, MLP), from run folders.

    python analysis/salf_table2.py runs/table2/*

Folders are named <method>-<rule>-<seed>. Per method and rule: the mean over seeds of each run's mean accuracy over its
last 10 rounds, beside the published figure. Costs seconds. Prints one JSON line last.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

import hpcfl

PUBLISHED = {"vanilla": 0.90, "drop": 0.49, "salf": 0.81}  # Lang, Cohen & Shlezinger, Table II, MLP, 90 %
LAST = 10


def accuracy(folder: Path) -> float:
    """Return the mean test accuracy over the last rounds."""
    return float(hpcfl.open_run(folder)["accuracy"].dropna("round")[-LAST:].mean())


def collected(folders: list[Path]) -> dict[tuple[str, str], list[float]]:
    """Return the accuracies of all seeds by method and rule."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for folder in sorted(folders):
        method, rule, _ = folder.resolve().name.split("-")
        found[method, rule].append(accuracy(folder))
    return dict(found)


def main() -> None:
    """Print the table and the JSON line."""
    found = collected([Path(name) for name in sys.argv[1:]])
    table = Table("method", "rule", "seeds", "mean", "min", "max", "published", "difference")
    rows = []
    for (method, rule), values in found.items():
        mean = statistics.fmean(values)
        row = {"method": method, "rule": rule, "seeds": len(values), "accuracy": mean, "published": PUBLISHED[method]}
        rows.append(row | {"min": min(values), "max": max(values)})
        figures = (mean, min(values), max(values), PUBLISHED[method], mean - PUBLISHED[method])
        table.add_row(method, rule, str(len(values)), *(f"{figure:.3f}" for figure in figures))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(json.dumps({"table2": rows}))


if __name__ == "__main__":
    main()
