"""Which law measured seconds follow, how they spread between and within clients, how long that lasts, who is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table
from scipy import stats

from hpcfl.base.errors import UsageError, toml
from hpcfl.base.lazy import Lazy
from hpcfl.base.types import Floats
from hpcfl.config import Config
from hpcfl.data.formats.csv_file import read_seconds
from hpcfl.engine.job import Job
from hpcfl.schedule.plan import Attempt

if TYPE_CHECKING:
    from hpcfl.results.drawing import Picture

matplotlib, drawing = Lazy("matplotlib"), Lazy("hpcfl.results.drawing")
LAGS = 1, 2, 5, 10
RESAMPLES = 1000
FEW = 100  # rows of a client, below which deviations from its own mean hide much of how long they last
OUTLIER, FACTOR = 6.0, 1.5
"""Slow throughout is a client whose median is so many robust standard deviations above, and so many times as high."""


@dataclass(frozen=True)
class Fitted:
    """A law by maximum likelihood: how good it is, and its keys in ``[speed]`` for clients that are alike."""

    distribution: Any
    keys: dict[str, float]
    free: int

    def facts(self, values: Floats) -> dict[str, Any]:
        """Return AIC, Kolmogorov's distance and keys."""
        likelihood = float(self.distribution.logpdf(values).sum())
        distance = float(stats.ks_1samp(values, self.distribution.cdf).statistic)
        return {"aic": 2 * self.free - 2 * likelihood, "ks": distance, **self.keys}


def laws(values: Floats) -> dict[str, Fitted]:
    """Return the laws by name, as ``speed.model`` has them, of values above 0."""
    mean, least, logs = float(values.mean()), float(values.min()), np.log(values)
    spread = float(logs.std())
    shape, _, scale = stats.gamma.fit(values, floc=0)
    curve, _, width = stats.weibull_min.fit(values, floc=0)
    weibull, index = stats.weibull_min(curve, scale=width), 1 / float((logs - log(least)).mean())
    center = float(logs.mean())
    found = {
        "lognormal": (stats.lognorm(spread, scale=exp(center)), exp(center + spread**2 / 2), spread, 2),
        "gamma": (stats.gamma(shape, scale=scale), mean, shape**-0.5, 2),
        "weibull": (weibull, float(weibull.mean()), float(weibull.std() / weibull.mean()), 2),
        "shifted-exponential": (stats.expon(least, mean - least), mean, (mean - least) / mean, 2),
        "exponential": (stats.expon(scale=mean), mean, 1.0, 1),
    }
    if index > 2:  # else it has no standard deviation
        pareto = stats.pareto(index, scale=least)
        found["pareto"] = pareto, float(pareto.mean()), float(pareto.std() / pareto.mean()), 2
    return {
        name: Fitted(law, {"mean": average, "spread": float(wide)}, free)
        for name, (law, average, wide, free) in found.items()
    }


def fit(path: Path, column: str | None = None, by: Sequence[str] = ()) -> dict[str, Any]:
    """Return what ``hpcfl speeds fit`` prints last; errors as `read_seconds`.

    Laws are compared by AIC over all values. ``between`` and ``within`` are standard deviations of the logarithm: of
    the clients' means, and of values about them (of those with three values or more). ``persistence`` is the lag-1
    autocorrelation of these deviations, the mean over clients, null where none has so many values; ``lags`` has more,
    with 95 % intervals by the bootstrap over clients.
    """
    name, clients = read_seconds("--column", "--by", path, column, by)
    values = np.concatenate([*clients.values()])
    if values.max() == values.min():
        raise UsageError(f"'{path}': all values of {name} are {values[0]:g}: expected some that differ")
    found = {law: fitted.facts(values) for law, fitted in laws(values).items()}
    best = min(found, key=lambda law: float(found[law]["aic"]))
    series = {client: np.log(each) for client, each in clients.items() if len(each) >= 3}
    deviations = [each - each.mean() for each in series.values()]
    within = float(np.sqrt(np.mean(np.concatenate(deviations) ** 2))) if deviations else 0.0
    centers = np.array([np.log(each).mean() for each in clients.values()])
    lags = {lag: correlation(deviations, lag) for lag in LAGS}
    return {
        "best": best,
        "parameters": {key: found[best][key] for key in ("mean", "spread")},
        "ks": found[best]["ks"],
        "aic": found[best]["aic"],
        "persistence": lags[1][0] if lags[1] else None,
        "lags": {str(lag): each for lag, each in lags.items() if each},
        "between": float(centers.std()),
        "within": within,
        "slow": slow(clients),
        "changes": {client: at for client, each in series.items() if (at := changes(each))},
        "column": name,
        "clients": len(clients),
        "values": len(values),
        "laws": dict(sorted(found.items(), key=lambda pair: float(pair[1]["aic"]))),
    }


def picture(found: Mapping[str, Any], path: Path, by: Sequence[str] = ()) -> Picture:
    """Return a picture of what `fit` has found in a file: how often values are exceeded, how long deviations last."""
    _, clients = read_seconds("--column", "--by", path, found["column"], by)
    values = np.sort(np.concatenate([*clients.values()]))
    drawn = laws(values)
    with matplotlib.rc_context(drawing.STYLE):
        made: Picture = drawing.Picture(figsize=(drawing.INCHES["page"], 2.4), layout="constrained")
        left, right = made.subplots(1, 2)
        left.loglog(values, 1 - np.arange(len(values)) / len(values), color="#000000", label="measured")
        at = np.geomspace(values[0], values[-1], 200)
        for color, name in zip(drawing.COLOURS, [*found["laws"]][:3]):
            left.loglog(at, drawn[name].distribution.sf(at), color=color, linewidth=0.8, label=name)
        left.set(xlabel="seconds", ylabel="share of values above", ylim=(0.5 / len(values), 1.5))
        left.legend()
        for lag, (rho, low, high) in found["lags"].items():
            right.errorbar(int(lag), rho, [[rho - low], [high - rho]], color=drawing.COLOURS[0], marker="o", capsize=2)
        right.axhline(0, color="#000000", linewidth=0.6)
        said = "autocorrelation of log seconds" if found["lags"] else "no order in time is known"
        right.set(xlabel="lag in rows of a client", ylabel=said, ylim=(-0.5, 1.05))
    return made


def correlation(deviations: Sequence[Floats], lag: int) -> tuple[float, float, float] | None:
    """Return the mean over clients of the autocorrelation at a lag, and its 95 % interval; None: too few values."""
    long = [each for each in deviations if len(each) > 2 * lag and each.any()]
    if not long:
        return None
    own = np.array([(each[lag:] @ each[:-lag]) / (each @ each) for each in long])
    drawn = own[np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))].mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(own.mean()), float(low), float(high)


def slow(clients: Mapping[str, Floats]) -> dict[str, float]:
    """Return who is slow throughout, and how many times as slow as the median client."""
    medians = np.log([np.median(each) for each in clients.values()])
    center = np.median(medians)
    spread = 1.4826 * np.median(np.abs(medians - center))
    above = np.maximum(OUTLIER * spread, log(FACTOR))
    return {
        client: float(exp(each - center)) for client, each in zip(clients, medians) if spread and each - center > above
    }


def changes(logs: Floats) -> list[int]:
    """Return where a client's level changes: places of values, by binary segmentation with a penalty as BIC's.

    Variances are those of an AR(1) series, so that what only lasts is no change.
    """
    one, two = ((np.median(np.abs(logs[lag:] - logs[:-lag])) / 0.6745) ** 2 for lag in (1, 2))  # a step moves neither
    rho = float(np.clip(two / one - 1, 0.0, 0.95)) if one else 0.0
    penalty = 3 * log(len(logs)) * max(one / 2, 1e-12) * (1 + rho) / (1 - rho) ** 2
    found, left = list[int](), [(0, len(logs))]
    while left:
        first, last = left.pop()
        part = logs[first:last]
        if len(part) < 8:
            continue
        sums, counts = np.cumsum(part)[3:-4], np.arange(4, len(part) - 3)
        gain = (sums - counts * part.mean()) ** 2 * len(part) / (counts * (len(part) - counts))
        if gain.max() > penalty:
            at = first + int(counts[gain.argmax()])
            found.append(at)
            left += [(first, at), (at, last)]
    return sorted(found)


def section(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of ``[speed]`` for what `fit` has found: the law's mean, and spreads in its own terms."""
    law, mean, spread = found["best"], found["parameters"]["mean"], found["parameters"]["spread"]
    if law == "exponential":
        return ["[speed]", f"model = {toml(law)}", f"rate = {1 / mean:.4g}", 'kind = "dynamic"']
    share = found["within"] ** 2 / max(found["within"] ** 2 + found["between"] ** 2, 1e-300)
    between, within = spread * (1 - share) ** 0.5, spread * share**0.5
    if law == "lognormal":
        between, within = found["between"], found["within"]
    lines = [
        "[speed]",
        f"model = {toml(law)}",
        f"mean = {mean:.4g}",
        f"between = {between:.3g}",
        f"within = {within:.3g}",
    ]
    return lines + ([f"persistence = {found['persistence']:.3g}"] if found["persistence"] and within else [])


def told(found: Mapping[str, Any]) -> list[Any]:
    """Return a table of the laws, for people, and lines about the rest."""
    table = Table("law", *(Column(name, justify="right") for name in ("AIC", "KS", "mean s", "spread")))
    for law, each in found["laws"].items():
        table.add_row(law, *(f"{each[key]:.4g}" for key in ("aic", "ks", "mean", "spread")))
    lines = [
        f"sd of log seconds: {found['between']:.3f} between {found['clients']} clients, {found['within']:.3f} within"
    ]
    for lag, (rho, low, high) in found["lags"].items():
        lines.append(f"autocorrelation of log seconds at lag {lag}: {rho:.2f} ({low:.2f} to {high:.2f})")
    if found["lags"] and found["values"] < FEW * found["clients"]:
        each = found["values"] / found["clients"]
        lines.append(f"{each:.0f} rows for each client: so few make persistence and within too small")
    lines += [f"client {client} is {factor:.2f} times as slow throughout" for client, factor in found["slow"].items()]
    if found["changes"]:
        lines.append(f"the level changes at {len(found['changes'])} of {found['clients']} clients")
    return [table, *lines, "", *section(found)]


ROUNDS, SHOWN = 200, 10
QUANTILES = 0.05, 0.25, 0.5, 0.75, 0.95


def shown(config: Config, data_dir: Path | None) -> list[Any]:
    """Return tables of what a config's visits take over so many rounds with everybody invited."""
    everybody, ends = np.arange(config.clients), config.participation.deadline
    # steps and bytes are known once the model is
    times = Job.of(config, data_dir, 1).planner.times if config.adds_times else config.speed
    rows, begins = list[Floats](), 0.0
    for place in range(ROUNDS):
        attempt = Attempt(config.seed, config.clients, np.ones(1), place, 0, everybody, begins=begins)
        rows.append(times.seconds(attempt))
        begins += float(rows[-1].max())
    seconds = np.stack(rows)
    law = Table("seconds of a visit", *(f"{quantile:.0%}" for quantile in QUANTILES), "mean")
    if config.availability.model != "always":
        law.caption = "as if everybody were always there"
    law.add_row("all", *(f"{value:.4g}" for value in (*np.quantile(seconds, QUANTILES), seconds.mean())))
    first, ranked = Table("first n visits", "seconds, mean over rounds"), np.sort(seconds, 1).mean(0)
    for n in sorted({1, *(max(1, config.clients * part // 4) for part in range(1, 5))}):
        first.add_row(str(n), f"{ranked[n - 1]:.4g}")
    late = isinstance(ends, (int, float))
    some = Table("client", *(f"round {place}" for place in range(1, 6)), *(["misses the deadline"] * late))
    for client in np.unique(np.linspace(0, config.clients - 1, SHOWN).astype(int)):
        own = seconds[:, client]
        missed = [f"{(own > ends).mean():.0%}"] if isinstance(ends, (int, float)) else []
        some.add_row(str(client), *(f"{value:.4g}" for value in own[:5]), *missed)
    return [law, first, some]
