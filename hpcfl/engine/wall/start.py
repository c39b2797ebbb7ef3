"""How rounds in real time begin and end: making the lanes, on every rank at once, and leaving them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from mpi4py import MPI

from hpcfl.base.errors import Diverged, Interrupted, Stopped, ended
from hpcfl.comm.launcher import end_job, end_ranks, has_cuda, has_ulfm
from hpcfl.comm.mpi import Bandwidth
from hpcfl.comm.placement import Topology, lane_topologies
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.profile import Phases
from hpcfl.engine.stopping import Stop
from hpcfl.engine.wall.arrivals import ArrivalsServer
from hpcfl.engine.wall.client import ClientRank
from hpcfl.engine.wall.executor import Executor
from hpcfl.engine.wall.lane import Lane
from hpcfl.engine.wall.lanes import Lanes
from hpcfl.engine.wall.server import Server
from hpcfl.engine.wall.watchdog import LeftBehind


def lead(
    job: Job,
    comm: MPI.Intracomm,
    hosts: Sequence[str],
    folder: Path,
    stop: Stop,
    now: Progress,
    phases: Phases | None = None,
) -> Server:
    """Return the server's rounds over lanes, from `now` on; the client ranks call `serve` meanwhile."""
    bandwidth = Bandwidth()

    def lane(topology: Topology, number: int) -> Lane:
        control, data = _connected(comm, topology, number)
        return Lane(topology, control, data, job.layout, job.config.clients, bandwidth, job.together, job.parts)

    def rest() -> None:
        if reason := stop.requested():
            raise Interrupted(reason)

    topologies = lane_topologies(job.config.lane_width, hosts, job.chunks)
    all_lanes = [lane(topology, number) for number, topology in enumerate(topologies)]
    spare = {
        rank: lane(topology.single(local_rank), _spare(rank, comm))
        for topology in topologies
        for local_rank, rank in enumerate(topology.ranks)
        if _may_fall_apart(topology, comm)
    }
    kind = ArrivalsServer if job.config.participation.by_arrivals else Server
    server = kind(job, Lanes(all_lanes, spare, job.config.lost_after, job.config.patience, bandwidth, phases), rest)
    with suppress(Interrupted):  # the request lasts: the first round hears of it
        server.gather()
    job.planner.recall(folder, now.round)
    return server


def serve(
    job: Job,
    comm: MPI.Intracomm,
    hosts: Sequence[str],
    now: Progress,
    rest: Callable[[], None],
    phases: Phases | None = None,
) -> Stopped | None:
    """Serve as a client rank until the server says that the run is over; return why it was stopped, if it was."""
    rank = comm.Get_rank()
    topologies = lane_topologies(job.config.lane_width, hosts, job.chunks)
    number, topology = next((number, each) for number, each in enumerate(topologies) if rank in each.ranks)
    local_rank = topology.ranks.index(rank)
    connected, spare = _connected(comm, topology, number), None
    if _may_fall_apart(topology, comm):
        spare = _connected(comm, topology.single(local_rank), _spare(rank, comm))
    now.shared = {}  # it comes with each invitation
    direct = job.task.device.type == "cuda" and bool(has_cuda(comm))
    executor = Executor(job, job.hosted(rank), now.personal, direct)
    client = ClientRank(job, executor, topology, local_rank, connected, rest, spare, phases)
    try:
        last = client.serve()
    except LeftBehind as left:
        print(f"hpcfl: rank {rank}: {left}", file=sys.stderr, flush=True)
        codes = {"done": 0, "diverged": Diverged.code}
        _drop(ended(now.round, codes.get(left.state, Stopped.code)))
    stopped = ended(last.round, last.stopped)
    if last.hard:
        _drop(stopped)
    _free(comm, connected)
    return stopped


def dismiss(server: Server, comm: MPI.Intracomm, done: int, stopped: Stopped | None) -> None:
    """Let all ranks leave at once; end the job where some do not come back."""
    missing, hard = server.leave(done, stopped.code if stopped else 0, has_ulfm(comm))
    if has_ulfm(comm):
        end_ranks([loss.rank for loss in server.lanes.lost])  # MPI waits for one that only hangs
    if missing:
        ranks = ", ".join(str(rank) for lane in missing for rank in lane.topology.ranks)
        print(f"hpcfl: the run is recorded, but rank {ranks} did not come back to leave", file=sys.stderr, flush=True)
        end_job(comm, 1 if stopped is None else stopped.code)
    if hard:
        _drop(stopped)
    for lane in server.lanes.all:
        _free(comm, (lane.control, lane.data))


def _free(comm: MPI.Intracomm, connected: tuple[Any, Any]) -> None:
    """Free a lane's communicators: MPI has few, and a process may run many runs. Not where one may have lost ranks."""
    if not has_ulfm(comm):
        for each in connected:
            each.Free()


def _drop(stopped: Stopped | None) -> NoReturn:
    """End this process without MPI's farewell: it would wait for the dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if stopped is None else stopped.code)


def _may_fall_apart(topology: Topology, comm: MPI.Intracomm) -> bool:
    return len(topology.ranks) > 1 and has_ulfm(comm)


def _spare(rank: int, comm: MPI.Intracomm) -> int:
    """Return the number of a rank's lane of its own; those of the lanes in use are below the number of ranks."""
    return int(comm.Get_size()) + rank


def _connected(comm: MPI.Intracomm, topology: Topology, number: int) -> tuple[Any, Any]:
    """Return a lane's two communicators; rank 0 is the server, then come the client ranks in their order."""
    group = comm.Get_group().Incl([0, *topology.ranks])
    control = comm.Create_group(group, 2 * number)
    data = comm.Create_group(group, 2 * number + 1)
    group.Free()
    return control, data
