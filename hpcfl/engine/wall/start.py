"""Making the lanes, on every rank at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from mpi4py import MPI

from hpcfl import store
from hpcfl.base.errors import Diverged, Interrupted, Stopped, ended
from hpcfl.comm.launcher import has_cuda, has_ulfm
from hpcfl.comm.mpi import Bandwidth
from hpcfl.comm.placement import Topology, lane_topologies
from hpcfl.comm.transport import Arrays
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.stopping import Stop
from hpcfl.engine.wall.client import Member
from hpcfl.engine.wall.executor import Host
from hpcfl.engine.wall.lane import Lane
from hpcfl.engine.wall.lanes import Fleet
from hpcfl.engine.wall.rounds import RealTime, last_saved
from hpcfl.engine.wall.server import Server
from hpcfl.engine.wall.watchdog import Parted


def led(job: Job, comm: MPI.Intracomm, hosts: Sequence[str], folder: Path, stop: Stop, now: Progress) -> RealTime:
    """Return the server's rounds over lanes, from `now` on; the client ranks call `served` meanwhile."""
    bandwidth = Bandwidth()

    def lane(bench: Topology, number: int) -> Lane:
        return Lane(bench, *_connected(comm, bench, number), job.layout, job.config.clients, bandwidth)

    rows = lane_topologies(job.config.lane_width, hosts, job.chunks)
    lanes = [lane(bench, number) for number, bench in enumerate(rows)]
    spare = {
        rank: lane(bench.single(seat), _spare(rank, comm))
        for bench in rows
        for seat, rank in enumerate(bench.ranks)
        if _may_fall_apart(bench, comm)
    }

    def rest() -> None:
        if reason := stop.requested():
            raise Interrupted(reason)

    def load(clients: list[int]) -> dict[int, Arrays]:
        return store.load_personal(now.saved, clients) if now.saved else {}

    def since(clients: list[int]) -> dict[int, int]:
        return store.personal_rounds(now.saved, clients) if now.saved else dict.fromkeys(clients, 0)

    fleet = Fleet(lanes, spare, job.config.lost_after, job.config.patience, bandwidth)
    server = Server(job, fleet, rest)
    with suppress(Interrupted):  # the request lasts: the first round hears of it
        server.gather()
    job.planner.recall(folder, now.round)
    return RealTime(job, server, last_saved(job, load), since)


def served(
    job: Job, comm: MPI.Intracomm, hosts: Sequence[str], now: Progress, rest: Callable[[], None]
) -> Stopped | None:
    """Serve as a client rank until the server says that the run is over; return whether it was stopped."""
    rank = comm.Get_rank()
    rows = lane_topologies(job.config.lane_width, hosts, job.chunks)
    number, bench = next((number, bench) for number, bench in enumerate(rows) if rank in bench.ranks)
    seat = bench.ranks.index(rank)
    connected = _connected(comm, bench, number)
    spare = _connected(comm, bench.single(seat), _spare(rank, comm)) if _may_fall_apart(bench, comm) else None
    now.shared = {}  # it comes with each call
    direct = job.task.device.type == "cuda" and bool(has_cuda(comm))
    host = Host(job, job.hosted(rank), now.personal, direct)
    member = Member(job, host, bench, seat, connected, rest, spare)
    try:
        call = member.serve()
    except Parted as parted:
        print(f"hpcfl: rank {rank}: {parted}", file=sys.stderr, flush=True)
        codes = {"done": 0, "diverged": Diverged.code}
        _drop(ended(now.round, codes.get(parted.state, Stopped.code)))
    stopped = ended(call.round, call.stopped)
    if call.hard:
        _drop(stopped)
    return stopped


def dismissed(rounds: RealTime, comm: MPI.Intracomm, done: int, stopped: Stopped | None) -> None:
    """Let all ranks leave at once; end the job where some do not come back."""
    missing, hard = rounds.server.leave(done, stopped.code if stopped else 0, not has_ulfm(comm))
    if missing:
        ranks = ", ".join(str(rank) for lane in missing for rank in lane.bench.ranks)
        print(f"hpcfl: the run is recorded, but rank {ranks} did not come back to leave", file=sys.stderr, flush=True)
        comm.Abort(1 if stopped is None else stopped.code)
    if hard:
        _drop(stopped)


def _drop(stopped: Stopped | None) -> NoReturn:
    """End this process without MPI's farewell: it would wait for the dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if stopped is None else stopped.code)


def _may_fall_apart(bench: Topology, comm: MPI.Intracomm) -> bool:
    return len(bench.ranks) > 1 and has_ulfm(comm)


def _spare(rank: int, comm: MPI.Intracomm) -> int:
    """Return the number of a rank's lane of its own; those of the lanes in use are below the number of ranks."""
    return int(comm.Get_size()) + rank


def _connected(comm: MPI.Intracomm, bench: Topology, number: int) -> tuple[Any, Any]:
    """Return a lane's two communicators; rank 0 is the server, then come the seats in their order."""
    group = comm.Get_group().Incl([0, *bench.ranks])
    control = comm.Create_group(group, 2 * number)
    data = comm.Create_group(group, 2 * number + 1)
    group.Free()
    return control, data
