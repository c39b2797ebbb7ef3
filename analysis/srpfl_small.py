"""Accuracies on the small case of SRPFL's released code, from run folders, beside those that this code reaches.

    python analysis/srpfl_small.py --write runs/released
    hpcfl sweep runs/released/*-1.toml --out runs/srpfl-small
    python analysis/srpfl_small.py runs/srpfl-small/*/

With `--write` it writes the configs of six methods for three splits: the presets ``…-mnist-released`` with the paces of
the released run, numpy's 20 exponential draws of seed 1, and 6,000 images dealt out as codes of this kind do it: each
class in 4 shards, to each client two at random, which may be of one class. The shuffle is Python's, by the split's
number; that of the released run is not known.

Per method, and per value of the keys in which its runs differ: the clients' accuracy after 10, 20 and 30 rounds in per
cent, weighted by their test samples as in the released code, mean ± standard deviation over seeds; the simulated time
by then, of the first seed. Costs seconds (the runs a minute or two each).
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from rich.console import Console
from rich.table import Table

import hpcfl
from hpcfl.base.types import Ints
from hpcfl.config.presets import flat
from hpcfl.data.base import Labels
from hpcfl.data.mnist import Mnist

ROUNDS = (10, 20, 30)
METHODS = {  # by algorithm, and whether participants double
    ("fedrep", True): "FedRep-SRPFL",
    ("fedrep", False): "FedRep",
    ("lg_fedavg", True): "LG-SRPFL",
    ("lg_fedavg", False): "LG-FedAvg",
    ("fedavg", True): "FLANP-FT",
    ("fedavg", False): "FedAvg-FT",
}
RELEASED = {
    "FedRep-SRPFL": (73.3, 76.2, 80.7),
    "FedRep": (93.8, 95.8, 96.9),
    "LG-SRPFL": (67.0, 75.0, 93.0),
    "FLANP-FT": (58.0, 55.0, 52.0),
    "FedAvg-FT": (57.0, 63.0, 61.0),
}
"""What the released code reaches, on one split and with one seed; it is reported of "LG" without more words."""
NAMES = ("srpfl-fedrep", "fedrep", "srpfl-lg", "lg", "flanp-ft", "fedavg-ft")
CLIENTS, SHARDS, IMAGES, SPLITS = 20, 2, 6000, (1, 2, 3)
FREE = {"data.partition_file", "seed", "batch_clients", "evaluate.every", "evaluate.last"}
"""Keys in which runs of one setting may differ."""


@dataclass(frozen=True)
class Run:
    """What is needed of one run: its keys by dotted name, and per cent and seconds after each of `ROUNDS`."""

    config: dict[str, Any]
    method: str
    accuracy: tuple[float, ...]
    seconds: tuple[float, ...]


def read(folder: Path) -> Run:
    """Return one run; leave with one line where it is of another method or was not tested after these rounds."""
    data = hpcfl.open_run(folder)
    config = dict(flat(json.loads(data.attrs["config"])))
    key = config["algorithm.name"], config["doubling.when"] != "never"
    if key not in METHODS:
        raise SystemExit(
            f"{folder}: algorithm.name = '{key[0]}'; expected {', '.join(sorted({n for n, _ in METHODS}))}"
        )
    tested = data["client_accuracy"].dropna("round", how="all")
    ends = [number - 1 for number in ROUNDS if number <= data.sizes["round"]]
    if not ends or not set(ends) <= set(tested["round"].values.tolist()):
        raise SystemExit(f"{folder}: expected tests after {', '.join(map(str, ROUNDS))} rounds: evaluate.every = 10")
    shares = tested.sel(round=ends).values @ data["test_samples"].values / data["test_samples"].values.sum()
    seconds = data["sim_seconds"].sel(round=ends).values
    return Run(config, METHODS[key], tuple((100 * shares).tolist()), tuple(seconds.tolist()))


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each method and of each setting of the keys in which its runs differ."""
    found = []
    for method in METHODS.values():
        own = [run for run in runs if run.method == method]
        cases: dict[str, list[Run]] = defaultdict(list)
        for run in own:
            cases[label(run, own)].append(run)
        for setting, members in sorted(cases.items()):
            found.append({"method": method, "setting": setting, **figures(members), "released": RELEASED.get(method)})
    return found


def label(run: Run, others: Sequence[Run]) -> str:
    """Return the keys of a run, but for its seed, that have other values in other runs of its method."""
    keys = sorted({key for each in others for key in each.config} - FREE)
    differing = [key for key in keys if len({repr(each.config.get(key)) for each in others}) > 1]
    return ", ".join(f"{key.rpartition('.')[2]} = {run.config.get(key)}" for key in differing)


def figures(members: Sequence[Run]) -> dict[str, Any]:
    """Return how many seeds there are, mean and standard deviation over them (null: of one) and the first's seconds."""
    by_round = list(zip(*(run.accuracy for run in members)))
    first = min(members, key=lambda run: run.config["seed"])
    return {
        "seeds": len(members),
        "accuracy": [statistics.fmean(values) for values in by_round],
        "std": [statistics.stdev(values) if len(values) > 1 else None for values in by_round],
        "seconds": list(first.seconds),
    }


def shown(found: Sequence[dict[str, Any]]) -> Table:
    """Return the table."""
    table = Table("method", "setting", "seeds", *(f"after {number}" for number in ROUNDS), "released", "seconds")
    for row in found:
        pairs = zip(row["accuracy"], row["std"])
        cells = [f"{mean:.1f}" + (f" ± {std:.1f}" if std is not None else "") for mean, std in pairs]
        cells += [""] * (len(ROUNDS) - len(cells))
        released = " / ".join(f"{value:g}" for value in row["released"]) if row["released"] else "–"
        seconds = " / ".join(f"{value:.4g}" for value in row["seconds"])
        table.add_row(row["method"], row["setting"], str(row["seeds"]), *cells, released, seconds)
    return table


def write(folder: Path, data_dir: Path | None) -> None:
    """Write paces, splits and configs; UsageError where MNIST is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paces = np.random.RandomState(1).exponential(1.0, CLIENTS).tolist()
    (folder / "paces.csv").write_text("client,seconds\n" + "".join(f"{c},{t!r}\n" for c, t in enumerate(paces)))
    pool = Mnist().load(0, data_dir)
    for number in SPLITS:
        split = folder.resolve() / f"split-{number}.h5"
        draw = random.Random(number)
        classes = list(range(10)) * (CLIENTS * SHARDS // 10)
        draw.shuffle(classes)
        with h5py.File(split, "w") as file:
            for part, labels in (("train", pool.train_labels[:IMAGES]), ("test", pool.test_labels)):
                for client, held in enumerate(dealt(labels, np.reshape(classes, (CLIENTS, SHARDS)), draw)):
                    file[f"clients/{client}/{part}"] = held
        for method in NAMES:
            (folder / f"{method}-{number}.toml").write_text(
                f'base = "{method}-mnist-released"\nseed = {number}\n'
                f'[speed]\nmodel = "table"\nfile = "{folder.resolve() / "paces.csv"}"\n'
                f'[data]\nname = "mnist"\nscale = "mnist"\npartition = "file"\npartition_file = "{split}"\n'
            )


def dealt(labels: Labels, classes: Ints, draw: random.Random) -> list[Ints]:
    """Return each client's places: shards, drawn one by one, of the classes in its row."""
    count = classes.size // 10
    shards = {c: np.array_split(np.flatnonzero(labels == c), count) for c in range(10)}
    return [
        np.sort(np.concatenate([shards[c].pop(draw.randrange(len(shards[c]))) for c in row]))
        for row in classes.tolist()
    ]


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--write", type=Path, help="folder to write configs to; nothing is read then")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("HPCFL_DATA"), help="folder of the data sets")
    options = parser.parse_args()
    if options.write:
        write(options.write, options.data_dir and Path(options.data_dir))
        print(json.dumps({"written": str(options.write)}))
        return
    found = rows([read(folder) for folder in sorted(options.runs) if (folder / "run.h5").exists()])
    Console(width=160).print(shown(found))
    print(json.dumps({"accuracies": found}))


if __name__ == "__main__":
    main()
