"""How figures are drawn: colours, dashes and panels, bands, axes and legends, of sizes that papers want."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log10
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from hpcfl.base.errors import listed
from hpcfl.base.terminal import say
from hpcfl.results import run_table
from hpcfl.results.curves import Curve, clipped
from hpcfl.results.kinds import Asked, Panel, spent, time_label
from hpcfl.results.naming import Names, in_order
from hpcfl.results.targets import reached

Width = Literal["column", "page"]
INCHES = {"column": 3.3, "page": 6.75}
WRAP = {"column": 52, "page": 30}  # characters of a legend's line
ROW_INCHES = 0.13  # of the legend
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
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
MARKS = ("o", "s", "^", "D", "v", "P", "X")
BANDS = {"sd": "mean ± sd", "ci95": "mean and 95 % interval"}
Look = dict[str, tuple[str, str]]
"""By color, style and facet: a value as it is recorded, and what it is called."""


class Picture(Figure):
    """A figure that keeps its style when it is drawn and saved, and shows itself in a notebook."""

    def draw(self, renderer: Any) -> None:
        with rc_context(STYLE):
            super().draw(renderer)

    def savefig(self, *args: Any, **how: Any) -> None:
        with rc_context(STYLE):
            super().savefig(*args, **how)

    def _repr_png_(self) -> bytes:
        self.savefig(picture := io.BytesIO(), format="png", dpi=144)
        return picture.getvalue()


@rc_context(STYLE)
def lines(
    asked: Asked,
    panels: Sequence[Panel],
    names: Names,
    keys: Mapping[str, str | None],
    order: Sequence[str],
    log: Sequence[str],
    width: Width,
) -> Picture:
    """Return the figure of a line, or a mark, for each config; what it leaves out is said on stderr.

    `keys`: those by whose values there are colours (`color`), dashes (`style`) and panels (`facet`).
    """
    groups = run_table.groups(asked.runs)
    labels = names.groups(groups, [key for name, key in keys.items() if key and name != "color"])
    subgroups = list(dict.fromkeys(name for panel in panels for _, name in panel.points))
    looks = {
        (place, sub): _look(group.runs[0], sub, label if len(groups) > 1 or not sub else "", names, keys)
        for place, (group, label) in enumerate(zip(groups, labels))
        for sub in subgroups
    }
    _say_untold(asked, groups, keys, looks)
    values = {name: in_order([look[name] for look in looks.values()], order) for name in keys}
    styles = values["style"] if any(values["style"]) else []
    marks, seeds = panels[0].marks, [len(group.runs) for group in groups]

    def text(word: str) -> str:
        its = {seeds[place] for (place, _), look in looks.items() if look["color"][1] == word}
        return textwrap.fill(f"{word} ({_between(its)})" if len({*seeds}) > 1 else word, WRAP[width])

    shown: list[tuple[str, tuple[int | None, int | None]]]
    shown = [(text(word), (place, None)) for place, word in enumerate(values["color"])]
    shown += [(word, (None, place)) for place, word in enumerate(styles)]
    handles = [Line2D([], [], label=word, **_how(*places, marks)) for word, places in shown]
    over = "mean of" if marks else f"{BANDS[asked.band]} over"
    title = f"{over} {_between({*seeds})} seeds" if max(seeds, default=0) > 1 else ""
    figure, grid = _laid_out(panels, values["facet"] or [""], width, handles, title)
    for (place, sub), look in looks.items():
        style = styles.index(look["style"][1]) if styles else None
        how = _how(values["color"].index(look["color"][1]), style, marks)
        for panel, axes in zip(panels, grid[look["facet"][1]]):
            ran = [(run.folder, sub) for run in groups[place].runs]
            points = [panel.points[each] for each in ran if each in panel.points]
            if points and marks:
                each = np.concatenate([np.stack(ends) for ends in points], axis=1)
                axes.plot(*each, **{**how, "markersize": 3}, alpha=0.5)
                axes.plot(*each.mean(1, keepdims=True), **how)
            elif points:
                _curve(axes, panel, Curve.of(points, asked.last, asked.band), how)
                if asked.last == "all":
                    _say_shorter(labels[place], panel, points)
    for panel, axes in ((panel, axes) for row in grid.values() for panel, axes in zip(panels, row)):
        for which, name in (("x", panel.axis), ("y", "y")):
            if name in log:
                _logarithmic(axes, which)
        if marks:
            axes.axline((0, 0), slope=1, color="0.7", linewidth=0.8, zorder=0)
    return figure


def _look(run: run_table.Recorded, sub: str, label: str, names: Names, keys: Mapping[str, str | None]) -> Look:
    """Return how a line looks: by the keys, else by its group of clients and by what its config is called."""
    color, style = (names.labels.get(sub, sub.replace("-", " ")), label) if sub else (label, "")
    free = {"color": color, "style": style, "facet": ""}
    own = {name: (run.keys.get(key, ""), names.value(run, key)) for name, key in keys.items() if key}
    return {name: (word, word) for name, word in free.items()} | own


def _say_untold(
    asked: Asked, groups: Sequence[run_table.Group], keys: Mapping[str, str | None], looks: Mapping[Any, Look]
) -> None:
    """Say which lines cannot be told apart, or which keys differ that nothing on the figure tells."""
    alike = {tuple(sorted(look.items())) for look in looks.values()}
    told, telling = {key for key in keys.values() if key}, {key for group in groups for key in group.keys}
    if len(alike) < len(looks):
        rest = listed(sorted(telling - told))
        say(f"{len(looks)} lines look like {len(alike)}: expected as color, style or facet one of {rest}")
    elif unsaid := run_table.differing(asked.runs).keys() - telling - told:
        say(f"for a caption: all lines are told apart, and these keys differ too: {', '.join(sorted(unsaid))}")


def _between(numbers: set[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


def _how(color: int | None, style: int | None, marks: bool) -> dict[str, Any]:
    """Return how the values at these places of their orders look; None: a color, or style, tells nothing."""
    shade = "k" if color is None else COLOURS[color % len(COLOURS)]
    turn = (color or 0) // len(COLOURS) if style is None else style
    if marks:
        return {"color": shade, "linestyle": "none", "markersize": 6, "marker": MARKS[turn % len(MARKS)]}
    return {"color": shade, "linestyle": DASHES[turn % len(DASHES)]}


def _laid_out(
    panels: Sequence[Panel], facets: Sequence[str], width: Width, handles: Sequence[Any], title: str
) -> tuple[Picture, dict[str, list[Axes]]]:
    """Return a figure with its labels and a legend outside of its panels, and for each facet the axes by panel."""
    count, rows = len(panels) * len(facets), sum(handle.get_label().count("\n") + 1 for handle in handles)
    columns = 2 if count == 4 else min(count, 3)
    if width == "column":
        columns = 1
    elif min(len(facets), len(panels)) > 1:
        columns = len(facets)
    beside = width == "page" and columns < 3
    across = 1 if beside else 3 if width == "page" else 1 + all(len(handle.get_label()) < 25 for handle in handles)
    legend = ROW_INCHES * (ceil(rows / across) + 1)
    height = ceil(count / columns) * (1.8 if width == "column" else 2.2)
    size = INCHES[width], max(2.6, height, legend + 2 * ROW_INCHES) if beside else height + legend
    figure = Picture(figsize=size, layout="constrained")
    share: Any = "all" if len({panel.y for panel in panels}) == 1 else "row" if columns == len(facets) else False
    grid = figure.subplots(ceil(count / columns), columns, squeeze=False, sharey=share)
    cells = [(panel, facet) for panel in panels for facet in facets]
    for place, ((panel, facet), axes) in enumerate(zip(cells, grid.flat)):
        axes.grid(alpha=0.3)
        if panel.ticks:
            upright = sum(map(len, panel.ticks)) > 30
            axes.set_xticks(range(1, len(panel.ticks) + 1), panel.ticks, rotation=90 if upright else 0)
        elif panel.axis in ("rounds", "clients", "staleness"):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_title(textwrap.fill(facet, 30))
        if len({each.x for each in panels}) > 1 or place + columns >= count:
            axes.set_xlabel(panel.x)
        if place % columns == 0 or not share:
            axes.set_ylabel(textwrap.fill(panel.y, 20 if width == "column" else 24))
    for axes in grid.flat[count:]:
        axes.remove()
    if handles:
        where: Any = "outside right upper" if beside else "outside lower center"
        figure.legend(handles=handles, loc=where, title=title or None, frameon=False, ncols=across)
    return figure, {facet: [*grid.flat[at : count : len(facets)]] for at, facet in enumerate(facets)}


def _curve(axes: Axes, panel: Panel, curve: Curve, how: dict[str, Any]) -> None:
    axes.plot(curve.x, curve.mean, marker="." if len(curve.x) == 1 else None, **how)
    if np.isfinite(curve.half).any():
        axes.fill_between(curve.x, *clipped(curve, *panel.span), color=how["color"], alpha=0.2, linewidth=0)


def _say_shorter(label: str, panel: Panel, seeds: Sequence[Any]) -> None:
    """Say that a line ends where its shortest run does, or cannot."""
    ends = {x[-1] for x, _ in seeds if x.size}
    if not Curve.of(seeds).shared:
        say(f"{label}: no {panel.axis} that all its seeds have in common: drawn where any of them is")
    elif panel.axis == "rounds" and len(ends) > 1:
        say(f"{label}: drawn up to round {min(ends):g}, where its shortest run ends; last=any goes on")


def _logarithmic(axes: Axes, which: str) -> None:
    """Make an axis logarithmic, with few enough ticks that their labels stay apart."""
    getattr(axes, f"set_{which}scale")("log")
    axis: Any = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    decades = log10(high / low)
    if decades <= 2:  # powers of ten would be one or two
        axis.set_major_locator(
            MaxNLocator(3) if decades < 0.5 else LogLocator(subs=(1, 2, 5) if decades < 0.8 else (1, 3))
        )
        axis.set_major_formatter("{x:.12g}")
    else:
        axis.set_major_locator(LogLocator(numticks=5))
    axis.set_minor_formatter(NullFormatter())


@rc_context(STYLE)
def bars(asked: Asked, names: Names, width: Width) -> Picture:
    """Return the figure of where wall-clock seconds went: a bar for each config, and one of its client ranks."""
    for name in ("wall_seconds", "compute_seconds", "wait_seconds", "server_seconds"):
        asked.need(name, "expected a round at least")
    groups = run_table.groups(asked.runs)
    rows: dict[str, dict[str, float]] = {}
    for group, label in zip(groups, names.groups(groups)):
        seeds = [spent(asked.data[run.folder]) for run in group.runs]
        for whose in seeds[0]:
            row = f"{label}, {whose}" if len(seeds[0]) > 1 else label
            its = [seed[whose] for seed in seeds if whose in seed]
            rows[row] = {part: float(np.mean([each[part] for each in its])) for part in its[0]}
    figure, axes = _rows(rows, width, "wall-clock time (s)")
    left = np.zeros(len(rows))
    for part, colour in zip(next(iter(rows.values())), COLOURS):
        seconds = np.array([row[part] for row in rows.values()])
        axes.barh(np.arange(len(rows)), seconds, left=left, color=colour, label=names.labels.get(part, part))
        left += seconds
    figure.legend(loc="outside lower center", ncols=2 if width == "column" else 5, frameon=False)
    return figure


@rc_context(STYLE)
def times(asked: Asked, names: Names, target: float, log: bool, width: Width) -> Picture:
    """Return the figure of when seeds reached a target: each seed, the median and its interval, how many there were.

    What was not reached lies beyond all that was: there intervals end in an arrow.
    """
    what, scored = run_table.scores(asked.data, asked.clients, asked.any_data, asked.y)
    groups, down = run_table.groups(asked.runs), asked.y == "test_loss"
    figure, axes = _rows(names.groups(groups), width, f"{time_label(asked.runs)} to {what} {target:g}")
    seeds = [[reached([scored[run.folder]], target, down)["seconds_to"] for run in group.runs] for group in groups]
    beyond = 1.1 * max((time for each in seeds for time in each if np.isfinite(time)), default=1.0)
    for row, (group, each) in enumerate(zip(groups, seeds)):
        colour, found = COLOURS[row % len(COLOURS)], reached([scored[run.folder] for run in group.runs], target, down)
        low, high = np.minimum([found["seconds_low"], found["seconds_high"]], beyond)
        axes.plot([low, high], [row, row], color=colour, marker=">" if high == beyond else None, markevery=[1])
        axes.plot(each, [row] * len(each), ".", color=colour, alpha=0.5)
        axes.plot(found["seconds_to"], row, "D", color=colour)
        axes.text(1.02, row, f"{found['reached']}/{len(each)}", transform=axes.get_yaxis_transform(), va="center")
    if log:
        _logarithmic(axes, "x")
    return figure


def _rows(labels: Iterable[str], width: Width, x: str) -> tuple[Picture, Axes]:
    """Return a figure with a row for each label, from above."""
    words = [textwrap.fill(label, 24) for label in labels]
    figure = Picture(figsize=(INCHES[width], 1 + 0.35 * len(words)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(words)), words)
    axes.set_ylim(len(words) - 0.5, -0.5)
    axes.set_xlabel(textwrap.fill(x, 30 if width == "column" else 80))
    return figure, axes
