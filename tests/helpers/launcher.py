"""Starting jobs from tests: in a process group of their own, with a time limit, and nobody left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
PREFIXES = Path(os.environ.get("HPCFL_MPI", ROOT / ".mpi"))
LIMIT = 600.0  # seconds after which a job hangs, on a busy machine too


def mpis() -> list[str]:
    """Return the names of the MPI runtimes that are installed under their own prefix."""
    return [name for name in LIBRARIES if (PREFIXES / name / "bin" / "mpiexec").exists()]


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Lines of hpcfl's own among all that went to stderr; Open MPI's launcher may put a stray byte before one."""
        return re.findall(r"^\W?(hpcfl: .*)$", self.err, re.MULTILINE)


def under(
    mpi: str, ranks: int, words: Sequence[str], options: Sequence[str] = (), program: Sequence[str] = (sys.executable,)
) -> tuple[list[str], dict[str, str]]:
    """Return a command line, ``mpiexec options -n ranks python words``, and its environment; without mpiexec for ""."""
    if not mpi:
        return [*program, *words], {}
    prefix = PREFIXES / mpi
    settings = {
        "MPI4PY_LIBMPI": str(prefix / "lib" / LIBRARIES[mpi]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "FI_TCP_IFACE": "lo",
        "UCX_NET_DEVICES": "lo",
    }
    return [str(prefix / "bin" / "mpiexec"), *options, "-n", str(ranks), *program, *words], settings


def start(command: Sequence[str], env: Mapping[str, str], **files: Any) -> subprocess.Popen[str]:
    """Start a command as its own process group, one thread per process."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        **files,
    )


def job(
    mpi: str, ranks: int, words: Sequence[str], limit: float = LIMIT, env: Mapping[str, str] | None = None, **how: Any
) -> Ended:
    """Run Python on ranks of the named MPI, see `under`."""
    command, settings = under(mpi, ranks, words, **how)
    return alone(command, limit, {**settings, **(env or {})})


def alone(command: Sequence[str], limit: float = LIMIT, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command as its own process group; end it with all its descendants when the time is up."""
    child = start(command, env or {}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=limit)
    except BaseException as error:
        end(child)
        out, err = child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"no end after {limit} s:\n{out[-4000:]}\n{err[-4000:]}") from None
        raise
    assert not survivors(child.pid), "the job left processes behind"
    return Ended(child.returncode, out, err)


def end(process: subprocess.Popen[str]) -> list[int]:
    """Kill a process that still runs, and all its descendants: launchers put their ranks into groups of their own."""
    family = descendants(process.pid) if process.poll() is None else []
    for pid in family:
        kill_one(pid)
    return family


def survivors(group: int) -> bool:
    """Return whether any process of the group still lives; ends it if so."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*"):
            try:
                found += [int(word) for word in (task / "children").read_text().split()]
            except OSError:  # it has ended
                continue
    return found


def kill_one(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
