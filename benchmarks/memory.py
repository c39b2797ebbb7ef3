"""How much memory rounds in real time take, against the bounds that ``hpcfl check`` states.

    python benchmarks/memory.py [--mpi openmpi|mpich] [--algorithms salf fedavg layers] [--widths 1 all] [--ranks 5]

A model of 52 MB, a client on each client rank, 3 rounds, scores and personal state included. ``salf`` and ``fedavg``
really train (an MLP, two steps of 16 samples of digits at most); of ``layers`` the clients compute nothing. Each case
is a job of its own. It does rounds of a tiny model first, so that torch and MPI have loaded and set up what they need;
then the model and the data are there, freed memory is given back to the system, and what is resident is the state
``before``. From there on the peak of what is resident is taken from the kernel (``VmHWM``, reset through
``clear_refs``), so it is exact and includes what MPI shares between ranks.

Columns: the growth of the server and of the client rank that has grown most, in MB, beside their bounds; and, of each
growth, how much was memory shared between processes at the end; at last the growth of each client rank: on a lane of
several, MPI itself holds messages on the ranks inside its tree. 2 minutes on 2 cores, 4 GB. Prints a table and one
JSON line last.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

if TYPE_CHECKING:
    from hpcfl.algorithms import Algorithm

if launching.inside():
    import wall_rounds
    from mpi4py import MPI

    from hpcfl.algorithms.fedavg import FedAvg
    from hpcfl.algorithms.salf import Salf
    from hpcfl.commands.check import bounds
    from hpcfl.engine.job import Job, Progress

ALGORITHMS = ("salf", "fedavg", "layers")
HIDDEN = [1600] * 6
ROUNDS = 3


def main() -> None:
    """Start the jobs, or be one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--widths", nargs="+", default=["1", "all"])
    parser.add_argument("--ranks", type=int, default=5)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked.algorithms[0], asked.widths[0])
        return
    print(f"{asked.mpi}, {asked.ranks} ranks; MB", flush=True)
    cases = []
    for algorithm in asked.algorithms:
        for width in asked.widths:
            args = [__file__, "--algorithms", algorithm, "--widths", width]
            found = launching.run(asked.mpi, asked.ranks, args, 300)
            cases.append({"algorithm": algorithm, "width": width, **found})
            print("  ".join(f"{name} {value}" for name, value in cases[-1].items()), flush=True)
    print(json.dumps({"mpi": asked.mpi, "ranks": asked.ranks, "load": launching.load(), "cases": cases}))


def on_a_rank(name: str, width: str) -> None:
    """Measure one case; the server prints."""
    comm = MPI.COMM_WORLD
    lanes = int(width) if width.isdecimal() else width
    rounds(job_of(name, comm, lanes, [8], 1000), comm)
    job = job_of(name, comm, lanes, HIDDEN, 1_600_000)
    limits = np.array(bounds(job, comm.Get_size()))
    before = settled()
    rounds(job, comm)
    grown = np.array([peak() - before, status("RssShmem")], dtype=np.int64)
    everyone = np.empty((comm.Get_size(), 2), dtype=np.int64)
    comm.Gather(grown, everyone, root=0)
    if comm.Get_rank() == 0:
        print(json.dumps(figures(everyone, limits)))


def job_of(name: str, comm: MPI.Intracomm, width: int | str, hidden: list[int], entries: int) -> Job:
    """Return the job of one case."""
    algorithms: dict[str, Algorithm] = {
        "salf": Salf(batch=16, missing="none"),
        "fedavg": FedAvg(batch=16, epochs=0, steps=2),
        "layers": wall_rounds.Layers(count=8, entries=entries),
    }
    model = {"name": "mlp", "hidden": hidden}
    return wall_rounds.job_of(algorithms[name], comm.Get_size(), width, {"close": "all"}, model=model)


def rounds(job: Job, comm: MPI.Intracomm) -> None:
    """Do some rounds."""
    if comm.Get_rank() > 0:
        wall_rounds.serve(job, comm)
        return
    server, shared = wall_rounds.server(job, comm), job.algorithm.init_server(job.task)
    for number in range(ROUNDS):
        plan, sums = server.run_round(number, shared)
        assert plan.counted.all()
        shared = job.algorithm.server(job.task, shared, sums)
        if not isinstance(job.algorithm, wall_rounds.Layers):  # a model that nobody can test
            server.scores(Progress(number, shared, {}))
    server.leave(ROUNDS, stopped=False, without_dead=True)


def settled() -> int:
    """Give back what is free, forget the peak; return the bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    """Return the most bytes that were resident since `settled`."""
    return status("VmHWM")


def status(name: str) -> int:
    """Return a line of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def figures(everyone: Any, limits: Any) -> dict[str, Any]:
    """Return growth, bounds and what of the growth is shared, in MB."""
    client = 1 + int(everyone[1:, 0].argmax())
    found: dict[str, Any] = {}
    for name, rank, limit in zip(("server", "client"), (0, client), limits):
        grown, shared = everyone[rank]
        found |= {name: round(grown / 1e6, 1), f"{name}_bound": round(limit / 1e6, 1)}
        found |= {f"{name}_shared": round(shared / 1e6, 1), f"{name}_holds": bool(grown <= limit)}
    return {**found, "clients": [round(float(grown) / 1e6) for grown, _ in everyone[1:]]}


if __name__ == "__main__":
    main()
