"""Real MPI jobs are killed, and their disks fail, at moments that are chosen; then they are resumed and compared.

    python tests/chaos.py --trials 300 --out FOLDER                 # kills
    python tests/chaos.py --faults --out FOLDER                     # calls on the run folder fail, on ranks
    python tests/chaos.py --faults --alone --out FOLDER             # each of them, in one process
    python tests/chaos.py --ends --out FOLDER                       # one process, killed at each call of its end
    python tests/chaos.py --both --trials 12 --out FOLDER           # a suspended client and a full disk, in real time

A trial of the first kind is a small run (one of `PRESETS`, simulated clock, a checkpoint after each round) on 2 to
4 ranks that is killed one to three times by SIGKILL: the server, a client, or the whole job; while modules are
imported, a visit is computed, a sum is under way, a row, a checkpoint, run.h5 or the status is written, a segment is
sealed, or at a random time. Each time the job must end by itself, leave no process and a folder that is whole by
`verify`, and be read by `open_run` and ``hpcfl show``. It is resumed on another number of ranks, of either MPI or
alone, and must end with the state and the columns of a run that nobody disturbed (all but `WALL` and those per rank).

With ``--faults`` a first run counts the calls (open, write, truncate, fsync, rename) of each rank on its run folder;
then one of them fails in each trial, once (``fail``) or with all that need room after it (``full``; on ranks only the
first, the middle and the last of equal calls on one file). The run must bear it or end within `FAULT_SECONDS` with one
line and an exit code other than 0, and go on later. With ``--alone`` that is a single process without MPI, forked.
With ``--ends`` it is killed at each call from its last row on, in a write when half of it is written: what says done
then is done for every reader, and nothing is left of it once it was resumed.

Trials that are in ``FOLDER/trials.jsonl`` (``faults.jsonl``, ``ends.jsonl``, ``both.jsonl``) already are not
repeated. Prints a line per trial and one JSON line last; ends with 1 if there was any problem. Needs a C compiler for
whatever happens on the disk, and the MPIs under ``.mpi`` or ``HPCFL_MPI``. A trial of kills takes 5 to 20 s on 2 cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import Any

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from helpers.launcher import ROOT, descendants, kill_one, mpis
from helpers.moments import IMPORTS
from helpers.struck import NOISE, Forked, Struck, build_disk
from helpers.warm import Warm
from hpcfl import store
from hpcfl.engine.record import PER_RANK, WALL

OFTEN = ("checkpoint.every=1", "checkpoint.keep=2", "evaluate.every=1")
KEPT = ("algorithm.momentum=0.5", "algorithm.persist_optimizer=true")
FEW = ("algorithm.epochs=1", "clients=8", "participation.size=5")
PRESETS: dict[str, tuple[str, ...]] = {
    "fedavg": ("wait-digits", "rounds=6", *KEPT),
    "salf": ("salf-digits", "rounds=8", *KEPT),
    "fedrep-doubling": (
        *("srpfl-fedrep-digits", "rounds=6", "clients=8", "doubling.rounds=2"),
        *("algorithm.epochs=1", "algorithm.head_epochs=1"),
    ),
    "flic": ("flic-digits", "rounds=4", *FEW, "algorithm.pretrain=1"),
    "fedlrgd": ("fedlrgd-logistic", "rounds=8", "clients=10", "batch_clients=2"),
    "scaffold": ("scaffold-digits", "rounds=6", *FEW),
    "fedbuff": ("fedbuff-digits", "rounds=8", *KEPT),
}
"""A preset and what is set on top of it."""
WHENS = {
    "server": ("import", "step", "reduction", "metrics", "checkpoint", "table", "status", "sealing", "leaving", "time"),
    "client": ("import", "compute", "message", "reduction", "checkpoint", "leaving", "time"),
    "job": ("import", "compute", "message", "reduction", "step", "metrics", "checkpoint", "sealing", "time"),
}
PATTERNS = {"metrics": "/metrics/", "checkpoint": "/checkpoints/", "table": "run.h5", "status": "/status"}
"""What is written, and what is part of the names of these files."""
ONCE = ("import", "table", "status", "sealing", "leaving")  # as often in any start, however many rounds it has left
LIMIT = 120.0  # seconds after which a job that was struck hangs
START_SECONDS = 300.0  # in which one that is not struck ends, on a busy machine too
FAULT_SECONDS = 10.0
FAULTY = ("wait-digits", "rounds=2", "checkpoint.keep=1", *KEPT)
REAL = ("wait-digits", "rounds=40", "clients=6", "clock=wall", "speed={model='none'}", *KEPT)


# ---- what a run is compared by


def figures(data: Any) -> dict[str, Any]:
    """All that is recorded, but what differs from run to run or by the number of ranks."""
    names = {*map(str, data.data_vars), *map(str, data.coords)} - {*WALL, *PER_RANK, "rank"}
    return {name: data[name] for name in sorted(names)}


def different(data: Any, reference: Any) -> list[str]:
    """The columns of the rounds that are there which are not those of the undisturbed run."""
    ours, theirs = figures(data), figures(reference)
    if not data.sizes["round"]:
        return []
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        found, wanted = ours[name].values, theirs[name].values
        wanted = wanted[: len(found)] if "round" in ours[name].dims else wanted
        if found.dtype != wanted.dtype or not np.array_equal(found, wanted, equal_nan=found.dtype.kind in "fc"):
            wrong.append(name)
    return wrong


def state(folder: Path) -> str:
    """Digest of all that the newest checkpoint holds: shared and personal state, extras, memory, who is at work."""
    newest = store.latest(folder)
    assert newest is not None
    saved = store.load(newest)
    sha256 = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for each in sorted(value):
                add(f"{name}/{each}", value[each])
        else:
            array = np.asarray(value)
            sha256.update(f"{name} {array.dtype.str if array.dtype.kind != 'U' else 'text'} {array.shape}".encode())
            sha256.update(array.tobytes())

    personal = {
        client: {name: values[row] for name, values in tensors.items()}
        for clients, tensors in saved.personal
        for row, client in enumerate(np.asarray(clients).tolist())
    }
    clock = {name: value for name, value in saved.clock.items() if name not in WALL}
    parts = {"round": saved.round, "shared": saved.shared, "clock": clock, "memory": saved.memory}
    add("", parts | {"extras": saved.extras, "served": saved.served, "stale": saved.stale})
    add("personal", personal)
    return sha256.hexdigest()


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed: its records and state, and how often each site is reached on 3 ranks.

    `calls` has, for each rank, the calls on the run folder as ``call path`` in their order, and ``phase name`` where a
    phase began; `seconds` is how long the job took.
    """

    data: Any
    state: str
    seconds: float
    reached: list[dict[str, int]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return int(self.data.sizes["round"])

    def count(self, when: str, rank: int) -> int:
        """How often a moment comes on a rank."""
        rank = min(rank, len(self.reached) - 1)
        calls = self.calls[rank] if self.calls else []
        sealed = calls.index("phase sealing") if "phase sealing" in calls else len(calls)
        if when == "sealing":
            return max(0, len(calls) - sealed - 1)
        if when in PATTERNS:
            return sum(PATTERNS[when] in call for call in calls[:sealed])
        return self.reached[rank].get(when, 0)


class Place:
    """The folder of results: references, the disk, and what was done already."""

    def __init__(self, folder: Path, file: str) -> None:
        self.folder, self.file, self.lock = folder, folder / file, Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.disk = build_disk(folder)
        self.commit = commit()
        self.threads = local()
        self.warms: list[Warm] = []

    @property
    def warm(self) -> Warm:
        """A process of this thread that starts commands at once."""
        if not hasattr(self.threads, "warm"):
            self.threads.warm = Warm({"LD_PRELOAD": str(self.disk)} if self.disk else None)
            self.warms.append(self.threads.warm)
        warm: Warm = self.threads.warm
        return warm

    def done(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines() if line.endswith("}")]

    def note(self, result: Mapping[str, Any]) -> None:
        with self.lock, self.file.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def reference(self, name: str, settings: Sequence[str], ranks: int = 0, mpi: str = "") -> Reference:
        """The undisturbed run of a preset, made once for each commit: alone, and if there are ranks, on these.

        RuntimeError where these two differ. One rank of no MPI is a process with a disk that counts.
        """
        here = self.folder / "reference" / f"{self.commit}-{name}-{ranks}"
        whole, counted, seconds = here / "alone", here / "ranks", here / "seconds"
        if not seconds.exists():
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(parents=True)
            job = self.warm.start(run_args(settings, whole), here / "out")
            if job.wait():
                raise RuntimeError(job.err)
            seconds.write_text(f"{self._counted(settings, ranks, mpi, here) if ranks else 0.0}")
        found = Reference(store.open_run(whole), state(whole), float(seconds.read_text()))
        if ranks:
            if wrong := different(store.open_run(counted), found.data) or found.state != state(counted):
                raise RuntimeError(f"{name}: {ranks} ranks and one process alone differ: {wrong}")
            counts = [here / f"counts.{rank}" for rank in range(ranks)]
            found.reached[:] = [json.loads(file.read_text()) for file in counts if file.exists()]
            found.calls[:] = [calls_of(here / f"calls.{rank}") for rank in range(ranks)] if self.disk else []
        return found

    def _counted(self, settings: Sequence[str], ranks: int, mpi: str, here: Path) -> float:
        """Carry out a run that counts its moments; return the seconds that it took."""
        folder = here / "ranks"
        env = {"CHAOS_FOLDER": str(folder), "CHAOS_LOG": str(here / "calls"), "CHAOS_COUNTS": str(here / "counts")}
        job = self.start(mpi, ranks, run_args(settings, folder), here / "ranks-out", env)
        if not job.until(lambda: False, START_SECONDS) or job.wait():
            raise RuntimeError(job.err)
        return time.monotonic() - job.began

    def start(self, mpi: str, ranks: int, args: Sequence[str], here: Path, env: Mapping[str, str]) -> Struck:
        """Start a job that is to be struck: on ranks, or without an MPI as a fork."""
        return Struck(mpi, ranks, args, here, env, self.disk) if mpi else Forked(self.warm, args, here, env)

    def end(self) -> None:
        for warm in self.warms:
            warm.end()


def commit() -> str:
    """The commit of this checkout, with a "+" where files differ from it."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    changed = git(["git", "status", "--porcelain", "--untracked-files=no", "hpcfl"]).stdout.strip()
    return str(git(["git", "rev-parse", "HEAD"]).stdout.strip()[:12] + "+" * bool(changed))


def calls_of(file: Path) -> list[str]:
    """The calls of one rank, without their numbers."""
    return [line.partition(" ")[2] for line in file.read_text().splitlines()] if file.exists() else []


def run_args(settings: Sequence[str], folder: Path) -> list[str]:
    preset, *more = settings
    return ["run", preset, *(word for each in (*OFTEN, *more) for word in ("--set", each)), "--out", str(folder)]


# ---- one run folder


@dataclass
class Scene:
    """A run folder to which things are done, and what is wrong with it."""

    place: Place
    here: Path
    settings: Sequence[str]
    reference: Reference | None
    told: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    starts: int = 0

    @property
    def folder(self) -> Path:
        return self.here / "run"

    def wrong(self, kind: str, text: object) -> None:
        self.problems.append(f"{kind}: {text}")

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note whatever goes wrong within the block: the trials after this one are to be carried out."""
        try:
            yield
        except Exception as error:
            self.wrong("error", f"{type(error).__name__}: {error}")

    def args(self) -> list[str]:
        """What a user would do next: what left no run.h5 is no run, so there is nothing to resume."""
        there = (self.folder / "run.h5").exists()
        return ["resume", str(self.folder)] if there else run_args(self.settings, self.folder)

    def start(self, mpi: str, ranks: int, env: Mapping[str, str]) -> Struck:
        self.starts += 1
        # what killed launchers leave behind goes with this folder
        env = {"CHAOS_FOLDER": str(self.folder), "TMPDIR": str(self.here), **env}
        return self.place.start(mpi, ranks, self.args(), self.here / f"out-{self.starts}", env)

    def ended(self, job: Struck, limit: float = LIMIT) -> int:
        """Wait for a job that is to end by itself; return its exit code, and note what it has told."""
        if not job.until(lambda: False, limit):
            self.wrong("hang", f"still there after {limit:.0f} s: {job.hit}")
            job.kill()
        if orphans := job.left_behind():
            self.wrong("orphans", orphans)
        self.told |= set(job.told)
        return int(job.wait())

    def saved(self) -> int:
        """Rounds in the newest checkpoint, 0 without one."""
        newest = store.latest(self.folder) if (self.folder / "checkpoints").exists() else None
        return store.load(newest, personal=False).round if newest else 0

    def command(self, *args: str) -> tuple[int, str, str]:
        """Carry out a command in a process of its own; return code, stdout and stderr."""
        self.starts += 1
        job = self.place.warm.start(args, self.here / f"out-{self.starts}")
        limit = time.monotonic() + LIMIT
        while not job.over():
            if time.monotonic() > limit:
                self.wrong("hang", args[0])
                job.kill()
            time.sleep(0.005)
        return job.wait(), job.out, job.err

    def read(self) -> dict[str, Any]:
        """Let readers look at what is left; return rounds told of, recorded and saved, and the status."""
        found: dict[str, Any] = {"told": len(self.told), "recorded": 0, "saved": 0, "status": "none"}
        code, out, err = self.command("show", "--json", str(self.folder))
        if NOISE.search(err):
            self.wrong("reader", f"hpcfl show: {err[-300:]}")
        if not (self.folder / "run.h5").exists():
            if self.told:
                self.wrong("loss", f"rounds {sorted(self.told)} were told of, and there is no run.h5")
            return found
        if code:
            self.wrong("reader", f"hpcfl show: {code}: {err[-300:]}")
        else:
            found["status"] = json.loads(out)["status"]
        try:
            data = store.open_run(self.folder)
            rounds = data["round"].values.tolist()
            found |= {"recorded": len(rounds), "saved": self.saved()}
        except Exception as error:  # whatever it is: a reader must not fail
            self.wrong("reader", f"{type(error).__name__}: {error}")
            return found
        if damaged := store.verify(self.folder).damaged:
            self.wrong("damage", damaged)
        if rounds != list(range(len(rounds))) or not self.told <= set(rounds):
            self.wrong("loss", f"told of {sorted(self.told)}, recorded are {rounds}")
        if found["saved"] < len(rounds) - 2:
            self.wrong("loss", f"{len(rounds)} rounds are recorded, the newest checkpoint is of {found['saved']}")
        if self.reference and (names := different(data, self.reference.data)):
            self.wrong("columns", f"before resuming: {', '.join(names)}")
        return found

    def finish(self, mpi: str, ranks: int) -> int:
        """Resume to the end, and compare with the undisturbed run; return the exit code."""
        if mpi:
            job = self.start(mpi, ranks, {})
            code, err = self.ended(job, START_SECONDS), job.err
        else:
            code, _, err = self.command(*self.args())
        if code:
            self.wrong("resume", f"exit code {code}: {err[-500:]}")
            return code
        if (found := self.read())["status"] != "done":
            self.wrong("resume", f"ended with status {found['status']}")
        self.plain()
        if left := [path.name for path in self.folder.rglob(".tmp-*")]:
            self.wrong("leftovers", left)
        if self.reference is None or self.problems:
            return code
        if found["recorded"] != self.reference.rounds:
            self.wrong("columns", f"{found['recorded']} rounds of {self.reference.rounds}")
        if state(self.folder) != self.reference.state:
            self.wrong("digest", "the state is not that of the undisturbed run")
        return code

    def plain(self) -> None:
        """A run that is done opens with any reader of netCDF-4."""
        import xarray

        try:
            with h5py.File(self.folder / "run.h5", "r") as file:
                if len(file["round"]) != (count := store.open_run(self.folder).sizes["round"]):
                    self.wrong("reader", f"h5py finds {len(file['round'])} rounds of {count}")
            with xarray.open_dataset(self.folder / "run.h5", engine="h5netcdf") as data:
                if names := different(data, store.open_run(self.folder)):
                    self.wrong("reader", f"plain xarray reads other {', '.join(names)}")
        except Exception as error:  # whatever it is
            self.wrong("reader", f"plain xarray: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Keep the folder only where something was wrong."""
        if not self.problems:
            shutil.rmtree(self.here)


# ---- kills


@dataclass(frozen=True)
class Kill:
    """Who is killed and when; `share` (0 to 1) chooses one of the times at which the moment comes."""

    who: str
    when: str
    share: float
    mpi: str
    ranks: int
    victim: int  # the rank that is killed, or at whose moment the whole job is

    def env(self, reference: Reference, left: float) -> dict[str, str]:
        """What lets the job be struck; `left` is the part of its rounds that are still to come."""
        action = "stop" if self.who == "job" else "kill"
        env = {"CHAOS_RANK": str(self.victim)}
        if self.when == "import":
            return env | {"CHAOS_MOMENT": f"{action}:import {IMPORTS[int(self.share * len(IMPORTS))]}:1"}
        count = reference.count(self.when, self.victim) * (1.0 if self.when in ONCE else left)
        number = 1 + int(self.share * count)
        if self.when in PATTERNS or (self.when == "sealing" and count):
            phase = "sealing" if self.when == "sealing" else ""
            return env | {"CHAOS_DISK": f"{action}:{PATTERNS.get(self.when, '')}:{number}:{phase}"}
        return env | {"CHAOS_MOMENT": f"{action}:{self.when}:{number}"}


@dataclass(frozen=True)
class Trial:
    """A run that is killed again and again, and what it is resumed on in the end ("": one process, no MPI)."""

    number: int
    preset: str
    kills: tuple[Kill, ...]
    mpi: str
    ranks: int


def drawn(seed: int, number: int, names: Sequence[str], disk: bool) -> Trial:
    """Draw a trial; presets and MPIs take turns, all else is random."""
    rng = np.random.default_rng((seed, number))

    def kill(place: int) -> Kill:
        who = str(rng.choice([*WHENS]))
        whens = [when for when in WHENS[who] if disk or when not in PATTERNS]
        when = str(rng.choice(whens))
        ranks = int(rng.choice([2, 2, 3, 3, 3, 4]))
        client = who == "client" or (who == "job" and when in ("compute", "message"))
        victim = int(rng.integers(1, ranks)) if client else 0
        return Kill(who, when, float(rng.random()), names[(number + place) % len(names)], ranks, victim)

    kills = tuple(kill(place) for place in range(1 + int(rng.choice(3, p=[0.4, 0.4, 0.2]))))
    ranks = int(rng.choice([each for each in (1, 1, 1, 1, 2, 3, 4) if each != kills[-1].ranks]))
    mpi = "" if ranks == 1 else str(rng.choice(names))
    return Trial(number, [*PRESETS][number % len(PRESETS)], kills, mpi, ranks)


def killed(trial: Trial, place: Place, reference: Reference, seed: int) -> dict[str, Any]:
    """Carry out a trial; return what came of it."""
    here = place.folder / "trials" / f"{trial.number:05d}"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    scene, began = Scene(place, here, PRESETS[trial.preset], reference), time.monotonic()
    kills: list[dict[str, Any]] = []
    resumed = None
    with scene.noting():
        for kill in trial.kills:
            left = 1 - (kills[-1]["found"]["saved"] if kills else 0) / reference.rounds
            kills.append(asdict(kill) | strike(scene, kill, left, reference) | {"found": scene.read()})
            if scene.problems:
                break
        resumed = None if scene.problems else scene.finish(trial.mpi, trial.ranks)
    scene.close()
    return {
        **{"number": trial.number, "seed": seed, "commit": place.commit, "preset": trial.preset, "kills": kills},
        **{"mpi": trial.mpi, "ranks": trial.ranks, "resumed": resumed, "problems": scene.problems},
        **{"seconds": round(time.monotonic() - began, 2)},
    }


def strike(scene: Scene, kill: Kill, left: float, reference: Reference) -> dict[str, Any]:
    """Start the job and kill it, or whom it is to lose; return where it was hit and how it ended."""
    timed = kill.when == "time"
    job = scene.start(kill.mpi, kill.ranks, {} if timed else kill.env(reference, left))
    if timed:
        job.until(lambda: time.monotonic() - job.began > kill.share * reference.seconds, START_SECONDS)
        hit = f"{time.monotonic():.9f} {kill.victim} 0 {time.monotonic() - job.began:.2f} s" if not job.over() else ""
        if hit and kill.who != "job":
            job.until(lambda: job.rank(kill.victim), START_SECONDS)
            victim = job.rank(kill.victim)
            if victim is None:
                hit = ""
            else:
                os.kill(victim, signal.SIGKILL)
    else:
        if not job.until(lambda: job.hit, START_SECONDS):
            scene.wrong("hang", "before it was struck")
        hit = job.hit
    if kill.who == "job" and hit:
        job.kill()
    code = scene.ended(job)
    took = time.monotonic() - float(hit.split()[0]) if hit else None
    if code == 0 and hit and kill.when != "leaving" and kill.who != "job" and not scene.problems:
        done = store.read_status(scene.folder).state == "done"
        if not (done and timed):
            scene.wrong("exit", f"code 0 although rank {kill.victim} was killed")
    return {"hit": hit.partition(" ")[2], "code": code, "ended_after": took and round(took, 2)}


def kills(given: argparse.Namespace, place: Place) -> list[dict[str, Any]]:
    """Carry out the trials of kills that are not done yet."""
    done = {each["number"] for each in place.done() if each["seed"] == given.seed}
    trials = [drawn(given.seed, number, given.mpi, bool(place.disk)) for number in range(given.trials)]
    trials = [trial for trial in trials if trial.number not in done]
    names = dict.fromkeys(trial.preset for trial in trials)
    references = {name: place.reference(name, PRESETS[name], 3, given.mpi[0]) for name in names}

    def carry_out(trial: Trial) -> None:
        result = killed(trial, place, references[trial.preset], given.seed)
        place.note(result)
        moments = ", ".join(
            f"{kill['who']} {kill['when']}" + (f" ({kill['hit'].split(' ', 2)[2]})" if kill["hit"] else " (missed)")
            for kill in result["kills"]
        )
        tell(f"trial {trial.number:4d}  {trial.preset:15s}  {moments}", result)

    in_parallel(carry_out, trials, given.jobs)
    return [each for each in place.done() if each["seed"] == given.seed and each["number"] < given.trials]


def tell(line: str, result: Mapping[str, Any]) -> None:
    print(f"{line}  {result['seconds']} s  {'; '.join(result['problems']) or 'ok'}", flush=True)


def in_parallel(act: Callable[[Any], None], over: Sequence[Any], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(act, over):
            pass


def kills_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Moments × outcomes, as Markdown: how many kills by MPI, how many rounds had to be done again, what went wrong."""
    rows: dict[str, list[tuple[Mapping[str, Any], bool]]] = {}
    for each in results:
        hits = [kill for kill in each["kills"] if kill["hit"]]
        for kill in hits:
            wrong = bool(each["problems"]) and kill is hits[-1]
            rows.setdefault(f"{kill['who']}, {kill['when']}", []).append((kill, wrong))
    lines = [
        "| who, when | Open MPI | MPICH | ended by itself, s | rounds to redo | lost, hung, left behind, other bits |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for moment, kills in sorted(rows.items()):
        by = Counter(kill["mpi"] for kill, _ in kills)
        waits = [kill["ended_after"] for kill, _ in kills if kill["who"] != "job"]
        slowest = f"{np.median(waits):.2f}, {max(waits):.2f}" if waits else "–"
        redo = max(kill["found"]["recorded"] - kill["found"]["saved"] for kill, _ in kills)
        problems = sum(wrong for _, wrong in kills)
        lines.append(f"| {moment} | {by['openmpi']} | {by['mpich']} | {slowest} | {redo} | {problems} |")
    return "\n".join(lines)


def kills_summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    print(kills_table(results))
    every = [kill for each in results for kill in each["kills"]]
    hits = [kill for kill in every if kill["hit"]]
    waits = [kill["ended_after"] for kill in hits if kill["who"] != "job"]
    return {
        "trials": len(results),
        "kills": len(hits),
        "missed": len(every) - len(hits),
        "by_mpi": Counter(kill["mpi"] for kill in hits),
        "by_preset": Counter(each["preset"] for each in results),
        "by_moment": Counter(f"{kill['who']} {kill['when']}" for kill in hits),
        "slowest_end": max(waits, default=None),
        "most_to_redo": max((kill["found"]["recorded"] - kill["found"]["saved"] for kill in hits), default=None),
    }


# ---- a disk that fails


@dataclass(frozen=True)
class Fault:
    """The number-th call (from 1) of a rank on the run folder fails, once (``fail``) or from there on (``full``).

    Or the rank is killed there (``kill``).
    """

    action: str
    rank: int
    number: int
    mpi: str

    @property
    def name(self) -> str:
        return f"{self.action}-{self.rank}-{self.number}-{self.mpi or 'alone'}"


def telling(calls: Sequence[str]) -> list[int]:
    """The numbers (from 1) of a rank's calls: of those of one kind on one file, one after the other, three at most."""
    groups: dict[tuple[str, int], list[int]] = {}
    opened: Counter[str] = Counter()
    for number, line in enumerate(calls, 1):
        call, _, path = line.partition(" ")
        opened[path] += call == "open"
        groups.setdefault((line, opened[path]), []).append(number)
    chosen = (number for same in groups.values() for number in (same[0], same[len(same) // 2], same[-1]))
    return sorted(set(chosen))


def faults(given: argparse.Namespace, place: Place) -> list[dict[str, Any]]:
    """Let calls fail, in an order drawn at random; the MPIs take turns."""
    if place.disk is None:
        raise SystemExit("chaos: faults of the disk need a C compiler (cc)")
    names, ranks = ([""], 1) if given.alone else (given.mpi, given.ranks)
    references = {mpi: place.reference(f"faulty-{mpi}", FAULTY, ranks, mpi) for mpi in names}
    every = []
    for rank, lines in enumerate(references[names[0]].calls):
        calls = [line for line in lines if not line.startswith("phase ")]
        each = range(1, len(calls) + 1)
        for turn, (action, numbers) in enumerate(
            {"fail": each, "full": each if given.alone else telling(calls)}.items()
        ):
            every += [Fault(action, rank, number, names[(at + turn) % len(names)]) for at, number in enumerate(numbers)]
    order = np.random.default_rng(given.seed).permutation(len(every))[: given.trials]
    chosen, done = [every[each] for each in order], {each["name"] for each in place.done()}

    def carry_out(fault: Fault) -> None:
        result = failed(fault, place, references[fault.mpi], ranks)
        place.note(result)
        tell(f"{fault.name:24s} {result['hit']:60s} {result['outcome']:9s}", result)

    in_parallel(carry_out, [fault for fault in chosen if fault.name not in done], given.jobs)
    asked = {fault.name for fault in chosen}
    return [each for each in place.done() if each["name"] in asked]


def ends(given: argparse.Namespace, place: Place) -> list[dict[str, Any]]:
    """Kill one process at each call on its folder from its last row on, in an order drawn at random."""
    if place.disk is None:
        raise SystemExit("chaos: kills at calls on the disk need a C compiler (cc)")
    reference = place.reference("faulty-", FAULTY, 1, "")
    calls = [line for line in reference.calls[0] if not line.startswith("phase ")]
    rows = [number for number, line in enumerate(calls, 1) if line == "write /metrics/segment-000.h5"]
    every = [Fault("kill", 0, number, "") for number in range(rows[-1], len(calls) + 1)]
    order = np.random.default_rng(given.seed).permutation(len(every))[: given.trials]
    chosen, done = [every[each] for each in order], {each["name"] for each in place.done()}
    for fault in chosen:
        if fault.name not in done:
            place.note(result := failed(fault, place, reference, 1))
            tell(f"{fault.name:24s} {result['hit']:60s} {result['outcome']:9s}", result)
    return [each for each in place.done() if each["name"] in {fault.name for fault in chosen}]


def failed(fault: Fault, place: Place, reference: Reference, ranks: int) -> dict[str, Any]:
    """Let one call fail; return what came of it."""
    here = place.folder / "faults" / fault.name
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    scene, began = Scene(place, here, FAULTY, reference), time.monotonic()
    env = {"CHAOS_DISK": f"{fault.action}::{fault.number}:", "CHAOS_RANK": str(fault.rank)}
    job = scene.start(fault.mpi, ranks, env)
    if not job.until(lambda: job.hit, START_SECONDS):
        scene.wrong("hang", "before it was struck")
    hit = job.hit
    job.until(lambda: False, LIMIT)
    took = time.monotonic() - float(hit.split()[0]) if hit else 0.0
    code = scene.ended(job)
    found, outcome = judged(scene, job, code, took if hit else None)
    said, resumed = job.said, None
    with scene.noting():
        resumed = None if scene.problems else scene.finish("", 1)
    scene.close()
    return {
        **{"name": fault.name, "commit": place.commit, "hit": " ".join(hit.split()[3:]), "code": code},
        **{"outcome": outcome, "said": said, "ended_after": round(took, 2), "found": found, "resumed": resumed},
        **{"problems": scene.problems, "seconds": round(time.monotonic() - began, 2)},
    }


def judged(scene: Scene, job: Struck, code: int, took: float | None) -> tuple[dict[str, Any], str]:
    """Judge how a job ended whose disk has failed; return what readers found, and the outcome in a word."""
    if NOISE.search(job.err):
        scene.wrong("noise", job.err[-600:])
    found = scene.read()
    if code == -signal.SIGKILL:
        if found["status"] == "done":
            scene.plain()
        return found, "killed"
    if took is None:
        return found, "missed"
    if code == 0:
        if found["status"] != "done":
            scene.wrong("exit", f"code 0 and status {found['status']}")
        return found, "borne"
    if len(job.said) != 1:
        scene.wrong("lines", f"{len(job.said)}: {job.said} of {job.err[-600:]}")
    if took > FAULT_SECONDS:
        scene.wrong("late", f"{took:.1f} s after the fault")
    return found, "explained"


def faults_summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "trials": len(results),
        "outcomes": Counter(f"{each['name'].split('-')[0]} {each['outcome']}" for each in results),
        "by_mpi": Counter(each["name"].rpartition("-")[2] for each in results),
        "slowest_end": max((each["ended_after"] for each in results if each["outcome"] == "explained"), default=None),
    }


# ---- two faults at once


def both(given: argparse.Namespace, place: Place) -> list[dict[str, Any]]:
    """Suspend a client of a run in real time, then let its disk be full."""
    if place.disk is None:
        raise SystemExit("chaos: faults of the disk need a C compiler (cc)")
    done = {each["number"] for each in place.done()}
    numbers = [number for number in range(given.trials) if number not in done]

    def carry_out(number: int) -> None:
        result = suspended_and_full(number, given, place)
        place.note(result)
        tell(f"{number:3d} {result['mpi']:8s} {result['rule']:20s} {result['outcome']:9s}", result)

    in_parallel(carry_out, numbers, given.jobs)
    return [each for each in place.done() if each["number"] < given.trials]


RULES = {
    "deadline": ("participation={close='deadline', deadline=0.05}",),
    "all, lost_after": ("participation={close='all'}", "lost_after=3.0"),
    "first": ("participation={close='first', first=4}",),
}


def suspended_and_full(number: int, given: argparse.Namespace, place: Place) -> dict[str, Any]:
    rng = np.random.default_rng((given.seed, number))
    rule, mpi = [*RULES][number % len(RULES)], given.mpi[number // len(RULES) % len(given.mpi)]
    here = place.folder / "both" / f"{number:03d}"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    scene, began = Scene(place, here, (*REAL, *RULES[rule]), None), time.monotonic()
    full = here / "full"
    job = scene.start(mpi, 4, {"CHAOS_FULL": str(full)})
    at, later = int(rng.integers(1, 8)), int(rng.integers(0, 4))
    if not job.until(lambda: len(job.told) >= at, START_SECONDS):
        scene.wrong("hang", "before anything was done")
    victim = job.rank(int(rng.integers(1, 4)))
    if victim is not None:
        os.kill(victim, signal.SIGSTOP)
    job.until(lambda: len(job.told) >= at + later, 2.0)  # with "all" no round closes from now on
    full.touch()
    since = time.monotonic()
    job.until(lambda: False, LIMIT)
    took = time.monotonic() - since
    code = scene.ended(job)
    found, outcome = judged(scene, job, code, max(0.0, took - (3.0 if "lost" in rule else 0.0)))
    full.unlink()
    said, resumed = job.said, None
    with scene.noting():
        resumed = None if scene.problems else scene.finish(mpi, 3)
    scene.close()
    return {
        **{"number": number, "commit": place.commit, "mpi": mpi, "rule": rule, "at": at, "later": later, "code": code},
        **{"outcome": outcome, "said": said, "ended_after": round(took, 2), "found": found, "resumed": resumed},
        **{"problems": scene.problems, "seconds": round(time.monotonic() - began, 2)},
    }


def both_summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "trials": len(results),
        "outcomes": Counter(f"{each['mpi']} {each['rule']} {each['outcome']}" for each in results),
        "slowest_end": max((each["ended_after"] for each in results), default=None),
    }


def give_up(number: int, _: object) -> None:
    """End all jobs, which are in sessions of their own, and this process: trials that were under way do not count."""
    for pid in descendants(os.getpid())[1:]:
        kill_one(pid)
    os._exit(128 + number)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, give_up)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", action="store_true", help="let each call on the run folder fail")
    parser.add_argument("--alone", action="store_true", help="with --faults: each call of one process, without MPI")
    parser.add_argument("--ends", action="store_true", help="kill one process at each call of its end")
    parser.add_argument("--both", action="store_true", help="a suspended client and a full disk, in real time")
    parser.add_argument("--trials", type=int, help="how many; of faults all unless it says fewer", default=None)
    parser.add_argument("--mpi", nargs="+", choices=mpis(), default=mpis())
    parser.add_argument("--ranks", type=int, default=2, help="of the runs whose disk fails")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    given = parser.parse_args()
    act, summary, file = (
        (faults, faults_summary, "faults.jsonl")
        if given.faults
        else (ends, faults_summary, "ends.jsonl")
        if given.ends
        else (both, both_summary, "both.jsonl")
        if given.both
        else (kills, kills_summary, "trials.jsonl")
    )
    if given.trials is None and not given.faults and not given.ends:
        given.trials = 12 if given.both else 300
    place = Place(given.out.resolve(), file)
    try:
        results = act(given, place)
    finally:
        place.end()
    problems = Counter(text.partition(":")[0] for each in results for text in each["problems"])
    print(json.dumps(summary(results) | {"problems": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
