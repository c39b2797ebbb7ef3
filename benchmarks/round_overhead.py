"""What a round in real time costs beyond computing, against raw MPI calls of the same bytes in the same job.

    python benchmarks/round_overhead.py [--mpi openmpi|mpich] [--megabytes 1 10 100] [--ranks 3] [--rounds 40]

The clients' 8 layers are there at once, so that next to nothing is hidden behind computing: their visits take the time
that it costs to hand 8 layers over. Measured at the server, in turns, in one job:

- ``round``: from the call of a round until it is closed, with one lane of everyone and with a lane for each client;
- ``compute``: of that, the slowest client's visit, by its own clock, from having the state to its last layer;
- ``hpcfl``: the round less that;
- ``bare``: the same nonblocking calls on the same communicators, polled alike, from and into such buffers;
- ``blocking``: one ``Bcast`` and one ``Reduce`` of the whole float32 model;
- ``server``: the server's step, which forms the sums exactly and makes the new state, while the others wait;
- ``plain``: what a plain program does, its step included: ``Ibcast`` and ``Ireduce`` of the whole model, polled and
  giving way, then the sum over its weight is added to the state, by NumPy as hpcfl does it: in float64, rounded once;
- ``single``: the same, but divided and added in float32, where numbers are rounded twice.

``to_plain`` and ``to_single`` are ``hpcfl`` and ``server`` over these; each other way comes after a step that is not
counted. Medians of 40 rounds (of 20 from 100 MB on), after 3 that do not count. 1 minute on 2 cores. Prints a table and
one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import launching
import numpy as np

if launching.inside():
    import wall_rounds
    from mpi4py import MPI

    from hpcfl.engine.job import Job
    from hpcfl.mpi.waiting import wait
    from hpcfl.realtime.client import ClientRank
    from hpcfl.realtime.lane import Lane
    from hpcfl.sums.frames import FrameFormat, StagedFrame, zero_frames
    from hpcfl.sums.packing import Bytes

WIDTHS: tuple[int | str, ...] = ("all", 1)
WARM = 3


def main() -> None:
    """Start the job, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--megabytes", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked.megabytes, asked.rounds)
        return
    print(f"{asked.mpi}, {asked.ranks} ranks, load {launching.load():.1f}; milliseconds", flush=True)
    found = launching.run(asked.mpi, asked.ranks, [__file__, *sys.argv[1:]], 600)
    print(json.dumps({"mpi": asked.mpi, "ranks": asked.ranks, "load": launching.load(), **found}))


def on_a_rank(megabytes: list[int], rounds: int) -> None:
    """Measure all sizes; the server prints."""
    comm = MPI.COMM_WORLD
    sizes = []
    for size in megabytes:
        for width in WIDTHS:
            found = measured(comm, size, width, rounds if size < 100 else max(1, rounds // 2))
            if comm.Get_rank() == 0:
                sizes.append({"megabytes": size, "width": width, **found})
                print("  ".join(f"{name} {value}" for name, value in sizes[-1].items()), flush=True)
    if comm.Get_rank() == 0:
        print(json.dumps({"sizes": sizes}))


def measured(comm: MPI.Intracomm, megabytes: int, width: int | str, rounds: int) -> dict[str, float]:
    """Return median milliseconds of every way, and ratios."""
    layers = wall_rounds.Layers(entries=megabytes * 1_000_000 // 4 // 8)
    job = wall_rounds.job_of(layers, comm.Get_size(), width, {"close": "all"})
    if comm.Get_rank() > 0:
        follow(comm, job, layers.entries, WARM + rounds)
        return {}
    rows = list(lead(comm, job, layers.entries, WARM + rounds))[WARM:]
    found = {name: 1000 * float(np.median([row[name] for row in rows])) for name in rows[0]}
    found |= {"to_bare": found["hpcfl"] / found["bare"], "to_blocking": found["hpcfl"] / found["blocking"]}
    for name in ("plain", "single"):
        found[f"to_{name}"] = float(np.median([(row["hpcfl"] + row["server"]) / row[name] for row in rows]))
    return {name: round(value, 2) for name, value in found.items()}


class Bare:
    """One round of the nonblocking calls that hpcfl makes, on its communicators, and nothing else."""

    def __init__(self, lanes: Sequence[Lane] = ()) -> None:
        self.call = np.zeros(8, np.int64)
        self.buffers = [zero_frames(lane.visits.formats) for lane in lanes]  # the server keeps those of its lanes
        self.summed = [own for lane, own in zip(lanes, self.buffers) if len(lane.topology.ranks) > 1]

    def server(self, lanes: list[Lane], state: list[Bytes]) -> None:
        """Send the state down, receive the layers."""
        wait([request for lane in lanes for request in lane.control.down(self.call)])
        wait([request for lane in lanes for part in state for request in lane.data.down(part)])
        for part in [part for own in self.summed for frame in own for part in frame]:
            part.zero_()  # the server's own part of the sums
        parts = [(lane, part.numpy()) for lane, own in zip(lanes, self.buffers) for frame in own for part in frame]
        wait([request for lane, part in parts for request in lane.data.summed(part)])

    def client(self, client_rank: ClientRank, staged: list[StagedFrame]) -> None:
        """Receive the state, send the layers."""
        wait(client_rank.control.down(self.call))
        wait([request for part in client_rank.parts for request in client_rank.data.down(part)])
        wait([request for each in staged for request in client_rank.send(each)])


def lead(comm: MPI.Intracomm, job: Job, entries: int, rounds: int) -> Iterator[dict[str, float]]:
    """Lead rounds of every kind in turns; yield the seconds of each."""
    server, shared = wall_rounds.server(job, comm), job.algorithm.init_server(job.task)
    lanes = server.lanes.all
    bare = Bare(lanes)
    whole = np.ones((3, len(job.layout) * entries), np.float32)
    _, sums = server.run_round(0, shared)
    server.figures()
    for number in range(1, 1 + rounds):
        row: dict[str, float] = {}
        step = partial(job.algorithm.server, job.task, shared, sums)  # before each of them
        with timed(row, "server"):
            shared = step()
        with timed(row, "round"):
            _, sums = server.run_round(number, shared)
        row["compute"] = float(server.figures()[1].max())
        row["hpcfl"] = row["round"] - row["compute"]
        assert all(bool((value == number).all()) for value in shared.values())
        server.leave(number, stopped=False, without_dead=True)
        state = server.packing.sent(shared)
        step()
        with timed(row, "bare"):
            bare.server(lanes, state)
        step()
        with timed(row, "blocking"):
            comm.Bcast(whole[0], root=0)
            comm.Reduce(whole[1], whole[2], root=0)
        for name, averaged in (("plain", in_double), ("single", in_single)):
            step()
            with timed(row, name):
                give_way(comm.Ibcast(whole[0], root=0))
                give_way(comm.Ireduce(whole[1], whole[2], root=0))
                averaged(whole[0], whole[2], comm.Get_size())
        yield row


def follow(comm: MPI.Intracomm, job: Job, entries: int, rounds: int) -> None:
    """Be a client in all of them."""
    client_rank = wall_rounds.client_rank(job, comm)
    bare, staged = Bare(), [full(group) for group in client_rank.formats.all]
    whole = np.ones((2, len(job.layout) * entries), np.float32)
    for _ in range(rounds):
        client_rank.serve()
        bare.client(client_rank, staged)
        comm.Bcast(whole[0], root=0)
        comm.Reduce(whole[1], None, root=0)
        for _ in ("plain", "single"):
            give_way(comm.Ibcast(whole[0], root=0))
            give_way(comm.Ireduce(whole[1], None, root=0))


def in_double(state: np.ndarray, total: np.ndarray, weight: int) -> None:
    """Take a step as hpcfl does: rounded once."""
    update = total.astype(np.float64)
    update /= weight
    update += state
    state[:] = update


def in_single(state: np.ndarray, total: np.ndarray, weight: int) -> None:
    """Take it in float32."""
    total /= np.float32(weight)
    state += total


def give_way(request: MPI.Request) -> None:
    """Poll a request and let others compute between two looks."""
    while not request.Test():
        os.sched_yield()


def full(group: FrameFormat) -> StagedFrame:
    """Return a group with its layer in it."""
    return StagedFrame(group, [group.head(), *(wall_rounds.ones(group.blocks[name].size)[0] for name in group.large)])


@contextmanager
def timed(row: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds that something takes."""
    start = time.perf_counter()
    yield
    row[name] = time.perf_counter() - start


if __name__ == "__main__":
    main()
