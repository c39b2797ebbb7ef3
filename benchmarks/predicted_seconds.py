"""How far predicted seconds are from jobs that are then really run: by `hpcfl check`, and by a replay of another job.

    .venv/bin/python benchmarks/predicted_seconds.py [--mpi openmpi] [--rounds 50] [--second 0.6]     # 11 minutes

Five ranks, a client on each but the server's: worlds whose seconds are enforced. Under each of the rules in `RULES` the
plan by the config's seed says how long the job takes, and the job is run by the wall clock: that is what is predicted,
and what was measured. Each job is scaled so that its rounds last `--second` seconds in the mean. Then, for `PAIRS` of
rules, a job under the first one is replayed by the second (``speed.closing = "rule"``), and held against the job that
was run under it, both scaled alike. Prints a line for each, and one JSON line last with the medians of the errors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launching

RANKS, LIMIT = 5, 600.0
WORLDS = "world/pai-4", "world/fail-slow"
RULES: dict[str, dict[str, Any]] = {
    "all": {},
    "first 3": {"participation.close": "first", "participation.first": 3},
    "quorum 2": {"participation.close": "quorum", "participation.quorum": 2, "participation.grace": 0.2},
    "deadline": {"participation.close": "deadline", "participation.deadline": 1.1},
    "arrivals": {"participation.close": "arrivals", "participation.buffer": 3},
}
"""Seconds are shares of those of a round that waits for everybody."""
SECONDS = "participation.grace", "participation.deadline"
PAIRS = ("all", "first 3"), ("all", "arrivals"), ("first 3", "all"), ("deadline", "all"), ("deadline", "first 3")
QUICKEST = "first 3"
"""The rule of which the replays' rounds last as long as they should."""


def main() -> None:
    """Run all jobs; print errors, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--second", type=float, default=0.6, help="seconds of a round in the mean")
    asked = parser.parse_args()
    print(f"{asked.mpi}, {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}", flush=True)
    jobs, replays = list[dict[str, Any]](), list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        for world in WORLDS:
            for name in RULES:
                settings = scaled(world, name, name, asked.rounds, asked.second)
                out = Path(folder) / f"{world.partition('/')[2]}-{name.replace(' ', '-')}"
                measured = run(asked.mpi, world, asked.rounds, settings, out)
                jobs.append(told(f"{world}, {name}", planned(world, asked.rounds, settings), measured))
        runs = dict[str, Path]()
        for name in dict.fromkeys(each for pair in PAIRS for each in pair):
            settings, runs[name] = scaled(WORLDS[0], name, QUICKEST, asked.rounds, asked.second), Path(folder) / name
            run(asked.mpi, WORLDS[0], asked.rounds, settings, runs[name])
        for one, other in PAIRS:
            rule = scaled(WORLDS[0], other, QUICKEST, asked.rounds, asked.second)
            rule.pop("speed.scale")
            speed = {"speed.model": "trace", "speed.closing": "rule", "speed.run": str(runs[one])}
            found = planned("", asked.rounds, {**rule, **speed})
            replays.append(told(f"{one} replayed by {other}", found, seconds(runs[other])))
    errors = {
        name: statistics.median(each["error"] for each in some) for name, some in (("jobs", jobs), ("replays", replays))
    }
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"median_error": errors, "jobs": jobs, "replays": replays, "mpi": asked.mpi, "load": load}))


def scaled(world: str, name: str, other: str, rounds: int, second: float) -> dict[str, Any]:
    """Return the settings of a rule at the scale at which rounds by another one last so many seconds in the mean."""
    whole = planned(world, rounds, {}) / rounds
    scale = second * rounds / planned(world, rounds, in_seconds(RULES[other], whole))
    return {**in_seconds(RULES[name], scale * whole), "speed.scale": scale}


def in_seconds(rule: dict[str, Any], whole: float) -> dict[str, Any]:
    """Return a rule with its seconds, where a round that waits for everybody takes so many."""
    return {key: value * whole if key in SECONDS else value for key, value in rule.items()}


def told(what: str, predicted: float, measured: float) -> dict[str, Any]:
    """Print and return how far a prediction is off, as a share of what was measured."""
    error = abs(predicted / measured - 1)
    print(f"  {what:40} predicted {predicted:7.2f} s   measured {measured:7.2f} s   {100 * error:5.2f} %", flush=True)
    return {"what": what, "predicted": predicted, "measured": measured, "error": error}


def base(world: str, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `hpcfl.config.load` is given beside the preset."""
    keys = {"clients": RANKS - 1, "rounds": rounds, "evaluate.every": rounds, **settings}
    return {"settings": keys, "overlays": [world] if world else []}


def planned(world: str, rounds: int, settings: dict[str, Any]) -> float:
    """Return how long all rounds take by the plan."""
    from itertools import islice

    from hpcfl.config import load
    from hpcfl.engine.job import Job

    job = Job.of(load("fedavg-digits", **base(world, rounds, settings)), None, 1)
    return sum(plan.duration for plan in islice(job.planner.plans(), rounds))


def run(mpi: str, world: str, rounds: int, settings: dict[str, Any], out: Path) -> float:
    """Run a job by the wall clock; return the seconds that its rounds took."""
    given = base(world, rounds, {**settings, "clock": "wall"})
    words = ["-m", "hpcfl", "run", "fedavg-digits", "--out", str(out), "--quiet"]
    words += [word for name in given["overlays"] for word in ("--with", name)]
    words += [word for key, value in given["settings"].items() for word in ("--set", f"{key}={json.dumps(value)}")]
    environment = launching.environment(mpi, out.name)
    ended = subprocess.run(
        launching.command(mpi, RANKS, words),
        env=environment,
        timeout=LIMIT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{out.name}: exit code {ended.returncode}: {ended.stderr[-2000:]}")
    return seconds(out)


def seconds(folder: Path) -> float:
    """Return the seconds that the rounds of a run took."""
    import hpcfl

    return float(hpcfl.open_run(folder)["sim_seconds"].values[-1])


if __name__ == "__main__":
    main()
