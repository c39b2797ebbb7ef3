"""Figures 4 and S4 of FLIC: how far embeddings bring classes to their anchors before the first round.

    python analysis/flic_pretraining.py [--epochs 10 50 100] [--seed 1] --out runs/flic-pretraining

Of the preset flic-toy-lm-small one round, of one local epoch, after so many epochs of alignment. Of the clients of that
round, for training and test samples: the distance of a class's embedded mean to its anchor's, over the mean distance to
the other anchors', and the share of samples that are nearest to the anchor of their class, among the client's classes.
Means are over clients and classes. 0 epochs: embeddings that have learned nothing. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import hpcfl
from hpcfl.algorithms.flic.config import MEANS
from hpcfl.base.types import Floats, Ints

PRESET = "flic-toy-lm-small"


def nearness(z: Floats, labels: Ints, anchors: Floats) -> tuple[float, float]:
    """Return both figures of one client's embedded samples ``[n, k]`` and anchors ``[C, k]``."""
    own = np.unique(labels)
    means = np.array([z[labels == label].mean(axis=0) for label in own])
    apart = np.linalg.norm(means[:, None] - anchors, axis=-1)
    mine = np.arange(len(anchors)) == own[:, None]
    nearest = own[np.linalg.norm(z[:, None] - anchors[own], axis=-1).argmin(axis=1)]
    return float(apart[mine].mean() / apart[~mine].mean()), float((nearest == labels).mean())


def figures(epochs: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """Return what is said of so many epochs, after what is said of 0."""
    keys = {"epochs": 1, "pretrain": epochs, "evaluation": "stored"}
    settings = {"seed": seed, "rounds": 1, "evaluate.every": 1} | {f"algorithm.{key}": keys[key] for key in keys}
    data = hpcfl.run(PRESET, overlays=[], settings=settings, out=out, quiet=True).data
    arrived, models = data["arrived"].values[0], hpcfl.open_models(out)
    rows = []
    for name, number in (("untrained", 0), ("", epochs)):
        row: dict[str, Any] = {"epochs": number}
        for part in ("train", "test"):
            found = []
            for model in (each for each in models if arrived[each.client]):
                x, y = (getattr(model.data, f"{part}_{kind}") for kind in ("features", "labels"))
                found.append(nearness((model.untrained if name else model).embed(x), y, models.shared[MEANS]))
            row[part] = dict(zip(("distance", "nearest"), np.mean(found, axis=0).tolist()))
        rows.append(row)
    return rows


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="+", default=[10, 50, 100], help="%(default)s")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/flic-pretraining"), help="folder of the runs")
    options = parser.parse_args()
    found = [figures(epochs, options.seed, options.out / f"{epochs}") for epochs in options.epochs]
    print(json.dumps({"seed": options.seed, "epochs": [found[0][0], *(rows[1] for rows in found)]}))


if __name__ == "__main__":
    main()
