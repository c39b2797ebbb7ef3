"""Accuracies of methods on clients with feature spaces of their own, from run folders (FLIC, Table 3 and Figure 3).

    python analysis/flic_table.py runs/flic/*/

Finished runs are grouped by data (the keys in which they differ, and the number of clients) and method; within a group
they may differ in the seed alone. Per group: the clients' accuracy at the last evaluation, as the mean over clients and
weighted by their test samples, mean ± standard deviation over seeds; its difference to Local, seed by seed, with the
standard error of the mean; wall-clock seconds per run. In points of per cent; as shares in the JSON line, which comes
last (null: not known). Costs seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from finished import finished
from rich.console import Console
from rich.table import Table

from hpcfl.base.errors import UsageError
from hpcfl.config.presets import flat

METHODS = {"local": "Local", "fedhenn": "FedHeNN"}
FREE = ("seed", "checkpoint.every", "checkpoint.keep")
"""Keys in which seeds of one group may differ."""
FIGURES = ("accuracy", "weighted")


@dataclass(frozen=True)
class Run:
    """What is needed of one run.

    Attributes
    ----------
    config : dict
        By dotted key.
    accuracy, weighted : float
        Mean over clients, and weighted by test samples; NaN where a run does not know these.
    """

    folder: Path
    config: dict[str, Any]
    method: str
    accuracy: float
    weighted: float
    seconds: float

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def data(self) -> dict[str, Any]:
        """The keys of its data, and how many clients share them."""
        own = {key: value for key, value in self.config.items() if key.startswith("data.")}
        return own | {"clients": self.config["clients"]}


def method_of(config: Mapping[str, Any]) -> str:
    """Return a method's name in the tables."""
    name = str(config["algorithm.name"])
    if name == "flic":
        return "FLIC-HL" if config.get("model.hidden") else "FLIC-Class"
    return METHODS.get(name, name)


def read(folder: Path) -> Run | None:
    """Return one run; None, and a line of why, if it has not finished."""
    if (found := finished(folder)) is None:
        return None
    data, config = found[0], dict(flat(found[1]))
    tested = data["client_accuracy"].dropna("round", how="all")
    if not tested.sizes["round"]:
        raise SystemExit(f"{folder}: no accuracy of its clients; expected a run of a classification")
    last = tested[-1].values
    known = np.isfinite(last)
    weighted = np.nan
    if "test_samples" in data:
        weighted = float(np.average(last[known], weights=data["test_samples"].values[known]))
    seconds = float(data["wall_seconds"][-1])
    return Run(folder, config, method_of(config), float(last[known].mean()), weighted, seconds)


def groups(runs: Sequence[Run]) -> dict[tuple[str, str], dict[int, Run]]:
    """Return the runs by data, method and seed; leave with one line where runs are no seeds of one."""
    differing = {key for run in runs for key, value in run.data.items() if any(value != r.data.get(key) for r in runs)}
    found: dict[tuple[str, str], dict[int, Run]] = defaultdict(dict)
    for run in runs:
        keys = [f"{key.removeprefix('data.')}={run.data[key]}" for key in sorted(run.data.keys() & differing)]
        label = ", ".join([run.data["data.name"], *(key for key in keys if not key.startswith("name="))])
        seeds = found[label, run.method]
        check_alike([*seeds.values(), run])
        seeds[run.seed] = run
    return found


def check_alike(runs: Sequence[Run]) -> None:
    """Leave with one line where the last run differs from the first in more than the seed, or has another's seed."""
    first, last = runs[0], runs[-1]
    for key in sorted(first.config.keys() | last.config.keys()):
        there, here = first.config.get(key), last.config.get(key)
        if there != here and key not in FREE:
            raise SystemExit(f"{key}: {first.folder} has {there!r}, {last.folder} {here!r}; expected seeds of one run")
    for other in runs[:-1]:
        if other.seed == last.seed:
            raise SystemExit(f"seed: {other.folder} and {last.folder} both have {last.seed}; expected each once")


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, standard deviation and the standard error of the mean; None: not known."""
    known = all(np.isfinite(values)) and len(values)
    deviation = statistics.stdev(values) if known and len(values) > 1 else None
    error = None if deviation is None else deviation / sqrt(len(values))
    return {"mean": statistics.fmean(values) if known else None, "std": deviation, "error": error}


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each group; Local first."""
    found, cases = [], groups(runs)
    for (label, method), seeds in sorted(cases.items(), key=lambda item: (item[0][0], item[0][1] != "Local", item[0])):
        local = cases.get((label, "Local"), {})
        row: dict[str, Any] = {"data": label, "method": method, "seeds": sorted(seeds)}
        for name in FIGURES:
            own = {seed: float(getattr(run, name)) for seed, run in sorted(seeds.items())}
            less = {seed: value - getattr(local[seed], name) for seed, value in own.items() if seed in local}
            row |= {name: spread(list(own.values()))}
            row |= {f"{name}_difference": {"seeds": list(less), **spread(list(less.values()))}}
        found.append(row | {"wall_seconds": statistics.fmean(run.seconds for run in seeds.values())})
    return found


def shown(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, in points of per cent."""
    table = Table("data", "method", "seeds", "accuracy", "- Local", "weighted", "- Local", "wall s")
    for row in found:
        cells = []
        for name in FIGURES:
            cells += [points(row[name], "std"), points(row[f"{name}_difference"], "error")]
        table.add_row(row["data"], row["method"], str(len(row["seeds"])), *cells, f"{row['wall_seconds']:.1f}")
    return table


def points(figures: Mapping[str, Any], by: str) -> str:
    """Return a mean and how sure it is."""
    if figures["mean"] is None:
        return "-"
    sure = "" if figures[by] is None else f" ± {100 * figures[by]:.2f}"
    return f"{100 * figures['mean']:.2f}{sure}"


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="the JSON line alone")
    options = parser.parse_args()
    try:
        found = rows([run for run in map(read, sorted(options.runs)) if run is not None])
    except UsageError as error:
        raise SystemExit(str(error)) from None
    if not options.json:
        Console(width=None if sys.stdout.isatty() else 140).print(shown(found))
    print(json.dumps({"flic_table": found}, allow_nan=False))


if __name__ == "__main__":
    main()
