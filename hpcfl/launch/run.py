"""Carrying out an order on every rank: the job is put together, torch is loaded, the rounds are run."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfl import config as configs
from hpcfl import store
from hpcfl.base.errors import Diverged, Elsewhere, Stopped, Told, UsageError
from hpcfl.base.memory import prefer_large_pages
from hpcfl.comm.guard import Norms
from hpcfl.comm.launcher import has_ulfm, local
from hpcfl.comm.placement import benches, check_single, cores, device, share_of_cores
from hpcfl.engine import stopping
from hpcfl.launch.consensus import first, settled, told
from hpcfl.launch.failure import fail, forget, note
from hpcfl.launch.request import Order
from hpcfl.schedule.doubling import Stage
from hpcfl.store.compatibility import check_personal, check_shared

if TYPE_CHECKING:
    from hpcfl.comm.transport import Transport
    from hpcfl.config import Config
    from hpcfl.engine.job import Job, Progress
    from hpcfl.engine.loop import Rounds


def launch(judge: Callable[[], Order | None], comm: Any) -> None:
    """Carry out what rank 0's `judge` says, on all ranks of `comm` (None: on this process alone).

    Raises
    ------
    UsageError, RunError
        On one rank; on the others `hpcfl.base.errors.Elsewhere`. Any other error ends the job.
    Stopped
        On every rank, if the run was asked to stop.
    """
    order = None
    try:
        order = told(comm, judge)
        if order is not None:
            carry_out(order, comm)
    except (Told, Elsewhere, Stopped):
        raise
    except BaseException as error:
        fail(comm, Path(order.run_dir) if order else None, error)
    finally:
        if order is not None:
            store.release(Path(order.run_dir))


def carry_out(order: Order, comm: Any) -> None:
    """Put the job together on every rank, then run it.

    Raises
    ------
    Stopped
        If the run was asked to stop.
    """
    config, folder = configs.from_text(order.config), Path(order.run_dir)
    if first(comm):
        forget(folder)
    here, beside = local(comm)
    threads = _threads(config, beside)
    from hpcfl.engine.job import Job

    rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    if comm is not None:
        from hpcfl.comm.mpi import Patience

        Patience.crowd = beside / len(cores())
    settled(comm, lambda: _check_mpi(config, comm))
    job = settled(comm, lambda: Job.of(config, order.data, size, _device(here), threads))
    processes = _processes(comm)
    hosts = [host for host, _ in processes]
    if config.clock == "wall" and config.singles:
        rows = benches(config.lane_width, hosts, job.chunks)
        settled(comm, lambda: check_single(config.singles, config.lane_width, rows))
    now = settled(comm, lambda: _begun(job, order, rank))
    settled(comm, lambda: _open(order, processes, job) if first(comm) else None)
    carry = _in_real_time if config.clock == "wall" else _in_step
    try:
        stopped = carry(job, order, now, comm, hosts)
    except Told as error:
        if comm is None:
            note(folder, str(error))
            raise
        fail(comm, folder, error)  # on this rank only: the others are in the middle of a round
    if stopped is not None:
        raise stopped


def _threads(config: Config, beside: int) -> int:
    """Return the threads per operation; to be called before torch is loaded, which reads the environment once."""
    threads = config.threads
    if threads == "auto":
        own = share_of_cores(beside) if config.clock == "wall" else 1
        asked = os.environ.get("OMP_NUM_THREADS", "") if config.clock == "wall" else ""
        threads = int(asked) if asked.isdecimal() and int(asked) else own
    os.environ["OMP_NUM_THREADS"] = str(threads)
    prefer_large_pages(os.environ)
    return threads


def _check_mpi(config: Config, comm: Any) -> None:
    """Refuse to promise what this MPI cannot keep."""
    if config.fault_tolerance == "ulfm" and not has_ulfm(comm):
        raise UsageError(
            "fault_tolerance = 'ulfm': this MPI does not tell of dead ranks; expected Open MPI 5 started with "
            "'mpiexec --with-ft ulfm'; nearest: fault_tolerance = 'auto'"
        )


def _in_step(job: Job, order: Order, now: Progress, comm: Any, hosts: list[str]) -> Stopped | None:
    """Run in simulated time: all ranks in step, until those of the clients are released."""
    from hpcfl.engine.simulated import Simulated

    folder, transport = Path(order.run_dir), _transport(comm)
    stop = stopping.Stop(folder, transport.serves)
    rounds = Simulated(job, transport, now.round)

    def rest() -> None:
        if rounds.released:
            stopping.hand_on(stop, folder)

    stopped = _led(job, order, rounds, now, transport.size, stop)
    return transport.leave(stopped, rest)


def _transport(comm: Any) -> Transport:
    if comm is None:
        from hpcfl.comm.transport import Alone

        return Alone()
    from hpcfl.comm.collective import Collective

    return Collective(comm)


def _in_real_time(job: Job, order: Order, now: Progress, comm: Any, hosts: list[str]) -> Stopped | None:
    """Run in real time: the server leads, the client ranks do what they are asked."""
    from hpcfl.engine.wall import start
    from hpcfl.engine.wall.watchdog import Watch

    folder = Path(order.run_dir)
    stop, watch = stopping.Stop(folder, first(comm)), Watch(folder, job.config.lost_after)

    def rest() -> None:
        stopping.hand_on(stop, folder)
        watch.look()

    if not first(comm):
        return start.served(job, comm, hosts, now, rest)
    rounds = start.led(job, comm, hosts, folder, stop, now)
    stopped = _led(job, order, rounds, now, comm.Get_size(), stop)
    start.dismissed(rounds, comm, now.round, stopped)
    return stopped


def _led(job: Job, order: Order, rounds: Rounds, now: Progress, ranks: int, stop: stopping.Stop) -> Stopped | None:
    """Run the rounds that are left, recorded by the server; return why not all of them, if so."""
    from hpcfl.engine.loop import run
    from hpcfl.engine.progress import Speaker
    from hpcfl.engine.record import Recorder

    folder = Path(order.run_dir)
    recorder = stopped = None
    if rounds.serves:
        speaker = Speaker(job.config.rounds, now.round, order.quiet)
        recorder = Recorder(folder, job, ranks, now.round, speaker)
    try:
        run(job, rounds, recorder, now, stop)
    except Stopped as early:
        stopped = early
    if recorder is not None:
        recorder.close()
        _over(folder, stopped)
    return stopped


def _over(folder: Path, stopped: Stopped | None) -> None:
    """Write down, and say, how the rounds ended."""
    stopping.withdraw(folder)
    if stopped is None:
        store.write_status(folder, "done")
        store.seal(folder)
    elif isinstance(stopped, Diverged):
        store.seal(folder)
        store.write_status(folder, "diverged", stopped.reason)
        remedy = "try a smaller algorithm.lr, or scaled features (hpcfl check looks at their range)"
        print(f"hpcfl: '{folder}' has diverged: {stopped.reason}; {remedy}", file=sys.stderr, flush=True)
    else:
        store.seal(folder)  # before the status: once it says so, somebody else may go on with the run
        store.write_status(folder, "stopped", stopped.reason)
        print(f"stopped after round {stopped.round} ({stopped.reason}); hpcfl resume {folder} goes on", flush=True)
    store.release(folder)  # now: whoever has waited for the status need not wait for the last rank to leave


def _begun(job: Job, order: Order, rank: int) -> Progress:
    """Return where this rank begins: before round 0, or after the checkpoint; each reads the clients it hosts."""
    now = job.begin(rank)
    if order.checkpoint is None:
        return now
    import torch

    now.saved = path = Path(order.checkpoint)
    saved = store.load(path, personal=False)
    now.round, now.stage = saved.round, Stage.of(saved.clock)
    now.clock = {name: saved.clock[name] for name in now.clock}
    now.norms = Norms.restored(saved.memory)
    check_shared(saved.shared, now.shared)
    hosted = [client for chunk in job.hosted(rank) for client in chunk.clients.tolist()]
    check_personal(path, hosted, job.like, job.task.federation.shapes)
    # copied into torch's own memory: the last bits of matrix products may depend on how memory is aligned
    now.shared = {name: torch.from_numpy(saved.shared[name]).to(value, copy=True) for name, value in now.shared.items()}
    for chunk in job.hosted(rank):
        state = now.personal[chunk.number]
        held = store.load_personal(path, chunk.clients.tolist()) if state else {}
        for name in state:
            for row, client in enumerate(chunk.clients.tolist()):
                state[name][row] = torch.from_numpy(held[client][name])
    return now


def _open(order: Order, processes: list[tuple[str, str]], job: Job) -> None:
    """Make the run folder, or take it up again."""
    folder, hosts = Path(order.run_dir), [host for host, _ in processes]
    if order.new:
        from hpcfl.engine.record import about_clients

        attributes = {"config": order.config, "data_dir": order.data_dir or "", "hosts": json.dumps(hosts)}
        attributes |= {"versions": json.dumps(versions()), "git_commit": git_commit()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            store.take(folder, order.force)
            store.create(folder, attributes, about_clients(job.task.federation))
        except OSError as error:
            raise UsageError(f"'{folder}' cannot be written: {error.strerror}") from None
    stopping.withdraw(folder)  # before the status: from then on requests are for this start
    store.write_status(folder, "running", ranks=[f"process {number} on {host}" for host, number in processes])


def _processes(comm: Any) -> list[tuple[str, str]]:
    """Return host and process id of each rank."""
    own = f"{os.getpid()} {socket.gethostname()}"
    found = [own]
    if comm is not None:
        from hpcfl.comm.mpi import names

        found = names(comm, own)
    return [(host, number) for number, _, host in (text.partition(" ") for text in found)]


def _device(local_rank: int) -> str:
    """Return the device of this rank."""
    import torch

    return device(local_rank, torch.cuda.device_count())


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    packages = ("hpcfl", "torch", "numpy", "h5py", "mpi4py")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def git_commit() -> str:
    """Return the commit of the checkout that this package lies in; empty where it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
