"""Federated oracle complexity of FedLRGD and FedAve, from run folders (Jadbabaie, Makur & Shah, Definition 1).

    python analysis/oracle_complexity.py runs/gamma/*/ -o oracle_complexity.png

Runs with ``evaluate.objective = true`` are grouped by problem (data, model and clients, whoever holds the server's
samples), and within one by method and setting; runs of a group differ in the seed alone. Γ(ε) of a setting is what it
had cost when F - F* had come to at most ε for good: gradients, of clients and server, and φ times the vectors sent
(median over seeds; never counts as inf). Γ(ε) of a method is the least over the settings that were run: each is tuned
for every ε and φ, the rank of FedLRGD and its number of steps like FedAve's b, batch, step size and number of epochs.
With --first a gap counts that passes through ε by chance, or on the way to a biased limit. F* is computed here.

Per problem and φ: Γ of both with the settings that win, their ratio (below 1: FedLRGD wins), that of the expected
running times (eq. 25), each tuned for the time, and the ranges of ε in which FedLRGD wins. Costs seconds to minutes.
Prints one JSON line last (null: never).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isinf
from pathlib import Path
from typing import Any

import numpy as np
from finished import finished
from rich.console import Console
from rich.table import Table

from hpcfl.base.errors import RunError, UsageError
from hpcfl.config import from_table
from hpcfl.contrib.theory.optimum import PooledObjective, optimum
from hpcfl.learning.task import Task

REPEAT = """\
How the runs of docs/studies/fedlrgd.md were made, here for m = 50. The others: m = 200 with --set clients=200 --set
batch_clients=200 and seed 2; d = 5 with --set data.dimension=5 --set data.server=64 and seed 2, FedLRGD's lr = 0.66 and
ranks 4,8,16,32,48,64, exact descent's lr = 1.32,2.64,5.28; fedlrgd-breast-cancer and fedave-breast-cancer with seeds
1,2,3, ranks 2,4,8,16,24,35 and 1.98,3.96,7.92. Exact descent is the second line.
  study() { hpcfl sweep "$@" --seeds 2,3,5 --out runs/gamma; }
  study fedlrgd-logistic --set rounds=120 --grid algorithm.rank=2,4,8,12,16,24,32 --grid algorithm.scale=1,2 \\
    --grid algorithm.penalty=reweighted,exact
  study fedave-logistic --set rounds=300 --grid algorithm.batch=0 --grid algorithm.steps=1 \\
    --grid algorithm.lr=2.62,5.24,7.86
  study fedave-logistic --set rounds=150 --grid algorithm.batch=0 --grid algorithm.steps=5 \\
    --grid algorithm.lr=0.5,1.31 --grid algorithm.decay=0,0.05
  for b in 1:300 5:200 20:100 50:50 200:10; do study fedave-logistic --set rounds=${b#*:} \\
    --grid algorithm.steps=${b%:*} --grid algorithm.lr=0.1,0.5 --grid algorithm.decay=0,0.05; done
  for b in 5 20; do study fedave-logistic --set rounds=100 --grid algorithm.steps=$b \\
    --set algorithm.lr=400 --set algorithm.decay=$b; done
"""
THEORY = """\
In theory Γ(FedLRGD) = r² + r s + r S + φ m r, with r = O((p/ε)^Θ(d/η)) for a loss of Hölder order η in the data
(Theorem 2), and Γ(FedAve) = O(φ m (p/ε)^(3/4)) (Theorem 3). The latter is an upper bound: to compare bounds is not to
compare methods. What follows is measured."""
PHIS = (1.0, 10.0, 100.0, 1000.0)
GAPS = tuple(10.0**-k for k in range(2, 9))
FINE = 20
"""Values of ε per decade on which ranges are looked for."""
METHODS = {"fedlrgd": "FedLRGD", "fedavg": "FedAve"}
SHOWN = {"FedLRGD": ("rank", "scale", "penalty"), "FedAve": ("steps", "batch", "lr", "decay")}
AGREED = 1e-9
"""How far the two methods' F* may lie apart."""


@dataclass(frozen=True)
class Run:
    """What is needed of one run.

    Attributes
    ----------
    problem, setting : str
        What runs of one problem, and of one setting of a method, have in common but for the seed; as JSON.
    start, least : float
        F(θ0) and F*.
    gap : float64 [evaluations]
        F - F*.
    gradients, vectors, computing : float64 [evaluations]
        Sums over the rounds until then: of gradients, of vectors sent, of the running time without sending (eq. 25).
    count : int64 [evaluations]
        Steps S at the server, or epochs T.
    """

    problem: str
    method: str
    setting: str
    seed: int
    start: float
    least: float
    gap: Any
    gradients: Any
    vectors: Any
    computing: Any
    count: Any

    def complexity(self, phi: float) -> Any:
        """Return Γ at each evaluation (Definition 1)."""
        return self.gradients + phi * self.vectors

    def time(self, phi: float) -> Any:
        """Return the expected running time at each evaluation (eq. 25)."""
        return self.computing + phi * self.vectors

    def kept(self) -> Run:
        """Return the run with the largest gap from each evaluation on: what is not kept has not been reached."""
        return replace(self, gap=np.maximum.accumulate(np.nan_to_num(self.gap, nan=inf)[::-1])[::-1])

    def at(self, epsilon: float) -> int | None:
        """Return the first evaluation at which the gap is at most ε; None: never."""
        reached = np.flatnonzero(self.gap <= epsilon)
        return int(reached[0]) if len(reached) else None


Cost = Callable[[Run, float], Any]
Case = dict[str, list[Run]]
"""Runs of one problem and method by setting; those of a setting are its seeds."""


@dataclass(frozen=True)
class Best:
    """The setting of a method that costs least; its runs are none, and its cost inf, where no setting gets there."""

    cost: float
    count: float
    runs: Sequence[Run]


def read(folder: Path) -> Run | None:
    """Return one run; None, and a line of why, if it has not finished."""
    if (found := finished(folder)) is None:
        return None
    data, config = found
    method = METHODS.get(config["algorithm"]["name"])
    if method is None:
        expected = " or ".join(METHODS)
        raise SystemExit(f"{folder}: algorithm.name = '{config['algorithm']['name']}', expected {expected}")
    if not config["evaluate"]["objective"]:
        raise SystemExit(f"{folder}: no objective was recorded, expected evaluate.objective = true")
    if "oracle" not in data:
        raise SystemExit(f"{folder}: no oracle complexity was recorded, expected oracle.record = true")
    known = np.flatnonzero(np.isfinite(data["objective"].values))
    start, least = ends(data.attrs["config"], data.attrs["data_dir"])
    vectors = data["vectors"].values
    sums = {
        "gradients": data["gradients"].values + data["server_gradients"].values,
        "vectors": vectors,
        "computing": data["running_time"].values - config["oracle"]["phi"] * vectors,
    }
    count = data["taken"].values if method == "FedLRGD" else data["round"].values + 1
    return Run(
        problem_of(config),
        method,
        json.dumps(config["algorithm"], sort_keys=True),
        config["seed"],
        start,
        least,
        gap=data["objective"].values[known] - least,
        count=count[known],
        **{name: np.cumsum(values)[known] for name, values in sums.items()},
    )


def problem_of(config: dict[str, Any]) -> str:
    """Return what decides about the objective but for the seed; not who holds the server's samples."""
    data = {key: value for key, value in config["data"].items() if key != "deal"}
    return json.dumps({"data": data, "model": config["model"], "clients": config["clients"]}, sort_keys=True)


def ends(text: str, data_dir: str) -> tuple[float, float]:
    """Return F(θ0) and F* of a run's config."""
    table = json.loads(text)
    parts = {key: table[key] for key in ("data", "model", "clients", "seed")}
    # a config has to have these as well, but the minimum does not depend on them
    return _ends(json.dumps({**parts, "rounds": 1, "algorithm": {"name": "fedavg"}}, sort_keys=True), data_dir)


@cache
def _ends(text: str, data_dir: str) -> tuple[float, float]:
    config, place = from_table(json.loads(text)), Path(data_dir) if data_dir else None
    federation = config.data.federate(config.clients, config.seed, place)
    task = Task(config.model, federation, config.seed, precision="double")
    objective = PooledObjective(task)
    return objective.value(objective.flat(task.initial())), optimum(task).value


def cases(runs: Iterable[Run]) -> dict[str, dict[str, Case]]:
    """Return the runs by problem, method and setting; leave with one line where they cannot be compared."""
    found: dict[str, dict[str, Case]] = defaultdict(lambda: {name: defaultdict(list) for name in METHODS.values()})
    for run in runs:
        found[run.problem][run.method][run.setting].append(run)
    for problem, methods in found.items():
        held = [name for name, settings in methods.items() if settings]
        if len(held) < len(METHODS):
            raise SystemExit(f"runs of {held[0]} alone on {problem}; expected runs of fedlrgd and of fedavg")
        check([run for settings in methods.values() for seeds in settings.values() for run in seeds])
        seeds = {tuple(sorted(run.seed for run in each)) for settings in methods.values() for each in settings.values()}
        if len(seeds) > 1:
            raise SystemExit(f"seeds {' and '.join(map(str, sorted(seeds)))} on {problem}; expected the same of each")
    return dict(sorted(found.items(), key=lambda item: position(item[0])))


def position(problem: str) -> tuple[str, int, int]:
    """Return what problems are sorted by: the name of the data, the dimension, the number of clients."""
    table = json.loads(problem)
    return table["data"]["name"], table["data"].get("dimension", 0), table["clients"]


def check(runs: Sequence[Run]) -> None:
    """Leave with one line where runs of one problem and seed have other minima."""
    first: dict[int, Run] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        if abs(run.least - other.least) > AGREED:
            raise SystemExit(
                f"F* = {other.least!r} for {other.method}, {run.least!r} for {run.method} with seed {run.seed}; "
                "expected the same: data.deal = true and the same data.server for fedavg"
            )


def best(case: Case, cost: Cost, epsilon: float, phi: float) -> Best:
    """Return the setting that reaches ε at the least cost, median over seeds."""
    found = Best(inf, inf, ())
    for runs in case.values():
        at = [run.at(epsilon) for run in runs]
        spent = statistics.median(inf if k is None else float(cost(run, phi)[k]) for run, k in zip(runs, at))
        if spent < found.cost:
            count = statistics.median(inf if k is None else float(run.count[k]) for run, k in zip(runs, at))
            found = Best(spent, count, runs)
    return found


def described(found: Best) -> dict[str, Any] | None:
    """Return what is said of the setting that wins; None: there is none."""
    if not found.runs:
        return None
    run, setting = found.runs[0], json.loads(found.runs[0].setting)
    count = {"S" if run.method == "FedLRGD" else "T": found.count}
    return {"cost": found.cost, **{key: setting[key] for key in SHOWN[run.method]}, **count}


def ratio(one: float, other: float) -> float | None:
    """Return a quotient of costs; None where one of them is inf."""
    return None if isinf(one) or isinf(other) else one / other


def winner(one: float, other: float) -> str:
    """Return who costs less."""
    if one == other:
        return "neither"
    return "FedLRGD" if one < other else "FedAve"


def rows(methods: dict[str, Case], phis: Sequence[float], gaps: Sequence[float]) -> list[dict[str, Any]]:
    """Return Γ of both methods for each φ and ε."""
    found = []
    for phi in phis:
        for epsilon in gaps:
            ours, theirs = (best(methods[name], Run.complexity, epsilon, phi) for name in METHODS.values())
            times = [best(methods[name], Run.time, epsilon, phi).cost for name in METHODS.values()]
            row = {"phi": phi, "epsilon": epsilon, "FedLRGD": described(ours), "FedAve": described(theirs)}
            row |= {"ratio": ratio(ours.cost, theirs.cost), "time_ratio": ratio(*times)}
            found.append(row | {"winner": winner(ours.cost, theirs.cost)})
    return found


def ranges(methods: dict[str, Case], phi: float, gaps: Sequence[float]) -> list[tuple[float, float]]:
    """Return the ranges of ε, each from its largest to its least, in which Γ of FedLRGD is the smaller one.

    Parameters
    ----------
    gaps : sequence of float
        Values of ε that are tried, falling.
    """
    found: list[tuple[float, float]] = []
    winning = False
    for epsilon in gaps:
        ours, theirs = (best(methods[name], Run.complexity, epsilon, phi).cost for name in METHODS.values())
        if ours < theirs:
            found = [*found[:-1], (found[-1][0], epsilon)] if winning else [*found, (epsilon, epsilon)]
        winning = ours < theirs
    return found


def won(phi: float, found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return where FedLRGD wins, and the crossover: the largest ε at which it does; None: it never does."""
    return {"phi": phi, "crossover": found[0][0] if found else None, "ranges": found}


def fine(gaps: Sequence[float]) -> list[float]:
    """Return values of ε from the largest to the least of `gaps`, so many per decade, falling."""
    high, low = np.log10(max(gaps)), np.log10(min(gaps))
    return [float(f"{10**power:.6g}") for power in np.linspace(high, low, round(FINE * (high - low)) + 1)]


def said(found: Sequence[tuple[float, float]], gaps: Sequence[float]) -> str:
    """Return ranges in words."""
    if not found:
        return "never"
    if found == [(gaps[0], gaps[-1])]:
        return "always"
    return ", ".join(f"{high:.1e} to {low:.1e}" for high, low in found)


def label(problem: str, others: Iterable[str]) -> str:
    """Return a problem's data and clients, and the keys of its data and model in which others of the data differ."""
    own, rest = json.loads(problem), [json.loads(other) for other in others]
    rest = [each for each in rest if each["data"]["name"] == own["data"]["name"]]
    keys = [(part, key) for part in ("data", "model") for key in own[part]]
    differing = [(part, key) for part, key in keys if any(r[part].get(key) != own[part][key] for r in rest)]
    name = own["data"].get("set", own["data"]["name"])
    return ", ".join([name, f"m = {own['clients']}", *(f"{key} = {own[part][key]}" for part, key in differing)])


def analysed(runs: Iterable[Run], phis: Sequence[float], gaps: Sequence[float]) -> list[dict[str, Any]]:
    """Return the figures of each problem: Γ of both methods, and where FedLRGD wins."""
    found, problems = [], cases(runs)
    for problem, methods in problems.items():
        first = next(iter(methods["FedLRGD"].values()))
        about = {
            "problem": label(problem, problems),
            "clients": json.loads(problem)["clients"],
            "seeds": sorted(run.seed for run in first),
            "start": statistics.median(run.start - run.least for run in first),
            "settings": {name: len(settings) for name, settings in methods.items()},
        }
        wins = [won(phi, ranges(methods, phi, fine(gaps))) for phi in phis]
        found.append(about | {"rows": rows(methods, phis, gaps), "wins": wins})
    return found


def shown(problem: dict[str, Any], gaps: Sequence[float]) -> list[Table]:
    """Return the tables of one problem."""
    title = f"{problem['problem']}: F(θ0) - F* = {problem['start']:.3g}, seeds {problem['seeds']}"
    ours, theirs = ("Γ FedLRGD", "r", "penalty", "S"), ("Γ FedAve", "b", "batch", "lr", "T")
    table = Table("φ", "ε", *ours, *theirs, "ratio", "time", "winner", title=title)
    for row in problem["rows"]:
        cells = [f"{row['phi']:g}", f"{row['epsilon']:.0e}"]
        for name, keys in (("FedLRGD", ("rank", "penalty", "S")), ("FedAve", ("steps", "batch", "rate", "T"))):
            one = row[name]
            cells += ["never", *("-" for _ in keys)] if one is None else [f"{one['cost']:.3g}", *settings(one, keys)]
        cells += ["-" if row[key] is None else f"{row[key]:.2g}" for key in ("ratio", "time_ratio")]
        table.add_row(*cells, row["winner"])
    wins = Table("φ", "FedLRGD wins for ε from")
    for case in problem["wins"]:
        wins.add_row(f"{case['phi']:g}", said(case["ranges"], fine(gaps)))
    return [table, wins]


def settings(one: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Return the cells of a setting; a step size that falls as lr/(1 + decay k), an empty batch that is all samples."""
    rate = f"{one.get('lr', 0):g}" + (f"/(1+{one['decay']:g}k)" if one.get("decay") else "")
    named = one | {"rate": rate} | ({"batch": "all"} if one.get("batch") == 0 else {})
    return [f"{named[key]:g}" if isinstance(named[key], float) else str(named[key]) for key in keys]


def draw(runs: Sequence[Run], phis: Sequence[float], gaps: Sequence[float], picture: Path) -> None:
    """Draw Γ(ε) of both methods: a row per problem, a column per φ, the crossovers as vertical lines."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    problems, tried = cases(runs), fine(gaps)
    size = (3.1 * len(phis), 2.4 * len(problems))
    figure, panels = plt.subplots(len(problems), len(phis), figsize=size, squeeze=False, sharex=True)
    for line, (problem, methods) in zip(panels, problems.items()):
        for panel, phi in zip(line, phis):
            for number, name in enumerate(METHODS.values()):
                costs = [best(methods[name], Run.complexity, epsilon, phi).cost for epsilon in tried]
                panel.plot(tried, costs, f"C{number}", label=name, linewidth=1.5)
            for high, low in ranges(methods, phi, tried):
                panel.axvspan(high, low, color="C0", alpha=0.12, linewidth=0)
            panel.set(xscale="log", yscale="log", xlim=(tried[0], tried[-1]))
            panel.set_title(f"{label(problem, problems)}, φ = {phi:g}", fontsize=6.5)
            panel.tick_params(labelsize="x-small")
    for panel in panels[-1]:
        panel.set_xlabel("ε", fontsize="small")
    for panel in panels[:, 0]:
        panel.set_ylabel("Γ(ε)", fontsize="small")
    panels[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(picture, dpi=80)


def main() -> None:
    """Print the tables and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=REPEAT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--phi", nargs="+", type=float, default=PHIS, help="values of φ")
    parser.add_argument("--epsilon", nargs="+", type=float, default=GAPS, help="values of ε")
    parser.add_argument("--first", action="store_true", help="ε counts as reached when the gap first is within it")
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    options = parser.parse_args()
    gaps = sorted(options.epsilon, reverse=True)
    try:
        folders = [folder for folder in sorted(options.runs) if (folder / "run.h5").exists()]
        runs = [run for run in map(read, folders) if run is not None]
        runs = runs if options.first else [run.kept() for run in runs]
        found = analysed(runs, options.phi, gaps)
    except (UsageError, RunError) as error:
        raise SystemExit(str(error)) from None
    print(THEORY)
    for problem in found:
        for table in shown(problem, gaps):
            Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.output:
        draw(runs, options.phi, gaps, options.output)
    print(json.dumps({"oracle_complexity": found}, allow_nan=False))


if __name__ == "__main__":
    main()
