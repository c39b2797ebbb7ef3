"""The time that methods take to reach accuracies, from run folders (SRPFL, Figure 3).

    python analysis/srpfl_time.py runs/srpfl-time/*/ -o srpfl_time.png

Per speed model, communication time C.T. and method: the simulated time until the mean test accuracy of the clients
first reaches each level (median over seeds; a run that never does counts as inf). C.T. is charged here, once per round,
in units of the mean compute time of a visit; the runs themselves must have none. All runs are of one data set, one law
of speeds and one way to invite clients. Costs seconds. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import hpcfl

COSTS = (0.0, 10.0, 100.0)
LEVELS = (0.6, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94)
METHODS = {  # by algorithm, and whether participants double
    ("fedrep", True): "FedRep-SRPFL",
    ("fedrep", False): "FedRep",
    ("lg_fedavg", True): "LG-SRPFL",
    ("lg_fedavg", False): "LG-FedAvg",
    ("fedavg", True): "FLANP-FT",
    ("fedavg", False): "FedAvg-FT",
    ("hf_maml", False): "HF-MAML",
}
COMMON = (("speed", "model"), ("data", "name"), ("participation", "invite"))
PAIRS = (("FedRep-SRPFL", "FedRep"), ("LG-SRPFL", "LG-FedAvg"), ("FedRep-SRPFL", "FLANP-FT"))


Setting = dict[str, str]


@dataclass(frozen=True)
class Run:
    """What is needed of one run.

    Attributes
    ----------
    setting : dict
        What all runs have to have in common, by key.
    speed : str
        ``speed.kind``.
    accuracy : float64 [evaluations]
        Mean over the clients.
    rounds : int64 [evaluations]
        Rounds that were over by then.
    seconds : float64 [evaluations]
        Simulated seconds by then, without communication.
    unit : float
        Mean compute time of a visit in seconds.
    """

    setting: Setting
    speed: str
    method: str
    accuracy: Any
    rounds: Any
    seconds: Any
    unit: float

    def time(self, cost: float) -> Any:
        """Return the time of each evaluation in units of the mean compute time."""
        return self.seconds / self.unit + cost * self.rounds

    def until(self, level: float, cost: float) -> float:
        """Return the time until the accuracy is first at least `level`; inf: never."""
        reached = np.flatnonzero(self.accuracy >= level)
        return float(self.time(cost)[reached[0]]) if len(reached) else inf


def read(folder: Path) -> Run:
    """Return one run."""
    data = hpcfl.open_run(folder)
    config = json.loads(data.attrs["config"])
    if config["speed"]["communication"]:
        raise SystemExit(f"{folder}: speed.communication = {config['speed']['communication']}, expected 0")
    method = METHODS[config["algorithm"]["name"], config["doubling"]["when"] != "never"]
    accuracy = data["client_accuracy"].mean("client").dropna("round")
    seconds = data["sim_seconds"].sel(round=accuracy["round"]).values
    visits = data["visit_seconds"].values
    unit = float(visits[np.isfinite(visits)].mean())
    setting = {f"{section}.{key}": config[section][key] for section, key in COMMON}
    speed, rounds = config["speed"].get("kind", "fixed"), accuracy["round"].values + 1
    return Run(setting, speed, method, accuracy.values, rounds, seconds, unit)


def check_alike(runs: Sequence[Run]) -> None:
    """Leave with one line where runs of different settings would be taken for seeds of one."""
    for key in runs[0].setting if runs else ():
        values = sorted({run.setting[key] for run in runs})
        if len(values) > 1:
            raise SystemExit(f"{key}: the runs have {', '.join(values)}; expected one of them only")


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the times of each speed model, C.T. and method; null: never."""
    cases: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        cases[run.speed, run.method].append(run)
    found = []
    for cost in COSTS:
        for speed, method in sorted(cases, key=lambda case: (case[0], list(METHODS.values()).index(case[1]))):
            members = cases[speed, method]
            times = [statistics.median(run.until(level, cost) for run in members) for level in LEVELS]
            best = statistics.median(float(run.accuracy.max()) for run in members)
            case = {"speed": speed, "cost": cost, "method": method, "seeds": len(members), "best": best}
            found.append(case | {"times": {f"{level:g}": None if isinf(t) else t for level, t in zip(LEVELS, times)}})
    return found


def ratios(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how much sooner one method of each pair is there than the other; null: one of them never is."""
    by = {(row["speed"], row["cost"], row["method"]): row["times"] for row in found}
    result = []
    for speed, cost in sorted({(row["speed"], row["cost"]) for row in found}):
        for one, other in PAIRS:
            if (speed, cost, one) not in by or (speed, cost, other) not in by:
                continue
            fast, slow = by[speed, cost, one], by[speed, cost, other]
            shares = {key: fast[key] / slow[key] if fast[key] and slow[key] else None for key in fast}
            result.append({"speed": speed, "cost": cost, "of": one, "to": other, "ratio": shares})
    return result


def shown(found: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the tables of times and of ratios."""
    levels = [f"{level:g}" for level in LEVELS]
    times = Table("speeds", "C.T.", "method", "seeds", "best", *levels, title="time to reach an accuracy")
    for row in found:
        cells = ("-" if row["times"][level] is None else f"{row['times'][level]:.3g}" for level in levels)
        head = row["speed"], f"{row['cost']:g}", row["method"], str(row["seeds"]), f"{row['best']:.3f}"
        times.add_row(*head, *cells)
    shares = Table("speeds", "C.T.", "of", "to", *levels, title="ratio of times")
    for row in pairs:
        cells = ("-" if row["ratio"][level] is None else f"{row['ratio'][level]:.2g}" for level in levels)
        shares.add_row(row["speed"], f"{row['cost']:g}", row["of"], row["to"], *cells)
    return [times, shares]


def draw(runs: Sequence[Run], picture: Path) -> None:
    """Draw accuracy against time: a row per speed model, a column per C.T., the first seed of each method."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    speeds = sorted({run.speed for run in runs})
    first: dict[tuple[str, str], Run] = {}
    for run in runs:
        first.setdefault((run.speed, run.method), run)
    figure, panels = plt.subplots(len(speeds), len(COSTS), figsize=(4.5 * len(COSTS), 3.5 * len(speeds)), squeeze=False)
    for line, speed in zip(panels, speeds):
        for panel, cost in zip(line, COSTS):
            for number, method in enumerate(METHODS.values()):
                if (speed, method) in first:
                    run = first[speed, method]
                    panel.plot(run.time(cost), run.accuracy, f"C{number}", label=method, linewidth=1)
            panel.set(title=f"{speed} speeds, C.T. = {cost:g}", xlabel="time / mean compute time", ylabel="accuracy")
            panel.set_xscale("log")
    panels[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Print the tables and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    options = parser.parse_args()
    runs = [read(folder) for folder in sorted(options.runs) if (folder / "run.h5").exists()]
    check_alike(runs)
    found = rows(runs)
    pairs = ratios(found)
    for table in shown(found, pairs):
        Console(width=140).print(table)
    if options.output:
        draw(runs, options.output)
    print(json.dumps({"times": found, "ratios": pairs}))


if __name__ == "__main__":
    main()
