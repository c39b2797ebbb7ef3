"""Runs side by side: when they reached a target, how their clients fare at the end, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from hpcfl import store
from hpcfl.base.console import width_of
from hpcfl.base.errors import UsageError, did_you_mean
from hpcfl.base.lazy import pandas, xarray
from hpcfl.base.terminal import say
from hpcfl.base.types import Floats
from hpcfl.results.naming import Names
from hpcfl.results.run_table import (
    ACCURACY,
    DECILE,
    Runs,
    chosen,
    groups,
    has_any,
    recorded_metrics,
    scores,
)

RESAMPLES, CONFIDENCE = 10_000, 0.95
GROUPS = {"": None, "_slow_third": "slow-third", "_worst_decile": DECILE}
"""By what a metric of theirs is called."""


def compare(runs: Runs, target: float | None = None, *, metric: str = ACCURACY) -> pandas.DataFrame:
    """Return what runs came to, a row for each group that differs in nothing but the seed.

    Parameters
    ----------
    runs : Path, str, Run, Sweep or several
        Runs, or folders of runs, such as a sweep's.
    target : float, optional
        What `metric` is to reach: at least so much, at most so much where it is a loss.
    metric : str
        A metric that the runs have recorded, or ``test_loss``: on the global test set where each run has one, else the
        mean over the clients.

    Returns
    -------
    DataFrame
        By ``run``, the label: ``runs``, how many; with a target ``reached``, how many of them did, and the medians over
        all of ``rounds_to`` and ``seconds_to`` the first test that gave it, of the run's clock, infinite where half did
        not reach it; ``seconds_low`` and ``seconds_high``, the 95 % interval of that median by the bootstrap. Means
        over the runs, of which ``_sd`` is the sample standard deviation: the metric at the end, ``_slow_third`` and
        ``_worst_decile`` on those clients' own test parts (NaN: not recorded); ``bytes`` that messages had;
        ``node_hours`` that the job took, real ones; ``steps`` of the server.

    Raises
    ------
    UsageError
        If the runs have not recorded the metric, or not on the same test sets, or it cannot reach the target.

    Examples
    --------
    >>> few = {"rounds": 2, "evaluate.every": 1}
    >>> runs = hpcfl.sweep("fedavg-digits", {"algorithm.lr": [0.05, 0.2]}, settings=few, out="runs/lr", jobs=1)
    >>> hpcfl.compare(runs, target=0.05)["reached"].to_dict()
    {'learning rate 0.05': 1, 'learning rate 0.2': 1}
    """
    if target is not None and metric == ACCURACY and not 0 < target <= 1:
        raise UsageError(f"accuracy: expected a target above 0 and up to 1, got {target:g}")
    recorded = chosen(runs)
    data = {run.folder: store.open_run(run.folder) for run in recorded}
    for folder, each in data.items():
        if not has_any(each, metric):
            known = [name for name in recorded_metrics(each) if has_any(each, name)]
            raise UsageError(f"'{folder}' recorded no '{metric}'{did_you_mean(metric, known)}")
    _, scored = scores(data, None, False, metric)
    every = max((int(run.keys.get("evaluate.every", 1)) for run in recorded), default=1)
    if target is not None and every > 1:
        say(f"times are known to the {every} rounds between tests (evaluate.every)")
    rows, found = {}, groups(recorded)
    for label, group in zip(Names(recorded, {}).groups(found), found):
        own = [data[run.folder] for run in group.runs]
        row: dict[str, Any] = {"runs": len(own)}
        if target is not None:
            row |= reached([scored[run.folder] for run in group.runs], target, metric == "test_loss")
        rows[label] = row | _means([_costs(each, metric) for each in own])
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def reached(seeds: Sequence[xarray.DataArray], target: float, down: bool) -> dict[str, Any]:
    """Return how many seeds' scores [round] reached a target, and the medians of when, as `compare` has them."""
    first = []
    for each in seeds:
        there = np.flatnonzero(each.values <= target if down else each.values >= target)
        first.append((each["round"][there[0]] + 1, each["sim_seconds"][there[0]]) if there.size else (np.inf, np.inf))
    rounds, seconds = np.array(first, float).T
    low, high = interval_of_median(seconds)
    medians = {"rounds_to": float(np.median(rounds)), "seconds_to": float(np.median(seconds))}
    return {"reached": int(np.isfinite(seconds).sum()), **medians, "seconds_low": low, "seconds_high": high}


def interval_of_median(values: Floats) -> tuple[float, float]:
    """The 95 % interval of the median of values [n] by the percentile bootstrap; NaN for one value.

    Infinite ones stand for runs that did not reach a target. It is drawn by a fixed seed.
    """
    if len(values) < 2:
        return np.nan, np.nan
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    medians = np.sort(np.median(drawn, axis=1))
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return float(medians[tail]), float(medians[-1 - tail])


def _costs(data: xarray.Dataset, metric: str) -> dict[str, float]:
    """One run's figures at its end."""
    found, own = dict[str, float](), Path()
    for suffix, clients in GROUPS.items():
        found[metric + suffix] = np.nan
        with suppress(UsageError):  # nobody is slower than others, or has a test part
            found[metric + suffix] = float(scores({own: data}, clients, True, metric)[1][own][-1])
    hosts = len(set(json.loads(data.attrs.get("hosts", '[""]'))))
    found["bytes"] = float(data["message_bytes"].clip(min=0).sum())
    found["node_hours"] = hosts * float(data["wall_seconds"][-1]) / 3600
    found["steps"] = float((data["void"] != 1).sum())
    return found


def _means(seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = dict[str, float]()
    for name in seeds[0]:
        values = np.array([each[name] for each in seeds])
        found |= {name: float(values.mean()), f"{name}_sd": float(values.std(ddof=1)) if len(values) > 1 else np.nan}
    return found


def worded(table: pandas.DataFrame, metric: str = ACCURACY, target: float | None = None) -> pandas.DataFrame:
    """Return the table of `compare` in words: means ± standard deviations, a median with its interval."""
    name = metric.replace("_", " ")
    cells: dict[str, Any] = {"runs": table["runs"]}
    if target is not None:
        goal = f"{name} {target:g}"
        cells["reached it"] = table["reached"]
        cells[f"rounds to {goal}"] = [_number(value) for value in table["rounds_to"]]
        medians = zip(table["seconds_to"], table["seconds_low"], table["seconds_high"])
        cells[f"s to {goal} (95 %)"] = [
            _number(value) + f" ({_number(low)} to {_number(high)})" * (low == low) for value, low, high in medians
        ]
    columns = {metric: f"final {name}", f"{metric}_slow_third": "slow third", f"{metric}_worst_decile": "worst decile"}
    columns |= {"bytes": "MB sent", "node_hours": "node-hours", "steps": "server steps"}
    for key, heading in columns.items():
        unit = 1e6 if key == "bytes" else 1
        cells[heading] = [
            _number(mean / unit) + f" ± {_number(sd / unit)}" * (sd > 0)
            for mean, sd in zip(table[key], table[f"{key}_sd"])
        ]
    return pandas.DataFrame(cells, index=table.index)


def _number(value: float) -> str:
    """Four digits, or a dash for what is unknown or was not reached."""
    return f"{value:.4g}" if np.isfinite(value) else "–"


def printed(table: pandas.DataFrame, width: int | None) -> Table:
    """Return a table in words as one of `rich`: a line for each run or, where that is wider than `width`, a column."""
    shown = Table("run", *(Column(name, justify="right") for name in table))
    for name, *cells in table.itertuples(name=None):
        shown.add_row(str(name), *map(str, cells))
    return printed(table.T, None) if width is not None and width_of(shown) > width else shown


def written(table: pandas.DataFrame, form: str) -> str:
    """Return a table as text: ``markdown`` or ``latex`` for a paper, ``csv`` or ``json``, an object a row, to read."""
    if form == "csv":
        return str(table.to_csv())
    if form == "json":
        return "".join(f"{line}\n" for line in table.reset_index().to_json(orient="records", lines=True).splitlines())
    if form == "latex":
        style = table.rename_axis(None).style.format(escape="latex")
        for axis in (0, 1):
            style = style.format_index(escape="latex", axis=axis)
        text = str(style.to_latex(hrules=True, column_format="l" + "r" * len(table.columns)))
        return text.replace("±", r"$\pm$").replace("–", "--")
    lines = [[str(table.index.name), *table], ["---"] * (1 + len(table.columns)), *table.reset_index().values.tolist()]
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
