"""SRPFL's theory beside runs of its linear case: equations 7 to 10 and 12, Lemmas B.2 and B.3, Remark B.4.

    python analysis/srpfl_theory.py [--seeds 20] [--set KEY=VALUE ...]

Runs the presets srpfl-linear and fedrep-linear, with the settings on top, and prints one JSON line. The extreme
singular values of equations 8 and 9 are those over the nested sets of the n fastest clients, n0 ≤ n ≤ N, since no other
sets take part. `factor` is by how much FedRep's distance shrinks per round until it is half of that at the start.
Times of methods are means over seeds until ε of equation 12, by 100 ĉ; null where some seed does not reach it. `kept`
are the shares of rounds in which the distance is at most what (10) allows. `equality` are the times that (10) gives,
were it an equality, with ĉ = 1.2, the largest a and no communication, beside the bounds of the lemmas. Costs half a
second per seed and 64 clients.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from math import inf, isfinite, log, log2, nan, sqrt
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import hpcfl
from hpcfl.algorithms.linear_fedrep import B, LinearFedRep
from hpcfl.config import Config, load
from hpcfl.data.linear_federation import LinearFederation
from hpcfl.engine.job import Job
from hpcfl.schedule.doubling import Theory as Stages
from hpcfl.schedule.doubling import stages, wanted

Floats = npt.NDArray[np.float64]
METHODS = {"SRPFL": "srpfl-linear", "FedRep": "fedrep-linear"}
CONSTANTS = 1.05, 1.2, 1.35
"""Values of ĉ."""


def spread(heads: Floats, first: int) -> tuple[float, float]:
    """Return σ̄_min and σ̄_max of the first n of these heads, over n from `first` to all (equations 8 and 9)."""
    values = [np.linalg.svd(heads[:n] / sqrt(n), compute_uv=False) for n in range(first, len(heads) + 1)]
    return float(min(each.min() for each in values)), float(max(each.max() for each in values))


@dataclass(frozen=True)
class Theory:
    """What the theory says of N clients, n0 of them at first; c: seconds of communication, λ = 1."""

    clients: int
    first: int
    a: float
    c: float = 0.0

    def bound(self, distance: Floats, visits: Floats) -> Floats:
        """Return what the distance is at most after a round, by (10)."""
        return distance * sqrt(1 - self.a) + self.a / np.sqrt(visits / self.first * (1 - self.a))

    def target(self, constant: float) -> float:
        """Return ε of (12)."""
        return constant * self.a / (sqrt(self.clients / self.first * (1 - self.a)) * (1 - sqrt(1 - self.a)))

    def srpfl(self, constant: float) -> float:
        """Return the seconds that SRPFL takes at most (Lemma B.2); its proof needs logarithms to the base 2."""
        each = 6 * (self.c + 1) + 4 * log2(1 / (constant - 1))
        return log2(self.clients) * each / log2(1 / (1 - self.a))

    def fedrep(self, constant: float) -> float:
        """Return the seconds that FedRep takes at least (Lemma B.3); its proof needs natural logarithms."""
        return log(self.clients) * (log(self.clients) + 2 * log(1 / (constant - 1))) / log(1 / (1 - self.a))

    def followed(self, constant: float, doubling: bool) -> float:
        """Return the seconds until ε from the distance 1 on, if (10) holds with equality and times are expected ones.

        With doubling, a stage is left at the distance of Lemma B.1.
        """
        times = np.cumsum(1 / np.arange(self.clients, 0, -1))
        limits, last = Stages(times, self.first, self.a, self.c), stages(self.first, self.clients) - 1
        distance, seconds, stage = 1.0, 0.0, 0 if doubling else last
        while distance > self.target(constant):
            while stage < last and limits.leaves_at(stage) >= distance:
                stage += 1
            visits = wanted(self.first, self.clients, stage)
            distance = float(self.bound(np.array(distance), np.array(visits)))
            seconds += float(times[visits - 1]) + self.c
        return seconds

    def times(self, constant: float) -> dict[str, float]:
        """Return what (10) with equality and the two lemmas say."""
        most, least = self.srpfl(constant), self.fedrep(constant)
        srpfl, fedrep = (self.followed(constant, doubling) for doubling in (True, False))
        return {"SRPFL": srpfl, "most": most, "FedRep": fedrep, "least": least}


@dataclass(frozen=True)
class Curve:
    """A run: distances before the first round and after each, seconds until then, and the rounds' visits."""

    distance: Floats  # [rounds + 1]
    seconds: Floats  # [rounds + 1]
    visits: Floats  # [rounds]

    def until(self, target: float) -> float:
        """Return the seconds until the distance is first at most `target`; inf: never."""
        there = np.flatnonzero(self.distance <= target)
        return float(self.seconds[there[0]]) if len(there) else inf

    def factor(self) -> float:
        """Return by how much the distance shrinks per round until it is half of that at the start; NaN: it is not."""
        there = np.flatnonzero(self.distance <= self.distance[0] / 2)
        return float((self.distance[there[0]] / self.distance[0]) ** (1 / there[0])) if len(there) else nan

    def kept(self, theory: Theory) -> float:
        """Return the share of rounds after which the distance is at most what (10) allows."""
        return float(np.mean(self.distance[1:] <= theory.bound(self.distance[:-1], self.visits)))


def curve(config: Config, job: Job, folder: Path) -> Curve:
    """Return what came of a run; the method of moments, where it is used, is the start and no round."""
    data = hpcfl.open_run(folder)
    distance, seconds, visits = (data[name].values for name in ("distance", "sim_seconds", "arrived"))
    if cast("LinearFedRep", config.algorithm).initial == "moments":
        return Curve(distance, seconds, visits[1:].sum(1))
    start, _ = np.linalg.qr(job.task.initial()[B].double().numpy().T)
    truth = cast("LinearFederation", job.task.federation).truth
    begin = float(np.linalg.norm(start - truth @ (truth.T @ start), 2))
    return Curve(np.r_[begin, distance], np.r_[0.0, seconds], visits.sum(1))


def compared(seed: int, settings: list[str]) -> dict[str, Any]:
    """Return the theory's figures and the runs' of one seed."""
    curves, first = dict[str, Curve](), 0
    for method, preset in METHODS.items():
        with TemporaryDirectory() as folder:
            asked = [*settings, f"seed={seed}", "evaluate.every=100000"]
            config = load(preset, asked)
            hpcfl.run(config, out=Path(folder) / "run", quiet=True)
            job = Job.of(config, None, 1)
            curves[method] = curve(config, job, Path(folder) / "run")
        first = max(first, config.participation.first or 0)
    federation = cast("LinearFederation", job.task.federation)
    rate = cast("LinearFedRep", config.algorithm).lr
    order = np.argsort(config.speed.paces(seed, config.clients))
    least, most = spread(federation.heads[order], first)
    e0 = 1 - float(curves["FedRep"].distance[0]) ** 2
    a = rate * e0 * least**2 / 2
    theory = Theory(config.clients, first, a, config.speed.communication)
    return {
        "E0": e0,
        "sigma_min": least,
        "sigma_max": most,
        "largest_step": 1 / (8 * most**2),
        "step_fits": float(rate <= (1 + 1e-9) / (8 * most**2)),
        "a": a,
        "factor": {"theory": sqrt(1 - a), "measured": curves["FedRep"].factor()},
        "kept": {method: each.kept(theory) for method, each in curves.items()},
        "times": {
            f"{100 * constant:.0f}": {
                "target": theory.target(constant),
                "SRPFL": curves["SRPFL"].until(theory.target(constant)),
                "most": theory.srpfl(constant),
                "FedRep": curves["FedRep"].until(theory.target(constant)),
                "least": theory.fedrep(constant),
            }
            for constant in CONSTANTS
        },
        "end": {method: float(each.distance[-1]) for method, each in curves.items()},
    }


def merged(found: list[Any]) -> Any:
    """Return means of figures that are each a tree of numbers; null where one is not finite."""
    if isinstance(found[0], dict):
        return {name: merged([each[name] for each in found]) for name in found[0]}
    return float(f"{fmean(found):.5g}") if all(map(isfinite, found)) else None


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for hpcfl run")
    asked = parser.parse_args()
    found = [compared(seed, asked.set) for seed in range(1, asked.seeds + 1)]
    starts = [sqrt(1 - each["E0"]) for each in found]
    start = {"mean": round(fmean(starts), 5), "largest": round(max(starts), 5)}
    equality = {str(clients): Theory(clients, 2, 0.25).times(1.2) for clients in (64, 512, 4096)}
    told = {"seeds": asked.seeds, "start": start, **merged(found), "equality": merged([equality])}
    print(json.dumps(told, allow_nan=False))


if __name__ == "__main__":
    main()
