"""What the kinds of figures show of each run: where it was measured, and what was measured there, panel by panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import xarray
from hpcfl.results import run_table
from hpcfl.results.curves import COORDINATES, Band, Last, Points, X, points
from hpcfl.results.run_table import ACCURACY, DECILE, FIGURES, Recorded, group_figures, worst_decile
from hpcfl.schedule.plan import Fate
from hpcfl.store.columns import NAMES

UNITS = ("bytes", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Asked:
    """The runs of a figure, what they recorded, and what of it is to be shown."""

    runs: Sequence[Recorded]
    data: Mapping[Path, xarray.Dataset]
    x: tuple[X, ...]
    y: str
    clients: str | None
    band: Band
    last: Last
    any_data: bool

    def each(self, what: Callable[[xarray.Dataset], Points]) -> dict[tuple[Path, str], Points]:
        """Return what each run shows, of all its clients."""
        return {(folder, ""): what(data) for folder, data in self.data.items()}

    @property
    def every(self) -> dict[Path, int]:
        """Rounds from one evaluation to the next, by run folder."""
        return {run.folder: int(run.keys.get("evaluate.every", 1)) for run in self.runs}

    def need(self, name: str, otherwise: str) -> None:
        """Raise UsageError where a run has not recorded what the kind of figure shows."""
        for folder, data in self.data.items():
            if name not in data or not data[name].size:
                raise UsageError(f"'{folder}' recorded no {name}: {otherwise}")


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes
    ----------
    axis : str
        What lies along the x axis, in a word.
    x, y : str
        What stands at the axes.
    points : mapping
        What is drawn, by run folder and group of clients, "" for all.
    span : tuple of float
        Least and largest value that there can be.
    marks : bool
        Each seed is a mark, not a curve.
    ticks : sequence of str
        What stands at 1, 2, … of the x axis; by default numbers.
    """

    axis: str
    x: str
    y: str
    points: Mapping[tuple[Path, str], Points]
    span: tuple[float, float] = (-inf, inf)
    marks: bool = False
    ticks: Sequence[str] = ()


def curve(asked: Asked) -> list[Panel]:
    """A metric against rounds, time or bytes."""
    what, scored = run_table.scores(asked.data, asked.clients, asked.any_data, asked.y)
    low = min((score.min().item() for score in scored.values() if score.size), default=-inf)
    span = SHARE if asked.y == ACCURACY else (0.0 if low >= 0 else -inf, inf)
    panels = []
    for x in asked.x:
        if x != "rounds":
            asked.need(COORDINATES[x], "expected another x")
        if x == "bytes":  # recorded of each round; -1: not recorded
            so_far = {run: each["message_bytes"].clip(min=0).cumsum("round") for run, each in asked.data.items()}
            scored = {run: score.assign_coords(message_bytes=so_far[run]) for run, score in scored.items()}
        drawn = {(folder, ""): points(score, x, asked.every[folder]) for folder, score in scored.items()}
        text = x.removesuffix("s") if x == "rounds" else time_label(asked.runs)
        if x == "bytes":
            most = max((at.max() for at, _ in drawn.values() if at.size), default=0.0)
            unit, size = [each for each in UNITS if each[1] <= max(most, 1.0)][-1]
            drawn = {key: (at / size, values) for key, (at, values) in drawn.items()}
            text = f"messages that counted ({unit})"
        panels.append(Panel(x, text, what, drawn, span))
    return panels


def time_label(runs: Sequence[Recorded]) -> str:
    words = {"simulated": "simulated", "wall": "wall-clock"}
    return " or ".join(sorted({words[run.keys.get("clock", "simulated")] for run in runs})) + " time (s)"


def groups(asked: Asked) -> list[Panel]:
    """Accuracy, participation and depth of groups of clients, against rounds."""
    drawn: dict[str, dict[tuple[Path, str], Points]] = {figure: {} for figure in FIGURES}
    for folder in asked.data:
        found = group_figures(folder)
        for figure in FIGURES:
            for name in found.group.values:
                known = found[figure].sel(group=name, drop=True).dropna("round")
                drawn[figure][folder, str(name)] = points(known, "rounds", asked.every[folder])
    return [Panel("rounds", "round", text, drawn[figure], SHARE) for figure, text in FIGURES.items()]


def _ended(data: xarray.Dataset) -> xarray.DataArray:
    """Who had a visit in a round that went on neither after it nor when the run ended [round, client]."""
    ended = data["cohort"] == 1
    if "fate" not in data:
        return ended
    last = data["round"] == data["round"][-1]
    return ended & (data["fate"] != Fate.UNDER_WAY) & ~(last & (data["fate"] == Fate.CANCELLED))


def participation(asked: Asked) -> list[Panel]:
    """Each client's share of its visits that counted: by their names if they have any, else from the least on."""
    asked.need("arrived", "expected a round at least")
    named = {tuple(data[NAMES].values) if NAMES in data.coords else () for data in asked.data.values()}
    names = next(iter(named)) if len(named) == 1 else ()

    def shares(data: xarray.Dataset) -> Points:
        ended = _ended(data)
        share = ((data["arrived"] == 1) & ended).sum("round") / ended.sum("round")
        known = share.values if names else np.sort(share.dropna("client").values)
        return np.arange(1.0, len(known) + 1), known

    x = "client" if names else "client, from the least"
    return [Panel("clients", x, "share of its visits that counted", asked.each(shares), SHARE, ticks=names)]


def depth(asked: Asked) -> list[Panel]:
    """How far visits came, round by round: layers, and local steps where they are recorded."""
    asked.need("blocks", "expected a round at least")
    panels = []
    for name, text in (("blocks", "share of layers that counted"), ("steps", "local steps that counted")):
        known = {folder: data for folder, data in asked.data.items() if name in data}

        def mean(data: xarray.Dataset, name: str = name) -> Points:
            came = data[name].where(_ended(data)).mean("client").dropna("round")
            return points(came / data.sizes["layer"] if name == "blocks" else came, "rounds")

        drawn = {(folder, ""): mean(data) for folder, data in known.items()}
        panels += [Panel("rounds", "round", text, drawn, SHARE if name == "blocks" else (0.0, inf))] if known else []
    return panels


def staleness(asked: Asked) -> list[Panel]:
    """How many versions passed between what a visit was served and its arrival."""
    asked.need("arrival_staleness", "expected participation.close = 'arrivals'")
    most = max(int(data["arrival_staleness"].max()) for data in asked.data.values())

    def shares(data: xarray.Dataset) -> Points:
        passed = data["arrival_staleness"].values
        count = np.bincount(passed[passed >= 0], minlength=most + 1)
        return np.arange(most + 1.0), count / max(count.sum(), 1)

    return [Panel("staleness", "staleness (versions)", "share of arrivals", asked.each(shares), SHARE)]


def fairness(asked: Asked) -> list[Panel]:
    """The worst tenth of the clients against the mean over all, when each run was last tested."""

    def ends(data: xarray.Dataset) -> Points:
        last = data["client_accuracy"].dropna("client", how="all").dropna("round", how="all")[-1:]
        return last.mean("client").values, worst_decile(last).values

    for folder, data in asked.data.items():
        if not data.get("client_accuracy", xarray.DataArray(np.nan)).notnull().any():
            raise UsageError(f"'{folder}' recorded no accuracy of clients: they have no own test parts")
    text = f"accuracy {run_table.CLIENTS[DECILE]}"
    return [Panel("accuracy", "mean accuracy over the clients", text, asked.each(ends), SHARE, marks=True)]


def spent(data: xarray.Dataset) -> dict[str, dict[str, float]]:
    """Where a run's wall-clock seconds went: at the server, and in the mean over the other ranks, if there are any.

    Returns seconds by part, by whose they are. Sending counts as waiting.
    """
    total = float(data["wall_seconds"][-1])
    by_rank = {name: data[name].sum("round").values for name in ("compute_seconds", "wait_seconds")}
    server = {
        "computing": by_rank["compute_seconds"][0],
        "communication and waiting": by_rank["wait_seconds"][0],
        "server's step": float(data["server_seconds"].sum()),
        "checkpoints": float(data["checkpoint_wait_seconds"].sum()) if "checkpoint_wait_seconds" in data else 0.0,
    }
    found = {"server": server}
    if data.sizes["rank"] > 1:
        others = (by_rank[name][1:].mean() for name in by_rank)
        found["clients"] = dict(zip(server, (*others, 0.0, 0.0)))
    for parts in found.values():
        parts["other"] = max(0.0, total - sum(parts.values()))
    return found
