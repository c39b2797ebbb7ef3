"""Rounds that arrivals end, beside rounds that wait for all: steps of the server, staleness, ranks that wait.

    python benchmarks/arrivals.py [--mpi openmpi|mpich] [--ranks 5 33] [--visits 400]

FedAvg on the bundled digits in real time, a client on each client rank. Visits are slowed down, by sleeping, to
exponential times; a quarter of the clients have a mean ten times that of the others. The means are 5 and 50 ms times
the number of clients, so that many ranks can share few cores. ``all``: rounds wait for all; ``arrivals``: the server
takes a step with every K = half as many visits as there are clients, all of which are at work; changes count
(1 + staleness)^-1/2 times. About as many visits are done either way. Figures of each:

- ``steps``: steps of the server per second, and ``visits`` that counted per second;
- ``staleness``: mean and largest, in the server's steps;
- ``waiting``: share of the rounds' time in which client ranks have nothing to do, mean and largest over the ranks;
- ``accuracy``: at the end, and ``to_accuracy``: seconds to 85 %.

1 to 2 minutes. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import launching
import numpy as np

CONFIG = """
rounds = {rounds}
clients = {clients}
clock = "wall"

[evaluate]
every = {every}

[checkpoint]
every = 1000000

[participation]
{closing}

[algorithm]
name = "fedavg"
lr = 0.1
batch = 10

[speed]
model = "groups"
kind = "dynamic"
means_of = {means}
shares_of = [0.75, 0.25]

[data]
name = "digits"

[model]
name = "mlp"
hidden = [32]
"""
LIMIT_SECONDS = 300.0
WANTED = 0.85


def main() -> None:
    """Run both ways on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 33])
    parser.add_argument("--visits", type=int, default=400)
    asked = parser.parse_args()
    found = []
    for ranks in asked.ranks:
        clients, buffer = ranks - 1, max(1, (ranks - 1) // 2)
        for close, each, closing in (
            ("all", clients, 'close = "all"'),
            ("arrivals", buffer, f'close = "arrivals"\nbuffer = {buffer}\n[staleness]\nweight = "polynomial"'),
        ):
            rounds = max(2, asked.visits // each)
            facts = {"clients": clients, "means": [0.005 * clients, 0.05 * clients]}
            config = CONFIG.format(rounds=rounds, every=max(1, clients // each), closing=closing, **facts)
            found.append({"ranks": ranks, "close": close, **measured(asked.mpi, ranks, config)})
            print("  ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    print(json.dumps({"mpi": asked.mpi, "visits": asked.visits, "load": launching.load(), "runs": found}))


def measured(mpi: str, ranks: int, config: str) -> dict[str, Any]:
    """Return the figures of one run."""
    from hpcfl import store

    with tempfile.TemporaryDirectory() as name:
        file, folder = Path(name, "arrivals.toml"), Path(name, "run")
        file.write_text(config)
        args = ["-m", "hpcfl", "run", str(file), "--out", str(folder), "--quiet", "--profile"]
        profile = launching.run(mpi, ranks, args, LIMIT_SECONDS)["profile"]
        data = store.open_run(folder)
        columns = ("wall_seconds", "accuracy", "arrived", "arrival_client", "arrival_staleness")
        kept = {name: data[name].values for name in columns if name in data}
    seconds, accuracy = kept["wall_seconds"], kept["accuracy"]
    counted, stale = (kept["arrived"] == 1).sum(), np.zeros(1)
    if "arrival_client" in kept:
        there = kept["arrival_client"] >= 0
        counted, stale = there.sum(), kept["arrival_staleness"][there]
    reached = np.flatnonzero(accuracy >= WANTED)
    waiting = [rank["shares"]["waiting"] for rank in profile if rank["rank"] > 0]
    return {
        "steps": round(len(seconds) / seconds[-1], 1),
        "visits": round(counted / seconds[-1], 1),
        "staleness": [round(float(stale.mean()), 2), int(stale.max())],
        "waiting": [round(float(np.mean(waiting)), 3), round(max(waiting), 3)],
        "accuracy": round(float(accuracy[~np.isnan(accuracy)][-1]), 3),
        "to_accuracy": round(float(seconds[reached[0]]), 2) if len(reached) else None,
    }


if __name__ == "__main__":
    main()
