"""Kill -9 at any moment loses nothing that was spoken of, and a resumed run ends as if nothing had happened.

Each case kills a run, some of them again once it was resumed. Before anything else touches the folder, `open_run`
reads it in this process, which is not the one that wrote; then `hpcfl seal` makes it readable by plain xarray; then
`hpcfl resume` must end in the state, and with the records, of a run that was left alone.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import xarray

from helpers import faults
from helpers.launcher import LIBRARIES, LIMIT, ROOT, alive, end, mpis, start, under
from helpers.warm import Warm
from hpcfl import open_run, store
from hpcfl.engine.record import PER_RANK, WALL

pytestmark = pytest.mark.launch

ROUNDS = 12
KEEP = 3  # a checkpoint after every so many rounds
CONFIG = f"""
rounds = {ROUNDS}
clients = 8
seed = 1

[evaluate]
every = 1  # a line for every round

[checkpoint]
every = {KEEP}

[algorithm]
name = "salf"
lr = 0.3
batch = 64
momentum = 0.5  # kept per client, so that a resumed run must find it again
persist_optimizer = true

[participation]
close = "deadline"

[speed]
model = "uniform-depth"
stragglers = 1.0

[data]
name = "digits"

[model]
name = "mlp"
hidden = [32, 16]
"""
ATTEMPTS = 12


def run_args(folder: Path, *settings: str) -> list[str]:
    file = folder.with_suffix(".toml")
    file.write_text(CONFIG, encoding="utf-8")
    return ["run", str(file), *(word for setting in settings for word in ("--set", setting)), "--out", str(folder)]


@dataclass(frozen=True)
class Moment:
    """When to kill: inside the write that `fault` names, or when `share` of the lines to come are there."""

    fault: str = ""
    share: float = 0.0

    @property
    def name(self) -> str:
        return self.fault or f"at {self.share:.3f}"


class Job(Protocol):
    """A command that was started, alone or under a launcher."""

    @property
    def out(self) -> str: ...
    @property
    def err(self) -> str: ...
    def over(self) -> bool: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


Start = Callable[[Sequence[str], Path, Mapping[str, str]], Job]


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed: its folder, records, digest, and how long it took to speak and per line."""

    folder: Path
    data: xarray.Dataset
    digest: str
    first: float
    each: float


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.end()


@pytest.fixture(scope="module")
def reference(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return measured(warm.start, tmp_path_factory.mktemp("reference"), warm)


def measured(start: Start, place: Path, warm: Warm) -> Reference:
    """Let a run end, looking at when it speaks."""
    began = time.perf_counter()
    job = start(run_args(place / "run"), place / "out", {})
    await_lines(job, 1)
    first = time.perf_counter()
    assert job.wait() == 0, job.err
    each = (time.perf_counter() - first) / (ROUNDS - 1)
    assert lines(job) == ROUNDS
    data = open_run(place / "run")
    assert data["round"].values.tolist() == list(range(ROUNDS))
    assert data.attrs["status"] == "done"
    return Reference(place / "run", data, digest(warm, place / "run"), first - began, each)


def lines(job: Job) -> int:
    """Rounds that were spoken of."""
    return sum(line.startswith("round ") for line in job.out.splitlines())


def await_lines(job: Job, count: int) -> None:
    """Wait until a job has spoken of `count` rounds, or is over."""
    limit = time.monotonic() + LIMIT
    while lines(job) < count and not job.over() and time.monotonic() < limit:
        time.sleep(0.002)


def command(warm: Warm, args: Sequence[str], out: Path, expected: int = 0) -> str:
    """Carry out a command that nobody disturbs; return what it printed."""
    job = warm.start(args, out)
    code = job.wait()
    assert code == expected, job.err
    return job.out


def digest(warm: Warm, folder: Path) -> str:
    shown = json.loads(command(warm, ["show", "--json", str(folder)], folder.with_name("show")))
    assert shown["rounds"] == ROUNDS
    assert shown["status"] == "done"
    return str(shown["state_sha256"])


@dataclass
class Scene:
    """One run folder, killed again and again."""

    place: Path
    reference: Reference
    warm: Warm
    start: Start
    skip: frozenset[str] = frozenset(WALL)
    starts: int = 0

    @property
    def folder(self) -> Path:
        return self.place / "run"

    def args(self) -> list[str]:
        """What a user would do next: a run that left no run.h5 is none, so there is nothing to resume."""
        return ["resume", str(self.folder)] if (self.folder / "run.h5").exists() else run_args(self.folder)

    def left(self) -> int:
        """Rounds that the next start will compute."""
        newest = store.latest(self.folder) if (self.folder / "run.h5").exists() else None
        return ROUNDS - (store.load(newest).round if newest else 0)

    def strike(self, moment: Moment) -> Job:
        """Start the run and kill it. A blow that came when the job was over did not count: again, and earlier."""
        before, share = self.place / "before", moment.share
        if self.folder.exists():
            shutil.copytree(self.folder, before)
        for _ in range(ATTEMPTS):
            job = self.begin({faults.VARIABLE: moment.fault} if moment.fault else {})
            if not moment.fault:
                self.hit(job, share * self.left())
            if job.wait() == -signal.SIGKILL:
                shutil.rmtree(before, ignore_errors=True)
                return job
            assert not moment.fault, f"no {moment.fault}: {job.out}{job.err}"
            assert "done" in (self.folder / "status").read_text().splitlines()[0], job.err
            share *= 0.5
            shutil.rmtree(self.folder)
            if before.exists():
                shutil.copytree(before, self.folder)
        raise AssertionError("never in time")

    def begin(self, env: Mapping[str, str]) -> Job:
        self.starts += 1
        return self.start(self.args(), self.place / f"out-{self.starts}", env)

    def hit(self, job: Job, after: float) -> None:
        """Kill when so many lines, and so much of the next one's time, have passed."""
        whole = int(after)
        await_lines(job, whole)
        time.sleep((after - whole) * (self.reference.each if whole else self.reference.first))
        job.kill()

    def survived(self, job: Job) -> None:
        """Every round that was spoken of can be read, and says what it should."""
        told = [int(line.split()[1].split("/")[0]) - 1 for line in job.out.splitlines() if line.startswith("round ")]
        if not (self.folder / "run.h5").exists():
            assert not told
            return
        data = open_run(self.folder)
        assert set(told) <= set(data["round"].values.tolist())
        assert data["round"].values.tolist() == list(range(data.sizes["round"])), "a gap"
        self.same(data)
        by_round = dict(zip(data["round"].values.tolist(), data["accuracy"].values))
        for line, number in zip([line for line in job.out.splitlines() if line.startswith("round ")], told):
            assert f"accuracy {by_round[number]:.4f}" in line

    def sealed(self, folder: Path) -> None:
        """After ``hpcfl seal``, xarray alone reads what `open_run` read before."""
        if not (folder / "run.h5").exists():
            return
        before = open_run(folder)
        command(self.warm, ["seal", str(folder)], self.place / "seal")
        plain(folder, before)

    def same(self, data: xarray.Dataset) -> None:
        """The rounds that are there are those of the undisturbed run."""
        ours, theirs = figures(data, self.skip), figures(self.reference.data, self.skip)
        assert ours.keys() == theirs.keys() or not data.sizes["round"]
        for name, values in ours.items():
            wanted = theirs[name][: len(values)] if "round" in data[name].dims else theirs[name]
            np.testing.assert_array_equal(values, wanted, err_msg=name)

    def ends_well(self, resumed: Job | None = None) -> None:
        """Resume to the end: nothing tells this run from one that was left alone."""
        job = resumed or self.begin({})
        assert job.wait() == 0, job.err
        assert digest(self.warm, self.folder) == self.reference.digest
        data = open_run(self.folder)
        assert data.sizes["round"] == ROUNDS
        self.same(data)


def figures(data: xarray.Dataset, skip: frozenset[str]) -> dict[str, np.ndarray[Any, Any]]:
    return {str(name): data[name].values for name in [*data.data_vars, *data.coords] if name not in skip}


def plain(folder: Path, expected: xarray.Dataset) -> None:
    with xarray.open_dataset(folder / "run.h5", engine="h5netcdf") as found:
        xarray.testing.assert_identical(found.load().drop_attrs(), expected.drop_attrs())


def inside(moment: Moment, job: Job, scene: Scene, done: int) -> None:
    """The blow fell inside the write it was meant for, `done` rounds having been computed by earlier starts."""
    kind, number = moment.fault.split(":")
    checkpoints = scene.folder / "checkpoints"
    torn = [path.name.rpartition("round-")[2] for path in checkpoints.glob(".tmp-*round-*")]
    if kind == "metrics":
        assert lines(job) == int(number) - 1
    elif kind == "checkpoint":
        assert lines(job) >= KEEP * int(number) - 1  # it is written beside the next rounds; another rank may be ahead
        assert f"{done + KEEP * int(number):06d}" in torn
    else:
        assert list(scene.folder.glob(".tmp-*run.h5"))


def drawn(seed: int) -> float:
    return float(np.random.default_rng(seed).uniform())


FAULTS = [
    "metrics:1",
    "metrics:7",
    "metrics:12",
    "checkpoint:1",
    "checkpoint:3",
    "checkpoint:4",
    "table:1",  # run.h5 has never been there
    "table:2",  # the segment is there, run.h5 does not know it yet
    "table:3",  # all is done, and is being sealed
]
AGAIN = ["metrics:2", "checkpoint:1", "table:1", "metrics:3"]  # in a resumed run
ONCE = [[Moment(share=(number + drawn(number)) / 14)] for number in range(14)]  # one in each 14th of the run
TWICE = [
    *([Moment(share=drawn(100 + i) * 0.7), Moment(fault)] for i, fault in enumerate(AGAIN)),
    *([Moment(share=drawn(200 + i)), Moment(share=drawn(300 + i))] for i in range(4)),
]
OFTEN = [
    *([Moment(fault)] for fault in FAULTS),
    *(ONCE[::2] + TWICE[::2]),
    [Moment("metrics:5"), Moment("checkpoint:1"), Moment("table:1"), Moment(share=0.5)],
    [Moment("checkpoint:2"), Moment("metrics:1"), Moment("metrics:1"), Moment(share=0.05)],
]
SELDOM = ONCE[1::2] + TWICE[1::2]
CASES = OFTEN + SELDOM


def test_there_are_enough_kills() -> None:
    firsts = [case[0] for case in OFTEN]
    assert sum(map(len, OFTEN)) >= 30
    assert sum(moment.fault.startswith(("metrics", "checkpoint")) for moment in firsts) >= 5
    assert sum(not moment.fault for moment in firsts) >= 10
    assert sum(len(case) > 1 for case in OFTEN) >= 5


@pytest.mark.parametrize(
    "moments",
    [*OFTEN, *(pytest.param(case, marks=pytest.mark.slow) for case in SELDOM)],
    ids=[", ".join(moment.name for moment in case) for case in CASES],
)
def test_a_killed_run_loses_nothing(moments: list[Moment], warm: Warm, reference: Reference, tmp_path: Path) -> None:
    scene = Scene(tmp_path, reference, warm, warm.start)
    for number, moment in enumerate(moments):
        done = ROUNDS - scene.left()
        job = scene.strike(moment)
        scene.survived(job)
        if moment.fault:
            inside(moment, job, scene, done)
        here = (CASES.index(moments) + number) % 2 == 0  # the resumed run finds a sealed folder, or one as it was left
        scene.sealed(scene.folder if here else copied(scene.folder, tmp_path / f"copy-{number}"))
    scene.ends_well()


def copied(folder: Path, to: Path) -> Path:
    if folder.exists():
        shutil.copytree(folder, to)
    return to


def test_a_run_killed_before_its_first_round_is_shown(warm: Warm, tmp_path: Path) -> None:
    job = warm.start(run_args(tmp_path / "run"), tmp_path / "out", {faults.VARIABLE: "table:2"})
    assert job.wait() == -signal.SIGKILL
    for path in (tmp_path / "run" / "metrics").iterdir():  # a moment earlier there was no segment yet
        path.unlink()
    row = json.loads(command(warm, ["show", "--json", str(tmp_path / "run")], tmp_path / "show"))
    assert (row["rounds"], row["status"], row["accuracy"], row["state_sha256"]) == (0, "killed", None, None)
    assert "run" in command(warm, ["show", str(tmp_path / "run")], tmp_path / "show")
    command(warm, ["plot", str(tmp_path / "run"), "-o", str(tmp_path / "picture.png")], tmp_path / "plot")
    command(warm, ["seal", str(tmp_path / "run")], tmp_path / "seal")
    assert open_run(tmp_path / "run").sizes["round"] == 0


@pytest.mark.parametrize("again", ["resume", "run --resume"])
def test_a_finished_run_is_left_as_it_is(again: str, warm: Warm, reference: Reference, tmp_path: Path) -> None:
    folder = copied(reference.folder, tmp_path / "run")
    before = content(folder)
    args = ["resume", str(folder)] if again == "resume" else [*run_args(folder), "--resume"]
    assert "done already" in command(warm, args, tmp_path / "out")
    assert content(folder) == before


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def test_two_runs_at_once_are_refused(warm: Warm, reference: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = warm.start(run_args(folder, "rounds=100000"), tmp_path / "out")
    await_lines(job, 2)
    second = warm.start(["resume", str(folder)], tmp_path / "second")
    assert second.wait() == 2
    assert "is running" in second.err
    assert open_run(folder).attrs["status"] == "running"
    job.kill()
    assert job.wait() == -signal.SIGKILL
    assert open_run(folder).attrs["status"] == "killed"


TROUBLE = '''
"""SALF that fails when told to."""

import os

from hpcfl.algorithms.salf import Salf


class Trouble(Salf):
    def client(self, task, shared, personal, visits):
        if str(visits.round) == os.environ.get("TROUBLE_IN_ROUND"):
            raise ArithmeticError("no luck")
        return (yield from super().client(task, shared, personal, visits))
'''


def test_a_failed_run_keeps_what_it_recorded(warm: Warm, reference: Reference, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "trouble.py").write_text(TROUBLE)
    args = run_args(tmp_path / "own" / "run", "algorithm.name=trouble:Trouble")
    scene = Scene(tmp_path / "own", reference, warm, warm.start)
    job = warm.start(args, tmp_path / "failed", {"TROUBLE_IN_ROUND": "7"})
    assert job.wait() == 1
    (said,) = re.findall(r"^hpcfl: (.*)$", job.err, re.MULTILINE)
    assert said.startswith("algorithm.name = 'trouble:Trouble': ArithmeticError: no luck in round 7 (")
    assert said.endswith("trouble.py, line 12)")
    assert "Traceback" not in job.err
    assert "Traceback (most recent call last)" in (scene.folder / "error.txt").read_text()
    assert lines(job) == 7
    scene.survived(job)
    data = open_run(scene.folder)
    assert data.sizes["round"] == 7
    assert (data.attrs["status"], data.attrs["reason"]) == ("failed", said)
    scene.sealed(copied(scene.folder, tmp_path / "copy"))
    again = scene.begin({"TROUBLE_IN_ROUND": "6"})  # the last checkpoint is that of 6 rounds
    assert again.wait() == 1
    scene.sealed(scene.folder)
    assert open_run(scene.folder).sizes["round"] in (6, 7)
    scene.ends_well()


class Ranks:
    """A job of 4 ranks under a launcher."""

    def __init__(self, mpi: str, args: Sequence[str], out: Path, env: Mapping[str, str]) -> None:
        command, settings = under(mpi, 4, [*faults.COMMAND[1:], *args])
        self.path, self.killed = out, False
        with out.open("w") as said, out.with_name(out.name + ".err").open("w") as complained:
            self.process = start(command, {**settings, **env}, stdout=said, stderr=complained, cwd=ROOT)

    @property
    def out(self) -> str:
        return self.path.read_text()

    @property
    def err(self) -> str:
        return self.path.with_name(self.path.name + ".err").read_text()

    def over(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill all at once."""
        self.killed = not self.over()
        family, limit = end(self.process), time.monotonic() + LIMIT
        while any(alive(pid) for pid in family if pid != self.process.pid) and time.monotonic() < limit:
            time.sleep(0.01)

    def wait(self) -> int:
        """Return -9 where the job was killed, by us or by a fault inside rank 0, else its exit code."""
        try:
            code = self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        lost = (signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL)
        return -signal.SIGKILL if self.killed or code in lost else code


RANK_FAULTS = ["metrics:1", "metrics:7", "checkpoint:1", "checkpoint:3", "table:2", "metrics:12"]
RANK_CASES = [*map(Moment, RANK_FAULTS), *(Moment(share=(i + drawn(400 + i)) / 14) for i in range(14))]


@pytest.fixture(scope="module", params=LIBRARIES)
def on_ranks(
    request: pytest.FixtureRequest, warm: Warm, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Start, Reference]:
    mpi = str(request.param)
    if mpi not in mpis():
        pytest.skip(f"{mpi} is not installed")

    def start(args: Sequence[str], out: Path, env: Mapping[str, str]) -> Job:
        return Ranks(mpi, args, out, env)

    return start, measured(start, tmp_path_factory.mktemp(mpi), warm)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RANK_CASES)), ids=[case.name for case in RANK_CASES])
def test_a_killed_job_loses_nothing(
    number: int, on_ranks: tuple[Start, Reference], warm: Warm, reference: Reference, tmp_path: Path
) -> None:
    start, undisturbed = on_ranks
    assert undisturbed.digest == reference.digest
    scene = Scene(tmp_path, undisturbed, warm, start)
    scene.survived(scene.strike(RANK_CASES[number]))
    scene.sealed(copied(scene.folder, tmp_path / "copy"))
    if number % 3:  # resumed by one process alone
        scene.start, scene.skip = warm.start, frozenset({*WALL, *PER_RANK, "rank"})
    scene.ends_well()
