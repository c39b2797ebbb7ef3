"""Many more ranks than cores: that runs in real time end, and what ranks that wait take from one that computes.

    python benchmarks/many_ranks.py [--mpi openmpi mpich] [--ranks 33] [--rounds 20] [--turns 10]

- ``hpcfl run``: so many rounds of FedAvg on digits with a client on each client rank, once with ``close = "all"`` and
  once closing with the first half of the visits: exit code, rounds on record, status, processes left behind, seconds
  (about half a minute of which is 33 times Python and torch being loaded).
- theft: one client computes for some 0.2 s, a round closes when it is done; the server and all other clients wait in
  their polling loops. ``polling``: its seconds over those of the same computation while all others are asleep, in turns
  in the same job; median, quartiles and worst of the turns, and the ratio of the shortest times, which other load on
  the machine disturbs least. ``blocking``: the same while they wait in a blocking ``Barrier`` (2 turns).

One thread per rank. 5 minutes on 2 cores, and 6 GB. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launching
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.base.types import State
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task

if launching.inside():
    import torch
    import wall_rounds
    from mpi4py import MPI

    from hpcfl.engine.job import Job

    class Uneven(wall_rounds.Layers):
        """One client computes, the others have nothing to do.

        Attributes
        ----------
        busy : int
            Who computes.
        """

        busy: int

        def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
            """Send the layers, perhaps after some work."""
            if visits.clients[0] == self.busy:
                WORKED.append(worked())
            return (yield from super().client(task, shared, personal, visits))


CONFIG = """
rounds = {rounds}
clients = {clients}
clock = "wall"

[participation]
{closing}

[algorithm]
name = "fedavg"
batch = 8

[data]
name = "digits"

[model]
name = "mlp"
hidden = [32]
"""
WORKED: list[float] = []
PRODUCTS = 600
ASLEEP_SECONDS = 0.2
LIMIT_SECONDS = 400.0
BLOCKED_TURNS = 2


def main() -> None:
    """Start the jobs, or be one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", nargs="+", choices=tuple(launching.LIBRARIES), default=tuple(launching.LIBRARIES))
    parser.add_argument("--ranks", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked.turns)
        return
    found = {mpi: measured(mpi, asked.ranks, asked.rounds, asked.turns) for mpi in asked.mpi}
    print(json.dumps({"ranks": asked.ranks, "load": launching.load(), "mpis": found}))


def measured(mpi: str, ranks: int, rounds: int, turns: int) -> dict[str, Any]:
    """Return how runs ended, and the theft, with one MPI."""
    print(f"{mpi}, {ranks} ranks, load {launching.load():.1f}", flush=True)
    runs = []
    for closing in ('close = "all"', f'close = "first"\nfirst = {(ranks - 1) // 2}'):
        runs.append({"closing": closing.replace("\n", ", "), **ended(mpi, ranks, rounds, closing)})
        print("  ".join(f"{name} {value}" for name, value in runs[-1].items()), flush=True)
    theft = launching.run(mpi, ranks, [__file__, "--turns", str(turns)], LIMIT_SECONDS)
    print("  ".join(f"{name} {value}" for name, value in theft.items()), flush=True)
    return {"runs": runs, "theft": theft}


def ended(mpi: str, ranks: int, rounds: int, closing: str) -> dict[str, Any]:
    """Run ``hpcfl run``; return how it ended."""
    with tempfile.TemporaryDirectory() as name:
        config, folder = Path(name, "many.toml"), Path(name, "run")
        config.write_text(CONFIG.format(rounds=rounds, clients=ranks - 1, closing=closing))
        start = time.monotonic()
        code, left = finished(mpi, ranks, ["-m", "hpcfl", "run", str(config), "--out", str(folder)])
        return {"exit": code, **recorded(folder), "left": left, "seconds": round(time.monotonic() - start, 1)}


def finished(mpi: str, ranks: int, args: list[str]) -> tuple[int | None, int]:
    """Run a job; return its exit code (None: it had to be killed) and how many processes it left behind."""
    mark = uuid.uuid4().hex
    child = subprocess.Popen(
        launching.command(mpi, ranks, args),
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=launching.environment(mpi, mark),
    )
    code = None
    try:
        code = child.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        left = launching.left_behind(mark)
    return code, left


def recorded(folder: Path) -> dict[str, Any]:
    """Return what is on record of a run."""
    from hpcfl import store

    data = store.open_run(folder)
    depth = data["depth"].values
    return {"rounds": len(depth), "status": store.read_status(folder).state}


def on_a_rank(turns: int) -> None:
    """Measure the theft; the server prints."""
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    job = wall_rounds.job_of(wall_rounds.Layers(count=1, entries=250), comm.Get_size(), 1, {"close": "all"})
    busy = int(job.hosted(1)[0].clients[0])
    job = wall_rounds.job_of(Uneven(count=1, entries=250, busy=busy), comm.Get_size(), 1, {"close": "all"})
    side = wall_rounds.server(job, comm) if rank == 0 else wall_rounds.client_rank(job, comm)
    waits: list[list[float]] = [[], WORKED, []]
    for turn in range(turns):
        waits[0] += beside(comm, asleep)
        one_round(job, side, turn)
        waits[2] += beside(comm, lambda comm: comm.Barrier()) if turn < BLOCKED_TURNS else []
    tell(comm, waits, turns)


def beside(comm: MPI.Intracomm, others: Callable[[MPI.Intracomm], None]) -> list[float]:
    """Compute on rank 1 while the others do something else, which ends when rank 1 joins in."""
    asleep(comm)
    time.sleep(2 * ASLEEP_SECONDS)  # all have noticed
    seconds = [worked()] if comm.Get_rank() == 1 else []
    others(comm)
    return seconds


def asleep(comm: MPI.Intracomm) -> None:
    """Wait for all others, nearly always asleep."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(ASLEEP_SECONDS)


def one_round(job: Job, side: Any, turn: int) -> None:
    """Take part in a round in which rank 1 computes."""
    if isinstance(side, wall_rounds.Timed):
        side.run_round(turn, job.algorithm.init_server(job.task))
        side.leave(turn, stopped=False, without_dead=True)
    else:
        side.serve()


def worked() -> float:
    """Compute; return the seconds it took."""
    start = time.perf_counter()
    value = torch.ones(256, 256)
    for _ in range(PRODUCTS):
        value = torch.mm(value, value).clamp_(max=1.0)
    return time.perf_counter() - start


def tell(comm: MPI.Intracomm, waits: list[list[float]], turns: int) -> None:
    """Let the server print what rank 1 has measured."""
    found = np.full((3, turns), np.nan)
    if comm.Get_rank() == 1:
        for row, seconds in zip(found, waits):
            row[: len(seconds)] = seconds
        comm.Send(found, dest=0)
    if comm.Get_rank() == 0:
        comm.Recv(found, source=1)
        print(json.dumps(figures(found)))


def figures(found: NDArray[np.float64]) -> dict[str, Any]:
    """Return ratios to computing alone: of neighbouring turns, and their median, quartiles and worst."""
    alone, polling, blocking = found
    ratio = polling / alone
    return {
        "alone_ms": round(1000 * float(np.median(alone))),
        "polling": round(float(np.median(ratio)), 2),
        "quartiles": [round(float(value), 2) for value in np.quantile(ratio, [0.25, 0.75])],
        "worst": round(float(ratio.max()), 2),
        "of_shortest": round(float(polling.min() / alone.min()), 2),
        "blocking": round(float(np.nanmedian(blocking / alone)), 2),
    }


if __name__ == "__main__":
    main()
