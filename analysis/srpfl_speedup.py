"""How much sooner SRPFL is done than FedRep in the linear case, from run folders (SRPFL, equation 12 and Theorem 4.9).

    python analysis/srpfl_speedup.py runs/speedup/* -o speedup.png

The folders hold runs of `linear_fedrep`, with and without doubling participant sets. For each start, number of
clients N and constant c: the target distance of equation 12 with the a and n0 of the doubling runs, the simulated time
of both methods until they first reach it (median over seeds), the ratio, and the order that Theorem 4.9 states. Costs
seconds. Prints one JSON line last; null: never.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import hpcfl

CONSTANTS = (1.05, 1.2, 1.35)
Case = tuple[str, int]  # start, clients


@dataclass(frozen=True)
class Run:
    """What is needed of one run: distances and simulated seconds, float64 ``[rounds]``."""

    start: str
    clients: int
    doubling: bool
    first: int
    a: float
    distance: Any
    seconds: Any

    def until(self, target: float) -> float:
        """Return the simulated seconds until the distance is first at most `target`; inf: never."""
        reached = np.flatnonzero(self.distance <= target)
        return float(self.seconds[reached[0]]) if len(reached) else inf


def read(folder: Path) -> Run:
    """Return one run."""
    data = hpcfl.open_run(folder)
    config = json.loads(data.attrs["config"])
    doubling, first = config["doubling"], config["participation"]["first"]
    start, clients = config["algorithm"]["initial"], config["clients"]
    figures = data["distance"].values, data["sim_seconds"].values
    return Run(start, clients, doubling["when"] != "never", first or clients, doubling["contraction"], *figures)


def target(constant: float, clients: int, first: int, a: float) -> float:
    """Return ε of equation 12."""
    return constant * a / (sqrt(clients / first * (1 - a)) * (1 - sqrt(1 - a)))


def order(constant: float, clients: int) -> float:
    """Return what Theorem 4.9 says of the ratio, up to a constant."""
    last = log(1 / (constant - 1))
    return last / (log(clients) + last)


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each start, number of clients and constant."""
    cases: dict[Case, list[Run]] = defaultdict(list)
    for run in runs:
        cases[run.start, run.clients].append(run)
    found = []
    for (start, clients), members in sorted(cases.items()):
        doubling = [run for run in members if run.doubling]
        plain = [run for run in members if not run.doubling]
        if not doubling or not plain:
            continue
        for constant in CONSTANTS:
            goal = target(constant, clients, doubling[0].first, doubling[0].a)
            fast, slow = (statistics.median(run.until(goal) for run in group) for group in (doubling, plain))
            figures = {"target": goal, "fedrep": slow, "srpfl": fast, "ratio": fast / slow if slow < inf else inf}
            case = {"start": start, "clients": clients, "constant": constant, "seeds": len(doubling)}
            found.append(case | figures | {"order": order(constant, clients)})
    return found


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as JSON has it: null where a method never reaches the target."""
    return {key: None if isinstance(value, float) and isinf(value) else value for key, value in row.items()}


def shown(found: Sequence[dict[str, Any]]) -> Table:
    """Return the table; the theorem's order is scaled to the ratio at the fewest clients."""
    table = Table("start", "N", "c", "target", "FedRep s", "SRPFL s", "ratio", "order, scaled")
    for row in found:
        cells = (f"{row[key]:.3g}" for key in ("target", "fedrep", "srpfl", "ratio"))
        table.add_row(row["start"], str(row["clients"]), f"{row['constant']:g}", *cells, f"{scaled(row, found):.3g}")
    return table


def scaled(row: dict[str, Any], found: Sequence[dict[str, Any]]) -> float:
    """Return the theorem's order, such that it is the ratio itself at the fewest clients."""
    first = next(one for one in found if (one["start"], one["constant"]) == (row["start"], row["constant"]))
    return float(row["order"] * first["ratio"] / first["order"])


def draw(found: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw the ratios against N, one panel per start, beside the theorem's order."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    starts = sorted({row["start"] for row in found})
    figure, panels = plt.subplots(1, len(starts), figsize=(5 * len(starts), 4), squeeze=False)
    for panel, start in zip(panels[0], starts):
        for number, constant in enumerate(CONSTANTS):
            own = [row for row in found if (row["start"], row["constant"]) == (start, constant)]
            clients = [row["clients"] for row in own]
            panel.plot(clients, [row["ratio"] for row in own], f"C{number}o-", label=f"measured, c = {constant:g}")
            panel.plot(clients, [scaled(row, found) for row in own], f"C{number}:", label="order of Theorem 4.9")
        panel.set(title=f"{start} start", xlabel="clients", ylabel="time of SRPFL / FedRep")
        panel.set(xscale="log", yscale="log")
        panel.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Print the table and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    options = parser.parse_args()
    found = rows([read(folder) for folder in options.runs if (folder / "run.h5").exists()])
    Console(width=120).print(shown(found))
    if options.output:
        draw(found, options.output)
    print(json.dumps({"speedup": [plain(row) for row in found]}, allow_nan=False))


if __name__ == "__main__":
    main()
