"""Table II of the SALF paper at 90 % stragglers (MNIST; MLP or CNN), from run folders.

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

# Lang, Cohen & Shlezinger, Table II, 90 %
PUBLISHED = {
    "mlp": {"vanilla": 0.90, "drop": 0.49, "salf": 0.81},
    "cnn": {"vanilla": 0.95, "drop": 0.28, "salf": 0.90},
}
LAST = 10
Case = tuple[str, str, str]  # model, method, rule


def read(folder: Path) -> tuple[Case, float]:
    """Return what a run is, and its mean test accuracy over the last rounds."""
    data = hpcfl.open_run(folder)
    method, rule, _ = folder.resolve().name.split("-")
    model = json.loads(data.attrs["config"])["model"]["name"]
    return (model, method, rule), float(data["accuracy"].dropna("round")[-LAST:].mean())


def collected(folders: list[Path]) -> dict[Case, list[float]]:
    """Return the accuracies of all seeds by model, method and rule."""
    found: dict[Case, list[float]] = defaultdict(list)
    for case, accuracy in map(read, sorted(folders)):
        found[case].append(accuracy)
    return dict(found)


def main() -> None:
    """Print the table and the JSON line."""
    found = collected([Path(name) for name in sys.argv[1:]])
    table = Table("model", "method", "rule", "seeds", "mean", "min", "max", "published", "difference")
    rows = []
    for (model, method, rule), values in found.items():
        mean, published = statistics.fmean(values), PUBLISHED[model][method]
        figures = {"accuracy": mean, "min": min(values), "max": max(values), "published": published}
        rows.append({"model": model, "method": method, "rule": rule, "seeds": len(values), **figures})
        shown = (*figures.values(), mean - published)
        table.add_row(model, method, rule, str(len(values)), *(f"{figure:.3f}" for figure in shown))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(json.dumps({"table2": rows}))


if __name__ == "__main__":
    main()
