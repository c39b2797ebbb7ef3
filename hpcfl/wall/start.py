"""Making the lanes, on every rank at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcfl import store
from hpcfl.errors import Interrupted, Stopped
from hpcfl.job import Job, Progress
from hpcfl.stopping import Stop
from hpcfl.transport import Arrays
from hpcfl.wall.host import Host
from hpcfl.wall.lane import Lane
from hpcfl.wall.member import Member
from hpcfl.wall.roster import Bench, benches
from hpcfl.wall.rounds import RealTime, last_saved
from hpcfl.wall.server import Server


def led(job: Job, comm: MPI.Intracomm, hosts: Sequence[str], folder: Path, stop: Stop) -> RealTime:
    """Return the server's rounds over lanes; the client ranks call `served` meanwhile."""
    lanes = [
        Lane(bench, *_connected(comm, bench, number), job.layout, job.config.clients)
        for number, bench in enumerate(benches(job.config.lane_width, hosts, job.chunks))
    ]

    def rest() -> None:
        if wish := stop.wished():
            raise Interrupted(wish)

    def load(clients: list[int]) -> dict[int, Arrays]:
        newest = store.latest(folder)
        return store.load_personal(newest, clients) if newest else {}

    return RealTime(job, Server(job, lanes, rest), last_saved(job, load))


def served(
    job: Job, comm: MPI.Intracomm, hosts: Sequence[str], now: Progress, rest: Callable[[], None]
) -> Stopped | None:
    """Serve as a client rank until the server says that the run is over; return whether it was stopped."""
    rank = comm.Get_rank()
    number, bench = next(
        (number, bench)
        for number, bench in enumerate(benches(job.config.lane_width, hosts, job.chunks))
        if rank in bench.ranks
    )
    host = Host(job, job.hosted(rank), now.personal)
    member = Member(job, host, bench, bench.ranks.index(rank), *_connected(comm, bench, number), rest)
    rounds, stopped = member.serve()
    return Stopped(rounds, "the server says so") if stopped else None


def dismissed(rounds: RealTime, comm: MPI.Intracomm, done: int, stopped: Stopped | None) -> None:
    """Let all ranks leave at once; end the job where some do not come back."""
    missing = rounds.server.leave(done, stopped is not None)
    if missing:
        ranks = ", ".join(str(rank) for lane in missing for rank in lane.bench.ranks)
        print(f"hpcfl: the run is recorded, but rank {ranks} did not come back to leave", file=sys.stderr, flush=True)
        comm.Abort(1)


def _connected(comm: MPI.Intracomm, bench: Bench, number: int) -> tuple[Any, Any]:
    """Return a lane's two communicators; rank 0 is the server, then come the seats in their order."""
    group = comm.Get_group().Incl([0, *bench.ranks])
    control = comm.Create_group(group, 2 * number)
    data = comm.Create_group(group, 2 * number + 1)
    group.Free()
    return control, data
