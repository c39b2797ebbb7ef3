"""Figures 6 and 7 of the SALF paper: VGG on CIFAR-10, or on its stand-in, MNIST as 3 x 32 x 32 images.

    python analysis/salf_vgg.py --rounds 30 --every 10 --data mnist32
    python analysis/salf_vgg.py --rounds 1500 --every 10 --seeds 1 2 3
    python analysis/salf_vgg.py --rounds 1500 --every 10 --seeds 1 2 3 --methods vanilla salf --stragglers 0.3 0.5 0.7

The first two are Figure 7, 90 % stragglers; the last one is Figure 6. Runs the presets vgg-cifar10-METHOD for each of
`--methods`, `--stragglers` and `--seeds`, and prints per method and share of stragglers, which vanilla has none of, the
test accuracy after each evaluation, mean over the seeds. Runs that are there already are only read, and one that was
cut short goes on after its last checkpoint. Costs, for each run on a CPU, some 10 minutes for 30 rounds, and hours for
1500: they want a GPU. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hpcfl

METHODS = ("vanilla", "drop", "salf", "heterofl")
SHOWN = 6
"""Evaluations in the table; the JSON line has all."""


def late(method: str, share: float) -> dict[str, Any]:
    """Return the keys by which so many stragglers take part."""
    if method == "vanilla":
        return {}
    return {"algorithm.shares": [round(1 - share, 6), share]} if method == "heterofl" else {"speed.stragglers": share}


def accuracies(folder: Path, method: str, settings: dict[str, Any], data_dir: Path | None) -> dict[int, float]:
    """Return a run's test accuracies by number of rounds; carry the run out where its folder does not hold it yet."""
    preset = f"vgg-cifar10-{method}"
    run = hpcfl.run(preset, settings=settings, out=folder, data_dir=data_dir, resume=True, quiet=True)
    found = run.data["accuracy"].dropna("round")
    return {number + 1: float(value) for number, value in zip(found["round"].values.tolist(), found.values)}


def figures(runs: list[dict[int, float]]) -> dict[str, Any]:
    """Return the rounds after which all seeds were tested, and mean and range of their accuracies then."""
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    by_round = [[run[number] for run in runs] for number in rounds]
    return {
        "seeds": len(runs),
        "rounds": rounds,
        "accuracy": [round(statistics.fmean(values), 4) for values in by_round],
        "min": [round(min(values), 4) for values in by_round],
        "max": [round(max(values), 4) for values in by_round],
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    """Return the table: the last evaluations of each method."""
    ends = sorted({number for row in rows for number in row["rounds"]})[-SHOWN:]
    table = Table("method", "stragglers", "seeds", *(f"after {number}" for number in ends))
    for row in rows:
        at = dict(zip(row["rounds"], row["accuracy"]))
        facts = row["method"], f"{row['stragglers']:g}", str(row["seeds"])
        table.add_row(*facts, *(f"{at[end]:.3f}" if end in at else "" for end in ends))
    return table


def plain(text: str) -> Any:
    """Return the value that JSON holds; the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    """Run what is missing, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="presets vgg-cifar10-METHOD")
    parser.add_argument("--stragglers", type=float, nargs="+", default=[0.9], help="their shares of the clients [0.9]")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--every", type=int, default=10, help="rounds from one test to the next")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--data", default="cifar10", help="data.name: cifar10, or mnist32 in its place")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys, values in JSON or words"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/salf-vgg"))
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("HPCFL_DATA"), help="folder of the data sets")
    options = parser.parse_args()
    more = {key: plain(value) for key, value in (pair.split("=", 1) for pair in options.set)}
    name = "-".join([options.data, str(options.rounds), *(pair.replace("=", "") for pair in options.set)])
    rows = []
    for method in options.methods:
        for share in [0.0] if method == "vanilla" else options.stragglers:
            runs = []
            for seed in options.seeds:
                settings = {"rounds": options.rounds, "seed": seed, "data.name": options.data, **more}
                settings |= {"evaluate.every": options.every, "evaluate.last": 1, "checkpoint.every": options.every}
                folder = options.out / f"{method}-{share:g}-{name}-{seed}"
                runs.append(accuracies(folder, method, settings | late(method, share), options.data_dir))
            rows.append({"method": method, "stragglers": share, **figures(runs)})
    Console(width=None if sys.stdout.isatty() else 120).print(shown(rows))
    print(json.dumps({"data": options.data, "salf_vgg": rows}))


if __name__ == "__main__":
    main()
