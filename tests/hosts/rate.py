"""How long a round takes where cables are slow: ``PYTHONPATH=tests python -m hosts.rate [--mbit 100] [--ranks 4]``.

Jobs in real time over two levels on four hosts, of a model of 10.5 MB, in which everybody is waited for. A round is
compared with what the server's cable needs for one copy of the state to each other host, at 4 bytes a number, and one
copy of the sums from each, at 8: it can be less, since a host may send while another one is still sent to.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from helpers.launcher import mpis
from hosts.cluster import Cluster, missing
from hosts.test_hosts import REAL, over, run
from hpcfl import store
from hpcfl.testing.runs import toml

HOSTS, ROUNDS, HIDDEN = 4, 8, 1580
NUMBERS = 64 * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN + HIDDEN * 10 + 10


def seconds(mpi: str, ranks: int, mbit: float, width: Any) -> list[float]:
    """Return the seconds of each round of a job, but those of the first."""
    more: dict[str, Any] = {"lane_width": width, "clients": HOSTS * ranks - 1, "rounds": ROUNDS}
    more |= {"participation": {"close": "all"}, "evaluate": {"every": ROUNDS}}
    with tempfile.TemporaryDirectory(prefix="rate-") as name:
        here = Path(name)
        config = toml(REAL | more | {"model": {"name": "mlp", "hidden": [HIDDEN, HIDDEN]}}, here / "run.toml")
        options = ("--bind-to", "none") if mpi == "openmpi" else ()  # there may be fewer cores than ranks
        with Cluster(HOSTS, [here]) as cluster:
            for host in cluster.names:
                cluster.rate(host, mbit)
            with cluster.live(mpi, [ranks] * HOSTS, run(here / "run", config), here / "job", options) as job:
                over(cluster, job)
        found: list[float] = store.open_run(here / "run")["round_seconds"].values[1:].tolist()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="a second, each way, of each host's cable")
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument("--width", default="two-level", help="lane_width")
    asked = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    floor = (HOSTS - 1) * (4 + 8) * NUMBERS * 8 / (asked.mbit * 1e6)
    width = int(asked.width) if asked.width.isdigit() else asked.width
    medians = {mpi: float(np.median(seconds(mpi, asked.ranks, asked.mbit, width))) for mpi in mpis()}
    ratios = {mpi: round(median / floor, 3) for mpi, median in medians.items()}
    line = {"model_megabytes": 4 * NUMBERS / 1e6, "ranks": HOSTS * asked.ranks, "width": width, "mbit": asked.mbit}
    print(json.dumps(line | {"seconds": medians, "floor": round(floor, 3), "ratios": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
