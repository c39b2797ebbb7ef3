"""What recording a round costs, against one h5py write of a compound row of the same bytes, and a flush.

    python benchmarks/recording.py [--clients 100 10000] [--rows 300]

Row by row in turns, each into a file of its own: ``reference``, in SWMR mode, is ``dataset[row] = record`` and
``file.flush()``; ``segment`` is `Segment.write` of the same values; ``recorder`` is `Recorder.row` of a round in which
nothing was evaluated, so what follows from its plan is worked out as well. Milliseconds of the processor for a row,
medians, and the medians of the ratios to the reference. The rounds are those of FedRep's linear case. 10 s on 2 cores;
needs no data. Prints a line per number of clients and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
from launching import load

from hpcfl import store
from hpcfl.config import from_table
from hpcfl.engine import loop
from hpcfl.engine.job import Job
from hpcfl.engine.record import Record, Recorder, Reporter
from hpcfl.engine.simulated import Simulated
from hpcfl.mpi.transport import Transport

Rows = Callable[[int], None]


def recorded(folder: Path, clients: int, rows: int) -> tuple[Rows, Recorder]:
    """Return a function that records one and the same round as that of a number, and what it records by."""
    table = {
        "rounds": rows,
        "clients": clients,
        "algorithm": {"name": "linear_fedrep", "initial": "random"},
        "data": {"name": "linear", "dimension": 20, "rank": 2, "samples": 10},
        "model": {"name": "linear"},
        "speed": {"model": "exponential"},
    }
    job = Job.of(from_table(table), None, 1)
    now, record, rounds = job.begin(0), Record.open(), Simulated(job, Transport(), 0)
    plan, sums = rounds.exchange(now, record)
    record.sums = sums
    loop.step(job, now, record, plan)
    loop.close(job, rounds, now, record, plan, "")
    store.create(folder, {"config": "{}"})
    recorder = Recorder(folder, job, 1, 0, Reporter(rows, 0, "simulated", quiet=True))
    return lambda number: recorder.row(replace(plan, round=number), record, sums, now.clock), recorder


def reference(path: Path, row: Any, rows: int) -> tuple[Rows, h5py.File]:
    """Return a function that writes a row of the same type by h5py, and its file."""
    file = h5py.File(path, "w", libver=("v110", "v110"))
    dataset = file.create_dataset("rows", (rows,), row.dtype, chunks=(max(1, 65536 // row.itemsize),))
    file.swmr_mode = True

    def write(number: int) -> None:
        dataset[number] = row
        file.flush()

    return write, file


def seconds(write: Rows, number: int) -> float:
    """Return what a row takes of the processor."""
    start = time.process_time()
    write(number)
    return time.process_time() - start


def measured(clients: int, rows: int) -> dict[str, float]:
    """Return medians, in milliseconds, and ratios."""
    with TemporaryDirectory() as place:
        record, recorder = recorded(Path(place) / "recorder", clients, rows)
        record(0)
        segment, row = recorder.segment, recorder.segment._row[0].copy()
        alone, file = reference(Path(place) / "reference.h5", row, rows)
        store.create(Path(place) / "segment", {"config": "{}"})
        columns = store.reading.read_part(segment.path)
        other = store.begin(Path(place) / "segment", columns.columns, columns.coords, 0, rows)
        values = {name: np.array(value) for name, value in segment._fields.items()}
        kinds: dict[str, Rows] = {
            "reference": alone,
            "segment": lambda number: other.write(number, values),
            "recorder": record,
        }
        found = [{name: seconds(write, number) for name, write in kinds.items()} for number in range(1, rows)]
        for each in (recorder, other, file):
            each.close()
    times = {f"{name}_ms": 1000 * median(each[name] for each in found) for name in kinds}
    ratios = {
        f"{name}_ratio": median(each[name] / each["reference"] for each in found) for name in ("segment", "recorder")
    }
    return {"bytes": row.itemsize, **{name: round(value, 3) for name, value in (times | ratios).items()}}


def main() -> None:
    """Print a line per number of clients, and all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 10_000])
    parser.add_argument("--rows", type=int, default=300)
    options = parser.parse_args()
    found = {clients: measured(clients, options.rows) for clients in options.clients}
    for clients, figures in found.items():
        print(f"{clients} clients  " + "  ".join(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps({"rows": options.rows, "load": load(), "clients": found}))


if __name__ == "__main__":
    main()
