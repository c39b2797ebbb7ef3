"""Accuracy against the deadline (Figure 5 of the SALF paper), from run folders; or what its layers cost.

    sh jobs/salf_fig5.sh
    python analysis/salf_deadlines.py -o fig5.png runs/salf-fig5/*/*/
    python analysis/salf_deadlines.py --measure

Per method, deadline (as a part of the longest backward pass), number of clients and clock: the mean over seeds of each
run's mean test accuracy over its last 10 rounds, and the lowest and highest seed. HeteroFL's part is the share of
clients that train the whole model; a run that waits for everybody stands at every deadline. Costs seconds.

With `--measure`: the seconds of each layer's backward pass in the CNN of Table II, for ``speed.costs``: the median over
`PASSES` passes on `BATCH` images, on one core. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from finished import finished
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from hpcfl.base.types import Floats
from hpcfl.models.cnn import Cnn

PASSES, BATCH, LAST = 1000, 16, 10
NAMES = {"salf": "SALF", "drop": "drop", "heterofl": "HeteroFL", "async": "AsyncFL"}


def measured() -> Floats:
    """Return the seconds of each layer's backward pass, first to last: from the gradients before it to its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _, layer in Cnn().build((1, 28, 28), 10)]
    model, ready = torch.nn.Sequential(*layers), np.zeros(len(layers) + 1)

    def note(number: int, _: torch.Tensor) -> None:
        ready[number] = time.perf_counter()

    for number, layer in enumerate(layers):
        for value in layer.parameters():
            value.register_post_accumulate_grad_hook(partial(note, number))  # type: ignore[no-untyped-call]
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    seconds = []
    for _ in range(PASSES):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        ready[-1] = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        seconds.append(-np.diff(ready))
    costs: Floats = np.median(seconds, axis=0)
    return costs


class Case(NamedTuple):
    """What seeds of one point have in common; where nobody is late there is no deadline."""

    method: str
    part: float | None
    clients: int
    clock: str


def read(folder: Path) -> tuple[Case, float] | None:
    """Return what a run is, and its mean test accuracy over the last rounds; None, and say so, where it is not done."""
    if (found := finished(folder)) is None:
        return None
    data, config = found
    algorithm, rules, speed = (config[section] for section in ("algorithm", "participation", "speed"))
    accuracy = float(data["accuracy"].dropna("round")[-LAST:].mean())
    method, part = algorithm["name"], None
    if method == "heterofl":
        part = algorithm["shares"][0] / sum(algorithm["shares"])
    elif rules["close"] == "all":
        method = "vanilla"
    else:
        method = "drop" if rules["partial"] == "discard" else "async" if rules["close"] == "arrivals" else method
        part = rules["deadline"] / speed["longest"]
    return Case(method, part and round(part, 6), config["clients"], config["clock"]), accuracy


def picture(points: dict[Case, list[float]], path: Path) -> None:
    """Draw a panel per number of clients, a colour per method: simulated time filled and joined, real time hollow."""
    from matplotlib import pyplot

    sizes = sorted({case.clients for case in points}, reverse=True)
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(4.5 * len(sizes), 3.6), squeeze=False, layout="constrained")
    for axis, clients in zip(axes[0], sizes):
        for clock in ("simulated", "wall"):
            whole = points.get(Case("vanilla", None, clients, clock))
            if whole and clock == "simulated":
                axis.axhline(statistics.fmean(whole), color="0.6", linestyle=":", label="vanilla")
            for number, (method, name) in enumerate(NAMES.items()):
                own = {case: values for case, values in points.items() if case[::2] == (method, clients)}
                line = sorted((case.part or 0, values) for case, values in own.items() if case.clock == clock)
                style = {"fmt": "o-"} if clock == "simulated" else {"fmt": "s", "mfc": "none"}
                if line:
                    drawn(axis, line, color=f"C{number}", label=name if clock == "simulated" else None, **style)
        axis.set(title=f"{clients} clients", ylim=(0, 1), xlabel="deadline / longest pass", ylabel="test accuracy")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def drawn(axis: Any, line: list[tuple[float, list[float]]], **style: Any) -> None:
    """Draw means over seeds, and the lowest and highest."""
    means = np.array([statistics.fmean(values) for _, values in line])
    ends = np.array([[min(values), max(values)] for _, values in line]).T
    axis.errorbar([part for part, _ in line], means, abs(ends - means), capsize=2, **style)


def main() -> None:
    """Print the table, or the costs, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="draw a picture into this file")
    parser.add_argument("--measure", action="store_true", help="measure the costs of layers instead")
    given = parser.parse_args()
    if given.measure:
        costs = measured()
        names = [name for name, _ in Cnn().build((1, 28, 28), 10)]
        for name, seconds in zip(names, costs):
            print(f"{name:6} {seconds * 1e6:8.1f} µs  {seconds / costs.sum():.3f}")
        print(json.dumps({"costs": {"names": names, "seconds": costs.tolist()}}))
        return
    points: dict[Case, list[float]] = defaultdict(list)
    for case, accuracy in filter(None, map(read, sorted(given.runs))):
        points[case].append(accuracy)
    table = Table("method", "deadline", "clients", "clock", "seeds", "mean", "min", "max")
    rows = []
    for case, values in sorted(
        points.items(), key=lambda item: (item[0].clients, item[0].method, item[0].part or 0, item[0].clock)
    ):
        figures = {"accuracy": statistics.fmean(values), "min": min(values), "max": max(values)}
        rows.append({**case._asdict(), "seeds": len(values), **figures})
        cells = (f"{figure:.3f}" for figure in figures.values())
        part = "–" if case.part is None else f"{case.part:g}"
        table.add_row(case.method, part, str(case.clients), case.clock, str(len(values)), *cells)
    Console().print(table)
    if given.output:
        picture(points, given.output)
    print(json.dumps({"deadlines": rows}))


if __name__ == "__main__":
    main()
