"""Goodput with a slow rank and a dead one: Decoupled DiLoCo beside DiLoCo, in real time.

    python benchmarks/goodput.py [--mpi openmpi|mpich] [--seconds 12]

Five ranks, of which four host a client each, on the bundled digits. Visits of 10 AdamW steps are slowed down, by
sleeping, to .1 s; one client takes five times as long, and the rank of another is killed after a third of the time.
``diloco``: rounds wait for all who are left. ``decoupled``: the server merges a third of the model with each 2 reports,
and what comes in the 50 ms after. ``decoupled-fresh``: the same without reports that are late, whose workers go on all
the same. Of each:

- ``samples``: training samples per second of visits that counted, the goodput; ``before`` and ``after`` the death;
- ``counted``: share of the visits of the ranks that are left;
- ``longest``: the longest step of the server, in seconds;
- ``accuracy``: at the end.

Prints a table and one JSON line last. 1 to 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import launching
import numpy as np

CONFIG = """
rounds = {rounds}
clients = 4
clock = "wall"
lane_width = 1
{lost}

[evaluate]
every = 1000000
last = 1

[checkpoint]
every = 1000000

[algorithm]
name = "{name}"
optimizer = "adamw"
lr = 0.003
persist_optimizer = true
epochs = 0
steps = {steps}
batch = {batch}
weights = "uniform"

[server]
optimizer = "nesterov"
lr = 0.3

[participation]
{closing}

[fragments]
count = {count}

[speed]
model = "table"
file = "{speeds}"

[data]
name = "digits"

[model]
name = "mlp"
hidden = [32, 16]
"""
RANKS, VICTIM, STEPS, BATCH, QUICK, SLOW = 5, 2, 10, 16, 0.1, 0.5
ARRIVALS = 'close = "arrivals"\nbuffer = 2\ngrace = 0.05\n'
WAYS = {  # name of the algorithm, participation, fragments, and seconds of a step of the server, about
    "diloco": ("fedavg", 'close = "all"', 1, SLOW),
    "decoupled": ("decoupled_diloco", ARRIVALS, 3, 1.3 * QUICK),
    "decoupled-fresh": ("decoupled_diloco", ARRIVALS + "max_staleness = 0", 3, 1.3 * QUICK),
}
LIMIT_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run, about")
    asked = parser.parse_args()
    found = {}
    for way in WAYS:
        found[way] = measured(asked.mpi, way, asked.seconds)
        print(f"  {way:16}", "  ".join(f"{name} {value}" for name, value in found[way].items()), flush=True)
    print(json.dumps({"mpi": asked.mpi, "load": launching.load(), "ways": found}))


def measured(mpi: str, way: str, seconds: float) -> dict[str, Any]:
    """Return the figures of one run."""
    from hpcfl import store

    name, closing, count, each = WAYS[way]
    with tempfile.TemporaryDirectory() as here:
        file, folder, speeds = (Path(here, each) for each in ("goodput.toml", "run", "speeds.csv"))
        times = [SLOW if client == RANKS - 2 else QUICK for client in range(RANKS - 1)]
        speeds.write_text("client,seconds\n" + "".join(f"{client},{time}\n" for client, time in enumerate(times)))
        lost = "lost_after = 2.0" if mpi == "mpich" else ""
        facts = {"name": name, "closing": closing, "count": count, "steps": STEPS, "batch": BATCH, "speeds": speeds}
        file.write_text(CONFIG.format(rounds=int(seconds / each), lost=lost, **facts))
        args = [__file__, str(seconds / 3), "run", str(file), "--out", str(folder), "--quiet", "--profile"]
        launching.run(mpi, RANKS, args, LIMIT_SECONDS, outlive=True)
        data = store.open_run(folder)
        ends, computed = data["wall_seconds"].values, data["visits"].values.sum()
        counted = (data["arrived"].values == 1).sum(1)
        if "arrival_depth" in data:
            counted = (data["arrival_depth"].values == 1).sum(1)
        (died,) = {event["round"] for event in store.events(folder) if event["kind"] == "lost"}
        accuracy = float(data["accuracy"].values[-1])
    death = ends[died]

    def rate(rows: np.ndarray[Any, Any], seconds: float) -> float:
        return round(float(counted[rows].sum() * STEPS * BATCH / seconds), 1)

    return {
        "samples": rate(ends > 0, ends[-1]),
        "before": rate(ends <= death, death),
        "after": rate(ends > death, ends[-1] - death),
        "counted": round(float(counted.sum() / computed), 3),
        "longest": round(float(np.diff(ends).max()), 2),
        "accuracy": round(accuracy, 3),
    }


def job(after: float, words: list[str]) -> None:
    """Be one rank of a run; one of them is killed."""
    from mpi4py import MPI

    from hpcfl.commands.cli import main as command

    def die() -> None:
        while not any(Path(words[words.index("--out") + 1], "metrics").glob("*")):  # the first round has not begun
            time.sleep(0.05)
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    if MPI.COMM_WORLD.Get_rank() == VICTIM:
        threading.Thread(target=die, daemon=True).start()
    sys.exit(command(words))


if __name__ == "__main__":
    if launching.inside():
        job(float(sys.argv[1]), sys.argv[2:])
    else:
        main()
