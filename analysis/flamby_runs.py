"""What the comparisons with FLamby's benchmarks have in common: flamby.py and flamby_heart.py.

Per data set seven methods and five seeds, tested on each centre and on all together, beside FLamby's published results
(du Terrail et al., NeurIPS 2022), with its settings and its initial values. FLamby's code of Cyclic hands nothing on:
what it tests is centre 0's model, trained alone in its turns. So does ``Cyclic`` here; ``handed on`` is cyclic weight
transfer. ``c by samples`` is SCAFFOLD with FLamby's mean of control variates. A cell is a method and a test; its
distance is that of the means over seeds, in published standard deviations.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import h5py
import numpy as np
import study_lines
import torch
from study_lines import ROOT

import hpcfl

Parts = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Features and labels of ``train_0``, ``test_0``, …, ``test_pooled``."""
Rows = list[dict[str, Any]]
LINES, SEEDS, HANDED_ON = ROOT / "jobs" / "flamby", range(42, 47), "handed on"
BESIDE = {HANDED_ON: "Cyclic", "c by samples": "Scaffold"}
"""What shows where a difference comes from, beside whose published results; the verdict leaves it out."""


class Study(NamedTuple):
    """A data set: names of its lines and results, samples, what tests measure, keys of all runs and of each method."""

    name: str
    results: str
    parts: Callable[[Path], Parts]
    measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    common: dict[str, Any]
    methods: dict[str, dict[str, Any]]


def fedopt(optimizer: str, local: float, lr: float, *betas: float) -> dict[str, Any]:
    server = {"server.optimizer": optimizer, "server.lr": lr, "server.betas": list(betas), "server.tau": 1e-8}
    return {"algorithm.lr": local, **server}


def trained(study: Study, method: str, seed: int, parts: Parts, place: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model with which a run in `place` ends, and its keys; no rounds leave the initial one."""
    place.mkdir(parents=True, exist_ok=True)
    centres = range(sum(name.startswith("test") for name in parts) - 1)
    with h5py.File(place / "data.h5", "w") as file:
        for kind, centre in ((kind, centre) for kind in ("train", "test") for centre in centres):
            for name, values in zip(("features", "labels"), parts[f"{kind}_{centre}"]):
                file[f"clients/{centre}/{kind}/{name}"] = values
    torch.manual_seed(seed)
    model: torch.nn.Module = torch.nn.Linear(parts["train_0"][0].shape[1], 1)
    torch.save(model.state_dict(), place / "initial.pt")
    files = {"data.name": "hdf5", "data.file": str(place / "data.h5"), "model.initial": str(place / "initial.pt")}
    keys = {**study.common, **study.methods[method], **files, "seed": seed}
    rounds, rng = range(keys["rounds"]), np.random.default_rng(seed)
    turns = [turn for _ in rounds for turn in rng.permutation(len(centres)).tolist()][: len(rounds)]
    if method == "Cyclic":
        keys |= {"rounds": turns.count(0), "participation.hold_out": list(centres[1:])}
    if method == HANDED_ON:
        first = (f"{number},{centre},{2 - (centre == turns[number])}" for number in rounds for centre in centres)
        (place / "turns.csv").write_text("\n".join(["round,client,seconds", *first]), encoding="utf-8")
        keys |= {"participation.close": "first", "participation.first": 1}
        keys |= {"speed.model": "table", "speed.file": str(place / "turns.csv")}
    if keys["rounds"]:
        begun = {"algorithm": {"name": "fedavg"}}
        model = hpcfl.run(begun, settings=keys, out=place / "run", overwrite=True, quiet=True).module()
    return model, keys


def carried_out(study: Study, method: str, seed: int, folder: Path, place: Path) -> dict[str, Any]:
    """Return the line of a run."""
    began, parts = time.process_time(), study.parts(folder)
    model, keys = trained(study, method, seed, parts, place)
    tests = sorted(name for name in parts if name.startswith("test"))
    with torch.no_grad():
        values = [study.measure(model(x), y).double().mean().item() for x, y in (parts[name] for name in tests)]
    with (folder / f"{study.results}_seed{seed}.csv").open(newline="", encoding="utf-8") as file:
        name = f"{BESIDE.get(method, method)}100"
        published = [float(row["Metric"]) for row in csv.DictReader(file) if row["Method"] == name]
    line = {"method": method, "seed": seed, "tests": values, "mean": fmean(values[:-1]), "published": published}
    line |= {"config": keys, **study_lines.origin()}
    return line | {"seconds": round(time.process_time() - began, 2), "date": f"{datetime.now(timezone.utc):%F}"}


def cells(rows: Rows) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return of each method's tests: mean and standard deviation as published, our mean, and the distance."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        ours, theirs = (zip(*(row[key] for row in rows if row["method"] == method)) for key in ("tests", "published"))
        for our, their in zip(ours, theirs):
            mean, spread, apart = fmean(their), stdev(their), abs(fmean(our) - fmean(their))
            distance = apart / spread if spread else inf if apart else 0.0
            found.setdefault(method, []).append((mean, spread, fmean(our), distance))
    return found


def shown(rows: Rows) -> list[str]:
    """Return the rows of the table: our mean, then mean and standard deviation as published."""
    found = cells(rows)
    each = {name: [f"{our:.3f} ({mean:.3f}±{spread:.3f})" for mean, spread, our, _ in found[name]] for name in found}
    return [f"| {' | '.join([name, *each[name]])} |".replace("0.", ".") for name in each]


def verdict(rows: Rows) -> dict[str, Any]:
    """Return the distances, and the share of cells within one standard deviation; what is beside counts for none."""
    found = {name: [round(cell[3], 3) for cell in each] for name, each in cells(rows).items()}
    every = [distance for name, each in found.items() if name not in BESIDE for distance in each]
    within, worst = sum(distance <= 1 for distance in every) / len(every), max(every)
    counted = {"cells": len(every), "within_one": round(within, 3), "worst": worst}
    return {**counted, "passed": within >= 0.9 and worst <= 2, "distances": found}


def main(study: Study, about: str | None) -> None:
    """Run what is missing, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("HPCFL_DATA"), help="has the folder flamby")
    parser.add_argument("--methods", nargs="+", default=list(study.methods), choices=study.methods)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--lines", type=Path, default=LINES / f"{study.name}.jsonl")
    options = parser.parse_args()
    rows = study_lines.read(options.lines)
    there = {(row["method"], row["seed"]) for row in rows}
    for method, seed in ((method, seed) for method in options.methods for seed in options.seeds):
        if (method, seed) not in there:
            if options.data_dir is None:
                parser.error("--data-dir, or HPCFL_DATA, has to say where FLamby's files are")
            rows.append(carried_out(study, method, seed, options.data_dir / "flamby", Path("runs/flamby")))
            study_lines.append(options.lines, rows[-1])
    print("\n".join(shown(rows)))
    print(json.dumps({"study": study.name, **verdict(rows)}))
