"""The first n of 4 visits: whether the right ones are taken, and what a round costs beyond the n-th client's sleep.

    python benchmarks/first_n.py [--mpi openmpi|mpich] [--rounds 100] [--megabytes 1]

Each of 4 clients (5 ranks, a lane for each) sleeps 20, 50, 80 or 110 ms, another one each round, and then sends one
block. A round closes with the first n visits. Figures:

- ``right``: rounds in which exactly the n with the shortest sleeps were taken;
- ``in_order``: rounds in which those were taken whose sleeps were over first, which a busy machine may delay;
- ``beyond``: milliseconds from the call of a round until it is closed, less the n-th sleep;
- ``down``: from that call until the n-th visit began: its client has the shared state, as large as the block;
- ``up``: from the end of its sleep until the round was closed;
- ``gather``, ``bcast``: a blocking ``Gather`` of one block per client, and a ``Bcast`` of the state, on all ranks.

Rounds and blocking calls take turns, 10 by 10, in one job. Medians, and the worst round. About 1 minute on 2 cores.
Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import launching
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task

if launching.inside():
    import wall_rounds
    from mpi4py import MPI

    from hpcfl.base.types import Floats, State
    from hpcfl.engine.job import Job
    from hpcfl.schedule.plan import Attempt
    from hpcfl.schedule.speeds.base import Equal

    class Sleeps(Equal):
        """Each client's visit takes the seconds that are drawn for it."""

        def enforced(self, attempt: Attempt) -> Floats:
            """Return the seconds of those who are invited, float64 [n]."""
            return drawn(attempt.round)[attempt.cohort]

    class Stamped(wall_rounds.Layers):
        """Notes when each round's visit began, and when its sleep was over and the block was handed to MPI's thread."""

        def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
            """Send the layer."""
            began = time.monotonic()
            yield from super().client(task, shared, personal, visits)
            ended = time.monotonic() if visits.in_time(1) else np.inf
            STAMPS[visits.round] = began, ended
            return {}


Seconds = NDArray[np.float64]

SECONDS = (0.020, 0.050, 0.080, 0.110)
ORDERS = np.array(list(permutations(SECONDS)))
STAMPS: dict[int, tuple[float, float]] = {}
TURN = 10
STILL_SECONDS = 0.03


def main() -> None:
    """Start the job, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--megabytes", type=float, default=1.0)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked.rounds, round(asked.megabytes * 250_000))
        return
    ranks = 1 + len(SECONDS)
    print(f"{asked.mpi}, {ranks} ranks, {asked.megabytes:g} MB, load {launching.load():.1f}; milliseconds", flush=True)
    found = launching.run(asked.mpi, ranks, [__file__, *sys.argv[1:]], 600)
    told = {"mpi": asked.mpi, "ranks": ranks, "megabytes": asked.megabytes, "rounds": asked.rounds}
    print(json.dumps({**told, "load": launching.load(), **found}))


def on_a_rank(rounds: int, entries: int) -> None:
    """Measure n = 1 … 4; the server prints."""
    comm, cases = MPI.COMM_WORLD, []
    for n in range(1, 1 + len(SECONDS)):
        found = measured(comm, n, rounds, entries)
        if comm.Get_rank() == 0:
            cases.append({"n": n, **found})
            print("  ".join(f"{name} {value}" for name, value in cases[-1].items()), flush=True)
    if comm.Get_rank() == 0:
        print(json.dumps({"cases": cases}))


def drawn(round_: int) -> Seconds:
    """Return the seconds that each client sleeps in a round: all orders in turn, neighbours unlike each other."""
    row: Seconds = ORDERS[7 * round_ % len(ORDERS)]
    return row


def measured(comm: MPI.Intracomm, n: int, rounds: int, entries: int) -> dict[str, float]:
    """Return how many rounds were right, and medians in milliseconds."""
    job = wall_rounds.job_of(Stamped(count=1, entries=entries), 1 + len(SECONDS), 1, {"close": "first", "first": n})
    job = replace(job, config=job.config.model_copy(update={"speed": Sleeps()}))
    if comm.Get_rank() > 0:
        follow(comm, job, rounds, entries)
        return {}
    taken, start, took, blocking = lead(comm, job, rounds, entries)
    stamps = np.empty((1 + len(SECONDS), rounds, 2))
    comm.Gather(MPI.IN_PLACE, stamps, root=0)
    began, ended = stamps[1:].transpose(2, 1, 0)
    longest = sorted(SECONDS)[n - 1]
    fastest = np.array([drawn(number) <= longest for number in range(rounds)])
    ready = ended <= np.sort(ended, axis=1)[:, [n - 1]]
    last = np.where(taken, ended, -np.inf).argmax(axis=1)
    down, up = began[np.arange(rounds), last] - start, start + took - ended[np.arange(rounds), last]
    counts = {"right": count(taken == fastest), "in_order": count(taken == ready), "of": rounds}
    return {**counts, **figures(took - longest, down, up, *blocking)}


def figures(beyond: Seconds, down: Seconds, up: Seconds, gather: Seconds, bcast: Seconds) -> dict[str, float]:
    """Return medians in milliseconds, the worst, and ratios."""
    columns = {"beyond": beyond, "down": down, "up": up, "gather": gather, "bcast": bcast}
    found = {name: 1000 * float(np.median(column)) for name, column in columns.items()}
    found |= {"worst": 1000 * float(beyond.max())}
    found |= {"to_gather": found["beyond"] / found["gather"], "up_to_gather": found["up"] / found["gather"]}
    return {name: round(value, 2) for name, value in found.items()}


def count(same: NDArray[np.bool_]) -> int:
    """Return in how many rounds all is the same."""
    return int(same.all(axis=1).sum())


def lead(comm: MPI.Intracomm, job: Job, rounds: int, entries: int) -> tuple[Any, Any, Any, Any]:
    """Lead rounds and blocking calls in turns.

    Returns
    -------
    bool [rounds, clients], float64 [rounds], float64 [rounds]
        Who was taken, when the round began, and the seconds until it was closed.
    float64 [2, calls]
        Seconds of each Gather and Bcast.
    """
    server, shared = wall_rounds.server(job, comm), job.algorithm.init_server(job.task)
    taken, start, took = np.zeros((rounds, len(SECONDS)), bool), np.zeros(rounds), np.zeros(rounds)
    blocking = []
    for number in range(rounds):
        plan, sums = server.run_round(number, {name: value.clone() for name, value in shared.items()})  # sent each time
        taken[number, plan.cohort[plan.depth == 1]] = True
        start[number], took[number] = server.began, server.took
        assert sums.weight("layer 1") == taken[number].sum()
        if last_of_turn(number, rounds):
            server.leave(number, stopped=False, without_dead=True)
            blocking += [calls(comm, entries) for _ in range(TURN)]
    return taken, start, took, np.array(blocking).T


def follow(comm: MPI.Intracomm, job: Job, rounds: int, entries: int) -> None:
    """Be a client in all of them; then hand in when each visit began and ended."""
    client_rank = wall_rounds.client_rank(job, comm)
    STAMPS.clear()
    for number in range(rounds):
        if last_of_turn(number, rounds):
            client_rank.serve()
            for _ in range(TURN):
                calls(comm, entries)
    never = (np.inf, np.inf)
    comm.Gather(np.array([STAMPS.get(number, never) for number in range(rounds)]), None, root=0)


def last_of_turn(number: int, rounds: int) -> bool:
    """Return whether blocking calls follow on this round."""
    return number % TURN == TURN - 1 or number == rounds - 1


def calls(comm: MPI.Intracomm, entries: int) -> tuple[float, float]:
    """Gather one block per rank, then broadcast one; return the seconds of each."""
    rank, block = comm.Get_rank(), np.ones(entries, np.float32)
    room = np.ones((comm.Get_size(), entries), np.float32) if rank == 0 else None
    if rank == 0:
        time.sleep(STILL_SECONDS)  # the others are there already
    start = time.perf_counter()
    comm.Gather(MPI.IN_PLACE if rank == 0 else block, room, root=0)
    between = time.perf_counter()
    comm.Bcast(block, root=0)
    return between - start, time.perf_counter() - between


if __name__ == "__main__":
    main()
