"""The law that the running time of oracle complexity rests on, beside a simulation (Jadbabaie, Makur & Shah).

    python analysis/running_time.py [RUN ...]

A gradient takes 1 + X units, X exponential with rate 1, so b of them take b + Y, Y of Erlang's law with shape b; m
clients take b + max Y. The paper takes F^-1(1 - 1/m), the quantile that Proposition 2 bounds, for log m + b (eq. 18),
and so 2b + log m for the mean (eq. 19), which is what `running_time` records. Vectors are sent through a queue, M/M/1
in its steady state, and the time for m of them is of Erlang's law with shape m.

Prints for some b and m: the quantile, its bounds and eq. 18; the mean of b + max Y by the law itself, by its limit
(Gumbel's, eq. 17), by eq. 19 and simulated; the mean and the variance of the simulated queue. For each run folder: the
sum of what it recorded as `running_time`, of the law's means, and of simulated times. Costs 20 s. Prints one JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from scipy.integrate import quad
from scipy.special import gammainc, gammainccinv

import hpcfl
from hpcfl.base.errors import RunError, UsageError

Floats = npt.NDArray[np.float64]

GRADIENTS = (1, 10, 100, 1000)
CLIENTS = (2, 10, 50, 1000)
SEED = 1
DRAWS = 20_000
NUMBERS = 4_000_000
"""Most random numbers at a time."""
RATE = 2.0
"""Rate of the queue's service, ν; the law does not depend on it."""


def quantile(b: int, m: float) -> float:
    """Return F^-1(1 - 1/m), F being Erlang's law with shape b."""
    return float(gammainccinv(b, 1 / m))


def bounds(b: int, m: int) -> tuple[float, float] | None:
    """Return Proposition 2's bounds of it; None where (m - 1) b < 55, for which it says nothing."""
    if (m - 1) * b < 55:
        return None
    return (log(m - 1) + log(b)) / 2, 2 * log(m - 1) + 2 * b * log(2 * b)


def slowest(b: int, m: int) -> float:
    """Return the mean of b + max Y over m clients, by the law: b + ∫ 1 - F(y)^m dy."""
    edges = [0.0, *(quantile(b, m * k) for k in (2, 100, 1e6, 1e12))]
    return b + sum(float(quad(lambda y: 1 - gammainc(b, y) ** m, *ends, limit=200)[0]) for ends in pairwise(edges))


def limit(b: int, m: int) -> float:
    """Return the same mean by Gumbel's law (eq. 17): b + q + γ a(q), with q the quantile and a eq. 16's function."""
    q, term, a = quantile(b, m), 1.0, 0.0
    for k in range(b):
        a += term
        term *= (b - 1 - k) / q
    return b + q + float(np.euler_gamma) * a


def simulated(b: int, m: int, rng: np.random.Generator, draws: int = DRAWS) -> tuple[float, float]:
    """Return mean and standard error of b + max Y in a simulation that adds up b exponential times for each client."""
    each = max(1, NUMBERS // (m * b)) if m * b <= NUMBERS else 1
    draws = min(draws, max(50, 50 * NUMBERS // (m * b)))
    found: list[float] = []
    while len(found) < draws:
        found += (b + rng.standard_exponential((each, m, b)).sum(2).max(1)).tolist()
    times = np.array(found[:draws])
    return float(times.mean()), float(times.std(ddof=1) / sqrt(draws))


def queue(m: int, rng: np.random.Generator, draws: int = DRAWS) -> tuple[float, float]:
    """Return mean and variance of the time until m vectors have left a queue that is in its steady state."""
    waiting = rng.geometric(1 - 1 / RATE, draws) - 1  # P(n) = (1 - 1/ν) ν^-n, arrivals having rate 1
    last, arrived, done = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    for number in range(m):
        new = number >= waiting
        arrived = arrived + new * rng.standard_exponential(draws)
        last = np.maximum(last, new * arrived) + rng.standard_exponential(draws) / RATE
        done = last
    return float(done.mean()), float(done.var(ddof=1))


def row(b: int, m: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the figures of one b and m."""
    mean, error = simulated(b, m, rng)
    exact, paper = slowest(b, m), 2 * b + log(m)
    found = {"b": b, "m": m, "quantile": quantile(b, m), "bounds": bounds(b, m), "eq18": log(m) + b, "law": exact}
    found |= {"limit": limit(b, m), "simulated": mean, "error": error, "eq19": paper}
    return found | {"off": paper / exact - 1}


def of_run(folder: Path, rng: np.random.Generator) -> dict[str, Any]:
    """Return the running time of a run: recorded, by the law, and simulated once for each draw of all rounds."""
    data = hpcfl.open_run(folder)
    if "running_time" not in data:
        raise SystemExit(f"{folder}: no running time was recorded, expected oracle.record = true")
    phi = json.loads(data.attrs["config"])["oracle"]["phi"]
    rounds = zip(*(data[name].values.tolist() for name in ("gradients", "server_gradients", "vectors")))
    active = data["arrived"].values.sum(1).astype(int).tolist()
    law, total = 0.0, np.zeros(200)
    for (b, server, vectors), m in zip(rounds, active):
        law += (slowest(b, m) if b else 0.0) + 2 * server + phi * vectors
        computing = rng.gamma(b, size=(len(total), m)).max(1) + b if b else 0.0
        serving = rng.gamma(server, size=len(total)) + server if server else 0.0
        # sending m vectors takes Erlang's time of shape m, of which φ is the mean unit
        total += computing + serving + (phi * rng.gamma(vectors, size=len(total)) if vectors else 0.0)
    recorded = float(data["running_time"].sum())
    error = float(total.std(ddof=1) / sqrt(len(total)))
    return {"run": folder.name, "recorded": recorded, "law": law, "simulated": float(total.mean()), "error": error}


def tables(rows: list[dict[str, Any]], queues: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[Table]:
    """Return what is printed."""
    quantiles = Table("b", "m", "F⁻¹(1 − 1/m)", "Proposition 2", "log m + b", title="The quantile of Erlang's law")
    means = Table("b", "m", "law", "Gumbel", "simulated", "2b + log m", "off", title="The mean of b + max Y")
    for each in rows:
        low, high = each["bounds"] or (None, None)
        within = "-" if low is None else f"{low:.3g} … {high:.4g}"
        head = str(each["b"]), str(each["m"])
        quantiles.add_row(*head, f"{each['quantile']:.2f}", within, f"{each['eq18']:.2f}")
        found = f"{each['simulated']:.2f} ± {each['error']:.2f}"
        cells = [f"{each['law']:.2f}", f"{each['limit']:.2f}", found, f"{each['eq19']:.2f}", f"{each['off']:+.1%}"]
        means.add_row(*head, *cells)
    sent = Table("m", "mean", "variance", title="Time until m vectors have left the queue: both are m by the law")
    for each in queues:
        sent.add_row(str(each["m"]), f"{each['mean']:.2f}", f"{each['variance']:.2f}")
    whole = Table("run", "recorded", "law", "simulated", title="Running time of whole runs")
    for each in runs:
        found = f"{each['simulated']:,.0f} ± {each['error']:,.0f}"
        whole.add_row(each["run"], f"{each['recorded']:,.0f}", f"{each['law']:,.0f}", found)
    return [quantiles, means, sent, *([whole] if runs else [])]


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--gradients", nargs="+", type=int, default=GRADIENTS, help="values of b")
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS, help="values of m, at least 2")
    options = parser.parse_args()
    rng = np.random.default_rng(SEED)
    rows = [row(b, m, rng) for b in options.gradients for m in options.clients]
    queues = [dict(zip(("m", "mean", "variance"), (m, *queue(m, rng)))) for m in options.clients]
    try:
        runs = [of_run(folder, rng) for folder in options.runs]
    except (UsageError, RunError) as error:
        raise SystemExit(str(error)) from None
    for table in tables(rows, queues, runs):
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(json.dumps({"running_time": {"laws": rows, "queues": queues, "runs": runs}}, allow_nan=False))


if __name__ == "__main__":
    main()
