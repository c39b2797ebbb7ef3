"""Clients that are computed together in real time, against a loop written by hand on as many ranks.

    python benchmarks/real_time_chunks.py [--mpi openmpi|mpich] [--rounds 15] [--clients 100] [--ranks 3]

FedAvg, 100 clients x 100 samples, MLP 784-200-10, batch 10, one local epoch; rank 0 serves, each other rank hosts its
part of the clients. Both ways take turns, round by round, in one job; the others wait asleep meanwhile.

- ``hpcfl``: a round over lanes of one rank that closes with all visits, and the server's step;
- ``plain``: a broadcast of the model; on each rank chunks of as many clients trained together, by ``bmm`` and
  derivatives written by hand, and added up in float64; one reduction of a float64 sum per rank; the mean. Nonblocking
  calls, polled asleep: a server that spun would take a core from those who compute;
- ``computing``: the same without the calls of MPI, on all ranks at once.

Medians of seconds, and the median of the ratios of turns; the same of processor time over all ranks (``cpu``), which
other work on the machine does not reach. Half a minute on 2 cores. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import launching
import numpy as np

if launching.inside():
    import torch
    import wall_rounds
    from clients_per_second import BATCH, LR, WORKS, federation
    from mpi4py import MPI
    from torch import Tensor

    from hpcfl.base.memory import keep_freed
    from hpcfl.config import from_table
    from hpcfl.engine.job import Job
    from hpcfl.learning.task import Task
    from hpcfl.mpi.cores import cores
    from hpcfl.mpi.placement import chunk_size, cut
    from hpcfl.mpi.waiting import Patience, wait

HIDDEN, CLASSES, FEATURES, WARM = 200, 10, 784, 3


def main() -> None:
    """Start the job, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=3)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked.rounds, asked.clients)
        return
    found = launching.run(asked.mpi, asked.ranks, [__file__, *sys.argv[1:]], 600)
    print(json.dumps({"mpi": asked.mpi, "ranks": asked.ranks, "load": launching.load(), **found}))


def on_a_rank(rounds: int, clients: int) -> None:
    """Take turns; the server prints."""
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    keep_freed()
    Patience.crowd = comm.Get_size() / len(cores())
    held = federation(replace(WORKS["images"], clients=clients))
    values = {
        "rounds": 1,
        "clients": clients,
        "clock": "wall",
        "participation": {"close": "all"},
        "algorithm": {"name": "fedavg", "lr": LR, "batch": BATCH},
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [HIDDEN]},
    }
    config = from_table(values)
    task = Task(config.model, held, config.seed)
    chunks = cut(chunk_size("auto", clients, task.nbytes), np.ones(clients), comm.Get_size())
    job = Job(config, task, config.algorithm, chunks)
    by_hand, server, shared = plain(comm, job), None, job.algorithm.init_server(task)
    client = wall_rounds.client_rank(job, comm) if comm.Get_rank() else None
    server = wall_rounds.server(job, comm) if client is None else None

    def ours(number: int) -> None:
        nonlocal shared
        if client is not None:
            client.serve()
        if server is not None:
            _, sums = server.run_round(number, shared)
            shared = job.algorithm.server(task, shared, sums)
            server.leave(number, 0, True)

    times = np.array(
        [
            [turn(comm, work) for work in (partial(ours, number), by_hand, partial(by_hand, alone=True))]
            for number in range(WARM + rounds)
        ]
    )[WARM:]
    if server is not None:
        found = {"chunk": float(job.chunk)}
        for kind, seconds in (("", times[..., 0]), ("cpu_", times[..., 1])):
            medians = zip(("hpcfl_s", "plain_s", "computing_s"), np.median(seconds, axis=0))
            found |= {kind + name: value for name, value in medians}
            found[f"{kind}ratio"] = np.median(seconds[:, 0] / seconds[:, 1])
        print(json.dumps({name: round(float(value), 4) for name, value in found.items()}))


def turn(comm: MPI.Intracomm, work: Callable[[], None]) -> tuple[float, float]:
    """Do something on all ranks at once.

    Return the seconds until the slowest has done it, and the processor time of all ranks.
    """
    wait([comm.Ibarrier()])
    start, spent = time.perf_counter(), time.process_time()
    work()
    wait([comm.Ibarrier()])
    used = np.array([time.process_time() - spent])
    seconds = time.perf_counter() - start
    wait([comm.Iallreduce(MPI.IN_PLACE, used)])
    return seconds, float(used[0])


def plain(comm: MPI.Intracomm, job: Job) -> Callable[..., None]:
    """Return a function that does one round as one would write it for this model alone."""
    sizes = HIDDEN * FEATURES, HIDDEN, CLASSES * HIDDEN, CLASSES
    model = torch.cat([value.flatten() for value in job.task.initial().values()])
    total, summed = torch.zeros(sum(sizes), dtype=torch.float64), torch.zeros(sum(sizes), dtype=torch.float64)
    chunks = []
    for chunk in job.hosted(comm.Get_rank()):
        held = [job.task.federation.client(int(client)) for client in chunk.clients]
        x, y = ([getattr(each, f"train_{part}") for each in held] for part in ("features", "labels"))
        chunks.append((torch.from_numpy(np.stack(x)), torch.from_numpy(np.stack(y))))

    def one_round(alone: bool = False) -> None:
        if not alone:
            wait([comm.Ibcast(model.numpy(), root=0)])
        total.zero_()
        for x, y in chunks:
            parts = [each.flatten(1).sum(0, dtype=torch.float64) for each in trained(model, sizes, x, y)]
            total.add_(torch.cat(parts))  # all clients have equally many samples
        if not alone:
            wait([comm.Ireduce(total.numpy(), summed.numpy(), root=0)])
            model.copy_(summed / job.config.clients)

    return one_round


def trained(model: Tensor, sizes: Sequence[int], x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the tensors of some clients' models ``[c, …]`` after one pass over their samples ``[c, n, …]``."""
    count = len(x)
    w1, b1, w2, b2 = (each.repeat(count, 1) for each in torch.split(model, list(sizes)))
    w1, w2 = w1.view(count, HIDDEN, FEATURES), w2.view(count, CLASSES, HIDDEN)
    order = torch.stack([torch.randperm(x.shape[1]) for _ in range(count)])
    clients = torch.arange(count)[:, None]
    for rows in torch.split(order, BATCH, dim=1):
        given = x[clients, rows]
        hidden = torch.baddbmm(b1[:, None], given, w1.transpose(1, 2)).relu_()
        error = torch.baddbmm(b2[:, None], hidden, w2.transpose(1, 2)).softmax(-1)
        error.scatter_add_(2, y[clients, rows][..., None], error.new_full((count, BATCH, 1), -1.0)).mul_(LR / BATCH)
        below = torch.bmm(error, w2).mul_(hidden > 0)
        w2.baddbmm_(error.transpose(1, 2), hidden, alpha=-1)
        w1.baddbmm_(below.transpose(1, 2), given, alpha=-1)
        b2.sub_(error.sum(1))
        b1.sub_(below.sum(1))
    return [w1, b1, w2, b2]


if __name__ == "__main__":
    main()
