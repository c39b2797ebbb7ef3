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

ROOT = Path(__file__).parents[2]
LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
PREFIXES = Path(os.environ.get("HPCFL_MPI", ROOT / ".mpi"))


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


def job(
    mpi: str,
    ranks: int,
    command: Sequence[str],
    limit: float,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    program: Sequence[str] = (sys.executable,),
) -> Ended:
    """Run ``mpiexec options -n ranks python …`` with the named MPI."""
    prefix = PREFIXES / mpi
    settings = {
        "MPI4PY_LIBMPI": str(prefix / "lib" / LIBRARIES[mpi]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "FI_TCP_IFACE": "lo",
        "UCX_NET_DEVICES": "lo",
    }
    return alone(
        [str(prefix / "bin" / "mpiexec"), *options, "-n", str(ranks), *program, *command],
        limit,
        {**settings, **(env or {})},
    )


def alone(command: Sequence[str], limit: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command as its own process group; end it with all its descendants when the time is up."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for pid in descendants(child.pid):  # launchers put their ranks into groups of their own
            kill_one(pid)
        out, err = child.communicate()
        raise AssertionError(f"no end after {limit} s:\n{out[-4000:]}\n{err[-4000:]}") from None
    assert not survivors(child.pid), "the job left processes behind"
    return Ended(child.returncode, out, err)


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
