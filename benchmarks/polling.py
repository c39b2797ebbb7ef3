"""What a server and its client ranks take of a core while nothing happens, and how many lanes one server may have.

    python benchmarks/polling.py [--mpi openmpi|mpich] [--lanes 256 1100] [--clients 4] [--seconds 3]

- For each number of lanes: as many lanes of one rank, whose other ends are dealt to two processes, which sleep. Printed
  are the seconds that it takes to make them; medians of one `Lanes.poll` while all lanes wait for visits, of one
  Testsome of as many receives in the same process, and their ratio (goal: at most 3); what the waiting server takes of
  a core; and the seconds of a round in which all other ends reply at once, whose sum is checked.
- With real client ranks whose visits sleep: shares of a core that the server takes, which waits for them (goal with 4:
  at most 10 %), a client rank in such a visit, and one that nobody asks anything (goal: at most 3 %).
- What it takes of a message to begin to receive 256 of them, by new requests and by persistent ones.

Shares are those of whole processes. 1 minute on 2 cores. Prints a line per case and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.base.types import State
    from hpcfl.engine.job import Job
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task

LOOKS = 300
MESSAGES = 256
LIMIT = 300.0
GO = 2**15 - 1  # the tag by which the server wakes the other processes: no lane's, but where there are many of them


def main() -> None:
    """Run a job for each case and print what it measured, then JSON."""
    asked = parsed()
    found: dict[str, Any] = {"mpi": asked.mpi, "load": launching.load(), "lanes": []}
    print(f"{asked.mpi}, load {launching.load():.1f}", flush=True)
    for lanes in asked.lanes:
        found["lanes"].append(launching.run(asked.mpi, 3, [__file__, *sys.argv[1:], "--lanes", str(lanes)], LIMIT))
        print("  ".join(f"{name} {value}" for name, value in found["lanes"][-1].items()), flush=True)
    args = [__file__, *sys.argv[1:], "--lanes", "0"]
    found["shares"] = launching.run(asked.mpi, 1 + asked.clients, args, LIMIT)
    print("  ".join(f"{name} {value}" for name, value in found["shares"].items()), flush=True)
    found["requests"] = launching.run(asked.mpi, 2, [__file__, *sys.argv[1:], "--lanes", "-1"], LIMIT)
    print("  ".join(f"{name} {value}" for name, value in found["requests"].items()), flush=True)
    print(json.dumps(found))


def parsed() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--lanes", type=int, nargs="+", default=[256, 1100])
    parser.add_argument("--clients", type=int, default=4, help="client ranks whose shares of a core are measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="for which shares are measured")
    return parser.parse_args()


# ---- many lanes


def many_lanes(comm: Any, count: int, seconds: float) -> dict[str, Any]:
    """Be a rank of a job with so many lanes; return at the server what was measured."""
    import wall_rounds
    from mpi4py import MPI

    from hpcfl.mpi.channel import direct
    from hpcfl.mpi.placement import Topology
    from hpcfl.mpi.transfers import Transfers
    from hpcfl.mpi.waiting import wait
    from hpcfl.realtime.lane import Lane
    from hpcfl.realtime.lanes import Lanes
    from hpcfl.realtime.orders import Command, Op
    from hpcfl.sums.frames import frame_formats

    rank, peers = comm.Get_rank(), comm.Get_size() - 1
    job = wall_rounds.job_of(wall_rounds.Layers(count=1, entries=10), count + 1, 1, {"close": "all"})
    shared, word = comm.Dup(), np.zeros(1)
    mine = [number for number in range(count) if rank in (0, 1 + number % peers)]
    start = time.perf_counter()
    ends = [direct(shared, 0 if rank else 1 + number % peers, rank == 0, number) for number in mine]
    made = time.perf_counter() - start
    (group,) = frame_formats(job.layout, 1)
    state = np.ones(40, dtype=np.uint8)
    if rank:
        commands, states = [Command.empty(1, count) for _ in mine], [np.zeros_like(state) for _ in mine]
        heard = [request for (control, _), room in zip(ends, commands) for request in control.down(room)]
        heard += [request for (_, data), room in zip(ends, states) for request in data.down(room)]
        go = comm.Irecv(word, 0, GO)
        while not MPI.Request.Testall([*heard, go]):
            time.sleep(0.05)
        frame, sends = group.zeros(), []
        group.sign(frame, 0, 0.0)
        group.weigh(frame, 0, "layer 1", 1.0)
        group.value(frame, "layer 1")[:] = 2.0
        for _, data in ends:
            sends += data.summed(frame[0].numpy())
        wait(sends)
        return {}
    transfers = Transfers()
    topologies = [Topology((1 + number,), (((number,),),)) for number in mine]
    all_lanes = [Lane(each, pair, job.layout, count, transfers) for each, pair in zip(topologies, ends)]
    lanes = Lanes(all_lanes, transfers=transfers)
    for lane in all_lanes:
        lane.invite(Command(Op.VISIT, cohort=np.arange(count)), [state])
    for _ in lanes.waiting("the state to leave", lambda: [one for one in all_lanes if one.visits.pending is None]):
        pass
    rooms = np.zeros((count, 8))
    others = [comm.Irecv(room, 1, 1) for room in rooms]  # nobody sends them
    poll, testsome = medians(lanes.poll, lambda: MPI.Request.Testsome(others))
    share = of_a_core(lanes.waiting("visits", lambda: lanes.those("visiting")), seconds)
    began = time.perf_counter()
    wait([comm.Isend(word, peer, GO) for peer in range(1, 1 + peers)])
    for _ in lanes.waiting("visits", lambda: lanes.those("visiting")):
        pass
    took = time.perf_counter() - began
    frames = [lane.visits.pending.frames[0] for lane in all_lanes if lane.visits.pending is not None]
    total = sum(float(group.value(frame, "layer 1").sum() * group.weights(frame, "layer 1")[0]) for frame in frames)
    if total != 20.0 * count:
        raise RuntimeError(f"expected a sum of {20.0 * count}, got {total}")
    for request in others:
        request.Cancel()
    MPI.Request.Waitall(others)
    return {
        "lanes": count,
        "made_ms": round(1000 * made, 2),
        "poll_us": round(1e6 * poll, 1),
        "testsome_us": round(1e6 * testsome, 1),
        "ratio": round(poll / testsome, 2),
        "server_share": round(share, 3),
        "round_s": round(took, 3),
    }


def medians(*ways: Callable[[], object]) -> list[float]:
    """Return the median seconds of each way, taken in turns."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(LOOKS):
        for way, row in zip(ways, seconds):
            began = time.perf_counter()
            way()
            row.append(time.perf_counter() - began)
    return [median(row) for row in seconds]


def of_a_core(waiting: Iterator[float], seconds: float) -> float:
    """Return what this process takes of a core while it waits for so long."""
    used = time.process_time()
    for lasted in waiting:
        if lasted > seconds:
            return (time.process_time() - used) / lasted
    raise RuntimeError("expected nothing to happen meanwhile, but it did")


# ---- persistent requests


def requests(comm: Any) -> dict[str, float]:
    """Be one of two ranks; return at the receiving one what beginning to receive takes of a message, microseconds."""
    from mpi4py import MPI

    rooms, seconds = np.zeros((MESSAGES, 8)), dict[bool, list[float]]({True: [], False: []})
    receives = comm.Get_rank() == 0
    kept = [comm.Recv_init(room, 1, 1) for room in rooms] if receives else []
    for turn in range(2 * LOOKS):
        persistent = turn % 2 == 1
        began = time.perf_counter()
        if receives and persistent:
            MPI.Prequest.Startall(kept)
        under_way = kept if persistent else [comm.Irecv(room, 1, 1) for room in rooms] if receives else []
        seconds[persistent].append(time.perf_counter() - began)
        comm.Barrier()
        for room in () if receives else rooms:
            comm.Send(room, 0, 1)
        MPI.Request.Waitall(under_way)
        comm.Barrier()
    for request in kept:
        request.Free()
    new, again = (1e6 * median(seconds[persistent]) / MESSAGES for persistent in (False, True))
    return {"new_us": round(new, 3), "persistent_us": round(again, 3)}


# ---- real client ranks


def shares(comm: Any, seconds: float) -> dict[str, Any]:
    """Be a rank of a job in which visits sleep; return at the server who takes what of a core."""
    import wall_rounds
    from puppets import seconds_of

    from hpcfl.mpi.waiting import rows

    class Asleep(wall_rounds.Layers):
        """Layers that are there after a sleep in all rounds but the first."""

        def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
            time.sleep(seconds if visits.round else 0.0)
            return (yield from super().client(task, shared, personal, visits))

    pids = rows(comm, np.array([float(os.getpid())]))[:, 0].astype(int).tolist()
    job: Job = wall_rounds.job_of(Asleep(count=2, entries=1000), comm.Get_size(), 1, {"close": "all"})
    if comm.Get_rank():
        wall_rounds.serve(job, comm)
        return {}
    server, shared = wall_rounds.server(job, comm), job.begin(0).shared
    server.run_round(0, shared)
    before, began = [seconds_of([pid]) for pid in pids], time.monotonic()
    server.run_round(1, shared)
    lasted = time.monotonic() - began
    after = [seconds_of([pid]) for pid in pids]
    visiting = [round((late - early) / lasted, 3) for early, late in zip(before, after)]
    time.sleep(1.0)  # until nobody remembers the round
    before, began = [seconds_of([pid]) for pid in pids], time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - began
    idle = [round((seconds_of([pid]) - early) / lasted, 3) for pid, early in zip(pids, before)]
    server.leave(2, 0, without_dead=True)
    return {
        "clients": comm.Get_size() - 1,
        "server_waiting": visiting[0],
        "client_visiting": median(visiting[1:]),
        "client_idle": median(idle[1:]),
    }


if __name__ == "__main__":
    if not launching.inside():
        main()
    else:
        from mpi4py import MPI

        given = parsed()
        (number,) = given.lanes
        if number < 0:
            measured = requests(MPI.COMM_WORLD)
        elif number == 0:
            measured = shares(MPI.COMM_WORLD, given.seconds)
        else:
            measured = many_lanes(MPI.COMM_WORLD, number, given.seconds)
        if MPI.COMM_WORLD.Get_rank() == 0:
            print(json.dumps(measured), flush=True)
