"""From a command to a running job: rank 0 decides, everybody agrees, then torch is loaded and the rounds begin."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcfl import config as configs
from hpcfl import store
from hpcfl.errors import Elsewhere, RunError, Told, UsageError
from hpcfl.orders import Order
from hpcfl.provenance import git_commit, versions
from hpcfl.ranks import device, launched

if TYPE_CHECKING:
    from hpcfl.engine import Job, Progress
    from hpcfl.transport import Transport

T = TypeVar("T")
GIVE_UP_SECONDS = 30.0  # how long a failed rank waits for the one that speaks to end the job


def launch(judge: Callable[[], Order | None], comm: Any) -> None:
    """Carry out what rank 0's `judge` says, on all ranks of `comm` (None: on this process alone).

    Raises
    ------
    UsageError, RunError
        On one rank; on the others `hpcfl.errors.Elsewhere`. Any other error ends the job.
    """
    order = None
    try:
        order = _told(comm, judge)
        if order is not None:
            _carried_out(order, comm)
    except (Told, Elsewhere):
        raise
    except BaseException as error:
        _fail(comm, Path(order.run_dir) if order else None, error)


def _carried_out(order: Order, comm: Any) -> None:
    """Put the job together on every rank, then run it."""
    config = configs.from_text(order.config)
    if _first(comm):  # an earlier start's: whoever writes it now is the first to fail
        (Path(order.run_dir) / "error.txt").unlink(missing_ok=True)
    # before torch is loaded: its worker threads read it once
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    from hpcfl.engine import Job

    size = 1 if comm is None else comm.Get_size()
    job = _settled(comm, lambda: Job.of(config, order.data, size, _device(comm)))
    hosts = _hosts(comm)
    _settled(comm, lambda: _opened(order, hosts) if _first(comm) else None)
    transport = _transport(comm)
    now = _settled(comm, lambda: _begun(job, order, transport))
    try:
        _rounds(job, order, transport, now)
    except Told as error:
        if comm is None:
            store.write_status(Path(order.run_dir), "failed", str(error))
            raise
        _fail(comm, Path(order.run_dir), error)  # on this rank only: the others are in the middle of a round
    transport.leave()


def _begun(job: Job, order: Order, transport: Transport) -> Progress:
    """Return where this rank begins: before round 0, or after the checkpoint."""
    if order.checkpoint is None:
        return job.begin(transport)
    return _resumed(job, Path(order.checkpoint), transport)


def _rounds(job: Job, order: Order, transport: Transport, now: Progress) -> None:
    """Run the rounds that are left, recorded by the server."""
    from hpcfl.engine import run
    from hpcfl.progress import Speaker
    from hpcfl.record import Recorder

    folder = Path(order.run_dir)
    recorder = None
    if transport.serves:
        speaker = Speaker(job.config.rounds, now.round, order.quiet)
        recorder = Recorder(folder, job, transport.size, now.round, speaker)
    run(job, transport, recorder, now)
    if recorder is not None:
        recorder.close()
        store.write_status(folder, "done")
        store.seal(folder)


def _resumed(job: Job, path: Path, transport: Transport) -> Progress:
    """Return what a checkpoint holds; each rank reads the clients it hosts."""
    import torch

    saved = store.load(path, personal=False)
    now = job.begin(transport)
    now.round, now.clock = saved.round, dict(saved.clock)
    now.shared = {name: torch.from_numpy(saved.shared[name]).to(value) for name, value in now.shared.items()}
    for chunk in job.hosted(transport):
        state = now.personal[chunk.number]
        held = store.load_personal(path, chunk.clients.tolist()) if state else {}
        for name in state:
            for row, client in enumerate(chunk.clients.tolist()):
                state[name][row] = torch.from_numpy(held[client][name])
    return now


def _opened(order: Order, hosts: list[str]) -> None:
    """Make the run folder, or take it up again."""
    folder = Path(order.run_dir)
    if order.new:
        facts = {"config": order.config, "data_dir": order.data_dir or "", "hosts": json.dumps(hosts)}
        try:
            store.create(folder, facts | {"versions": json.dumps(versions()), "git_commit": git_commit()})
        except OSError as error:
            raise UsageError(f"'{folder}' cannot be written: {error.strerror}") from None
    store.write_status(folder, "running")


def _hosts(comm: Any) -> list[str]:
    """Return the host of each rank."""
    if comm is None:
        return [socket.gethostname()]
    from hpcfl.wire import names

    return names(comm, socket.gethostname())


def _device(comm: Any) -> str:
    """Return the device of this rank."""
    import torch

    if comm is None:
        return device(0, torch.cuda.device_count())
    from mpi4py import MPI

    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local = here.Get_rank()
    here.Free()
    return device(local, torch.cuda.device_count())


def world() -> Any:
    """Return the world communicator where a launcher started this process, else None: MPI is not imported then."""
    if not launched():
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RunError(
            f"started by an MPI launcher, but MPI cannot be loaded: {' '.join(str(error).split())}"
        ) from None
    return MPI.COMM_WORLD


def speaks(error: Told) -> bool:
    """Return whether this rank is the one to tell of an error; where all ranks had it at once, the first is."""
    if error.settled or not launched():
        return True
    try:
        _settled(world(), lambda: _raised(error))
    except Elsewhere:
        return False
    except Told:
        return True
    return True


def _raised(error: Told) -> None:
    raise error


def _first(comm: Any) -> bool:
    return comm is None or comm.Get_rank() == 0


def _transport(comm: Any) -> Transport:
    if comm is None:
        from hpcfl.transport import Alone

        return Alone()
    from hpcfl.lanes import Tree

    return Tree(comm)


def _told(comm: Any, judge: Callable[[], Order | None]) -> Order | None:
    """Return rank 0's judgement on every rank; its error becomes everybody's exit."""
    order = _settled(comm, lambda: judge() if _first(comm) else None)
    if comm is None:
        return order
    from hpcfl.wire import tell

    told = json.loads(tell(comm, json.dumps(asdict(order) if order else None)))
    return Order(**told) if told else None


def _settled(comm: Any, make: Callable[[], T]) -> T:
    """Return what `make` returns, if no rank had an error; else raise on all."""
    if comm is None:
        return make()
    from hpcfl.wire import settle

    error: Exception | None = None
    made = None
    try:
        made = make()
    except Exception as caught:  # any: a rank that leaves alone would let the others wait for ever
        error = caught
    settle(comm, error)
    return made  # type: ignore[return-value]


def _fail(comm: Any, folder: Path | None, error: BaseException) -> None:
    """End the whole job after an error that nobody foresaw: one traceback, the status written, no rank left."""
    who = "" if comm is None else f"rank {comm.Get_rank()} of {comm.Get_size()}: "
    text = "".join(traceback.format_exception(error))
    if not _claimed(folder, who + text):
        time.sleep(GIVE_UP_SECONDS)  # another rank speaks and is about to end the job
    else:
        print(f"hpcfl: {who}{type(error).__name__}: {error}\n{text}", end="", file=sys.stderr, flush=True)
        if folder is not None and (folder / "run.h5").exists():
            store.write_status(folder, "failed", f"{who}{type(error).__name__}: {error}")
    if comm is not None:
        comm.Abort(1)
    raise SystemExit(1)


def _claimed(folder: Path | None, text: str) -> bool:
    """Return whether this rank is the first to write down an error of the run, if there is a run yet."""
    if folder is None or not folder.is_dir():
        return True
    try:
        with (folder / "error.txt").open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True
