"""From a command to a running job: rank 0 decides, everybody agrees, then torch is loaded and the rounds begin."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcfl import config as configs
from hpcfl import store
from hpcfl.errors import Elsewhere, RunError, Told, UsageError
from hpcfl.ranks import device, launched

if TYPE_CHECKING:
    from hpcfl.engine import Job, Progress
    from hpcfl.transport import Transport

T = TypeVar("T")
GIVE_UP_SECONDS = 30.0  # how long a failed rank waits for the one that speaks to end the job


@dataclass(frozen=True)
class Order:
    """What rank 0 tells the others to do."""

    run_dir: str
    config: str
    data_dir: str | None
    checkpoint: str | None = None
    new: bool = True
    quiet: bool = False

    @property
    def data(self) -> Path | None:
        """The folder of the data sets."""
        return Path(self.data_dir) if self.data_dir else None


def ordered_run(
    name: str,
    settings: Sequence[str],
    out: Path | None,
    data_dir: Path | None,
    resume: bool = False,
    quiet: bool = False,
    force: bool = False,
) -> Order | None:
    """Judge a new run: its config, its data's headers, its folder. Return None where nothing is left to do."""
    config = configs.load(name, settings)
    run_dir = out or Path("runs") / Path(name).stem
    if (run_dir / "run.h5").exists():
        if not resume:
            raise UsageError(f"'{run_dir}' already holds a run: choose another --out, or hpcfl resume {run_dir}")
        return ordered_resume(run_dir, data_dir, quiet, force)
    config.check(data_dir)
    _check_writable(run_dir)
    return Order(str(run_dir), config.text(), str(data_dir.resolve()) if data_dir else None, quiet=quiet)


def _check_writable(run_dir: Path) -> None:
    """Raise UsageError where the folder cannot be made or written, without making it."""
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written" if there.is_dir() else "is no folder"
        raise UsageError(f"'{run_dir}' cannot be written: '{there}' {reason}; expected a writable folder")


def ordered_resume(run_dir: Path, data_dir: Path | None, quiet: bool = False, force: bool = False) -> Order | None:
    """Judge a resumption; a finished run says so and gives None. `force` passes over a run that seems to go on."""
    folder = store.run_folder(run_dir)
    status = store.read_status(folder)
    if status.state == "done":
        print(f"'{folder}' is done already")
        return None
    if status.state == "running" and not force:
        raise UsageError(
            f"'{folder}' is running on {status.host} (pid {status.pid}); if that is no more so, add --force"
        )
    attributes = store.run_attributes(folder)
    data = data_dir or (Path(attributes["data_dir"]) if attributes["data_dir"] else None)
    configs.from_text(attributes["config"]).check(data)
    found = store.latest(folder)
    place = str(data) if data else None
    return Order(str(folder), attributes["config"], place, str(found) if found else None, new=False, quiet=quiet)


def launch(judge: Callable[[], Order | None], comm: Any) -> None:
    """Carry out what rank 0's `judge` says, on all ranks of `comm` (None: on this process alone).

    Raises
    ------
    UsageError, RunError
        On one rank; on the others `hpcfl.lanes.Elsewhere`.
    """
    order = _told(comm, judge)
    if order is None:
        return
    config = configs.from_text(order.config)
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
    except BaseException as error:
        _fail(comm, Path(order.run_dir), error)
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

    saved = store.load(path)
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
            store.create(folder, facts | {"versions": json.dumps(_versions()), "git_commit": _git_commit()})
        except OSError as error:
            raise UsageError(f"'{folder}' cannot be written: {error.strerror}") from None
    (folder / "error.txt").unlink(missing_ok=True)
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


def _versions() -> dict[str, str]:
    packages = ("hpcfl", "torch", "numpy", "h5py", "mpi4py")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def _git_commit() -> str:
    """Return the commit of the checkout that this package lies in; empty where it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


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

    error, made = None, None
    try:
        made = make()
    except Told as caught:
        error = caught
    settle(comm, error)
    return made  # type: ignore[return-value]


def _fail(comm: Any, folder: Path, error: BaseException) -> None:
    """End the whole job after an error that nobody foresaw: one traceback, the status written, no rank left."""
    text = "".join(traceback.format_exception(error))
    who = "" if comm is None else f"rank {comm.Get_rank()} of {comm.Get_size()}: "
    try:
        with (folder / "error.txt").open("x") as file:  # whoever creates it speaks
            file.write(who + text)
        print(f"hpcfl: {who}{type(error).__name__}: {error}\n{text}", end="", file=sys.stderr, flush=True)
        store.write_status(folder, "failed", f"{who}{type(error).__name__}: {error}")
    except FileExistsError:
        time.sleep(GIVE_UP_SECONDS)
    if comm is not None:
        comm.Abort(1)
    raise SystemExit(1)
