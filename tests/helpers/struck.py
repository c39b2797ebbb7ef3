"""Jobs that are struck at a moment that was chosen, from outside, and what is left of them afterwards.

`build_disk` compiles ``disk.c``; `Struck` is a job that was started with it, and with ``moments.py``, in its way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from helpers.launcher import ROOT, start, under
from helpers.warm import Warm

HERE = Path(__file__).parent
COMMAND = str(HERE / "moments.py")
MARKER = "CHAOS_JOB"
LINGER_SECONDS = 5.0  # how long ranks may outlive their launcher
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
NOISE = re.compile(r"Traceback|Exception ignored|HDF5-DIAG|Segmentation|core dumped|Fatal Python|terminate called")


def build_disk(folder: Path) -> Path | None:
    """Compile the disk that fails on purpose; None where there is no C compiler."""
    disk = folder / "disk.so"
    with suppress(FileNotFoundError):
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(disk), str(HERE / "disk.c"), "-ldl"]
        subprocess.run(command, check=True)
        return disk
    return None


def processes(**wanted: str) -> list[int]:
    """The living processes that were started with such an environment."""
    words = {f"{name}={value}".encode() for name, value in wanted.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile; a zombie's is empty
                if words <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def kill_all(token: str) -> int:
    """Kill all processes of a job, and those that they start meanwhile; return how many there were at first."""
    first, limit = len(processes(**{MARKER: token})), time.monotonic() + LINGER_SECONDS
    while (left := processes(**{MARKER: token})) and time.monotonic() < limit:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return first


class Struck:
    """A command of hpcfl on ranks of an MPI, or alone (""), told by its environment where it is struck."""

    def __init__(
        self, mpi: str, ranks: int, args: Sequence[str], here: Path, env: Mapping[str, str], disk: Path | None
    ) -> None:
        self.mark, self.token, self.here = here.with_name(f"{here.name}.mark"), uuid.uuid4().hex, here
        program = ["env", f"LD_PRELOAD={disk}", sys.executable] if disk else [sys.executable]
        command, settings = under(mpi, ranks, [COMMAND, *args], program=program)
        own = {MARKER: self.token, "CHAOS_MARK": str(self.mark), "PYTHONPATH": str(ROOT)}
        self.began = time.monotonic()
        with here.open("w") as out, here.with_name(f"{here.name}.err").open("w") as err:
            self.process = start(command, {**settings, **own, **env}, stdout=out, stderr=err, cwd=ROOT)

    @property
    def out(self) -> str:
        return self.here.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.here.with_name(f"{self.here.name}.err").read_text(errors="replace")

    @property
    def told(self) -> list[int]:
        """The rounds (from 0) that were told of."""
        return [int(number) - 1 for number in re.findall(r"^round (\d+)/\d+ .*\n", self.out, re.MULTILINE)]

    @property
    def said(self) -> list[str]:
        """Lines of hpcfl's own on stderr but warnings, losses and older state; a launcher may put a byte before one."""
        lines = re.findall(r"^\W?(hpcfl: .*)$", self.err, re.MULTILINE)
        no_errors = r"hpcfl: (warning: |rank \d+ is lost |checkpoint after round )"
        return [line for line in lines if not re.match(no_errors, line)]

    @property
    def hit(self) -> str:
        """Where the job was struck, "" where it was not yet: seconds, rank, process, moment."""
        with suppress(FileNotFoundError):
            return self.mark.read_text().partition("\n")[0]
        return ""

    def rank(self, number: int) -> int | None:
        """The process of a rank, None where it is not there yet."""
        found = [pid for name in RANKS for pid in processes(**{MARKER: self.token, name: str(number)})]
        return found[0] if found else None

    def over(self) -> bool:
        return self.process.poll() is not None

    def until(self, seen: Callable[[], object], limit: float) -> bool:
        """Wait until something is seen or the job is over, at most so many seconds; False where neither is."""
        end = time.monotonic() + limit
        while not seen() and not self.over():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def left_behind(self) -> int:
        """End what has outlived its launcher by `LINGER_SECONDS`; return how many processes that were."""
        end = time.monotonic() + LINGER_SECONDS
        while processes(**{MARKER: self.token}) and time.monotonic() < end:
            time.sleep(0.05)
        return self.kill()

    def wait(self) -> int:
        return self.process.wait()

    def kill(self) -> int:
        """Kill the launcher and all ranks at once; return how many processes they were."""
        killed = kill_all(self.token)
        self.process.wait()
        return killed


class Forked(Struck):
    """A command of one process that is forked from a warm one, which has the disk preloaded."""

    def __init__(self, warm: Warm, args: Sequence[str], here: Path, env: Mapping[str, str]) -> None:
        self.mark, self.here = here.with_name(f"{here.name}.mark"), here
        self.began = time.monotonic()
        self.job = warm.start(args, here, {"CHAOS_MARK": str(self.mark), **env})

    def over(self) -> bool:
        return self.job.over()

    def wait(self) -> int:
        return self.job.wait()

    def left_behind(self) -> int:
        return 0

    def kill(self) -> int:
        self.job.kill()
        return 1
