"""FLamby's Fed-TCGA-BRCA by hpcfl: a linear model learns Cox's partial likelihood, and C-indices test it.

    python analysis/flamby.py --data-dir DIR [--methods FedAvg ...] [--seeds 42 ...]

DIR/flamby has brca.csv, train_test_split.csv and tcga_seed42.csv to tcga_seed46.csv of FLamby (du Terrail et al.,
NeurIPS 2022). flamby_runs.py says what is run and compared. Each run appends a line to jobs/flamby/brca.jsonl; what is
there is skipped. Prints the table, and one JSON line last. All 40 runs take a core a minute and a quarter.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import torch
from flamby_runs import HANDED_ON, Parts, Study, fedopt, main


def linear(shape: tuple[int, ...]) -> torch.nn.Module:
    return torch.nn.Linear(shape[0], 1)


def cox(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return minus each event's partial log-likelihood among those of the batch that lived as long; 0 of no event."""
    order = labels[:, 1].argsort(descending=True, stable=True)
    among: torch.Tensor = outputs[order, 0].logcumsumexp(0)[order.argsort()]
    return (among - outputs[:, 0]) * labels[:, 0]


def concordance(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return Harrell's C-index, the same for each sample: of pairs of known order, the share that outputs order so."""
    score, (event, days) = outputs[:, 0], labels.T
    known = event[:, None].bool() & ((days[:, None] < days) | ((days[:, None] == days) & ~event.bool()))
    right = (score[:, None] > score).double() + (score[:, None] == score).double() / 2
    index: torch.Tensor = (right * known).sum() / known.sum()
    return index.expand(len(score))


def patients(folder: Path) -> Parts:
    with (folder / "train_test_split.csv").open(newline="", encoding="utf-8") as file:
        split = {row["pid"]: row["fold2"] for row in csv.DictReader(file)}
    rows = defaultdict(list)
    with (folder / "brca.csv").open(newline="", encoding="utf-8") as file:
        for pid, *values in list(csv.reader(file))[1:]:
            rows[split.get(pid)].append([float(value) for value in values])
    tables = {part: torch.tensor(values) for part, values in rows.items() if part}
    tables["test_pooled"] = torch.cat([table for part, table in tables.items() if part.startswith("test")])
    return {part: (table[:, :39], table[:, 39:]) for part, table in tables.items()}


BRCA = Study(
    name="brca",
    results="tcga",
    parts=patients,
    measure=concordance,
    common={
        "rounds": 5,
        "algorithm.lr": 0.01,
        "algorithm.epochs": 0,
        "algorithm.steps": 100,
        "algorithm.batch": 8,
        "model.name": "flamby:linear",
        "task.loss": "flamby:cox",
        "task.metrics": ["flamby:concordance"],
    },
    methods={
        "FedAvg": {"algorithm.lr": 0.1},
        "FedProx": {"algorithm.name": "fedprox", "algorithm.lr": 0.1, "algorithm.mu": 0.1},
        "Scaffold": {"algorithm.name": "scaffold", "algorithm.weights": "samples"},
        "FedAdam": fedopt("adam", 0.01, 0.1, 0.9, 0.999),
        "FedYogi": fedopt("yogi", 0.01, 0.1, 0.9, 0.999),
        "FedAdagrad": fedopt("adagrad", 0.01, 1.0, 0.9),
        "Cyclic": {},
        HANDED_ON: {},
        "c by samples": {"algorithm.name": "flamby_scaffold:BySamples", "algorithm.weights": "samples"},
    },
)

if __name__ == "__main__":
    main(BRCA, __doc__)
