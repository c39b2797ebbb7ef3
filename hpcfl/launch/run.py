"""Carrying out a run request on every rank: the job is put together, torch is loaded, the rounds are run."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from hpcfl import store
from hpcfl.base import plugins
from hpcfl.base.blame import blaming
from hpcfl.base.errors import (
    Diverged,
    Ended,
    ErrorOnOtherRank,
    LeftOut,
    RunError,
    Stopped,
    UsageError,
    UserError,
    refusal,
)
from hpcfl.base.lazy import MPI, torch
from hpcfl.base.loaded import renew
from hpcfl.base.memory import prefer_large_pages
from hpcfl.base.terminal import say
from hpcfl.base.types import Computing
from hpcfl.config import Config, from_text
from hpcfl.data.absent import about_samples
from hpcfl.engine import stopping
from hpcfl.engine.checkpointing import Saver, begin, mark_of, see_one_folder, write_part
from hpcfl.engine.ending import ASKED, Ending, Row, scores
from hpcfl.engine.hangs import Moves, watched
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.loop import run
from hpcfl.engine.profile import Phases, gathered, report
from hpcfl.engine.record import Recorder, Reporter, about_clients, columns
from hpcfl.engine.rounds import Rounds
from hpcfl.engine.simulated import Simulated
from hpcfl.engine.trial import tried
from hpcfl.engine.watchdog import LeftBehind, Watchdog, beating
from hpcfl.launch import given, host
from hpcfl.launch.failure import ERROR_FILE, GIVE_UP_SECONDS, fail, noted, raise_together
from hpcfl.launch.request import RunRequest
from hpcfl.launch.saved import keep_initial, kept_data
from hpcfl.mpi.channel import connect
from hpcfl.mpi.collective import Collective
from hpcfl.mpi.cores import Processors, processors, shares, threads
from hpcfl.mpi.launcher import SLOW_SECONDS, end_job, has_ulfm, library
from hpcfl.mpi.placement import check_communicators, check_there, lane_topologies
from hpcfl.mpi.transport import Transport
from hpcfl.mpi.waiting import Patience, Roll, tell, telling, texts
from hpcfl.realtime import start
from hpcfl.schedule.cadence import Target
from hpcfl.store.atomic import number_of, write_text

Processes = list[tuple[str, str]]
"""Host and process id of each rank."""


def launch(
    decide: Callable[[], RunRequest | None],
    comm: Any,
    from_python: bool = False,
    allow_mixed: bool = False,
    on_round: Callable[[Row], Any] | None = None,
) -> None:
    """Carry out what rank 0 decides, on all ranks of `comm` (None: on this process alone).

    `on_round`: see `Ending`; rank 0's is called.

    Ranks that compute by other code than rank 0 are refused before, unless `allow_mixed`.

    Raises
    ------
    UsageError, RunError
        On one rank; on the others `hpcfl.base.errors.ErrorOnOtherRank`. Any other error ends the job, unless it is one
        of a process alone and the run is started `from_python`.
    Stopped
        On every rank, if the run was asked to stop.
    """
    request = None
    try:
        with telling(comm, SLOW_SECONDS):
            found = host.builds(comm)
            serves = comm is None or comm.Get_rank() == 0

            def decided() -> RunRequest | None:
                mixed = host.check_builds(found, allow_mixed)
                made = decide()
                return made and made.model_copy(update={"mixed": mixed})

            request = raise_together(comm, decided if serves else lambda: None)
            if comm is not None:
                # not by pydantic's own JSON, which refuses paths that are not UTF-8
                fields = json.loads(tell(comm, json.dumps(request.model_dump(mode="json") if request else None)))
                request = RunRequest(**fields) if fields else None
        if request is not None:
            carry_out(request, comm, on_round)
    except (UserError, ErrorOnOtherRank, Stopped):
        raise
    except BaseException as error:
        folder = request.folder if request else None
        if comm is None and from_python:
            raise noted(folder, error) from None
        fail(comm, folder, error)
    finally:
        if request is not None:
            store.release(request.folder)


def carry_out(request: RunRequest, comm: Any, on_round: Callable[[Row], Any] | None = None) -> None:
    """Put the job together on every rank, then run it; `Stopped` if it was asked to stop."""
    plugins.look_first(request.places, request.folder, request.only)
    given.written(request.modules)
    renew()
    config = raise_together(comm, lambda: from_text(request.config))
    rank = 0 if comm is None else comm.Get_rank()
    if rank == 0:
        (request.folder / ERROR_FILE).unlink(missing_ok=True)
    with telling(comm, config.patience):
        own = processors()
        found = texts(comm, json.dumps([socket.gethostname(), str(os.getpid()), [*own.cores], {**own.quotas}]))
        here = [json.loads(text) for text in found]
        processes, hosts = [(host, number) for host, number, *_ in here], [host for host, *_ in here]
        share = shares([Processors(*known) for _, _, *known in here], hosts)[rank]  # of the cores of its host
        count = config.threads
        if count == "auto":
            count = threads(share, os.environ.get("OMP_NUM_THREADS", "")) if config.clock == "wall" else 1
        os.environ["OMP_NUM_THREADS"] = str(count)  # torch reads it once, when it is loaded
        prefer_large_pages(os.environ)
        counts = [int(each) for each in texts(comm, str(count))]
        ranks = comm  # with which the job starts, or what stands for it where some may be missing
        if comm is not None and config.start_within is not None:
            lanes = connect(comm, config.lane_width, hosts, has_ulfm(comm), config.participation.by_arrivals)
            ranks = Roll(comm, config.start_within, lanes)
        with _without_absent(request, ranks):
            device, devices = host.placed(config, ranks, hosts)
    with host.fixed_arithmetic(config.reproducible and device != "cpu"):
        with _without_absent(request, ranks), watched(Moves(), config.patience, rank, len(hosts)):
            job, now = _prepared(config, request, ranks, hosts, device, count, share)
            host.check_code(config, ranks)
            where = {"hosts": hosts, "devices": devices, "threads": counts}
            opened = partial(_open, request, processes, where, job, now, ranks)
            raise_together(ranks, opened if rank == 0 else lambda: None)
        run = _in_real_time if (real := config.clock == "wall") else _in_step
        phases, ending = Phases(request.profile), None
        if rank == 0 and (on_round is not None or config.stop != Target()):
            earlier = scores(store.open_run(request.folder), now.round) if config.stop.patience and now.round else ()
            ending = Ending(config.stop, on_round, earlier)
        try:
            tells = not real or rank == 0  # of the round: other ranks are told of each by the server
            moving = watched(job.moves, config.patience, rank, len(hosts), waits_in_words=real)
            heard = beating(request.folder) if comm is not None and rank == 0 else nullcontext()
            with heard, moving, blaming(lambda: f" in round {now.round}" if tells else ""):
                stopped = run(job, request, now, ranks, processes, phases, ending)
        except UserError as error:
            if comm is None:
                raise noted(request.folder, error) from error.__cause__
            fail(comm, request.folder, error)  # on this rank only: the others are in the middle of a round
    if stopped is not None:
        raise stopped


@contextmanager
def _without_absent(request: RunRequest, ranks: Any) -> Iterator[None]:
    """Let a start fail without waiting for ranks that are missing, and let these go when they come after all."""
    try:
        yield
    except LeftOut as error:
        say(str(error))
        os._exit(0)  # without MPI's farewell, in which the others do not wait for this rank
    except (UserError, ErrorOnOtherRank) as error:
        if not getattr(ranks, "absent", None):
            raise
        if isinstance(error, ErrorOnOtherRank):
            time.sleep(GIVE_UP_SECONDS)  # the rank that speaks ends the job
        fail(ranks.comm, request.folder, error)


def _prepared(
    config: Config, request: RunRequest, comm: Any, hosts: list[str], device: str, count: int, share: float
) -> tuple[Job, Progress]:
    """The job, and where this rank begins; it has `count` threads, and a `share` of its host's cores."""
    rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    if comm is not None:
        Patience.crowd = 1 / share

    def check() -> None:
        if config.clock == "wall" and comm is not None:
            check_communicators(library(MPI.Get_library_version()), config.lane_width, hosts)
        expected = "expected Open MPI 5 started with 'mpiexec --with-ft ulfm'"
        for key, wanted, instead in (("fault_tolerance", "ulfm", "auto"), ("lost_clients", "rehost", "drop")):
            if getattr(config, key) == wanted and not has_ulfm(comm):
                why = f"this MPI does not tell of dead ranks; {expected}"
                raise UsageError(f"{key} = '{wanted}': {why}; did you mean {key} = '{instead}'?")
        if config.min_ranks is not None and config.min_ranks > size:
            raise refusal("min_ranks", f"at most {size}, the ranks of this job", config.min_ranks, size)
        if config.min_ranks is not None and config.min_ranks < size and not has_ulfm(comm):
            why = f"this MPI ends a job of {size} ranks with the first of them"
            raise UsageError(f"min_ranks = {config.min_ranks}: {why}; {expected}; remove it")
        torch.set_num_threads(count)

    def make(computing: Computing | None = request.computing) -> tuple[Job, Progress]:
        job = Job.of(config, request.data_dir, size, device, count, computing, request.chunk, federation)
        columns(job)  # refused before there is a folder
        if config.clock == "wall":
            config.check_lanes(lane_topologies(config.lane_width, hosts, job.chunks))
        if rank == 0 and torch.get_num_threads() != count:
            say(f"threads = {count}: torch was loaded before, and keeps {torch.get_num_threads()}")
        return job, begin(job, rank, request.checkpoint)

    with host.read_once(config, request.data_dir, comm, hosts, check) as federation:
        job, now = raise_together(comm, make)
    if comm is None:
        return job, now
    decided = cast("Computing", tell(comm, job.task.computing))  # rank 0's: others may be other machines
    return (job, now) if decided == job.task.computing else make(decided)


def _in_step(
    job: Job,
    request: RunRequest,
    now: Progress,
    comm: Any,
    processes: Processes,
    phases: Phases,
    ending: Ending | None,
) -> Stopped | None:
    """Run in simulated time: all ranks in step, until those of the clients are released."""
    rank, hosts = 0 if comm is None else comm.Get_rank(), [host for host, _ in processes]
    stop = stopping.Stop(request.folder, rank == 0)
    watch = Watchdog(request.folder, rank=rank, hosts=hosts)

    def rest() -> None:
        if rank != 0:
            _look_for_server(watch, stop, comm)
        if rounds.released:
            stopping.forward(stop, request.folder)

    phase = phases.phase if request.profile else None
    transport = Transport() if comm is None else Collective(comm, phase, rest, hosts)
    rounds = Simulated(job, transport, now.round, see_one_folder(request.folder, processes[0][1], comm))
    rounds.phases = phases
    try:
        stopped = _run_rounds(job, request, rounds, now, processes, rank, stop, ending)
        stopped = transport.leave(stopped)
    except LeftBehind as left:
        start.leave_behind(rank, left, now.round)
    if request.profile:
        report(gathered(phases, comm))
    return stopped


def _in_real_time(
    job: Job,
    request: RunRequest,
    now: Progress,
    comm: Any,
    processes: Processes,
    phases: Phases,
    ending: Ending | None,
) -> Stopped | None:
    """Run in real time: the server leads, the client ranks do what they are asked."""
    apart = see_one_folder(request.folder, processes[0][1], comm)
    connected, absent = None, dict[int, str]()
    if isinstance(comm, Roll):
        comm, connected, absent = comm.comm, comm.connected, comm.absent
    folder, serves, hosts = request.folder, comm.Get_rank() == 0, [host for host, _ in processes]
    stop, watch = stopping.Stop(folder, serves), Watchdog(folder, job.config.lost_after, comm.Get_rank(), hosts)

    def rest() -> None:
        stopping.forward(stop, folder)
        _look_for_server(watch, stop, comm)

    if not serves:
        write = partial(write_part, folder, processes[0][1], comm.Get_rank())
        return start.serve(job, comm, hosts, now, rest, phases, connected, absent, write)
    rounds = start.lead(job, comm, hosts, folder, stop, now, phases, connected, absent, apart)
    stopped = _run_rounds(job, request, rounds, now, processes, 0, stop, ending)
    if request.profile:
        report(rounds.profiles())
    start.dismiss(rounds, comm, now.round, stopped)
    return stopped


def _look_for_server(watch: Watchdog, stop: stopping.Stop, comm: Any) -> None:
    """Raise RunError if the server is gone; where the launcher is ending this rank meanwhile, end without a word.

    Whoever has made the launcher do so has spoken. Where no file can be written, nothing else tells that.
    """
    try:
        watch.look()
    except RunError:
        if stop.requested() != "signal TERM":
            raise
        end_job(comm, 1)


def _run_rounds(
    job: Job,
    request: RunRequest,
    rounds: Rounds,
    now: Progress,
    processes: Processes,
    rank: int,
    stop: stopping.Stop,
    ending: Ending | None,
) -> Stopped | None:
    """Run the rounds that are left, recorded by the server; return why not all of them, if so."""
    recorder, stopped, folder = None, None, request.folder
    if rounds.serves:
        reporter = Reporter(job.config.rounds, now.round, job.config.clock, request.quiet)
        recorder = Recorder(folder, job, len(processes), now.round, reporter)
    saver = Saver(job, rounds, folder, rank, processes[0][1], now.round, recorder)
    try:
        run(job, rounds, recorder, now, stop, saver, ending)
    except Stopped as early:
        stopped = early
    except Exception:
        saver.abandon()
        raise
    saver.finish()
    rounds.phases.end()
    if recorder is None:
        return stopped
    store.check_owner(folder)
    recorder.close()
    stopping.withdraw(folder)
    store.seal(folder)  # before the status: whoever reads it finds all rows, and somebody may go on with the run
    if stopped is None:
        store.write_status(folder, "done")
    elif isinstance(stopped, Ended):
        store.write_status(folder, "stopped" if stopped.reason == ASKED else "ended", stopped.reason)
        print(f"ended after round {stopped.round}: {stopped.reason}", flush=True)
        stopped = None
    elif isinstance(stopped, Diverged):
        store.write_status(folder, "diverged", stopped.reason)
        say(f"'{folder}' has diverged: {stopped.reason}; {stopped.remedy}")
    else:
        store.write_status(folder, "stopped", stopped.reason)
        print(f"stopped after round {stopped.round} ({stopped.reason}); hpcfl resume {folder} goes on", flush=True)
    store.release(folder)  # now: a process that waits for the status need not wait for the last rank to leave
    return stopped


def _open(
    request: RunRequest, processes: Processes, where: Mapping[str, Any], job: Job, now: Progress, ranks: Any
) -> None:
    """Try what of a new run is the user's; make the run folder, or take it up again, if enough ranks are there."""
    if request.new:
        tried(job, now, request.data_dir)
    if absent := getattr(ranks, "absent", None):
        check_there(job.config.min_ranks, len(processes), absent, ranks.seconds)
    folder = request.folder
    if request.new:
        whole = job.task.whole
        buffers = {} if whole is None else {name: whole.integer(name) for name in whole.buffers}  # which of them count
        files = {**job.config.files, **kept_data(job.config, folder)}
        facts = {
            **where,
            "code": job.config.code or None,
            "computing": {"how": job.task.computing, "why": job.task.why},
            "samples": about_samples(job.task.federation),
            "tensors": {"names": [*job.task.initial()], "buffers": buffers, "frozen": [*job.task.frozen]},
            "versions": versions(),
        }
        attributes = {name: json.dumps(value) for name, value in facts.items() if value is not None}
        attributes |= {"config": request.config, "data_dir": str(request.data_dir or ""), "chunk": str(job.chunk)}
        attributes |= {"git_commit": git_commit(), "package_sha256": host.package_digest()}
        attributes |= {"mixed": request.mixed} if request.mixed else {}
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            store.take(folder, request.force)
            if request.overwrite:
                store.discard(folder, [Path(each["file"]).name for each in files.values()])
            for name, source in request.modules.items():
                (folder / "code").mkdir(exist_ok=True)
                write_text(folder / "code" / f"{name}.py", source)
            if job.task.frozen:
                keep_initial(job.task, files, folder)
            attributes |= {"files": json.dumps(files)} if files else {}
            store.create(folder, attributes, about_clients(job.task.federation))
    else:
        held = store.run_attributes(folder)
        if changed := _changed(held, request, job.config.code):
            with _writable(folder):
                store.rebuild(folder, changed)
        if other := host.other_device(held, where["devices"]):
            say(f"'{folder}' {other}")
    if line := plugins.run_here(job.config.code):
        say(f"'{folder}': {line}")
    with _writable(folder):
        mark = mark_of(folder, processes[0][1])
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        if not stopping.waits(folder):  # asked since the request was judged
            stopping.withdraw(folder)  # before the status: from then on requests are for this start
        store.write_status(folder, "running", ranks=[f"process {number} on {host}" for host, number in processes])


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Say in one line where a run folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"'{error.filename or folder}' cannot be written: {error.strerror}") from None


def _changed(held: dict[str, Any], request: RunRequest, code: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The attributes of a run that are others from now on; UsageError where code is, and that is not forced."""
    changes, attributes = [], dict[str, str]()
    if held["config"] != request.config:
        before, after = (json.loads(text)["rounds"] for text in (held["config"], request.config))
        changes += [{"key": "rounds", "from": before, "to": after}] if before != after else []
        attributes["config"] = request.config
    recorded = json.loads(held.get("code", "{}"))
    if line := host.other_code(code, recorded, "this process", "the run"):
        if not request.force:
            raise UsageError(line)
        changes.append({"key": "code", "from": recorded, "to": code})
        attributes["code"] = json.dumps(code)
    if request.mixed:
        attributes["mixed"] = request.mixed
    if changes:
        done = 0 if request.checkpoint is None else number_of(request.checkpoint)
        when = {"after_round": done, "time": time.time()}
        history = [*json.loads(held.get("history", "[]")), *(change | when for change in changes)]
        attributes["history"] = json.dumps(history)
    return attributes


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    packages = ("hpcfl", "torch", "numpy", "h5py", "mpi4py")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def git_commit() -> str:
    """The commit of the checkout that this package lies in; empty where it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
