"""Make the runs of one of FedLRGD's studies in a folder, one after the other, then say what its script says of them.

    python analysis/fedlrgd_runs.py gamma runs/gamma

gamma  analysis/oracle_complexity.py on the search for d = 2 and m = 50: 159 runs, 5 minutes.
error  analysis/error_by_rank.py on ranks, dimensions and links: 315 runs, 4 minutes.
time   analysis/running_time.py on fedlrgd-logistic and fedave-logistic: 20 s.

Runs that end early by diverging stay as they are. Prints one JSON line last, that of the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import hpcfl

Keys = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Runs of a preset: `settings` on top of it, and each combination of the values in `grid`."""

    preset: str
    settings: Keys = field(default_factory=Keys)
    grid: dict[str, list[Any]] = field(default_factory=dict)

    def runs(self, seeds: list[int]) -> Iterator[tuple[str, Keys]]:
        """Yield preset and settings."""
        for values in product(*self.grid.values(), seeds):
            yield self.preset, self.settings | dict(zip([*self.grid, "seed"], values))


@dataclass(frozen=True)
class Study:
    """Runs, and the script that reads them, with options."""

    script: str
    sweeps: list[Sweep]
    seeds: list[int]
    options: tuple[str, ...] = ()

    def runs(self, seeds: list[int] | None = None) -> list[tuple[str, Keys]]:
        """Return preset and settings of each run."""
        return [run for sweep in self.sweeps for run in sweep.runs(seeds or self.seeds)]


RATES: dict[str, list[Any]] = {"algorithm.lr": [0.1, 0.5], "algorithm.decay": [0, 0.05]}
ROUNDS = {1: 300, 5: 200, 20: 100, 50: 50, 200: 10}
"""Rounds of FedAve by its local steps on single samples."""
GAMMA = [
    Sweep(
        "fedlrgd-logistic",
        {"rounds": 120},
        {
            "algorithm.rank": [4, 8, 12, 16, 24, 32],
            "algorithm.scale": [1, 2],
            "algorithm.penalty": ["reweighted", "exact"],
        },
    ),
    Sweep(
        "fedave-logistic",
        {"rounds": 300, "algorithm.batch": 0, "algorithm.steps": 1},
        {"algorithm.lr": [2.62, 5.24, 7.86]},
    ),
    Sweep(
        "fedave-logistic",
        {"rounds": 150, "algorithm.batch": 0, "algorithm.steps": 5},
        {"algorithm.lr": [0.5, 1.31], "algorithm.decay": [0, 0.05]},
    ),
    *(Sweep("fedave-logistic", {"rounds": rounds, "algorithm.steps": b}, RATES) for b, rounds in ROUNDS.items()),
    *(
        Sweep(
            "fedave-logistic",
            {"rounds": 100, "algorithm.steps": b, "algorithm.lr": 400, "algorithm.decay": b},
        )
        for b in (5, 20)
    ),
]
SIZES = {"algorithm.rank": [2, 4, 8, 16, 32, 64, 128], "data.dimension": [1, 2, 3]}
ERROR = [
    Sweep("fedlrgd-rough", {}, SIZES | {"model.smoothness": [1, 2, 4]}),
    Sweep("fedlrgd-rough", {"model.link": "tanh"}, SIZES),
    Sweep("fedlrgd-rough", {"model.link": "logistic", "data.labels": 2}, SIZES),
]
STUDIES = {
    "gamma": Study("oracle_complexity", GAMMA, [2, 3, 5]),
    "error": Study("error_by_rank", ERROR, [1, 2, 3], ("--brief",)),
    "time": Study("running_time", [Sweep("fedlrgd-logistic"), Sweep("fedave-logistic")], [2]),
}


def main() -> None:
    """Make the runs, and call the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("folder", type=Path, help="a new one, for the runs")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the study's")
    options = parser.parse_args()
    study, folders = STUDIES[options.study], list[str]()
    for number, (preset, settings) in enumerate(study.runs(options.seeds)):
        folders.append(str(options.folder / f"{preset}-{number:03}"))
        with suppress(hpcfl.Diverged):
            hpcfl.run(preset, settings=settings, out=folders[-1], quiet=True)
    sys.argv = [study.script, *folders, *study.options]
    import_module(study.script).main()


if __name__ == "__main__":
    main()
