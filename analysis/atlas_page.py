"""What the lines of the atlas say: a table of all cells, the page docs/studies/atlas.md, and its figures.

    python analysis/atlas_page.py [-o docs/studies]

Writes jobs/atlas/cells.csv, and of jobs/atlas/page.md the page: ``{seconds[pai-4/own/wait]:.0f}`` stands there for a
figure of a cell, ``{table_of_jobs}`` for a table. So each number on it follows from the lines. Draws atlas_map.png,
atlas_ranks.png and atlas_slow.png. Prints one JSON line last: how many cells there are, and the mean ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isinf, sqrt
from pathlib import Path
from typing import Any

import atlas
import numpy as np
from atlas import Cell, Floats

TARGET = "0.8"
TARGETS = TARGET, "0.9"
COME_AND_GO = "phones-diurnal", "spot"
"""Worlds that have no place for some methods."""
SHOWN = "pai-2", "pai-4"
"""Worlds in which the slow third is held against time: in both the same clients are slow, in one by far."""
NAMED = {
    **{"wait": (-4, 7), "drop": (0, -13), "first": (0, 6), "doubling": (28, -8), "steps": (-18, -4)},
    **{"salf-paper": (0, -13), "fedbuff": (14, 6), "ca2fl": (0, 6), "heterofl": (0, 6), "diloco": (0, 6)},
}
"""Methods that are named there, and where their names stand beside their points."""
MEANS = "area", "accuracy", "slow", "decile", "never", "megabytes", "goodput", "staleness", "jain"
TOLD = tuple(f"{name}_{target}" for target in TARGETS for name in ("reached", "seconds", "low", "high"))
COLUMNS = "study", "world", "labels", "method", "lr", "seeds", "diverged", *TOLD, *MEANS, "why"


@dataclass
class Found:
    """What a cell has come to: its lines, one per seed; none where the method is none for its world."""

    cell: Cell
    lr: float | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    @cached_property
    def times(self) -> Floats:
        return self.times_to(TARGET)

    def times_to(self, target: str) -> Floats:
        """Return the seconds to a target, float64 [seeds]; inf: not reached."""
        every = [line.get("reached", {}).get(target) for line in self.lines]
        return np.array([inf if each is None else each for each in every], float)

    @property
    def seconds(self) -> float:
        """The median of the seconds to the target; inf: half of the seeds did not reach it; NaN: there are none."""
        return median(self.times)

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the seeds that have it."""
        known = [line[name] for line in self.lines if line.get(name) is not None]
        return float(np.mean(known)) if known else None


def median(times: Floats) -> float:
    """Return the median of seconds; NaN: there are none."""
    return float(np.median(times)) if len(times) else np.nan


def found(study: str) -> dict[str, Found]:
    """Return each cell's lines, by its key."""
    seeds, cells = atlas.grid()[study]["seeds"], dict[str, Found]()
    known = {(atlas.cell_of(line).key, line["lr"], line["seed"]): line for line in atlas.known_of(study)}
    for pair in atlas.pairs(study):
        sizes = atlas.method_of(pair[0])["lr"]
        tried = [line for (name, _, seed), line in known.items() if seed not in seeds and name in {c.key for c in pair}]
        refused = next((line["why"] for line in tried if line["status"] == "UsageError"), "")
        whole = len(tried) == len(sizes) * len(pair)
        lr = atlas.chosen(pair, known) if whole and not refused else None
        for cell in pair:
            lines = [known[cell.key, lr, seed] for seed in seeds if (cell.key, lr, seed) in known] if lr else []
            why = refused or ("" if lr or not whole else "no step size has led to a test in time")
            if lines or why:
                cells[cell.key] = Found(cell, lr, lines, why)
    return cells


def rows(cells: Sequence[Found]) -> list[list[str]]:
    """Return the table of all cells, as text."""
    from hpcfl.results.targets import interval_of_median

    table = [list(COLUMNS)]
    for each in cells:
        cell, diverged = each.cell, sum(line["status"] == "Diverged" for line in each.lines)
        row: list[Any] = [cell.study, cell.world, cell.labels, cell.method, each.lr, len(each.lines), diverged]
        for target in TARGETS:
            times = each.times_to(target)
            row += [int(np.isfinite(times).sum()), median(times), *interval_of_median(times)]
        table.append([word(value) for value in [*row, *map(each.mean, MEANS), each.why]])
    return table


def word(value: Any) -> str:
    """Return a number with four digits, "" for what is not known."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def ranks(cells: dict[str, Found], keys: Sequence[str], methods: Sequence[str]) -> Floats:
    """Return the rank of each method on each seed of each place, "world/labels", float64 [places, seeds, methods].

    The first one is 1, equal ones share their mean rank. Who has not reached the target comes after those who have, by
    accuracy.
    """
    from scipy.stats import rankdata

    seeds = len(cells[f"{keys[0]}/{methods[0]}"].lines)
    found = np.empty((len(keys), seeds, len(methods)))
    for place, one in enumerate(keys):
        for seed in range(seeds):
            scores = []
            for method in methods:
                each = cells[f"{one}/{method}"]
                seconds = each.times[seed]
                scores.append(1e6 - each.lines[seed].get("accuracy", 0.0) if isinf(seconds) else seconds)
            found[place, seed] = rankdata(scores)
    return found


def critical_difference(methods: int, places: int) -> float:
    """Return by how much mean ranks over so many places have to differ (Nemenyi's test, 5 %)."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(0.95, methods, inf) / sqrt(2) * sqrt(methods * (methods + 1) / (6 * places)))


def everywhere(cells: dict[str, Found], places: Sequence[str]) -> list[str]:
    """Return the methods that were run in all of some places."""
    return [
        method
        for method in atlas.grid()["methods"]
        if all(f"{place}/{method}" in cells and cells[f"{place}/{method}"].lines for place in places)
    ]


def places(labels: Sequence[str] = atlas.LABELS) -> list[str]:
    return [f"{world}/{each}" for world in atlas.grid()["worlds"] for each in labels]


def calm() -> list[str]:
    """Return the worlds that have a place for all methods."""
    return [world for world in atlas.grid()["worlds"] if world not in COME_AND_GO]


def draw_map(cells: dict[str, Found], picture: Path) -> None:
    """Draw a map: the seconds to the target of each method, by world and by who holds the labels."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    columns = places()
    values = np.array(
        [[cells[f"{place}/{method}"].seconds if f"{place}/{method}" in cells else np.nan for place in columns]
         for method in atlas.grid()["methods"]]
    )  # fmt: skip
    order = np.argsort([np.mean(np.where(np.isfinite(row), row, 300.0)) for row in values], kind="stable")
    names = [list(atlas.grid()["methods"])[index] for index in order]
    values = values[order]
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.subplots()
    shown = np.where(np.isfinite(values), values, np.nan)
    image = axes.imshow(shown, cmap="viridis_r", norm=LogNorm(10, 150), aspect="auto")
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        text = f"{value:.0f}" if np.isfinite(value) else "–" if isinf(value) else "×"
        axes.text(
            column, row, text, ha="center", va="center", fontsize=8, color="w" if value > 60 and value < inf else "k"
        )
    axes.set_xticks(range(len(columns)), [place.replace("/", "\n") for place in columns], fontsize=7, rotation=60)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(
        image, ax=axes, label=f"seconds to an accuracy of {TARGET}; a visit takes one in the mean", shrink=0.6
    )
    figure.savefig(picture, dpi=130)


def draw_ranks(cells: dict[str, Found], picture: Path) -> dict[str, list[tuple[str, float]]]:
    """Draw mean ranks with intervals and the critical difference, by who holds the labels; return them, best first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    told = dict[str, list[tuple[str, float]]]()
    for axes, labels in zip(figure.subplots(1, 2), atlas.LABELS):
        known = [f"{world}/{labels}" for world in calm()]
        methods = everywhere(cells, known)
        drawn = ranks(cells, known, methods)
        mean = drawn.mean((0, 1))
        order = np.argsort(mean)
        rng = np.random.default_rng(0)
        resampled = drawn[:, rng.integers(0, drawn.shape[1], (2000, drawn.shape[1]))].mean((0, 2))
        low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
        height = np.arange(len(methods))
        axes.errorbar(mean[order], height, xerr=[(mean - low)[order], (high - mean)[order]], fmt="o", ms=4, lw=1)
        difference = critical_difference(len(methods), len(known))
        axes.axvspan(mean.min(), mean.min() + difference, color="0.9", zorder=0)
        axes.set_yticks(height, [methods[index] for index in order], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("mean rank by seconds to the target")
        axes.set_title("anyone holds any label" if labels == "anyone" else "the slow third holds labels of its own")
        told[labels] = [(methods[index], round(float(mean[index]), 2)) for index in order]
    figure.savefig(picture, dpi=130)
    return told


def draw_slow(cells: dict[str, Found], picture: Path) -> None:
    """Draw who reaches the target first, and the accuracy of the slow third at the end, whose labels are its own."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    never = 1.25 * atlas.grid()["digits"]["seconds"]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, world in zip(figure.subplots(1, 2, sharey=True), SHOWN):
        for method in atlas.grid()["methods"]:
            one = cells.get(f"{world}/own/{method}")
            if one is None or not one.lines:
                continue
            x, y = min(one.seconds, never), one.mean("slow") or 0.0
            axes.plot(x, y, "o", ms=5, color="C0" if method in NAMED else "0.75", zorder=2 + (method in NAMED))
            if method in NAMED:
                axes.annotate(method, (x, y), NAMED[method], textcoords="offset points", fontsize=8, ha="center")
        axes.set(xscale="log", xlim=(12, 1.2 * never), ylim=(-0.05, 1.08), title=world)
        axes.set_xlabel(f"seconds to an accuracy of {TARGET}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xticks([15, 30, 60, 120, never], ["15", "30", "60", "120", "never"])
    figure.axes[0].set_ylabel("accuracy of the slow third at the end")
    figure.savefig(picture, dpi=130)


class Figures:
    """A figure of each cell, by its key: the digits' study's, or "study:world/labels/method"."""

    def __init__(self, every: Mapping[str, dict[str, Found]], name: str) -> None:
        self.every, self.name = every, name

    def __getitem__(self, key: str) -> float:
        study, _, cell = key.rpartition(":")
        each = self.every[study or "digits"][cell]
        value = each.seconds if self.name == "seconds" else each.lr if self.name == "lr" else each.mean(self.name)
        return np.nan if value is None else value


def page(every: Mapping[str, dict[str, Found]], told: Mapping[str, list[tuple[str, float]]]) -> str:
    """Return the page, all figures filled in."""
    known: dict[str, Any] = {name: Figures(every, name) for name in ("seconds", "lr", *MEANS)}
    lines = [line for study in atlas.STUDIES for line in atlas.known_of(study)]
    known |= {"runs": len(lines), "hours": sum(line["seconds"] for line in lines) / 3600}
    known |= {"failed": sum(line["status"] == "Diverged" for line in lines), "methods": len(atlas.grid()["methods"])}
    ahead = [sooner(every["digits"], place, "salf-paper", "drop-one") for place in places()]
    known |= {"sooner": ahead.count(True), "later": ahead.count(False)}
    known |= {"best": {place: quickest(every["digits"], place) for place in places()}}
    known |= {"ranked": len(told["anyone"]), "difference": critical_difference(len(told["anyone"]), len(calm()))}
    tuned = [cell for cells in every.values() for cell in cells.values() if cell.lr and cell.cell.labels == "anyone"]
    steps = [(each.lr, atlas.method_of(each.cell)["lr"]) for each in tuned]
    known |= {"tuned": len(tuned), "edges": sum(lr in (min(four), max(four)) for lr, four in steps)}
    known |= {"table_of_combinations": table_of_combinations(every), "table_of_others": table_of_others(every)}
    known |= {"table_of_jobs": table_of_jobs(), "rank": {key: dict(some) for key, some in told.items()}}
    known |= {"worst_replay": 100 * max(line["worst_error"]["replays"] for line in atlas.known_of("real"))}
    return (atlas.FOLDER / "page.md").read_text(encoding="utf-8").format_map(known)


def sooner(cells: dict[str, Found], place: str, one: str, other: str) -> bool | None:
    """Return whether one method reaches the target before another in a place; None: neither does."""
    first, second = (cells[f"{place}/{method}"].seconds for method in (one, other))
    return None if isinf(first) and isinf(second) else first < second


def quickest(cells: dict[str, Found], place: str) -> float:
    """Return the fewest seconds to the target in a place, of those who do not wait for all."""
    seconds = [
        each.seconds for key, each in cells.items() if key.startswith(f"{place}/") and each.cell.method != "wait"
    ]
    return float(np.nanmin(seconds))


def table_of_others(every: Mapping[str, dict[str, Found]]) -> str:
    """Return what came of larger data and of a deeper network, world by world."""
    studies = [(study, world) for study in ("mnist", "deep") for world in atlas.grid()[study]["worlds"]]
    methods = [*atlas.grid()["mnist"]["methods"]]
    methods += [method for method in atlas.grid()["deep"]["methods"] if method not in methods]
    rows = [f"||{'|'.join(f'{study}, {world}' for study, world in studies)}|", "|---" * (1 + len(studies)) + "|"]
    for method in methods:
        cells = [every[study].get(f"{world}/own/{method}") for study, world in studies]
        words = ["" if one is None else "×" if not one.lines else told_of(one) for one in cells]
        rows.append(f"|{method}|{'|'.join(words)}|")
    return "\n".join(rows)


def told_of(one: Found) -> str:
    """Return the seconds of a cell to its target, and the accuracy of its slow third."""
    return f"{'–' if isinf(one.seconds) else f'{one.seconds:.0f}'}, {one.mean('slow') or 0.0:.2f}"


def table_of_combinations(every: Mapping[str, dict[str, Found]]) -> str:
    """Return what layers, doubling and anchors add, on digits of two sizes."""
    rows = ["| |digits, all|slow third|with MNIST, all|slow third|", "|---|---|---|---|---|"]
    for method in atlas.grid()["methods-of-spaces"]:
        cells = [every[study][f"pai-4/own/{method}"] for study in ("combined", "combined-mnist")]
        figures = [each.mean(name) or np.nan for each in cells for name in ("area", "slow")]
        rows.append(f"|{method}|{'|'.join(f'{value:.3f}' for value in figures)}|")
    return "\n".join(rows)


def table_of_jobs() -> str:
    """Return what was predicted of jobs that were really run, and what they did."""
    rows = ["|world, method|hosts|predicted s|measured s|same arrivals|", "|---|---|---|---|---|"]
    for line in atlas.known_of("real"):
        for each in line["cells"]:
            seconds = f"{each['predicted']:.1f}|{each['measured']:.1f}"
            rows.append(f"|{each['what']}|{line['hosts']}|{seconds}|{each['same_arrivals']:.1%}|")
    return "\n".join(rows)


def main() -> None:
    """Write the table and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=atlas.FOLDER.parents[1] / "docs" / "studies")
    asked = parser.parse_args()
    every = {study: found(study) for study in atlas.STUDIES}
    with (atlas.FOLDER / "cells.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            rows([each for cells in every.values() for each in cells.values()])
        )
    digits = every["digits"]
    draw_map(digits, asked.out / "atlas_map.png")
    told = draw_ranks(digits, asked.out / "atlas_ranks.png")
    draw_slow(digits, asked.out / "atlas_slow.png")
    (asked.out / "atlas.md").write_text(page(every, told), encoding="utf-8")
    print(json.dumps({"cells": {study: len(cells) for study, cells in every.items()}, "ranks": told}))


if __name__ == "__main__":
    main()
