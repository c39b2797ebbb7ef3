"""What one server does with many ranks: how late it closes rounds, what it takes, and what goes over the wire.

    .venv/bin/python benchmarks/puppets.py --ranks 32 64 128 256 --rounds 50 --deadline 0.2 --slow 0.1 --stopped 0.02
    .venv/bin/python benchmarks/puppets.py --ranks 64 --width 1 node all --per-host 16 --kilobytes 64 1024 --mpi mpich

Rank 0 is a server as in any run; all others are puppets (`puppet.py`), which speak its protocol but do not import torch
and sleep instead of computing, so that some hundred fit into one machine. Hosts are faked, so many ranks on each.
For each number of ranks, width of lanes and size of the model a job is started, in which come one after the other:

- rounds with a deadline. A visit takes half of it. A share of the ranks is slow, one and a half times the deadline;
  a share is suspended (SIGSTOP, by process id) at different moments of one round, until these rounds end; a share is
  killed then (Open MPI). `late_ms`: from the deadline to when the server has decided what counts;
  for how much of the worst, at most, it was ready to run but had no core. The server's share of a core, and the
  puppets' while nobody asks them anything; bytes per round of commands, state and frames, counted by the puppets.
- a round in which all sleep for longer than it lasts: what a look at all lanes takes of a core.
- `--swift` rounds in which nobody sleeps, and everybody is waited for: milliseconds until all lanes have the state
  (`down`), from then until all frames are there (`up`), and for the sums.

What a sum should be is known, see `puppet.py`: a wrong one ends the benchmark. All ranks share this machine's cores, so
puppets run when nobody else wants to (SCHED_IDLE): the server of a cluster has cores of its own. Needs Linux. Prints a
line per job, and one JSON line last, from which `analysis/scaling.py` predicts larger jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

from hpcfl.mpi.launcher import FAREWELL, has_ulfm, library

if TYPE_CHECKING:
    from puppet import Facts
    from wall_rounds import Timed

    from hpcfl.engine.job import Job
    from hpcfl.sums.frames import FrameFormat

LAYERS = 4
VISIT, SLOW = 0.5, 1.5  # parts of the deadline that a visit takes
IDLE_SECONDS = 3.0
LOOKING_SECONDS = 1.0
LOOKS = 5  # in a row: by the second one, what has come is known
BACK_SECONDS = 30.0  # for ranks that were suspended or slow
LIMIT = 900.0
FAULTS = ("slow", "stopped", "killed")


def main() -> None:
    """Run a job for each case and print what it measured, then JSON."""
    asked, runs = parsed(), []
    if asked.killed:
        os.environ.update(FAREWELL)
    print(f"{asked.mpi}, load {launching.load():.1f}")
    for ranks, width, kilobytes in product(asked.ranks, asked.width, asked.kilobytes):
        case = ["--ranks", str(ranks), "--width", width, "--kilobytes", str(kilobytes)]
        args = [__file__, *sys.argv[1:], *case]  # of options that are given twice the last ones count
        runs.append(launching.run(asked.mpi, ranks, args, LIMIT, outlive=asked.killed > 0))
        print("  ".join(f"{name} {value}" for name, value in runs[-1].items()), flush=True)
    print(json.dumps({"puppets": runs}))


def parsed(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32], help="the server and its puppets")
    parser.add_argument("--width", nargs="+", default=["1"], help="client ranks per lane: a number, node or all")
    parser.add_argument("--per-host", type=int, default=32, help="ranks on each faked host")
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[64.0], help="size of the model")
    parser.add_argument("--rounds", type=int, default=50, help="rounds with a deadline")
    parser.add_argument("--deadline", type=float, default=0.2, help="seconds")
    for fault in FAULTS:
        parser.add_argument(f"--{fault}", type=float, default=0.0, help="share of the puppets")
    parser.add_argument("--swift", type=int, default=10, help="rounds in which nobody sleeps")
    asked = parser.parse_args(args)
    if asked.killed and asked.mpi != "openmpi":
        parser.error("--killed: expected --mpi openmpi, where a job goes on without its dead")
    if wrong := [width for width in asked.width if not width.isdigit() and width not in ("node", "all")]:
        parser.error(f"--width: expected a number of ranks, node or all, got {wrong[0]}")
    if asked.rounds < 1 or asked.swift < 1:
        parser.error(f"--rounds, --swift: expected at least 1, got {asked.rounds} and {asked.swift}")
    if wrong := [ranks for ranks in asked.ranks if ranks < 2]:
        parser.error(f"--ranks: expected at least 2, the server and a puppet, got {wrong[0]}")
    return asked


def serve(comm: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Be the server of one job; return what was measured."""
    import wall_rounds
    from mpi4py import MPI

    from hpcfl.engine.stopping import Stop
    from hpcfl.mpi.channel import connect
    from hpcfl.realtime import start

    ranks, (width,) = comm.Get_size(), asked.width
    entries = max(1, round(asked.kilobytes[0] * 250 / LAYERS))
    given = wall_rounds.Layers(count=LAYERS, entries=entries), ranks, int(width) if width.isdigit() else width
    job = wall_rounds.job_of(*given, {"close": "deadline", "deadline": asked.deadline})
    faults = struck(ranks, {fault: getattr(asked, fault) for fault in FAULTS})
    visit = dict.fromkeys(faults["slow"], SLOW)
    facts = facts_of(
        job,
        [f"host{rank // asked.per_host}" for rank in range(ranks)],
        [asked.deadline * visit.get(rank, VISIT) for rank in range(ranks)],
        asked.rounds,
        has_ulfm(comm),
    )
    pids = facts.tell(comm).astype(int).tolist()
    empty, began = memory(), time.monotonic()
    connected = connect(comm, facts.width, facts.hosts, facts.apart)
    made = time.monotonic()
    stop = Stop(wall_rounds.NOWHERE, True)
    lanes = start.lead(job, comm, facts.hosts, wall_rounds.NOWHERE, stop, job.begin(0), connected=connected).lanes
    found: dict[str, Any] = {
        "mpi": library(MPI.Get_library_version()),
        "ranks": ranks,
        "width": given[2],
        "lanes": len(lanes.all),
        "per_host": asked.per_host,
        "kilobytes": 4 * LAYERS * entries / 1000,
        "layers": LAYERS,
        "deadline": asked.deadline,
        "made_s": round(made - began, 3),
    }
    series = Series(wall_rounds.Timed(job, lanes))
    found |= with_deadline(series, asked, {fault: [pids[rank] for rank in faults[fault]] for fault in FAULTS}, faults)
    used = seconds_of(pids[1:])
    time.sleep(IDLE_SECONDS)
    found["idle_puppet_cpu"] = round((seconds_of(pids[1:]) - used) / IDLE_SECONDS / (ranks - 1), 5)
    looking = wall_rounds.job_of(*given, {"close": "deadline", "deadline": LOOKING_SECONDS})
    found["look"] = look(Series(wall_rounds.Timed(looking, lanes), series.number))
    closing = wall_rounds.job_of(*given, {"close": "all"})
    last = Series(wall_rounds.Timed(closing, lanes), series.number + 1)
    found["swift_ms"] = swift(last, asked.swift)
    found["layers_counted"]["swift"] = round(sum(last.layers.values()) / (ranks - 1) / asked.swift, 2)
    found |= {"memory_mb": [empty, memory()], "load": launching.load()}
    last.server.leave(last.number, 0, without_dead=True)
    if not facts.apart:
        connected.free()
    return found


class Series:
    """Rounds, one after the other: their sums are as they should be, or RuntimeError is raised.

    Attributes
    ----------
    layers : dict of int to int
        How many layers of each rank have counted.
    summing : float
        Seconds that the sums of the last round took.
    queued : float
        Seconds for which this thread, by the end of the last round, had been ready to run but had no core.
    """

    def __init__(self, server: Timed, number: int = 0) -> None:
        self.server, self.number = server, number
        self.rank = {int(client): chunk.rank for chunk in server.job.chunks for client in chunk.clients}
        self.layers = dict.fromkeys(self.rank.values(), 0)
        self.summing = self.queued = 0.0

    def next(self) -> float:
        """Run a round; return how long it took to close."""
        job, server = self.server.job, self.server
        shared = {name: value + self.number for name, value in job.begin(0).shared.items()}
        plan, sums = server.run_round(self.number, shared)
        self.queued = queued()
        counted = dict(zip((self.rank[client] for client in plan.cohort.tolist()), plan.depth.tolist()))
        began = time.perf_counter()
        totals = {name: sums.total(name) for name in shared}
        self.summing = time.perf_counter() - began
        for layer, (name, total) in enumerate(totals.items(), start=1):
            right = sum(self.number + rank for rank, depth in counted.items() if depth <= layer)
            if not bool((total == right).all()):
                raise RuntimeError(f"round {self.number}: expected sums of {right} in {name}, got {total}")
        for rank, depth in counted.items():
            self.layers[rank] += LAYERS + 1 - depth
        self.number += 1
        return server.took


def with_deadline(
    series: Series, asked: argparse.Namespace, pids: dict[str, list[int]], ranks: dict[str, list[int]]
) -> dict[str, Any]:
    """Run the rounds with a deadline, blows included; return how late they closed, and what it took."""
    from puppet import COUNTED

    server, late, looked = series.server, [], queued()

    def rest() -> None:
        nonlocal looked
        looked = queued()

    server.rest = rest
    used, began = time.process_time(), time.monotonic()
    for number in range(asked.rounds):
        if number == asked.rounds // 4:
            blows(pids["stopped"], signal.SIGSTOP, asked.deadline)
            blows(pids["killed"], signal.SIGKILL, asked.deadline)
        looked = queued()
        took = series.next()
        late.append((1000 * (took - asked.deadline), 1000 * (series.queued - looked)))
    used, took = time.process_time() - used, time.monotonic() - began
    for pid in pids["stopped"]:
        os.kill(pid, signal.SIGCONT)
    server.lanes.wait_for_all(BACK_SECONDS)
    counts = np.array([row for rank, row in server.profiles().items() if rank])[:, : len(COUNTED)]
    total = dict(zip(COUNTED, counts.sum(0).tolist()))
    sound = set(series.layers) - {rank for those in ranks.values() for rank in those}
    return {
        "late_ms": {
            "median": round(median(each for each, _ in late), 1),
            "worst": round(max(late)[0], 1),
            "of_it_queued": round(max(late)[1], 1),
        },
        "rounds": asked.rounds,
        "faults": {fault: len(those) for fault, those in ranks.items()},
        "layers_counted": {
            name: round(sum(series.layers[rank] for rank in those) / asked.rounds / len(those), 2)
            for name, those in {"sound": sound, **ranks}.items()
            if those
        },
        "lost": [*server.lanes.lost],
        "server_cpu": round(used / took, 3),
        "bytes": {name: round(total[name] / asked.rounds) for name in ("control", "down", "up")},
    }


def look(series: Series) -> dict[str, Any]:
    """Run a round in which nobody ends in time; return what a look takes at lanes whose ranks sleep."""
    server, seconds = series.server, []

    def rest() -> None:
        if not server.lanes.transfers.outgoing:
            for _ in range(LOOKS):
                began = time.thread_time()
                if not server.lanes.poll():
                    seconds.append(time.thread_time() - began)

    server.rest = rest
    series.next()
    server.lanes.wait_for_all(BACK_SECONDS)
    return {"cpu_ms": round(1000 * median(seconds), 4) if seconds else None, "looks": len(seconds)}


def swift(series: Series, rounds: int) -> dict[str, list[float]]:
    """Run rounds in which nobody sleeps; return milliseconds of their parts, round by round."""
    found: dict[str, list[float]] = {"down": [], "up": [], "sums": []}
    server, sent = series.server, 0.0

    def rest() -> None:
        nonlocal sent
        if not sent and not server.lanes.transfers.outgoing:
            sent = time.monotonic()

    server.rest = rest
    for _ in range(rounds):
        sent = 0.0
        took = series.next()
        down = min(took, (sent or inf) - server.began)
        for name, seconds in (("down", down), ("up", took - down), ("sums", series.summing)):
            found[name].append(round(1000 * seconds, 3))
    return found


def facts_of(job: Job, hosts: list[str], seconds: list[float], rounds: int, apart: bool) -> Facts:
    """Return what the puppets are told."""
    from puppet import Facts

    from hpcfl.engine.profile import Phases
    from hpcfl.mpi.placement import TWO_LEVEL, lane_ranks
    from hpcfl.realtime.orders import HEAD, Command, Op
    from hpcfl.sums.frames import frame_formats
    from hpcfl.sums.packing import Packing

    width = job.config.lane_width
    sizes = {1}  # what is left of a lane of several that has lost a rank
    if width != TWO_LEVEL:
        sizes |= {len(row) for row in lane_ranks(width, hosts)}
    packing = Packing(job.begin(0).shared)
    return Facts(
        hosts=hosts,
        width=width,
        ops={op.name: int(op) for op in Op},
        words={str(size): len(Command.empty(size, job.config.clients)) for size in sizes},
        held=HEAD - 1,
        state=[len(part) for part in packing.received(packing.zeros())],
        frames={str(size): [frame_facts(group) for group in frame_formats(job.layout, size)] for size in sizes},
        seconds=seconds,
        rounds=rounds,
        asleep=10 * LOOKING_SECONDS,
        figures=len(Phases().figures()),
        apart=apart,
    )


def frame_facts(group: FrameFormat) -> dict[str, Any]:
    """Return what a puppet has to know of a group's frames: see `Facts`."""
    frame, (name,) = group.zeros(), group.blocks
    group.weigh(frame, 0, name, 1.0)
    (weight,) = np.flatnonzero(frame[0].numpy()).tolist()
    parts = [(len(part), part.numpy().dtype.char) for part in frame]
    values = group.small[name].start if name in group.small else group.size
    return {"parts": parts, "weight": weight, "values": values}


def struck(ranks: int, shares: dict[str, float]) -> dict[str, list[int]]:
    """Return which puppets each fault meets, at least one where it is to be any."""
    chosen = np.random.default_rng(0).permutation(np.arange(1, ranks)).tolist()
    wanted = {fault: max(share > 0, round(share * (ranks - 1))) for fault, share in shares.items()}
    return {fault: [chosen.pop() for _ in range(min(number, len(chosen)))] for fault, number in wanted.items()}


def blows(pids: list[int], number: int, seconds: float) -> None:
    """Let a signal fall on each of some processes, at moments spread over so many seconds from now."""
    for place, pid in enumerate(pids):
        timer = threading.Timer(seconds * (place + 0.5) / len(pids), os.kill, (pid, number))
        timer.daemon = True
        timer.start()


def queued() -> float:
    """Return the seconds for which this thread was ready to run but had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def memory() -> int:
    """Return the megabytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 10**6


def seconds_of(pids: list[int]) -> float:
    """Return the seconds of a core that some processes have used by now, those that are dead left out."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    if not launching.inside():
        main()
    else:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_rank():
            from puppet import serve as be_puppet

            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            be_puppet(MPI.COMM_WORLD)
        else:
            print(json.dumps(serve(MPI.COMM_WORLD, parsed())), flush=True)
