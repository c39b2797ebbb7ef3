"""How late rounds close over two levels, and what counts of what has come, beside the other layouts of lanes.

    .venv/bin/python benchmarks/two_levels.py                       # 10 MB; a quarter of an hour
    .venv/bin/python benchmarks/two_levels.py --megabytes 100 --layouts two-level --repeats 5
    .venv/bin/python benchmarks/two_levels.py --layouts two-level --cases stopped --rounds 2 --megabytes 1

A server and 4 faked nodes of 8 ranks each: in one lane, in lanes of one rank, and in two levels. The server, the ranks
that lead and the one at fault are ranks as in any run; the others are puppets (`puppet.py`), which speak the same
protocol. Nobody computes: a visit sleeps, and sends 8 layers one after the other. The deadline is twice what a round
without a fault takes here, since 2 cores copy all the bytes, and those of a cluster are not in the middle of that when
it comes. One client, which does not lead, is slow (its visit takes twice the deadline), stuck in one long operation,
suspended (SIGSTOP) in the middle of a visit for about 2 rounds, or killed there (Open MPI with ULFM). What each sum
should be is known: a wrong one ends the benchmark.

Per layout and case, of the rounds that the deadline ended while the fault lasted, the one that was latest: by how many
milliseconds (`late_ms`), how long of that it waited for what was under way (`flush_ms`), for how long of this the
server had no core (`without_a_core_ms`), how many bytes those were, how many bytes a second come from one leader to the
server in the same job, by a plain message of that size, and what 5 ms and twice the time of those bytes make
(`allowed_ms`). Over two levels these are the medians of several jobs (`--repeats`), with what each has measured beside
them. Over all such rounds of all jobs: how many layers had arrived at the leaders, by their own record as they heard of
the closing, and how many counted. All ranks share this machine's cores, where the server and the leaders of a cluster
have theirs: puppets are nice (10) and interrupt nobody (SCHED_BATCH), and how long ranks sleep between two looks
follows from how many others there are per core, puppets not counted. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

from hpcfl.mpi.launcher import FAREWELL, has_ulfm
from hpcfl.mpi.placement import TWO_LEVEL, tree

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.base.types import State
    from hpcfl.engine.job import Job
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task
    from hpcfl.realtime.leader import Leader

NODES, PER_NODE, LAYERS = 4, 8, 8
RANKS = 1 + NODES * PER_NODE
VICTIM = 2  # the first rank that does not lead
CASES, LAYOUTS = ("slow", "stuck", "stopped", "killed"), ("all", "1", TWO_LEVEL)
BEFORE = 5  # rounds without a fault, from whose median the deadline follows; their memory is used again after four
SLEEP = 0.16  # seconds of a visit, in parts of 8 layers
DELIVERED = 3  # layers that the victim still sends, where it is not slow only
BACK_SECONDS, LIMIT = 60.0, 1800.0
SUFFERED: list[str] = []
UP = 77  # tag of the messages that measure the bandwidth


def main() -> None:
    """Run a job for each layout and case, print a table, then JSON."""
    asked, found = parsed(), dict[str, dict[str, Any]]()
    print(f"{asked.mpi}, {asked.megabytes:g} MB, load {launching.load():.1f}")
    for layout, case in product(asked.layouts, asked.cases):
        if case == "killed":
            if asked.mpi != "openmpi":
                continue
            os.environ.update(FAREWELL)
        jobs = []
        for _ in range(asked.repeats if layout == TWO_LEVEL else 1):
            with tempfile.TemporaryDirectory() as folder:
                args = [__file__, *sys.argv[1:], "--layouts", layout, "--cases", case, "--folder", folder]
                jobs.append(launching.run(asked.mpi, RANKS, args, LIMIT, outlive=case == "killed"))
        found.setdefault(layout, {})[case] = row = over(jobs)
        print(f"{layout:>9} {case:>7}  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        row["jobs"] = jobs
    facts = {"mpi": asked.mpi, "megabytes": asked.megabytes, "ranks": RANKS, "nodes": NODES}
    print(json.dumps({"cases": found.get(TWO_LEVEL, {}), "layouts": found, **facts}))


def over(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of what jobs have measured, and their layers all together."""
    numbers = [name for name, value in jobs[0].items() if isinstance(value, (int, float))]
    whole = "layers_counted", "layers_arrived"
    return {name: (sum if name in whole else median)(job[name] for job in jobs) for name in numbers}


def parsed() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the model")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each case over two levels")
    parser.add_argument("--rounds", type=int, default=4, help="rounds from the fault on")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def job_of(asked: argparse.Namespace, rules: dict[str, Any]) -> Job:
    """Return the job, with a client on each rank."""
    import torch
    import wall_rounds

    from hpcfl.mpi.cores import cores
    from hpcfl.mpi.waiting import Patience

    (layout,), (case,) = asked.layouts, asked.cases

    class Sleepers(wall_rounds.Layers):
        """Layers full of one number, the state's and that of the client's rank, sent one after the other."""

        def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
            rank, number = ranks[int(visits.clients[0])], float(shared["layer 1"][0])
            fault = Path(asked.folder) / "fault"
            struck = float(fault.read_text()) if rank == VICTIM and fault.exists() else 0.0
            for sent, (name,) in enumerate(reversed(self.layers(task))):
                time.sleep(SLEEP / LAYERS)
                if struck and case == "slow" and sent >= DELIVERED:
                    time.sleep(struck / (LAYERS - DELIVERED))
                if struck and case != "slow" and sent == DELIVERED:
                    suffer(case, struck)
                yield {name: (torch.full((1, self.entries), number + rank), visits.ones(1))}
            return {}

    more = {"leaders": NODES} if layout == TWO_LEVEL else {}
    width = int(layout) if layout.isdigit() else layout
    entries = max(1, round(asked.megabytes * 250_000 / LAYERS))
    job = wall_rounds.job_of(Sleepers(count=LAYERS, entries=entries), RANKS, width, rules, **more)
    ranks = {int(client): chunk.rank for chunk in job.chunks for client in chunk.clients}
    Patience.crowd = len({0, VICTIM, *leaders()}) / len(cores())
    return job


def suffer(case: str, seconds: float) -> None:
    """Be stuck for so many seconds in one operation; or be suspended, or killed, once.

    The operation takes a core only where nobody else wants it: the other ranks of a cluster have theirs.
    """
    if case == "stuck":
        import torch

        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread's alone
        start = time.perf_counter()
        torch.linalg.svd(torch.rand(300, 300))
        size = int(300 * (seconds / (time.perf_counter() - start)) ** (1 / 3))
        torch.linalg.svd(torch.rand(size, size))
    elif case not in SUFFERED:
        SUFFERED.append(case)
        os.kill(os.getpid(), {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}[case])


def hosts() -> list[str]:
    """Return the faked host of each rank."""
    return [f"host{max(0, rank - 1) // PER_NODE}" for rank in range(RANKS)]


def leaders() -> list[int]:
    """Return the ranks that lead where there are two levels."""
    return list(tree(NODES, NODES, hosts()).leaders)


# ---- the ranks of a job


def puppet(comm: Any) -> None:
    """Be a rank that neither leads nor is at fault."""
    from puppet import Facts, Puppet, joined

    from hpcfl.mpi.channel import connect, direct
    from hpcfl.mpi.cores import cores
    from hpcfl.mpi.waiting import Patience

    os.nice(10)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it takes no core from the others when it wakes
    facts, rank = Facts.heard(comm), comm.Get_rank()
    Patience.crowd = RANKS / len(cores())
    comm.Dup()  # the bandwidth's
    there = connect(comm, facts.width, facts.hosts, facts.apart)
    if facts.width == TWO_LEVEL:
        leader, _ = tree(NODES, NODES, facts.hosts).above(rank)
        Puppet(facts, rank, 0, 1, direct(there.comms[0], leader, leads=False)).serve()
    else:
        joined(comm, facts, there).serve()


def real(comm: Any, asked: argparse.Namespace) -> None:
    """Be a client rank as in any run; one that leads keeps a record of what has arrived when rounds closed."""
    from puppet import Facts

    from hpcfl.realtime import leader, start

    Facts.heard(comm)
    job, arrived = job_of(asked, {"close": "all"}), dict[int, int]()
    measured = comm.Dup()
    if comm.Get_rank() == leaders()[0]:
        send_up(measured, asked)
    end, close = leader.Leader._end, leader.Leader._close

    def note(self: Leader) -> None:
        if self.round is not None:
            stamped = {lane: lane.visits.pending for lane, _ in self.round.lanes}
            arrived[int(self.notice.data[0])] = sum(len(one.times) for one in stamped.values() if one is not None)

    def ended(self: Leader) -> None:
        note(self)
        end(self)

    def closed(self: Leader, command: Any) -> None:
        note(self)
        close(self, command)

    leader.Leader._end, leader.Leader._close = ended, closed  # type: ignore[method-assign]
    start.serve(job, comm, hosts(), job.begin(comm.Get_rank()), lambda: None)
    (Path(asked.folder) / f"arrived-{comm.Get_rank()}.json").write_text(json.dumps(arrived))


def send_up(comm: Any, asked: argparse.Namespace) -> None:
    """Send the server what a sum of the model takes, some times."""
    data = np.ones(round(2e6 * asked.megabytes), dtype=np.uint8)
    for _ in range(5):
        comm.Recv(np.zeros(1, dtype=np.uint8), 0, UP)
        comm.Send(data, 0, UP)


def bandwidth(comm: Any, asked: argparse.Namespace) -> float:
    """Return bytes per second from a leader to the server, the median of some messages."""
    data, seconds = np.ones(round(2e6 * asked.megabytes), dtype=np.uint8), []
    for _ in range(5):
        request = comm.Irecv(data, leaders()[0], UP)
        began = time.monotonic()
        comm.Send(np.zeros(1, dtype=np.uint8), leaders()[0], UP)
        request.Wait()
        seconds.append(time.monotonic() - began)
    return data.nbytes / median(seconds)


def serve(comm: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Be the server of one job; return what was measured."""
    import puppets
    import wall_rounds

    from hpcfl.engine.stopping import Stop
    from hpcfl.realtime import start

    puppets.LAYERS = LAYERS
    (case,) = asked.cases
    job = job_of(asked, {"close": "all"})
    facts = puppets.facts_of(job, hosts(), [SLEEP] * RANKS, 10**6, has_ulfm(comm))
    pids = facts.tell(comm).astype(int).tolist()
    rate = bandwidth(comm.Dup(), asked)
    stop = Stop(wall_rounds.NOWHERE, True)
    lanes = start.lead(job, comm, hosts(), wall_rounds.NOWHERE, stop, job.begin(0)).lanes
    series = puppets.Series(wall_rounds.Timed(job, lanes))
    usual = median(series.next() for _ in range(BEFORE))
    deadline = round(max(0.3, 2 * usual), 3)
    timed = wall_rounds.Timed(job_of(asked, {"close": "deadline", "deadline": deadline}), lanes)
    series, flush = puppets.Series(timed, series.number), Flush(timed)
    fault = Path(asked.folder) / "fault"
    rounds, late = asked.rounds, []
    for number in range(rounds):
        if number == 0:
            fault.write_text(str(2 * deadline))
            wake = threading.Timer(2.2 * deadline, os.kill, (pids[VICTIM], signal.SIGCONT))
            wake.daemon = True
            wake.start() if case == "stopped" else None
        flush.clear()
        before, first = sum(series.layers.values()), series.number
        took = series.next()
        struck = VICTIM in {series.rank[int(client)] for client in timed.attempt.cohort}
        row = {"round": first, "late": took - deadline, "counted": sum(series.layers.values()) - before}
        row |= {"victim": struck, "flush": flush.seconds, "without": flush.without, "bytes": flush.bytes}
        late.append(row)
    fault.write_text("0")
    lanes.wait_for_all(BACK_SECONDS)
    lost = [*lanes.lost]
    timed.leave(series.number, 0, without_dead=True)
    time.sleep(0.5)
    return summary(asked, late, rate) | {
        "usual_s": round(usual, 3),
        "deadline_s": deadline,
        "victim_layers": series.layers[VICTIM],
        "lost": lost,
        "rows": [[round(1000 * each["late"], 1), each["counted"], int(each["victim"])] for each in late],
    }


class Flush:
    """How long the server waits for what is under way, how long of that it has no core, and what comes then."""

    def __init__(self, server: Any) -> None:
        self.wait = server.lanes.wait_for_frames
        server.lanes.wait_for_frames = self.measured
        self.clear()

    def clear(self) -> None:
        """Begin with a round."""
        self.seconds, self.without, self.bytes = 0.0, 0.0, 0

    def measured(self, lanes: list[Any], by_name: bool) -> None:
        """Wait, and measure it."""
        there = {lane: len(lane.visits.pending.times) for lane in lanes if lane.visits.pending is not None}
        import puppets

        began, queued = time.monotonic(), puppets.queued()
        self.wait(lanes, by_name)
        self.seconds, self.without = time.monotonic() - began, puppets.queued() - queued
        for lane, first in there.items():
            frames = lane.visits.pending.frames[first : len(lane.visits.pending.times)]
            self.bytes += sum(part.nbytes for frame in frames for part in frame)


def summary(asked: argparse.Namespace, late: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """Return what is told of the rounds that the fault met."""
    met = [row for row in late if row["victim"]] or late
    worst = max(met, key=lambda row: row["late"] - row["flush"])
    arrived = [json.loads(path.read_text()) for path in Path(asked.folder).glob("arrived-*.json")]
    return {
        "late_ms": round(1000 * worst["late"], 1),
        "flush_ms": round(1000 * worst["flush"], 1),
        "without_a_core_ms": round(1000 * worst["without"], 1),
        "bytes_under_way": worst["bytes"],
        "bandwidth": round(rate),
        "allowed_ms": round(5 + 2000 * worst["bytes"] / rate, 1),
        "layers_counted": sum(row["counted"] for row in met),
        "layers_arrived": sum(each.get(str(row["round"]), 0) for row in met for each in arrived),
    }


if __name__ == "__main__":
    if not launching.inside():
        main()
    else:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
        if rank == 0:
            print(json.dumps(serve(MPI.COMM_WORLD, parsed())), flush=True)
        elif rank in {*leaders(), VICTIM}:
            real(MPI.COMM_WORLD, parsed())
        else:
            puppet(MPI.COMM_WORLD)
