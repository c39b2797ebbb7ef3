"""How far anchors' covariances come, and how far barycenters are from means of factors, from run folders (FLIC).

    hpcfl sweep flic-barycenter --grid algorithm.covariances=bures,mean --seeds 1-3 --out runs/barycenter
    python analysis/flic_covariances.py runs/barycenter/*/

Per seed, the means over the anchors of |S − I|/|I| with either reduction and of |S_bures − S_mean|/|S_bures| (in the
Frobenius norm), and the clients' mean accuracy at the end of either. Then mean ± standard deviation over seeds. Runs
may differ in seed and ``algorithm.covariances`` alone. Costs seconds. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.config.presets import flat

FREE = ("seed", "algorithm.covariances", "checkpoint.every", "checkpoint.keep")
FIGURES = ("bures from I", "mean from I", "apart", "accuracy bures", "accuracy mean")


@dataclass(frozen=True)
class Run:
    """What is needed of one run: its config by dotted key, S float64 [C, k, k], and the clients' mean accuracy."""

    folder: Path
    config: dict[str, Any]
    covariances: npt.NDArray[np.float64]
    accuracy: float


def read(folder: Path) -> Run:
    """Return one run; leave with one line where its covariances do not learn."""
    data, models = hpcfl.open_run(folder), hpcfl.open_models(folder)
    config = dict(flat(json.loads(data.attrs["config"])))
    if "anchor.factors" not in models.shared:
        raise SystemExit(f"{folder}: no anchor.factors; expected a run with algorithm.covariances = 'bures' or 'mean'")
    factors = models.shared["anchor.factors"].astype(np.float64)
    accuracy = float(data["client_accuracy"].dropna("round", how="all")[-1].mean())
    return Run(folder, config, factors @ factors.transpose(0, 2, 1), accuracy)


def pairs(runs: Sequence[Run]) -> dict[int, dict[str, Run]]:
    """Return the runs by seed and reduction; leave with one line where they differ in more, or one is missing."""
    found: dict[int, dict[str, Run]] = defaultdict(dict)
    for run in runs:
        for key in sorted(run.config.keys() | runs[0].config.keys()):
            here, there = run.config.get(key), runs[0].config.get(key)
            if here != there and key not in FREE:
                raise SystemExit(f"{key}: {run.folder} has {here!r}, {runs[0].folder} {there!r}; expected them equal")
        found[int(run.config["seed"])][run.config["algorithm.covariances"]] = run
    for seed, both in found.items():
        if both.keys() != {"bures", "mean"}:
            raise SystemExit(f"seed {seed}: expected a run of algorithm.covariances 'bures' and one of 'mean'")
    return dict(sorted(found.items()))


def figures(bures: Run, mean: Run) -> dict[str, float]:
    """Return one seed's figures."""

    def relative(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
        return float(np.mean(np.linalg.norm(one - other, axis=(1, 2)) / np.linalg.norm(one, axis=(1, 2))))

    eye = np.broadcast_to(np.eye(bures.covariances.shape[1]), bures.covariances.shape)
    apart = relative(bures.covariances, mean.covariances)
    ends = relative(eye, bures.covariances), relative(eye, mean.covariances)
    return dict(zip(FIGURES, (*ends, apart, bures.accuracy, mean.accuracy)))


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    try:
        found = {seed: figures(**both) for seed, both in pairs([read(folder) for folder in options.runs]).items()}
    except UsageError as error:
        raise SystemExit(str(error)) from None
    table = Table("seed", *FIGURES)
    for seed, row in found.items():
        table.add_row(str(seed), *(f"{row[name]:.3f}" for name in FIGURES))
    columns = {name: [row[name] for row in found.values()] for name in FIGURES}
    spread = {name: statistics.stdev(values) if len(values) > 1 else None for name, values in columns.items()}
    means = {name: statistics.fmean(values) for name, values in columns.items()}
    table.add_row("all", *(f"{means[name]:.3f} ± {spread[name] or 0:.3f}" for name in FIGURES))
    Console(width=120).print(table)
    print(json.dumps({"flic_covariances": {"seeds": found, "mean": means, "std": spread}}, allow_nan=False))


if __name__ == "__main__":
    main()
