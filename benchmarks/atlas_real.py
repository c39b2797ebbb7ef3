"""One cell of the atlas per world, really run: predicted and measured seconds, who arrived, accuracy, and replays.

    .venv/bin/python benchmarks/atlas_real.py [--mpi openmpi] [--rounds 40] [--second 1] [--record FILE]    # 8 minutes

Five ranks, one of them the server, a client on each other one, and speeds that are enforced: a visit takes `--second`
in the mean. The same config is then run in simulated time, which predicts the seconds, who arrives when, and the
accuracy. From each recording the methods of `REPLAYED` are replayed (``speed.closing = "rule"``), and predicted from
the world's own law: a replay knows the seconds that were recorded, and draws those that were not. Where clients come
and go they stay until a visit is over, as they do in real time, and nothing can be replayed. Prints a line for each,
and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launching
import numpy as np

from hpcfl.testing.runs import toml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "analysis"), str(ROOT / "tests")]
import atlas  # noqa: E402
import study_lines  # noqa: E402

RANKS, LIMIT = 5, 900.0
CELLS = {
    "phones-diurnal": "steps",
    "pai-1": "drop",
    "pai-2": "salf-exact",
    "pai-3": "first",
    "pai-4": "salf-paper",
    "llm-se": "drop",
    "llm-ar": "wait",
    "spot": "wait",
}
"""The method that is really run in each world."""
BESIDE = {"llm-se": "fedbuff"}
"""Another one: where visits are drawn by the version that they begin with, two that arrive together change places."""
REPLAYED = "wait", "drop", "first", "salf-paper"
COME_AND_GO = "phones-diurnal", "spot"  # what of their recorded seconds was computing is not known
FIRST, BUFFER = 3, 2  # of four clients


def main() -> None:
    """Run all cells; print what was predicted and measured, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--second", type=float, default=1.0, help="seconds of a visit in the mean")
    parser.add_argument("--hosts", type=int, default=1, help="more than one: namespaces of this machine, as root")
    parser.add_argument("--worlds", nargs="*", default=list(CELLS))
    parser.add_argument("--record", type=Path, help="a file to which the JSON line is appended")
    asked = parser.parse_args()
    print(f"{asked.mpi}, {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}", flush=True)
    cells, beside, replays = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        for world in asked.worlds:
            place = Path(folder) / world
            found, recorded = cell(asked, world, CELLS[world], place)
            cells.append(found)
            if world in BESIDE:
                beside.append(cell(asked, world, BESIDE[world], place / "beside")[0])
            if world not in COME_AND_GO:
                replays += [replay(asked, world, method, recorded, place) for method in REPLAYED]
    worst = {name: max(each["error"] for each in some) for name, some in (("cells", cells), ("replays", replays))}
    same = min(each["same_arrivals"] for each in cells)
    load = round(os.getloadavg()[0], 1)
    line = {"worst_error": worst, "least_same_arrivals": same, "cells": cells, "beside": beside, "replays": replays}
    line |= {"mpi": asked.mpi, "hosts": asked.hosts}
    line |= {"rounds": asked.rounds, "second": asked.second, "load": load, "commit": study_lines.commit()}
    print(json.dumps(line))
    if asked.record:
        study_lines.append(asked.record, line)


def table(asked: argparse.Namespace, world: str, method: str, place: Path) -> dict[str, Any]:
    """Return the config of a cell with four clients, in simulated time."""
    given = atlas.settings(atlas.Cell("digits", world, "anyone", method), lr(method), 1, place)
    given |= {"clients": RANKS - 1, "rounds": asked.rounds, "evaluate": {"every": asked.rounds}}
    given["data"] = {"name": "digits", "partition": "shards", "classes": 5}
    given["speed"] = {**given["speed"], "scale": given["speed"]["scale"] * asked.second}
    rules = dict(given.get("participation", {}))
    rules |= {"deadline": rules["deadline"] * asked.second} if "deadline" in rules else {}
    rules |= {name: most for name, most in (("first", FIRST), ("buffer", BUFFER)) if name in rules}
    if "availability" in given:
        given["availability"] = {**given["availability"], "leaves": "stays"}
    return {**given, "participation": rules}


def lr(method: str) -> float:
    return float(atlas.grid()["methods"][method]["lr"][1])


def cell(asked: argparse.Namespace, world: str, method: str, place: Path) -> tuple[dict[str, Any], Path]:
    """Run a cell by both clocks; return what was found, and the folder of the real run."""
    import hpcfl

    place.mkdir()
    out = place / "real"
    given = table(asked, world, method, place)
    predicted = hpcfl.run(given, out=place / "predicted", quiet=True).data
    config = toml({**given, "clock": "wall"}, place / "run.toml")
    words = ["-m", "hpcfl", "run", str(config), "--out", str(out), "--quiet"]
    on_hosts(asked, words, place) if asked.hosts > 1 else here(asked, words, world)
    measured = hpcfl.open_run(out)
    found = told(f"{world}, {method}", predicted, measured)
    return found | {"same_arrivals": same(predicted, measured)}, out


def here(asked: argparse.Namespace, words: list[str], mark: str) -> None:
    """Carry out a job on this host."""
    how: dict[str, Any] = {"timeout": LIMIT, "capture_output": True, "text": True, "check": False}
    job = launching.command(asked.mpi, RANKS, words)
    ended = subprocess.run(job, env=launching.environment(asked.mpi, mark), **how)
    if ended.returncode:
        raise RuntimeError(f"{mark}: exit code {ended.returncode}: {ended.stderr[-2000:]}")


def on_hosts(asked: argparse.Namespace, words: list[str], place: Path) -> None:
    """Carry out a job on hosts of our own, the server and a client on the first one."""
    from hosts.cluster import Cluster

    ranks = [RANKS - asked.hosts + 1] + [1] * (asked.hosts - 1)
    options = ("--bind-to", "none") if asked.mpi == "openmpi" else ()
    given = asked.mpi, ranks, words, place / "job", options
    with Cluster(asked.hosts, [place]) as cluster, cluster.live(*given) as job:
        if job.wait():
            raise RuntimeError(job.out + job.err)


def same(one: Any, other: Any) -> float:
    """Return the share of visits that came in the same round, or after as many others, in both."""
    names = ("arrival_client", "arrival_version") if "arrival_client" in one else ("arrived", "depth")
    alike = np.logical_and(*(one[name].values == other[name].values for name in names))
    return float(alike.mean())


def replay(asked: argparse.Namespace, world: str, method: str, recorded: Path, place: Path) -> dict[str, Any]:
    """Replay a method from a recording, and hold the seconds against those of the world's own law."""
    import hpcfl

    given = table(asked, world, method, place)
    predicted = hpcfl.run(given, out=place / f"{method}-by-law", quiet=True).data
    speed = {"model": "trace", "closing": "rule", "run": str(recorded)}
    replayed = hpcfl.run({**given, "speed": speed}, out=place / f"{method}-replayed", quiet=True).data
    return told(f"{world}, {CELLS[world]} replayed by {method}", predicted, replayed)


def told(what: str, predicted: Any, measured: Any) -> dict[str, Any]:
    """Print and return seconds and accuracies, and how far the former are off."""
    seconds = [float(each["sim_seconds"].values[-1]) for each in (predicted, measured)]
    accuracy = [round(float(each["accuracy"].dropna("round").values[-1]), 4) for each in (predicted, measured)]
    error = abs(seconds[0] / seconds[1] - 1)
    print(f"  {what:45} {seconds[0]:7.2f} s {seconds[1]:7.2f} s {100 * error:5.2f} %  {accuracy}", flush=True)
    return {"what": what, "predicted": seconds[0], "measured": seconds[1], "error": error, "accuracy": accuracy}


if __name__ == "__main__":
    main()
