"""What a checkpoint after every round adds to rounds of about a second: a model of 10 MB, 1,000 personal heads.

    python benchmarks/checkpointing.py [--rounds 60] [--visits 80] [--width 100] [--folder DIR]
    mpiexec -n 3 python -m mpi4py benchmarks/checkpointing.py

One run of FedRep, in which blocks of five rounds with a checkpoint after each take turns with blocks without: both see
the same machine. A round lasts from the line that tells of one to the line that tells of the next, so that copying the
state, waiting for the checkpoint before, and what its writing takes from the rounds beside it are all in it. The share
is the median over blocks with checkpoints of their ratio to the two beside them, less 1. `--width` numbers come into
each head: 40 bytes a client and number. Prints the medians and the columns that a run records of its checkpoints; one
JSON line last. A minute; needs no data.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from launching import load

import hpcfl
from hpcfl.engine.record import Reporter
from hpcfl.schedule.cadence import Checkpoints

BLOCK = 5
CLIENTS = 1000


def table(rounds: int, visits: int, width: int) -> dict[str, Any]:
    """Return the config; the body of the model has 2.6 million numbers."""
    return {
        "rounds": rounds,
        "clients": CLIENTS,
        "threads": 1,
        "evaluate": {"every": rounds, "last": 1},
        "checkpoint": {"every": 1, "keep": 2},
        "algorithm": {"name": "fedrep", "epochs": 1, "head_epochs": 1, "batch": 10},
        "participation": {"invite": "uniform", "size": visits},
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [1200, 2000, width]},
    }


def main() -> None:
    """Print what was measured, on the rank that serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="a multiple of 10")
    parser.add_argument("--visits", type=int, default=80, help="of a round")
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where the run folder is made; default: the system's temporary one")
    options = parser.parse_args()
    told: list[float] = []
    Reporter.round = lambda *_: told.append(time.perf_counter())  # type: ignore[method-assign]
    # whether the state after a round is saved: in every second block
    Checkpoints.due = lambda self, done, rounds: done // BLOCK % 2 == 1  # type: ignore[method-assign]
    with TemporaryDirectory(dir=options.folder) as place:
        run = hpcfl.run(table(options.rounds, options.visits, options.width), out=Path(place) / "run", quiet=True)
        if not told:
            return
        data = hpcfl.open_run(run.folder)
        columns = {name: data[name].values for name in ("checkpoint_wait_seconds", "checkpoint_seconds")}
        sizes = data["checkpoint_bytes"].values
    seconds = [after - before for before, after in pairwise(told)]  # number i: from i + 1 rounds done to i + 2
    blocks = [seconds[start - 1 : start + BLOCK - 1] for start in range(BLOCK, options.rounds, BLOCK)]
    means = [sum(block) / len(block) for block in blocks]
    ratios = [means[i] / median(means[i - 1 : i + 2 : 2]) for i in range(2, len(means) - 1, 2)]
    figures = {
        "share": round(median(ratios) - 1, 4),
        "shares": [round(ratio - 1, 4) for ratio in ratios],
        "round_seconds": round(median(means[1::2]), 4),
        "checkpoint_bytes": int(sizes.max()),
        "wait_seconds": round(median(columns["checkpoint_wait_seconds"][sizes > 0]), 4),
        "checkpoint_seconds": round(median(columns["checkpoint_seconds"][sizes > 0]), 4),
        "load": load(),
    }
    for name, value in figures.items():
        print(f"{name:20}{value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
