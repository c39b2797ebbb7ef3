"""Curves of a metric: what a run scored at its evaluated rounds, and the mean of several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfl.base.errors import UsageError, listed
from hpcfl.base.lazy import xarray
from hpcfl.base.types import Floats, Ints

ACCURACY = "accuracy"
THIRDS = "slow-third", "middle-third", "fast-third"
DECILE = "worst-decile"
CLIENTS = {
    DECILE: "of the worst tenth of the clients",
    "slow-third": "of the slowest third of the clients",
    "middle-third": "of the middle third of the clients by speed",
    "fast-third": "of the fastest third of the clients",
}


@dataclass(frozen=True)
class Curve:
    """Mean over seeds at `x`, and the sample standard deviation (None for one seed), [points] each."""

    x: Floats
    mean: Floats
    sd: Floats | None

    @classmethod
    def of(cls, x: Floats, values: Floats) -> Curve:
        """Return the curve of values [seeds, points]."""
        return cls(x, values.mean(0), values.std(0, ddof=1) if len(values) > 1 else None)


def scores(
    runs: Mapping[str, xarray.Dataset], clients: str | None, mixed: bool, metric: str = ACCURACY
) -> tuple[str, dict[str, xarray.DataArray]]:
    """Return what is drawn, one thing for all runs, and each run's scores [round] at its evaluated rounds.

    That is the metric on the global test set if each run recorded it, else the mean over the clients of that on their
    own test parts, or that of some `clients`. `mixed`: where runs have no such thing in common, each its own.

    Raises
    ------
    UsageError
        If the runs have nothing in common, or did not record what the clients in question are chosen by.
    """
    named = metric.replace("_", " ").removeprefix("test ")
    if clients:
        chosen = dict[str, xarray.DataArray]()
        for name, data in runs.items():
            known, where = data[f"client_{metric}"].dropna("client", how="all"), f"--clients {clients}: '{name}'"
            if not known.size:
                raise UsageError(f"{where} recorded no {metric} of clients: they have no own test parts")
            if clients in THIRDS:
                third = thirds(data["visit_seconds"], where)[clients]
                score = known.sel(client=known.client.isin(third)).mean("client")
            else:
                score = -worst_decile(-known) if metric == "test_loss" else worst_decile(known)
            chosen[name] = score.dropna("round")
        return f"{named} {CLIENTS[clients]}", chosen
    shared = {name: data[metric].dropna("round") for name, data in runs.items()}
    own = {name: data[f"client_{metric}"].mean("client").dropna("round") for name, data in runs.items()}
    whole = f"test {named}"
    for what, each in ((whole, shared), (f"mean {whole} over the clients", own)):
        if all(score.size for score in each.values()):
            return what, each
    if mixed:
        return whole, {name: score if score.size else own[name] for name, score in shared.items()}
    bare, lonely = (listed([f"'{name}'" for name in runs if not each[name].size], 4) for each in (shared, own))
    said = f"{bare} none on the global test set, {lonely} none of clients; expected one that all have, or --any-data"
    raise UsageError(f"the runs recorded no {metric} in common: {said}")


def has_any(data: xarray.Dataset, metric: str = ACCURACY) -> bool:
    """Whether a run has recorded a metric; one that was killed early has none, one that learns numbers no accuracy."""
    return metric in data and bool(data[metric].notnull().any() or data[f"client_{metric}"].notnull().any())


def recorded_metrics(data: xarray.Dataset) -> list[str]:
    """The names of what a run's tests measure, the loss last."""
    return sorted((str(name) for name in data.data_vars if f"client_{name}" in data), key="test_loss".__eq__)


def worst_decile(accuracy: xarray.DataArray) -> xarray.DataArray:
    """The mean over the worst tenth, rounded up, of the clients with a test part: the worst of each round anew."""
    over = [["client"]]
    ascending: xarray.DataArray = xarray.apply_ufunc(np.sort, accuracy, input_core_dims=over, output_core_dims=over)
    return ascending.isel(client=slice(tenth(accuracy.sizes["client"]))).mean("client")


def thirds(seconds: xarray.DataArray, whose: str) -> dict[str, Ints]:
    """The ids of the slowest, the middle and the fastest third of the clients that were invited, in all rounds alike.

    By the mean of what their visits took; one that did not end counts as the run's longest that did. What is left over
    goes to the slower ones. UsageError, which begins with `whose`, where no client is slower than another.
    """
    ended = seconds.where(np.isfinite(seconds))
    means = ended.where(seconds != np.inf, ended.max()).mean("round").dropna("client")
    if not means.size or means.max() == means.min():
        raise UsageError(f"{whose} recorded no client that is slower than another")
    order = means.client.values[np.argsort(-means.values, kind="stable")]
    return dict(zip(THIRDS, np.array_split(order, 3)))


def tenth(count: int) -> int:
    """A tenth of so many, rounded up."""
    return -(-count // 10)


def over_rounds(seeds: Sequence[xarray.DataArray]) -> Curve:
    """The mean of several seeds over the rounds after which all of them were evaluated."""
    plain = [scores.reset_coords(drop=True) for scores in seeds]
    together = xarray.concat(plain, "seed", join="inner").transpose("seed", "round")
    return Curve.of(together["round"].values + 1.0, together.values)


def over_time(seeds: Sequence[xarray.DataArray]) -> Curve:
    """The mean of several seeds over time, which passes differently for each.

    Between two evaluations a seed's accuracy is taken to lie on the line between them, as it is drawn for one seed.
    The points are all times of an evaluation of any seed, from where all have begun until the first has ended: the
    mean over seeds at a time, not over rounds that lie at different times.
    """
    timed = [scores.isel(round=np.isfinite(scores["sim_seconds"].values)) for scores in seeds]
    times = [scores["sim_seconds"].values for scores in timed]
    if not all(time.size for time in times):
        return Curve.of(np.empty(0), np.empty((len(seeds), 0)))
    grid = np.unique(np.concatenate(times))
    grid = grid[(grid >= max(time[0] for time in times)) & (grid <= min(time[-1] for time in times))]
    return Curve.of(grid, np.stack([np.interp(grid, time, scores.values) for time, scores in zip(times, timed)]))
