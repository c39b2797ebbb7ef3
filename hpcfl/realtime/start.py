"""How rounds in real time begin and end: making the lanes, on every rank at once, and leaving them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from hpcfl.base.errors import Diverged, Interrupted, LeftOut, Stopped, ended
from hpcfl.base.lazy import MPI
from hpcfl.base.terminal import say
from hpcfl.engine.executor import Executor
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.profile import Phases
from hpcfl.engine.stopping import Stop
from hpcfl.engine.watchdog import LeftBehind
from hpcfl.mpi.channel import Connected, connect, direct, single
from hpcfl.mpi.launcher import end_job, end_launcher, end_ranks, has_cuda, has_ulfm
from hpcfl.mpi.placement import TWO_LEVEL, lane_topologies, topology, tree
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import telling
from hpcfl.realtime.arrivals import ArrivalsServer, ScheduledServer
from hpcfl.realtime.client import ClientRank, Rest
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.questions import Store
from hpcfl.realtime.server import Server
from hpcfl.realtime.succession import Succession
from hpcfl.realtime.two_levels import RelayedRank, Roles, relayed_lanes


def lead(
    job: Job,
    comm: MPI.Intracomm,
    hosts: Sequence[str],
    folder: Path,
    stop: Stop,
    now: Progress,
    phases: Phases | None = None,
    connected: Connected | None = None,
    absent: Mapping[int, str] = MappingProxyType({}),
    apart: bool = False,
) -> Server:
    """Return the server's rounds over lanes, from `now` on; the client ranks call `serve` meanwhile.

    The lanes are those that were `connected` earlier, if any were. Ranks that are `absent` are lost from the start, for
    the reason that is given. Where ranks write `apart`, each has the `store` that `serve` is given.
    """
    transfers = Transfers()
    facts = job.layout, job.config.clients, transfers, job.together, job.parts

    def rest() -> None:
        if reason := stop.requested():
            raise Interrupted(reason)

    kind, spare, succession = Server, dict[int, Lane](), None
    if arrivals := job.config.participation.by_arrivals:
        kind = ScheduledServer if job.config.participation.scheduled else ArrivalsServer
    with telling(comm, job.config.patience):
        there = connected or connect(comm, job.config.lane_width, hosts, has_ulfm(comm), arrivals)
    if job.config.lane_width == TWO_LEVEL:
        nodes, shared = tree(job.config.leaders, job.config.fan_out, hosts, absent), there.comms[0]
        if arrivals:
            lanes, spare = relayed_lanes(job, there.comms, nodes, facts)
        else:
            succession = Succession(job, shared, nodes, facts)
            lanes = succession.lanes()
        lanes += [Lane(topology([rank], job.chunks), direct(shared, rank, leads=True), *facts) for rank in absent]
    else:
        lanes, size = [], comm.Get_size()
        for number, each in enumerate(lane_topologies(job.config.lane_width, hosts, job.chunks)):
            for local_rank, rank in enumerate(each.ranks):
                if (channels := there.lanes.get(single(rank, size))) is not None:
                    spare[rank] = Lane(each.single(local_rank), channels, *facts)
            whole = absent.keys().isdisjoint(each.ranks) or len(each.ranks) == 1 or each.ranks[0] not in spare
            lanes += [Lane(each, there.lanes[number], *facts)] if whole else [spare[rank] for rank in each.ranks]
    made = kind(job, Lanes(lanes, spare, job.config.lost_after, job.config.patience, phases, transfers), rest)
    made.absences.hosts = hosts
    made.connected, made.apart, made.succession = there, apart, succession
    with suppress(Interrupted):  # the request lasts: the first round hears of it
        made.gather(absent)
    job.planner.recall(folder, now.round)
    return made


def serve(
    job: Job,
    comm: MPI.Intracomm,
    hosts: Sequence[str],
    now: Progress,
    rest: Rest,
    phases: Phases | None = None,
    connected: Connected | None = None,
    absent: Collection[int] = (),
    store: Store = None,
) -> Stopped | None:
    """Serve as a client rank until the server says that the run is over; return why it was stopped, if it was.

    `connected` and `absent` as for `lead`; `store` writes personal state, ``{client: {name: […]}}``, to the checkpoint
    after so many rounds.
    """
    rank = comm.Get_rank()
    now.shared = {}  # it comes with each invitation
    from_device = job.task.device.type == "cuda" and bool(has_cuda(comm))
    executor = Executor(job, job.hosted(rank), now.personal, from_device)
    client: ClientRank | Roles | RelayedRank
    arrivals = job.config.participation.by_arrivals
    there = connected or connect(comm, job.config.lane_width, hosts, has_ulfm(comm), arrivals)
    if job.config.lane_width == TWO_LEVEL:
        nodes = tree(job.config.leaders, job.config.fan_out, hosts, absent)
        made = RelayedRank if arrivals else Roles
        client = made(job, there.comms, nodes, executor, rest, phases, store)
    else:
        topologies = lane_topologies(job.config.lane_width, hosts, job.chunks)
        number, lane = next((number, each) for number, each in enumerate(topologies) if rank in each.ranks)
        local_rank = lane.ranks.index(rank)
        own, spare = there.lanes[number], there.lanes.get(single(rank, comm.Get_size()))
        if spare is not None and not {*absent}.isdisjoint(lane.ranks):
            lane, local_rank, own, spare = lane.single(local_rank), 0, spare, None
        client = ClientRank(job, executor, lane, local_rank, own, rest, spare, phases, store)
    try:
        last = client.serve()
    except LeftBehind as left:
        leave_behind(rank, left, now.round)
    except LeftOut as out:
        say(f"rank {rank}: {out}")
        _drop(None, alone=True)
    stopped = ended(last.round, last.stopped)
    if last.hard:
        _drop(stopped)
    _free(comm, there)
    return stopped


def dismiss(server: Server, comm: MPI.Intracomm, done: int, stopped: Stopped | None) -> None:
    """Let all ranks leave at once; end the job where some do not come back."""
    missing, hard = server.leave(done, stopped.code if stopped else 0, has_ulfm(comm))
    if has_ulfm(comm) and server.lanes.lost:
        end_ranks([*server.lanes.lost])  # MPI waits for one that only hangs
        end_launcher()  # and, as its launcher, for a host that is out of reach
    if missing:
        say(f"the run is recorded, but rank {', '.join(map(str, missing))} did not come back to leave")
        end_job(comm, 1 if stopped is None else stopped.code)
    if hard:
        _drop(stopped)
    _free(comm, server.connected)


def _free(comm: MPI.Intracomm, connected: Connected) -> None:
    """Let go of the lanes, unless MPI may have lost ranks."""
    if not has_ulfm(comm):
        connected.free()


def leave_behind(rank: int, left: LeftBehind, done: int) -> NoReturn:
    """End this rank, which the run has done without since round `done`."""
    say(f"rank {rank}: {left}")
    _drop(ended(done, {"done": 0, "ended": 0, "diverged": Diverged.code}.get(left.state, Stopped.code)))


def _drop(stopped: Stopped | None, alone: bool = False) -> NoReturn:
    """End this process without MPI's farewell: it would wait for the dead, as a launcher may; `alone` has it go on."""
    if not alone:
        end_launcher()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if stopped is None else stopped.code)
