"""How much sooner SRPFL is done than FedRep in the linear case, from run folders (SRPFL, equation 12 and Theorem 4.9).

    python analysis/srpfl_speedup.py runs/speedup/* -o speedup.png

The folders hold runs of `linear_fedrep`, with and without doubling participant sets. For each start, kind of stages,
number of clients N and constant c: the target distance of equation 12 with the a and n0 of the doubling runs, the
simulated time of both methods until they first reach it (medians over seeds), the ratio of the two with its 95 %
bootstrap interval over seeds, how often the participants had doubled by then (median), and the order that Theorem 4.9
states. Costs seconds. Prints one JSON line last; null: never, or too few seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

import hpcfl

CONSTANTS = (1.05, 1.2, 1.35)
FEWEST = 5
"""Seeds from which on an interval is given."""


@dataclass(frozen=True)
class Run:
    """What is needed of one run: distances, simulated seconds and stages, ``[rounds]``."""

    start: str
    clients: int
    doubling: bool
    first: int
    a: float
    skip: bool
    distance: Any
    seconds: Any
    stage: Any

    def reached(self, target: float) -> int | None:
        """Return the first round after which the distance is at most `target`; None: none."""
        rounds = np.flatnonzero(self.distance <= target)
        return int(rounds[0]) if len(rounds) else None

    def until(self, target: float) -> float:
        """Return the simulated seconds until the distance is first at most `target`; inf: never."""
        round_ = self.reached(target)
        return inf if round_ is None else float(self.seconds[round_])

    def doublings(self, target: float) -> int:
        """Return how often the participants had doubled by then, or by the last round."""
        return int(self.stage[-1 if (round_ := self.reached(target)) is None else round_] - self.stage[0])


def read(folder: Path) -> Run:
    """Return one run."""
    data = hpcfl.open_run(folder)
    config = json.loads(data.attrs["config"])
    doubling, first = config["doubling"], config["participation"]["first"]
    start, clients = config["algorithm"]["initial"], config["clients"]
    figures = (data[name].values for name in ("distance", "sim_seconds", "stage"))
    doubles = doubling["when"] != "never"
    return Run(start, clients, doubles, first or clients, doubling["contraction"], doubling["skip"], *figures)


def target(constant: float, clients: int, first: int, a: float) -> float:
    """Return ε of equation 12."""
    return constant * a / (sqrt(clients / first * (1 - a)) * (1 - sqrt(1 - a)))


def order(constant: float, clients: int) -> float:
    """Return what Theorem 4.9 says of the ratio, up to a constant."""
    last = log(1 / (constant - 1))
    return last / (log(clients) + last)


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each start, kind of stages, number of clients and constant."""
    waiting: dict[tuple[str, int], list[Run]] = defaultdict(list)
    doubling: dict[tuple[str, bool, int], list[Run]] = defaultdict(list)
    for run in runs:
        if run.doubling:
            doubling[run.start, run.skip, run.clients].append(run)
        else:
            waiting[run.start, run.clients].append(run)
    found = []
    for (start, skip, clients), members in sorted(doubling.items()):
        others = waiting[start, clients]
        for constant in CONSTANTS if others else ():
            goal = target(constant, clients, members[0].first, members[0].a)
            case = {"start": start, "skip": skip, "clients": clients, "constant": constant, "seeds": len(members)}
            times = [run.until(goal) for run in members], [run.until(goal) for run in others]
            doublings = statistics.median(run.doublings(goal) for run in members)
            figures = {"target": goal, **compared(*times), "doublings": doublings}
            found.append(case | figures | {"order": order(constant, clients)})
    return found


def compared(fast: list[float], slow: list[float]) -> dict[str, float]:
    """Return the medians of both times, their ratio, and its interval over seeds; NaN: no interval."""
    medians = statistics.median(fast), statistics.median(slow)
    ratio, low, high = (medians[0] / medians[1] if medians[1] < inf else inf), nan, nan
    if min(len(fast), len(slow)) >= FEWEST and max(*fast, *slow) < inf:

        def of_medians(a: Any, b: Any, axis: int) -> Any:
            return np.median(a, axis=axis) / np.median(b, axis=axis)

        drawn = bootstrap((fast, slow), of_medians, method="percentile", rng=np.random.default_rng(0))
        low, high = map(float, drawn.confidence_interval)
    return {"srpfl": medians[0], "fedrep": medians[1], "ratio": ratio, "low": low, "high": high}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as JSON has it: null where a method never reaches the target."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}


def shown(found: Sequence[dict[str, Any]]) -> Table:
    """Return the table; the theorem's order is scaled to the ratio at the fewest clients."""
    table = Table("start", "stages", "N", "c", "FedRep s", "SRPFL s", "ratio", "95 %", "doublings", "order, scaled")
    for row in found:
        fedrep, srpfl, ratio, low, high = (f"{row[key]:.3g}" for key in ("fedrep", "srpfl", "ratio", "low", "high"))
        kind = "skipped" if row["skip"] else "all"
        case = row["start"], kind, str(row["clients"]), f"{row['constant']:g}"
        table.add_row(
            *case, fedrep, srpfl, ratio, f"{low}–{high}", f"{row['doublings']:g}", f"{scaled(row, found):.3g}"
        )
    return table


def scaled(row: dict[str, Any], found: Sequence[dict[str, Any]]) -> float:
    """Return the theorem's order, such that it is the ratio itself at the fewest clients."""
    first = next(one for one in found if all(one[key] == row[key] for key in ("start", "skip", "constant")))
    return float(row["order"] * first["ratio"] / first["order"])


def draw(found: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw the ratios and their intervals against N, one panel per start and kind of stages, beside the order."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    kinds = sorted({(row["start"], row["skip"]) for row in found})
    figure, panels = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False, sharey=True)
    for panel, (start, skip) in zip(panels[0], kinds):
        for number, constant in enumerate(CONSTANTS):
            own = [row for row in found if (row["start"], row["skip"], row["constant"]) == (start, skip, constant)]
            clients = [row["clients"] for row in own]
            panel.plot(clients, [row["ratio"] for row in own], f"C{number}o-", label=f"measured, c = {constant:g}")
            panel.fill_between(clients, *([row[key] for row in own] for key in ("low", "high")), alpha=0.2)
            panel.plot(clients, [scaled(row, found) for row in own], f"C{number}:", label="order of Theorem 4.9")
        stages = "stages skipped by theory" if skip else "all stages"
        panel.set(title=f"{start} start, {stages}", xlabel="clients", ylabel="time of SRPFL / FedRep")
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
    Console(width=130).print(shown(found))
    if options.output:
        draw(found, options.output)
    print(json.dumps({"speedup": [plain(row) for row in found]}, allow_nan=False))


if __name__ == "__main__":
    main()
