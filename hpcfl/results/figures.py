"""Figures of runs as papers print them: a line, a mark or a bar for each config, over its seeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from hpcfl import store
from hpcfl.base.errors import UsageError, did_you_mean, listed, no_meaning
from hpcfl.base.terminal import say
from hpcfl.results import drawing, kinds, run_table
from hpcfl.results.curves import Band, Last, X
from hpcfl.results.drawing import Picture, Width
from hpcfl.results.kinds import Asked
from hpcfl.results.naming import Names
from hpcfl.results.run_table import ACCURACY, CLIENTS, Recorded, Runs, has_any

Kind = Literal[
    "curve", "groups", "participation", "depth", "staleness", "fairness", "time-to-target", "where-time-went"
]
BANDED = ("color", "style", "facet", "order", "band", "last", "log")
OPTIONS: dict[str, tuple[str, ...]] = {
    "curve": ("x", "y", "clients", *BANDED),
    "groups": ("style", *BANDED[2:]),
    **dict.fromkeys(("participation", "depth", "staleness"), BANDED),
    "fairness": BANDED[:4],
    "time-to-target": ("y", "clients", "target", "log"),
    "where-time-went": (),
}
"""What a kind may be told beside `labels`, `width` and `any_data`."""


def figure(
    runs: Runs,
    kind: Kind = "curve",
    *,
    x: X | Sequence[X] | None = None,
    y: str | None = None,
    color: str | None = None,
    style: str | None = None,
    facet: str | None = None,
    labels: Mapping[str, str] | None = None,
    order: Sequence[str] = (),
    clients: str | None = None,
    band: Band | None = None,
    last: Last | None = None,
    log: str | Sequence[str] = (),
    target: float | None = None,
    width: Width = "page",
    any_data: bool = False,
) -> Picture:
    """Return a figure of runs, as ``hpcfl plot`` draws it: runs that differ in nothing but the seed are one line.

    Parameters
    ----------
    runs : str, Path, Run, Sweep or several
        Runs, or folders of runs.
    kind : str
        ``curve``; ``groups``, of fast and slow clients; ``participation``, ``depth``, ``staleness``, ``fairness``,
        ``time-to-target``, ``where-time-went``.
    x : str or several
        ``rounds``, ``time``, ``bytes``: a panel for each; by default the first two.
    y : str
        A metric, or any number that is recorded by round; by default the accuracy.
    color, style, facet : str
        Keys of the config, such as ``algorithm.lr``, by whose values there are colours, dashes, panels. By default a
        colour for each config.
    labels : mapping of str to str
        Words for keys, values, and names on the figure.
    order : list of str
        Values in the order in which they are to be.
    clients : str
        ``all``, ``slow-third``, ``middle-third``, ``fast-third`` or ``worst-decile``.
    band : str
        ``sd``, the standard deviation over seeds, or ``ci95``, Student's 95 % interval of the mean.
    last : str
        ``all``: a line is drawn where all its seeds are; ``any``: where any is.
    log : str or several
        Axes that are logarithmic: what lies along x, or ``y``.
    target : float
        What the metric is to reach, for ``time-to-target``.
    width : str
        ``page``, 6.75 inches, or ``column``, 3.3.
    any_data : bool
        Show runs on different data in one panel.

    Raises
    ------
    UsageError
        If there is no such run, key or choice, or the runs did not record what the kind shows.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> hpcfl.figure(run, x="rounds").savefig("two.pdf")
    """
    looks = {"color": color, "style": style, "facet": facet}
    axes = ("rounds", "time") if x is None else (x,) if isinstance(x, str) else tuple(x)
    _choose("kind", kind, get_args(Kind))
    for along in axes:
        _choose("x", along, get_args(X))
    _choose("clients", clients, ("all", *CLIENTS))
    _choose("band", band, get_args(Band))
    _choose("last", last, get_args(Last))
    _choose("width", width, get_args(Width))
    given: dict[str, Any] = {"x": x, "y": y, "clients": clients, "band": band, "last": last, "order": order, "log": log}
    for name, value in {**given, **looks, "target": target}.items():
        if value and name not in OPTIONS[kind]:
            raise no_meaning(name, value, f"kind = '{kind}'")
    found = run_table.chosen(runs)
    for name, key in looks.items():
        _choose(name, key, {known for run in found for known in run.keys})
    if not any_data:
        _check_data(found, facet)
    metric, data = y or ACCURACY, {run.folder: store.open_run(run.folder) for run in found}
    known = found
    if "y" in OPTIONS[kind]:
        by_round = {str(name) for each in data.values() for name in each if each[name].dims == ("round",)}
        there = {name for name in by_round if any(has_any(each, name) for each in data.values())}
        if y is None and there and metric not in there:
            measured = listed(
                sorted(there & {name for each in data.values() for name in run_table.recorded_metrics(each)})
            )
            raise UsageError(f"y: the runs recorded no '{metric}': expected one of {measured}")
        _choose("y", metric, there or {metric})
        known = [run for run in found if has_any(data[run.folder], metric)]
    for run in found:
        if run not in known:
            say(f"'{run.folder}' has recorded no {metric}: left out")
    recorded = {run.folder: data[run.folder] for run in known}
    where = None if clients == "all" else clients
    asked = Asked(known, recorded, axes, metric, where, band or "sd", last or "all", any_data)
    names = Names(known, labels or {})
    if kind == "where-time-went":
        return drawing.bars(asked, names, width)
    logarithmic = (log,) if isinstance(log, str) else tuple(log)
    if kind == "time-to-target":
        if target is None:
            raise UsageError(f"target: kind = '{kind}' needs it")
        for each in logarithmic:
            _choose("log", each, ["time"])
        return drawing.times(asked, names, target, bool(logarithmic), width)
    panels = getattr(kinds, kind)(asked)
    for each in logarithmic:
        _choose("log", each, [*dict.fromkeys(panel.axis for panel in panels), "y"])
    return drawing.lines(asked, panels, names, looks, order, logarithmic, width)


def _choose(name: str, value: str | None, choices: Collection[str]) -> None:
    if value is not None and value not in choices:
        raise UsageError(f"{name}: there is no '{value}'{did_you_mean(value, choices)}")


def _check_data(runs: Sequence[Recorded], facet: str | None) -> None:
    """Raise UsageError where the runs of a panel are not on one data set."""
    panels: dict[str | None, list[Recorded]] = {}
    for run in runs:
        panels.setdefault(run.keys.get(facet or ""), []).append(run)
    for alike in panels.values():
        for key, values in run_table.differing(alike).items():
            if key.startswith("data."):
                where = (f"{value} in {listed([str(run.folder) for run in its], 4)}" for value, its in values.items())
                raise UsageError(f"{key} differs: {'; '.join(where)}; expected runs on one data set, or any-data")
