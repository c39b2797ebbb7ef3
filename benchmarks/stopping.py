"""What is left of a run that is asked to stop: every signal, to whom it may be sent, and ``hpcfl stop``.

    python benchmarks/stopping.py [--clock simulated|wall] [--ranks 3] [--mpi openmpi mpich] [--seconds 0.2 3]

Each case starts a run of 40 rounds on digits under ``mpiexec``, asks it to stop once 12 rounds were told of, waits for
the launcher, looks at what is left, and resumes under the same launcher. A checkpoint is written every 10 rounds and
takes the given seconds. Columns: the rounds that the launcher passed on as told, those that are on record, and the
round of the newest checkpoint that can be read; the word in ``status`` as another process reads it; the launcher's exit
code; seconds from asking to the launcher's end; processes left behind a second later, by descent or process group; how
the resumed run ended.

40 cases of 10 to 15 s each: 9 minutes on 2 cores, and a few MB in a temporary folder. Needs both MPIs under ``.mpi`` or
``HPCFL_MPI``. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from hpcfl import store

PREFIXES = Path(os.environ.get("HPCFL_MPI", Path(__file__).parent.parent / ".mpi"))
FAULTS = Path(__file__).parent.parent / "tests" / "helpers" / "faults.py"  # hpcfl, with slow checkpoints
LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
CONFIG = """
rounds = 40
clients = 8
seed = 1

[evaluate]
every = 1  # a line for every round

[checkpoint]
every = 10

[algorithm]
name = "fedavg"
lr = 0.1
batch = 8

[data]
name = "digits"

[model]
name = "mlp"
hidden = [64]
"""
ASK_AFTER = 12  # rounds
LIMIT = 120.0  # seconds
GRACE = 1.0  # seconds after the launcher's end in which its ranks may still vanish
HEADINGS = (
    "MPI",
    "asked by",
    "checkpoint",
    "told",
    "recorded",
    "saved",
    "status",
    "exit",
    "seconds",
    "orphans",
    "resumed",
)


@dataclass(frozen=True)
class Case:
    """Who asks: a signal sent to a client rank, to rank 0 or to the launcher; or the command, which sends none."""

    mpi: str
    signal: str
    to: str
    seconds: float

    @property
    def words(self) -> str:
        """How a reader would say it."""
        return f"{self.signal} to {self.to}" if self.signal else "hpcfl stop"


@dataclass(frozen=True)
class Left:
    """What was left: rounds told, recorded, saved, status, exit code, seconds it took, orphans; and the resumption."""

    told: int
    recorded: int
    saved: int
    status: str
    exit: int
    seconds: float
    orphans: int
    resumed: str


class Launched:
    """A command under an MPI launcher, in a process group of its own; what it says goes to a file."""

    def __init__(self, mpi: str, ranks: int, args: Sequence[str], said: Path, seconds: float) -> None:
        prefix, self.said = PREFIXES / mpi, said
        settings = {
            "MPI4PY_LIBMPI": str(prefix / "lib" / LIBRARIES[mpi]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "HPCFL_FAULT": f"checkpoint-seconds:{seconds}",
        }
        with said.open("w") as out, said.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(
                [str(prefix / "bin" / "mpiexec"), "-n", str(ranks), sys.executable, str(FAULTS), *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, **settings},
            )

    def told(self) -> int:
        """Return the last round that was told of."""
        lines = [line for line in self.said.read_text().splitlines() if line.startswith("round ")]
        return int(lines[-1].split()[1].split("/")[0]) if lines else 0

    def await_round(self, count: int) -> None:
        """Wait until so many rounds were told of."""
        end = time.monotonic() + LIMIT
        while self.told() < count:
            if self.process.poll() is not None or time.monotonic() > end:
                self.end_all(descendants(self.process.pid))
                raise RuntimeError(f"no round {count}: {self.said.with_suffix('.err').read_text()[-2000:]}")
            time.sleep(0.005)

    def rank(self, number: int) -> int:
        """Return the process id of a rank."""
        names = {f"{name}={number}".encode() for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")}
        for pid in descendants(self.process.pid):
            if names & set(read(f"/proc/{pid}/environ").split(b"\0")):
                return pid
        raise RuntimeError(f"rank {number} is not there")

    def wait(self, family: Sequence[int]) -> int:
        """Return the exit code; end everybody when the time is up."""
        try:
            return self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.end_all(family)
            raise

    def end_all(self, family: Sequence[int]) -> None:
        """Kill the launcher and the processes of `family` that still live."""
        for pid in processes().keys() & {self.process.pid, *family}:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def read(path: str) -> bytes:
    """Return a file's content, nothing where its process has ended."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def processes() -> dict[int, list[str]]:
    """Return ``{process: [state, parent, process group, …]}`` of all that run; zombies do not."""
    numbers = [path.name for path in Path("/proc").iterdir() if path.name.isdecimal()]
    stats = {int(n): read(f"/proc/{n}/stat").decode(errors="replace").rpartition(")")[2].split() for n in numbers}
    return {pid: fields for pid, fields in stats.items() if fields and fields[0] not in "ZX"}


def descendants(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    parents = {other: int(fields[1]) for other, fields in processes().items()}
    family = [pid]
    for parent in family:
        family += [child for child, its in parents.items() if its == parent]
    return family


def orphans(family: Sequence[int], groups: set[str]) -> int:
    """Return how many of a family, or of its process groups, still run when the grace is over; end them."""
    end = time.monotonic() + GRACE
    while True:
        left = [pid for pid, fields in processes().items() if pid in family or fields[2] in groups]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def ask(case: Case, job: Launched, folder: Path, ranks: int) -> None:
    """Do what the case says."""
    if not case.signal:
        subprocess.run([sys.executable, "-m", "hpcfl", "stop", str(folder)], check=True)
        return
    ranked = {"rank 0": 0, "a client": ranks - 1}
    pid = job.rank(ranked[case.to]) if case.to in ranked else job.process.pid
    os.kill(pid, signal.Signals[f"SIG{case.signal}"])


def play(case: Case, place: Path, ranks: int, settings: Sequence[str]) -> Left:
    """Start a run, ask it to stop, look at what is left, resume it."""
    config, folder = place / "stopping.toml", place / "run"
    config.write_text(CONFIG)
    job = Launched(case.mpi, ranks, ["run", str(config), *settings, "--out", str(folder)], place / "out", case.seconds)
    job.await_round(ASK_AFTER)
    family = descendants(job.process.pid)
    groups = {fields[2] for pid, fields in processes().items() if pid in family}
    ask(case, job, folder, ranks)
    start = time.monotonic()
    code = job.wait(family)
    took = time.monotonic() - start
    behind = orphans(family, groups)
    newest = store.latest(folder)
    rounds = job.told(), store.open_run(folder).sizes["round"], store.load(newest).round if newest else 0
    state = store.read_status(folder).state
    return Left(*rounds, state, code, round(took, 1), behind, resumed(case, folder, place, ranks))


def resumed(case: Case, folder: Path, place: Path, ranks: int) -> str:
    """Resume to the end, checkpoints taking no time; return the exit code and the status word."""
    job = Launched(case.mpi, ranks, ["resume", str(folder)], place / "again", 0)
    code = job.wait(descendants(job.process.pid))
    return f"{code} {store.read_status(folder).state}"


def cases(mpis: Sequence[str], seconds: Sequence[float]) -> list[Case]:
    """Return every combination."""
    signalled = product(("a client", "rank 0", "mpiexec"), ("USR1", "TERM", "INT"))
    asked = [("", ""), *((name, to) for to, name in signalled)]
    return [Case(mpi, name, to, each) for mpi in mpis for name, to in asked for each in seconds]


def main() -> None:
    """Play all cases and print what was left of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clock", choices=("simulated", "wall"), default="simulated")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mpi", nargs="+", choices=tuple(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--seconds", nargs="+", type=float, default=[0.2, 3.0], help="that a checkpoint takes")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background shells ignore it, for all descendants
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    found = []
    for case in cases(asked.mpi, asked.seconds):
        with tempfile.TemporaryDirectory(prefix="hpcfl-stopping-") as place:
            left = play(case, Path(place), asked.ranks, ("--set", f"clock={asked.clock}"))
        found.append({**asdict(case), **asdict(left)})
        print(
            "|",
            " | ".join(map(str, (case.mpi, case.words, f"{case.seconds:g} s", *asdict(left).values()))),
            "|",
            flush=True,
        )
    print(json.dumps({"clock": asked.clock, "ranks": asked.ranks, "cases": found}))


if __name__ == "__main__":
    main()
