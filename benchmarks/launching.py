"""Starting MPI jobs from benchmarks: with either MPI, within a time limit, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfl.base.memory import prefer_large_pages
from hpcfl.mpi.launcher import set_defaults

PREFIXES = Path(os.environ.get("HPCFL_MPI", Path(__file__).parent.parent / ".mpi"))
LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
LEAVING_SECONDS = 1.0
MARK = "HPCFL_BENCHMARK"  # in the environment of every process of a job, whoever has become its parent
SHIM = ("sh", "-c", "trap '' USR1; \"$@\"; exit 0", "shim")  # MPICH's launcher tells survivors by USR1


def mpis() -> list[str]:
    """Return the names of the MPI runtimes that are installed under their own prefix."""
    return [name for name in LIBRARIES if (PREFIXES / name / "bin" / "mpiexec").exists()]


def inside() -> bool:
    """Return whether this process belongs to a job: others import neither MPI nor torch."""
    return MARK in os.environ


def command(mpi: str, ranks: int, args: Sequence[str], outlive: bool = False) -> list[str]:
    """Return the command line of ``python -m mpi4py args`` on so many ranks.

    Parameters
    ----------
    outlive : bool
        Ranks go on when one is killed. Open MPI does it by ULFM. MPICH ends everybody when it sees a bad exit, so
        there each rank runs in a shell that always exits well.
    """
    options = {"openmpi": ["--with-ft", "ulfm"], "mpich": ["-disable-auto-cleanup"]}[mpi] if outlive else []
    shim = SHIM if outlive and mpi == "mpich" else ()
    mpiexec = str(PREFIXES / mpi / "bin" / "mpiexec")
    return [mpiexec, *options, "-n", str(ranks), *shim, sys.executable, "-m", "mpi4py", *args]


def environment(mpi: str, mark: str) -> dict[str, str]:
    """Return the environment of a job: its MPI, one thread per rank, more ranks than cores, no real network."""
    settings = {
        **os.environ,
        MARK: mark,
        "MPI4PY_LIBMPI": str(PREFIXES / mpi / "lib" / LIBRARIES[mpi]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "FI_TCP_IFACE": "lo",
        "UCX_NET_DEVICES": "lo",
        "OMP_NUM_THREADS": "1",
    }
    set_defaults(settings)  # as every run does; here MPI and torch are loaded before anything of hpcfl
    prefer_large_pages(settings)
    return settings


def run(mpi: str, ranks: int, args: Sequence[str], limit: float, outlive: bool = False) -> Any:
    """Run a job, pass on what it prints, and return what its last line says in JSON.

    Parameters
    ----------
    limit : float
        Seconds after which all of it is killed.

    Raises
    ------
    RuntimeError
        If it ended without such a line, or leaves processes behind.
    """
    mark, last = uuid.uuid4().hex, ""
    child = subprocess.Popen(
        command(mpi, ranks, args, outlive),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment(mpi, mark),
    )
    timer = threading.Timer(limit, end, [mark])
    timer.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what follows is done
    try:
        assert child.stdout is not None
        for line in child.stdout:
            last = line
            if not line.startswith("{"):
                print(line, end="", flush=True)
        code = child.wait()
    finally:
        timer.cancel()
        left = left_behind(mark)
    if not last.startswith("{"):
        raise RuntimeError(f"{' '.join(args)} under {mpi}: no result, exit code {code}")
    if left:
        raise RuntimeError(f"{' '.join(args)} under {mpi}: {left} processes were left behind")
    return json.loads(last)


def left_behind(mark: str) -> int:
    """Return how many of a job's processes had to be killed: a launcher may be a moment quicker than its ranks."""
    for _ in range(10):
        if not family(mark):
            return 0
        time.sleep(LEAVING_SECONDS / 10)
    return end(mark)


def end(mark: str) -> int:
    """Kill all processes of a job; return how many there were."""
    found = family(mark)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            continue
    return len(found)


def family(mark: str) -> list[int]:
    """Return the processes of a job that still run; zombies do not."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and _marked(path, mark)]


def _marked(process: Path, mark: str) -> bool:
    try:
        state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX" and f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is not ours
        return False


def load() -> float:
    """Return the machine's load over the last minute: figures from a busy machine mean little."""
    return os.getloadavg()[0]
