"""What becomes of slow clients whose labels nobody else holds: waiting, dropping, and SALF by two rules.

    python analysis/slow_labels.py -o docs/studies/slow_labels.png --jobs 2

Runs 12 clients on the bundled digits, 4 fast, 4 middling, 4 slow, each third with digits of its own; 5 methods, 5
seeds. A visit takes an exponential time, on average 0.5, 1 or 5 seconds; a round closes after 0.5 seconds, or with the
last visit where the server waits. All methods take one step per visit, of the same size. Draws mean and standard
deviation over the seeds of the clients' mean test accuracy against simulated time, of all clients and of the slow
third. Runs that are there already are only read. Costs a few minutes on 2 cores. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DEADLINE = 0.5
CONFIG: dict[str, Any] = {
    "rounds": 400,
    "clients": 12,
    "evaluate": {"every": 5},
    "participation": {"close": "deadline", "deadline": DEADLINE},
    "speed": {
        "model": "groups",
        "means_of": [0.5, 1.0, 5.0],
        "shares_of": [0.3333333, 0.3333333, 0.3333334],
        "kind": "dynamic",
        "sorted": True,
    },
    "data": {"name": "digits", "partition": "shards", "classes": 2, "label_groups": 3},
    "model": {"name": "mlp", "hidden": [32, 16]},
}
STEP = {"lr": 0.2, "batch": 64}
ONE_STEP = {"name": "fedavg", "epochs": 0, "steps": 1, "weights": "uniform", **STEP}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg that waits": {"algorithm": ONE_STEP, "participation": {"close": "all"}},
    "drop-stragglers": {"algorithm": ONE_STEP, "participation": CONFIG["participation"] | {"partial": "discard"}},
    "SALF, eq. 9": {"algorithm": {"name": "salf", "missing": "exact", **STEP}},
    "SALF, eq. 9 with eq. 10": {"algorithm": {"name": "salf", "missing": "paper", **STEP}},
    "SALF, inverse probability": {"algorithm": {"name": "salf", "rule": "inverse-probability", **STEP}},
}
DRAWN = [name for name in METHODS if "eq. 10" not in name]
"""Eq. 10 makes no difference that could be seen."""


@dataclass(frozen=True)
class Curve:
    """One run's accuracies, float64 [evaluations], of all clients and of the slow third, and when they were had."""

    seconds: Floats
    all: Floats
    slow: Floats

    def at(self, times: Floats, which: str) -> Floats:
        """Return the newest accuracy at each time, float64; NaN before the first."""
        place = np.searchsorted(self.seconds, times + 1e-9) - 1
        values: Floats = np.where(place >= 0, getattr(self, which)[place], np.nan)
        return values


def curve(method: str, seed: int, rounds: int, lr: float, out: Path) -> Curve:
    """Return one run's curve; carry the run out where its folder does not hold it yet."""
    import hpcfl

    own = METHODS[method]
    config = CONFIG | own | {"algorithm": own["algorithm"] | {"lr": lr}, "rounds": rounds, "seed": seed}
    words = "".join(letter if letter.isalnum() else "-" for letter in method)
    data = hpcfl.run(config, out=out / f"{words}_lr={lr:g}_seed={seed}", resume=True, quiet=True).data
    accuracy = data["client_accuracy"].dropna("round", how="all")
    clients = accuracy.sizes["client"]
    return Curve(
        data["sim_seconds"].sel(round=accuracy["round"]).values,
        accuracy.mean("client").values,
        accuracy.isel(client=slice(clients - clients // 3, None)).mean("client").values,
    )


def curves(seeds: int, rounds: int, lr: float, out: Path, jobs: int) -> dict[str, list[Curve]]:
    """Return the curves of each method, one per seed, `jobs` runs at a time."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {
            method: [pool.submit(curve, method, seed, rounds, lr, out) for seed in range(1, seeds + 1)]
            for method in METHODS
        }
        return {method: [run.result() for run in runs] for method, runs in waiting.items()}


def spread(runs: Sequence[Curve], times: Floats, which: str) -> tuple[Floats, Floats]:
    """Return mean and standard deviation over the seeds at each time; NaN where a seed has no accuracy yet."""
    values = np.stack([run.at(times, which) for run in runs])
    return values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(times))


def figures(found: dict[str, list[Curve]], end: float) -> list[dict[str, Any]]:
    """Return each method's accuracies, mean and standard deviation, after a quarter, half and all of `end` seconds."""
    times = np.array([end / 4, end / 2, end])
    rows = []
    for method, runs in found.items():
        row: dict[str, Any] = {"method": method, "seeds": len(runs)}
        for which in ("all", "slow"):
            pairs = zip(times, *spread(runs, times, which))
            row[which] = {f"{t:g}": None if np.isnan(mean) else [round(mean, 4), round(sd, 4)] for t, mean, sd in pairs}
        row["ends"] = round(float(np.mean([run.seconds[-1] for run in runs])), 1)
        row["at_the_end"] = [round(float(np.mean([getattr(run, w)[-1] for run in runs])), 4) for w in ("all", "slow")]
        rows.append(row)
    return rows


def draw(found: dict[str, list[Curve]], end: float, picture: Path) -> None:
    """Draw mean and band over the seeds against simulated time, of all clients and of the slow third."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, which, title in zip(panels, ("all", "slow"), ("all clients", "the slow third, with digits of its own")):
        for number, method in enumerate(DRAWN):
            runs = found[method]
            first, last = max(run.seconds[0] for run in runs), min(run.seconds[-1] for run in runs)
            times = np.geomspace(first, last, 200)
            mean, sd = spread(runs, times, which)
            panel.plot(times, mean, f"C{number}", label=method)
            panel.fill_between(times, mean - sd, mean + sd, color=f"C{number}", alpha=0.2, linewidth=0)
        panel.axvline(end, color="gray", linewidth=0.8, linestyle=":")
        panel.set(title=title, xlabel="simulated seconds", xscale="log", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean test accuracy of the clients")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Carry out what is missing, draw the picture, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    parser.add_argument("--out", type=Path, default=Path("runs/slow-labels"), help="folder of the runs: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to this: %(default)s")
    parser.add_argument("--rounds", type=int, default=CONFIG["rounds"], help="%(default)s")
    parser.add_argument("--lr", type=float, default=STEP["lr"], help="everybody's step size: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time: %(default)s")
    options = parser.parse_args()
    end = options.rounds * DEADLINE
    found = curves(options.seeds, options.rounds, options.lr, options.out, options.jobs)
    if options.output:
        draw(found, end, options.output)
    print(json.dumps({"lr": options.lr, "seconds": end, "methods": figures(found, end)}))


if __name__ == "__main__":
    main()
