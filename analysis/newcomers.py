"""What a run's shared layers are worth to newcomers: their accuracy against epochs, beside training alone.

    python analysis/newcomers.py runs/newcomers/*/ -o docs/measured/newcomers.png
    python analysis/newcomers.py --preset srpfl-fedrep-digits

Takes finished runs of methods that newcomers can adapt to; those that differ in the seed alone are one group. Newcomers
are whom `hpcfl adapt` takes by default: who was held out. Each is tested before it learns and after so many epochs in
which its own layers learn on the run's shared ones; and alone, after as many epochs in which all layers of the same
model learn from their initial values, with the same step size, batches and optimiser. Draws the mean over newcomers,
and mean and standard deviation of that over seeds; prints them in per cent, with the mean difference and its standard
error over seeds, and how many gradients a sample took; as shares in the JSON line, which comes last. A number of epochs
is computed from the start each time: costs a second per run and dozen epochs with a few hundred samples. With --preset
five runs of it are carried out first, which hold out a quarter of their clients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import hpcfl
from hpcfl.algorithms.local import Local
from hpcfl.base.errors import UsageError
from hpcfl.commands.adapt import adapt_request, adapted
from hpcfl.config import load
from hpcfl.learning.batches import Visits
from hpcfl.learning.evaluate import client_scores
from hpcfl.mpi.placement import cut_by_kind
from hpcfl.results.run_table import Recorded, groups

Floats = npt.NDArray[np.float64]
LEARNING = ("lr", "batch", "optimizer", "momentum", "weight_decay", "tune_lr", "tune_momentum", "tune_weight_decay")
"""Keys of a method that say how its newcomers learn."""
CHUNK = 64


@dataclass(frozen=True)
class Curves:
    """One run's newcomers: accuracy on the run's shared layers and alone, and gradients per sample, [points] each."""

    newcomers: int
    epochs: list[int]
    served: Floats
    alone: Floats
    gradients: Floats


def held_out(preset: str, home: Path) -> list[Path]:
    """Return the folders of five runs of a preset in which every fourth client takes no part."""
    settings = {"participation.hold_out": list(range(3, load(preset).clients, 4))}
    for seed in range(1, 6):
        hpcfl.run(preset, settings={**settings, "seed": seed}, out=home / str(seed), quiet=True)
    return [home / str(seed) for seed in range(1, 6)]


def read(folder: Path, epochs: str, data_dir: Path | None) -> Curves:
    """Let a run's newcomers adapt and, apart from that, train alone."""
    outcome = adapted(adapt_request(folder, None, epochs, data_dir, None))
    curve, rows = outcome["curve"], outcome["clients"]
    tested = [point["epochs"] for point in curve]
    samples = sum(row["train_samples"] for row in rows)
    gradients = np.array([sum(row["curve"][k]["gradients"] for row in rows) for k in range(len(tested))]) / samples
    alone = accuracies_alone(folder, [row["client"] for row in rows], tested, data_dir)
    return Curves(len(rows), tested, np.array([point["accuracy"] for point in curve]), alone, gradients)


def accuracies_alone(folder: Path, clients: Sequence[int], epochs: Sequence[int], data_dir: Path | None) -> Floats:
    """Return the mean accuracy of clients that have trained the whole model by themselves, [points]."""
    models = hpcfl.open_models(folder, data_dir)
    task, fields = models.task, type(models.algorithm).model_fields
    local = Local(**{key: getattr(models.algorithm, key) for key in LEARNING if key in fields})
    sizes, found = task.federation.test_sizes, np.full((len(epochs), len(clients)), np.nan)
    order = {client: place for place, client in enumerate(clients)}
    for part in cut_by_kind(CHUNK, np.array(clients), task.federation.shapes):
        visits, places = Visits.for_test(models.round, part), [order[client] for client in part.tolist()]
        for row, number in zip(found, epochs):
            _, correct = client_scores(task, local.adapted(task, {}, visits, number), part)
            row[places] = correct / sizes[part]
    means: Floats = np.nanmean(found, 1)
    return means


def figures(label: str, seeds: Sequence[Curves]) -> dict[str, Any]:
    """Return means over the seeds, standard deviations, and the difference with its standard error; null: one seed."""
    row: dict[str, Any] = {"group": label, "seeds": len(seeds), "newcomers": seeds[0].newcomers}
    row["epochs"], several = seeds[0].epochs, len(seeds) > 1
    for name, runs in (("served", [run.served for run in seeds]), ("alone", [run.alone for run in seeds])):
        row[name] = np.mean(runs, 0).tolist()
        row[f"{name}_sd"] = np.std(runs, 0, ddof=1).tolist() if several else None
    apart = np.array([run.served - run.alone for run in seeds])
    row["difference"] = apart.mean(0).tolist()
    row["error"] = (apart.std(0, ddof=1) / len(seeds) ** 0.5).tolist() if several else None
    row["gradients"] = np.mean([run.gradients for run in seeds], 0).tolist()
    return row


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table, in points of per cent."""
    table = Table("group", "epochs", "on shared layers", "alone", "difference", "gradients per sample")
    for row in rows:
        for k, number in enumerate(row["epochs"]):
            cells = [
                points(row[name][k], row[by][k] if row[by] else None)
                for name, by in (("served", "served_sd"), ("alone", "alone_sd"), ("difference", "error"))
            ]
            table.add_row("" if k else row["group"], str(number), *cells, f"{row['gradients'][k]:g}")
        table.add_section()
    return table


def points(value: float, sure: float | None) -> str:
    return f"{100 * value:.1f}" + ("" if sure is None else f" ± {100 * sure:.1f}")


def draw(rows: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw a panel for each group."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    size = 0.6 + 3.3 * len(rows), 3.6
    figure, panels = plt.subplots(1, len(rows), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for panel, row in zip(panels[0], rows):
        places = range(len(row["epochs"]))
        for name, text in (("served", "own layers on the run's shared ones"), ("alone", "the whole model, alone")):
            mean, sd = np.array(row[name]), np.array(row[f"{name}_sd"] or [0.0] * len(row[name]))
            (line,) = panel.plot(places, mean, marker="o", markersize=3, label=text)
            panel.fill_between(places, mean - sd, mean + sd, color=line.get_color(), alpha=0.2, linewidth=0)
        panel.set(xlabel="epochs of the newcomer", ylim=(0, 1))
        panel.set_title(row["group"].replace(", ", "\n"), fontsize=9)
        panel.set_xticks(places, [str(number) for number in row["epochs"]])
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("mean test accuracy of the newcomers")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Print the table and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--preset", help="carry out runs of this preset")
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    parser.add_argument("--epochs", default="1,2,5,10,20,50", help="%(default)s")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets, where the runs do not know it")
    options = parser.parse_args()
    try:
        with TemporaryDirectory() as home:
            carried_out = held_out(options.preset, Path(home)) if options.preset else []
            found = groups([Recorded.of(folder) for folder in sorted([*options.runs, *carried_out])])
            rows = [
                figures(group.label, [read(run.folder, options.epochs, options.data_dir) for run in group.runs])
                for group in found
            ]
    except UsageError as error:
        raise SystemExit(str(error)) from None
    if options.output:
        draw(rows, options.output)
    Console(width=140).print(shown(rows))
    print(json.dumps({"newcomers": rows}))


if __name__ == "__main__":
    main()
