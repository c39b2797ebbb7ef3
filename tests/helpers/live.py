"""Jobs that a test looks at while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.launcher import LIBRARIES, PREFIXES, descendants, kill_one

LIMIT = 120.0


@dataclass(frozen=True)
class Live:
    """A job that was started, and what it has said so far."""

    process: subprocess.Popen[bytes]
    here: Path

    @property
    def out(self) -> str:
        return (self.here / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.here / "err").read_text(errors="replace")

    def until(self, seen: Callable[[], object]) -> None:
        """Wait until something is seen of a job that still runs."""
        end = time.monotonic() + LIMIT
        while not seen():
            assert self.process.poll() is None, f"over with {self.process.returncode}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"not seen:\n{self.out}\n{self.err}"
            time.sleep(0.002)

    def wait(self) -> int:
        return self.process.wait(timeout=LIMIT)


@contextmanager
def live(mpi: str, ranks: int, command: Sequence[str], here: Path) -> Iterator[Live]:
    """Start ``python command`` on ranks of the named MPI, or alone (""); nobody is left when the block ends."""
    before: list[str] = []
    settings = {"OMP_NUM_THREADS": "1"}
    if mpi:
        before = [str(PREFIXES / mpi / "bin" / "mpiexec"), "-n", str(ranks)]
        settings |= {
            "MPI4PY_LIBMPI": str(PREFIXES / mpi / "lib" / LIBRARIES[mpi]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "FI_TCP_IFACE": "lo",
            "UCX_NET_DEVICES": "lo",
        }
    with (here / "out").open("wb") as out, (here / "err").open("wb") as err:
        process = subprocess.Popen(
            [*before, sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, **settings},
        )
    try:
        yield Live(process, here)
    finally:
        for pid in descendants(process.pid) if process.poll() is None else []:
            kill_one(pid)
        process.wait()
