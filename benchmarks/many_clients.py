"""How long rounds of many clients take, and how much memory, in simulated time on one rank.

    .venv/bin/python benchmarks/many_clients.py [--clients 1024 131072] [--rounds 100] [--share 0.01]    # 3 minutes

Linear regression; a hundredth of the clients is invited to each round, and draws its samples then. Printed per number
of clients: seconds of the whole command, and the most memory that it had. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

CONFIG = """
seed = 1
algorithm = { name = "fedavg", lr = 0.05, steps = 1, epochs = 0, batch = 0 }
data.name = "linear"
model.name = "linear"
speed = { model = "lognormal", within = 0.3 }
"""


def main() -> None:
    """Run all sizes, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1024, 131072])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.01)
    asked = parser.parse_args()
    found = []
    for clients in asked.clients:
        with TemporaryDirectory() as folder:
            size = max(1, round(asked.share * clients))
            rows = [f"clients = {clients}", f"rounds = {asked.rounds}", f"evaluate.every = {asked.rounds}"]
            rows += ['participation.invite = "uniform"', f"participation.size = {size}"]
            Path(folder, "run.toml").write_text("\n".join(rows) + CONFIG)
            words = [sys.executable, "-m", "hpcfl", "run", "run.toml", "--out", "run", "--quiet"]
            began = time.monotonic()
            subprocess.run(words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
            seconds = time.monotonic() - began
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of all so far: sizes ascend
        found.append({"clients": clients, "invited": size, "seconds": round(seconds, 1), "MB": round(most)})
        print(f"{clients:8} clients, {size:6} invited: {seconds:7.1f} s, {most:7.0f} MB", flush=True)
    print(json.dumps({"rounds": asked.rounds, "sizes": found, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
