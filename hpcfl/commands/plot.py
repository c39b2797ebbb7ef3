"""A metric against rounds and against time, several runs in one picture: a line for each config, over its seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcfl import store
from hpcfl.base.errors import UsageError, UserError, did_you_mean, listed
from hpcfl.base.terminal import say
from hpcfl.commands.show import unforeseen
from hpcfl.results import run_table
from hpcfl.results.run_table import ACCURACY, FIGURES, Curve, Recorded, has_any, over_rounds, run_folders

Width = Literal["column", "page"]
INCHES = {"column": 3.3, "page": 6.75}
WRAP = {"column": 52, "page": 30}  # characters of a legend's line
ROW_INCHES = 0.13  # of the legend
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # publishers refuse matplotlib's default, type 3
    "ps.fonttype": 42,
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Line:
    """What is drawn of a group of runs."""

    label: str
    seeds: int
    rounds: Curve
    time: Curve


def plot(
    folders: Sequence[Path],
    picture: Path,
    log_time: bool = False,
    clients: str | None = None,
    width: Width | None = None,
    any_data: bool = False,
    metric: str = ACCURACY,
    groups: bool = False,
) -> None:
    """Draw the curves of a metric of runs, or of folders of runs, into `picture` (format by its suffix).

    With `groups` those of accuracy, participation and depth of groups of clients, against rounds alone. UsageError for
    a suffix that stands for no format, and as `lines`, `run_table.scores` and `group_figures`.
    """
    kinds = Figure().canvas.get_supported_filetypes()
    if picture.suffix.removeprefix(".") not in kinds:
        raise UsageError(f"'{picture}': no picture of that kind{did_you_mean(picture.suffix.removeprefix('.'), kinds)}")
    runs = [Recorded.of(folder) for folder in run_folders(folders)]
    width = width or ("column" if picture.suffix == ".pdf" else "page")
    with rc_context(STYLE):
        try:
            if groups:
                figure = draw_groups(runs, width)
            else:
                what, drawn = lines(runs, clients, any_data, metric)
                figure = draw(drawn, what, seconds(runs), width, log_time)
        except UserError:
            raise
        except Exception as error:  # what an odd table makes xarray and h5py raise is not foreseen
            raise unforeseen(listed([f"'{folder}'" for folder in folders]), error) from error
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=200)


def lines(
    runs: Sequence[Recorded], clients: str | None = None, any_data: bool = False, metric: str = ACCURACY
) -> tuple[str, list[Line]]:
    """Return what the curves show, and a line for each group; what the picture leaves out is said on stderr.

    UsageError where the runs are not on one data set, unless `any_data`, or where none has recorded the metric.
    """
    for key, values in {} if any_data else run_table.differing(runs).items():
        if key.startswith("data."):
            where = (f"{value} in {listed([str(run.folder) for run in alike], 4)}" for value, alike in values.items())
            raise UsageError(f"{key} differs: {'; '.join(where)}; expected runs on one data set, or --any-data")
    data = {run.folder: store.open_run(run.folder) for run in runs}
    known = [run for run in runs if has_any(data[run.folder], metric)]
    there = sorted({name for each in data.values() for name in run_table.recorded_metrics(each) if has_any(each, name)})
    if not known and there:
        raise UsageError(f"--metric: the runs recorded no '{metric}': expected one of {', '.join(there)}")
    what, scored = run_table.scores({run.folder: data[run.folder] for run in known}, clients, any_data, metric)
    found = run_table.groups(known)
    drawn = []
    for group in found:
        seeds = [scored[run.folder] for run in group.runs]
        drawn.append(Line(group.label, len(seeds), over_rounds(seeds), run_table.over_time(seeds)))
        ends = {int(scores["round"][-1]) + 1 for scores in seeds}
        if len(ends) > 1:
            say(f"{group.label}: drawn up to round {min(ends)}, where its shortest run ends")
    for run in runs:
        if run not in known:
            say(f"'{run.folder}' has recorded no {metric}: left out")
    unsaid = run_table.differing(known).keys() - {key for group in found for key in group.keys}
    if unsaid:
        say(f"the labels tell the runs apart; these keys differ too: {', '.join(sorted(unsaid))}")
    return what, drawn


def seconds(runs: Sequence[Recorded]) -> str:
    """Return what the runs' seconds are: real by the wall clock, else simulated."""
    return " or ".join(sorted({run.keys.get("clock", "simulated") for run in runs})) + " seconds"


def draw(drawn: Sequence[Line], what: str, time: str, width: Width = "page", log_time: bool = False) -> Figure:
    """Return the figure: at page width its panels and the legend are side by side, at column width below each other."""
    seeds = sorted({line.seeds for line in drawn})
    texts = (line.label + f" ({line.seeds})" * (len(seeds) > 1) for line in drawn)
    labels = [textwrap.fill(text, WRAP[width], break_long_words=False) for text in texts]
    rows = sum(label.count("\n") + 1 for label in labels)
    height = 3.6 + ROW_INCHES * (rows + 1) if width == "column" else max(2.6, ROW_INCHES * (rows + 3))
    figure = Figure(figsize=(INCHES[width], height), layout="constrained")
    panels = figure.subplots(*((2, 1) if width == "column" else (1, 2)), sharey=True)
    for place, (line, label) in enumerate(zip(drawn, labels)):
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        for axes, curve in zip(panels, (line.rounds, line.time)):
            _add(axes, curve, label=label, color=colour, linestyle=dash)
    for axes, text in zip(panels, ("round", time)):
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
    if log_time:
        panels[1].set_xscale("log")
    for axes in panels if width == "column" else panels[:1]:
        axes.set_ylabel(textwrap.fill(what, 24))
    if drawn:
        mean = f"mean ± sd over {seeds[0]}{f' to {seeds[-1]}' * (len(seeds) > 1)} seeds"
        where: Any = "outside lower center" if width == "column" else "outside right upper"
        figure.legend(handles=panels[0].get_lines(), loc=where, title=None if seeds == [1] else mean, frameon=False)
    return figure


def draw_groups(runs: Sequence[Recorded], width: Width = "page") -> Figure:
    """Return the figure: a panel for each of `FIGURES`, a colour for each group, a dash for each config."""
    figure = Figure(figsize=(INCHES[width], 5.4), layout="constrained")
    panels = dict(zip(FIGURES, figure.subplots(len(FIGURES), 1, sharex=True)))
    configs = run_table.groups(runs)
    for config, dash in zip(configs, cycle(DASHES)):
        seeds = [run_table.group_figures(run.folder) for run in config.runs]
        for name, colour in zip(seeds[0].group.values, COLOURS):
            label = name if len(configs) == 1 else f"{name}, {config.label}"
            for which, axes in panels.items():
                curve = over_rounds([one[which].sel(group=name, drop=True).dropna("round") for one in seeds])
                _add(axes, curve, label=label, color=colour, linestyle=dash)
    for which, axes in panels.items():
        axes.set_ylabel(textwrap.fill(FIGURES[which], 24))
        axes.grid(alpha=0.3)
    panels["depth"].set_xlabel("round")
    figure.legend(handles=panels["depth"].get_lines(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _add(axes: Axes, curve: Curve, **how: Any) -> None:
    axes.plot(curve.x, curve.mean, marker="." if len(curve.x) == 1 else None, **how)
    if curve.sd is not None:
        low, high = curve.mean - curve.sd, curve.mean + curve.sd
        axes.fill_between(curve.x, low, high, color=how["color"], alpha=0.2, linewidth=0)
