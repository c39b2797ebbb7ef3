"""Sweeps: what is listed is what is run, what is done is left alone, and no process outlives its sweep."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcfl
from helpers.launcher import LIMIT, alive, descendants
from helpers.recorded import curve, restated, write_run
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands import sweep
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.commands.sweep import Board
from hpcfl.data import Header
from hpcfl.data.bundled import Digits
from hpcfl.mpi.launcher import launched
from hpcfl.testing.runs import cut_back

FEW = ["--set", "rounds=4", "--set", "checkpoint.every=2", "--set", "evaluate.every=1"]

STUB = """
import json, os, signal, sys, time, zlib
from pathlib import Path

words = sys.argv[sys.argv.index("run"):]
folder = Path(words[words.index("--out") + 1])
kind, _, value = words[words.index("--kind") + 1].partition("=") if "--kind" in words else ("", "", "")
seed = next((int(word[5:]) for word in words if word.startswith("seed=")), 0)
got = []
for name in ("INT", "TERM", "USR1"):
    signal.signal(signal.Signals["SIG" + name], lambda number, _: got.append(signal.Signals(number).name))
facts = {"words": words, "threads": os.environ["OMP_NUM_THREADS"], "pid": os.getpid(), "group": os.getpgid(0)}


def tell(name):
    (folder.parent / ".new").with_name(f"{folder.name}.new").write_text(json.dumps(facts))
    os.rename(folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.{name}"))


tell("begun")
wanted = int(os.environ.get("STUB_SIGNALS", "0"))
end = time.monotonic() + 500
while len(got) < wanted and time.monotonic() < end:
    time.sleep(0.01)
    if got and "heard" not in facts:
        facts["heard"] = got[:1]
        tell("heard")
facts["signals"] = got
tell("over")
if wanted:
    sys.exit(85)
if seed == 2:
    print("first\\nhpcfl: rounds: no luck\\n-----\\n")
    sys.exit(3)
if seed == 3:
    os.kill(os.getpid(), signal.SIGKILL)
folder.mkdir(exist_ok=True)
word, fields = "running" if seed == 9 else "done", "reason: \\nhost: stub\\n"
check = zlib.crc32(f"{word}\\n{fields}".encode())
(folder / "status").write_text(f"{word}\\ncheck: {check:08x}\\n{fields}")
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand in an empty folder, as a process alone that does not ignore INT."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCFL_DATA", raising=False)
    if request.node.get_closest_marker("mpi") is None:
        for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
            monkeypatch.setattr(f"{module}.launched", lambda: False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A program that stands for hpcfl: it starts at once, and ends as its seed and the environment say."""
    (tmp_path / "stub.py").write_text(STUB)
    program = [sys.executable, "-S", str(tmp_path / "stub.py")]
    monkeypatch.setattr(sweep, "PROGRAM", tuple(program))
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    return program


def swept(*more: str) -> int:
    return main(["sweep", "fedavg-digits", "--out", "s", *more])


def facts(kind: str) -> dict[str, Any]:
    """What the stubs of a sweep have left, by seed."""
    return {
        path.name[-len(kind) - 2 : -len(kind) - 1]: json.loads(path.read_text()) for path in Path("s").glob(f"*.{kind}")
    }


def await_(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


# ---- the product


def test_every_config_with_every_value() -> None:
    found = sweep.runs(["a-b", "x/my.toml"], Path("s"), ["rounds=2"], ["p.first=2,4", "lr=0.1"], "1-2")
    assert [run.name for run in found] == [
        f"{config}_p.first={first}_lr=0.1_seed={seed}"
        for config in ("a-b", "my")
        for first in (2, 4)
        for seed in (1, 2)
    ]
    assert [run.index for run in found] == list(range(8))
    words = "run x/my.toml --set rounds=2 --set p.first=4 --set lr=0.1 --set seed=1 --out s/{} --resume"
    assert found[6].words == words.format("my_p.first=4_lr=0.1_seed=1").split()
    assert [run.name for run in sweep.runs(["a"], Path("s"))] == ["a"]


def test_overlays_are_axes() -> None:
    found = sweep.runs(["a"], Path("s"), ["rounds=2"], ["lr=1,2"], "3", overlays=[["x/one.toml", "two"], ["three"]])
    assert [run.name for run in found] == [
        f"a_{overlay}_three_lr={rate}_seed=3" for overlay in ("one", "two") for rate in (1, 2)
    ]
    words = "run a --with x/one.toml --with three --set rounds=2 --set lr=2 --set seed=3 --out s/{} --resume"
    assert found[1].words == words.format("a_one_three_lr=2_seed=3").split()


def test_methods_and_speeds_are_swept(capsys: Any) -> None:
    """Each run's config is judged as it will be run, without a word on what is dropped from it."""
    Path("fedavg.toml").write_text('[algorithm]\nname = "fedavg"\n[participation]\nclose = "all"\n')
    Path("salf.toml").write_text('[algorithm]\nname = "salf"\n')
    Path("groups.toml").write_text('[speed]\nmodel = "groups"\nmeans_of = [0.1, 1.0]\nshares_of = [0.5, 0.5]\n')
    axes = ["--with", "fedavg.toml,salf.toml", "--with", "groups.toml", "--grid", "speed.rate=1.0"]
    assert main(["sweep", "salf-digits", "--out", "s", *axes, "--list"]) == 2
    assert "(salf-digits_fedavg_groups_speed.rate=1.0): speed.rate: unknown key" in capsys.readouterr().err
    axes = [*axes[:4], "--grid", "speed.model=groups,none", "--seeds", "1-2"]
    assert main(["sweep", "salf-digits", "--out", "s", *axes, "--list"]) == 2
    where = "(salf-digits_fedavg_groups_speed.model=none_seed=1): groups.toml: speed.means_of"
    assert f"{where}: unknown key" in capsys.readouterr().err
    assert main(["sweep", "salf-digits", "--out", "s", *axes[:2], *axes[-2:], "--list"]) == 0
    said, complained = capsys.readouterr()
    assert complained == ""
    lines = [line.split("\t") for line in said.splitlines()]
    assert [folder for _, _, folder, _ in lines] == [
        f"s/salf-digits_{overlay}_seed={seed}" for overlay in ("fedavg", "salf") for seed in (1, 2)
    ]
    assert lines[0][3] == (
        "hpcfl run salf-digits --with fedavg.toml --set seed=1 --out s/salf-digits_fedavg_seed=1 --resume"
    )


def test_values_with_commas_and_names_for_any_file_system() -> None:
    (key, values), *rest = sweep.axes([], ["a.b = [1,2], [[0,1.5],[-3,4]],'x,y/z' ,{k=1,l=2}"], None).items()
    assert rest == []
    assert (key, values) == ("a.b", ["[1,2]", "[[0,1.5],[-3,4]]", "'x,y/z'", "{k=1,l=2}"])
    names = [sweep.name_of("c.toml", [f"a={value}"]) for value in values]
    assert names == ["c_a=1-2", "c_a=0-1.5--3-4", "c_a=x-y-z", "c_a=k=1-l=2"]


def test_long_names_are_cut_and_stay_apart() -> None:
    one, other = (sweep.name_of("c", ["key=" + "1" * 300, f"last={number}"]) for number in (1, 2))
    assert one != other
    assert one[:-8] == other[:-8] == "c_key=" + "1" * 185 + "-"
    assert len(one) == sweep.LONGEST


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", [3]), ("1,2,5", [1, 2, 5]), ("1-3", [1, 2, 3]), ("7,1-2, 0", [7, 1, 2, 0])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert sweep.seed_list(text) == [str(seed) for seed in seeds]


@pytest.mark.parametrize("text", ["", "x", "1,", "1-", "-1", "3-1", "1.5", "1-2-3", "²"])
def test_no_seeds(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--seeds .*: expected numbers as in 1,2,3 or 1-3, got "):
        sweep.seed_list(text)


# ---- bad input

BAD = {
    "preset": ("--list salf-digit", "run 1 (salf-digit)", "'salf-digits'"),
    "grid-key": ("--grid algorithm.lrr=1,2", "run 0 (fedavg-digits_algorithm.lrr=1)", "algorithm.lrr", "'lr'"),
    "grid-value": ("--grid algorithm.lr=0.1,x --seeds 1-2", "run 2 (", "algorithm.lr", "number", "'x'"),
    "grid-together": ("--grid data.train_samples=100,2000", "run 1 (", "data.train_samples", "did you mean 1437"),
    "grid-without-values": ("--grid seed", "--grid seed", "KEY=V1,V2"),
    "grid-without-a-value": ("--grid seed=1,,2", "--grid seed=1,,2", "KEY=V1,V2"),
    "grid-open": ("--grid model.hidden=[1,2", "--grid model.hidden=[1,2", "KEY=V1,V2"),
    "set-and-grid": ("--set seed=1 --grid seed=1,2", "seed: set twice", "--grid"),
    "grid-and-seeds": ("--grid seed=1,2 --seeds 3", "seed: set twice", "--seeds"),
    "seeds": ("--seeds 1..3", "--seeds 1..3", "1-3", "'1..3'"),
    "seed-twice": ("--seeds 1,1", "share the folder", "fedavg-digits_seed=1"),
    "overlay": ("--with wait,stub.py --list", "run 1 (fedavg-digits_stub)", "stub.py: not valid TOML"),
    "no-overlay": ("--with wait,wiat", "run 1 (fedavg-digits_wiat)", "no overlay 'wiat'", "'wait'"),
    "overlays-with-a-hole": ("--with wait,", "--with wait,", "FILE[,FILE...]"),
    "overlays-of-one-name": ("--with wait,x/wait.toml", "share the folder", "--with x/wait.toml"),
    "only": ("--seeds 1-3 --only 3", "--only", "0 to 2", "got 3", "did you mean 2"),
    "only-below": ("--seeds 1-3 --only -1", "--only", "0 to 2", "got -1", "did you mean 0"),
    "only-word": ("--only x", "--only", "'x'"),
    "jobs": ("--jobs 0", "--jobs", "0"),
    "launcher": ("--launcher 'mpirunn -n 4'", "--launcher mpirunn", "no such command", "mpirun -n 4"),
    "launcher-open": ('--launcher "mpirun \'"', "--launcher mpirun '", "quotation"),
    "pack": ("--pack 2", "--pack 2", "no allocation of Slurm", "salloc or sbatch"),
    "pack-and-launcher": ("--pack 2 --launcher env", "--pack", "without --launcher"),
    "option": ("--seed 1", "--seed", "--seeds"),
    "out": ("--out stub.py/x", "stub.py/x", "writ"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_starts_nothing(name: str, stub: list[str], tmp_path: Path, capfd: Any) -> None:
    typed, *words = BAD[name]
    assert swept(*shlex.split(typed)) == 2
    said, complained = capfd.readouterr()
    assert (said, complained.count("\n")) == ("", 1)
    for word in words:
        assert word in complained
    assert [path.name for path in tmp_path.iterdir()] == ["stub.py"]


def test_no_config_and_no_folder(capsys: Any) -> None:
    assert main(["sweep", "--out", "s"]) == 2
    assert main(["sweep", "fedavg-digits"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "CONFIG" in lines[0]
    assert "--out" in lines[1]


def test_another_configs_run_is_not_taken_for_this_one(stub: list[str], capsys: Any) -> None:
    from hpcfl.config import load

    config = load("fedavg-digits", ["seed=7", "algorithm.lr=0.5"])
    store.create(Path("s/fedavg-digits_seed=7"), {"config": config.text(), "data_dir": ""})
    assert swept("--seeds", "6-7") == 2
    assert capsys.readouterr().err == (
        "hpcfl: run 1 (fedavg-digits_seed=7): 's/fedavg-digits_seed=7' holds a run with algorithm.lr = 0.5, "
        "expected 0.1; choose another --out\n"
    )
    assert swept("--seeds", "7", "--set", "algorithm.lr=0.5", "--list") == 0


@pytest.mark.mpi
def test_under_a_launcher_nothing_is_swept(world: Any, shared_dir: Path, capsys: Any) -> None:
    if not launched():
        pytest.skip("needs a launcher")
    assert main(["sweep", "fedavg-digits", "--out", str(shared_dir / "s")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (world.rank == 0)
    assert world.rank or "--launcher 'mpirun -n 4'" in lines[0]
    world.meet()
    assert not (shared_dir / "s").exists()


def test_data_are_read_once_for_all_runs_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int | None]] = []
    check = Digits.check

    def counted(self: Digits, clients: int, data_dir: Path | None) -> Header:
        read.append((clients, self.train_samples))
        return check(self, clients, data_dir)

    monkeypatch.setattr(Digits, "check", counted)
    grid = ["algorithm.lr=0.1,0.2", "clients=5,6", "data.train_samples=100,200"]
    sweep.check(sweep.runs(["fedavg-digits"], Path("s"), [], grid, "1-3"), None)
    assert sorted(read) == [(5, 100), (5, 200), (6, 100), (6, 200)]
    # what is refused is so again
    with pytest.raises(UsageError, match=r"^run 1 \(.*data.train_samples: expected 0 … 1437, got 5000"):
        sweep.check(sweep.runs(["fedavg-digits"], Path("s"), [], ["data.train_samples=100,5000"]), None)


# ---- the list


def listed(capsys: Any, *more: str) -> list[list[str]]:
    capsys.readouterr()
    assert swept("--list", *more) == 0
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.launch
def test_what_is_listed_is_what_is_run(stub: list[str], tmp_path: Path, capsys: Any) -> None:
    args = ["--grid", "algorithm.lr=0.1,0.2", "--grid", "model.hidden=[8],[9,8]", "--data-dir", "d e"]
    lines = listed(capsys, *args)
    assert [path.name for path in tmp_path.iterdir()] == ["stub.py"]
    assert [(line[0], line[1]) for line in lines] == [(str(index), "new") for index in range(4)]
    assert swept(*args) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 runs: 4 done, 0 skipped, 0 failed"
    for _, _, folder, command in lines:
        begun = json.loads(Path(f"{folder}.begun").read_text())
        assert ["hpcfl", *begun["words"]] == shlex.split(command)
        assert begun["words"][begun["words"].index("--out") + 1] == folder
        assert begun["pid"] == begun["group"] != os.getpgid(0)


@pytest.mark.launch
def test_one_of_the_list(stub: list[str], capsys: Any) -> None:
    words = "--seeds", "4-9", "--only", "3", "--launcher", "env A=1", "--force", "--allow-mixed"
    assert swept(*words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1/1  done  fedavg-digits_seed=7",
        "1 run: 1 done, 0 skipped, 0 failed",
    ]
    (begun,) = facts("begun").values()
    ((index, _, folder, command),) = listed(capsys, *words)
    assert (index, folder) == ("3", "s/fedavg-digits_seed=7")
    assert shlex.split(command) == ["env", "A=1", "hpcfl", *begun["words"]]
    assert begun["words"][-3:] == ["--resume", "--force", "--allow-mixed"]


# ---- processes that stand for runs


@pytest.mark.launch
@pytest.mark.parametrize(("before", "threads"), [(None, "1"), ("3", "3")])
def test_one_thread_each_unless_said(
    stub: list[str], monkeypatch: pytest.MonkeyPatch, before: str | None, threads: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", before) if before else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert swept("--seeds", "1") == 0
    assert facts("begun")["1"]["threads"] == threads


@pytest.mark.launch
def test_a_failed_run_does_not_stop_the_others(stub: list[str], capfd: Any) -> None:
    Path("s/fedavg-digits_seed=5.log").mkdir(parents=True)
    Path("s/fedavg-digits_seed=3.log").write_text("an earlier start\n")
    assert swept("--seeds", "1-6", "--jobs", "2") == 1
    said, complained = capfd.readouterr()
    assert sorted(complained.splitlines()) == [
        "hpcfl: fedavg-digits_seed=2 failed: exit code 3: rounds: no luck",
        "hpcfl: fedavg-digits_seed=3 failed: signal KILL: nothing was said in s/fedavg-digits_seed=3.log",
        "hpcfl: fedavg-digits_seed=5 failed: cannot be started: [Errno 21] Is a directory: "
        "'s/fedavg-digits_seed=5.log'",
    ]
    words = [line.split() for line in said.splitlines()]
    assert [number for number, *_ in words[:-1]] == [f"{number}/6" for number in range(1, 7)]
    ended = {name[-1]: outcome for _, outcome, name in words[:-1]}
    assert ended == {"1": "done", "2": "failed", "3": "failed", "4": "done", "5": "failed", "6": "done"}
    assert said.splitlines()[-1] == "6 runs: 3 done, 0 skipped, 3 failed"
    assert Path("s/fedavg-digits_seed=2.log").read_text() == "first\nhpcfl: rounds: no luck\n-----\n\n"


@pytest.mark.launch
def test_a_run_that_ends_without_a_word_is_not_done(stub: list[str], capfd: Any) -> None:
    assert swept("--seeds", "8-9") == 1
    said, complained = capfd.readouterr()
    assert said.splitlines()[-1] == "2 runs: 1 done, 0 skipped, 1 failed"
    assert complained == (
        "hpcfl: fedavg-digits_seed=9 failed: exit code 0, but the run's state is new, expected done: nothing was said "
        "in s/fedavg-digits_seed=9.log\n"
    )


class Ended:
    """A process that is over."""

    def __init__(self, code: int) -> None:
        self.returncode = code


@pytest.mark.parametrize(
    ("code", "how"), [(3, "exit code 3"), (-9, "signal KILL"), (-35, "signal 35"), (-signal.SIGRTMIN, "signal RTMIN")]
)
def test_why_a_run_has_failed_is_told_without_its_log_too(code: int, how: str) -> None:
    process: Any = Ended(code)
    child = sweep.Child(sweep.runs(["a"], Path("s"))[0], process, 0)
    assert sweep.failure(child) == f"{how}: nothing was said in s/a.log"


def test_only_what_a_request_to_stop_brings_about_is_stopped() -> None:
    ends = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    for code in (85, *(-number for number in ends), *(128 + number for number in ends)):
        assert sweep.outcome(code, asked=True) == "stopped"
        assert sweep.outcome(code, asked=False) == ("stopped" if code == 85 else "failed")
    for code in (1, 2, 3, -9, -11, 137):
        assert {sweep.outcome(code, asked) for asked in (True, False)} == {"failed"}
    assert {sweep.outcome(0, asked, "done") for asked in (True, False)} == {"done"}
    assert {sweep.outcome(0, asked, "running") for asked in (True, False)} == {"failed"}
    assert [sweep.outcome(9, asked, "stopped") for asked in (True, False)] == ["stopped", "failed"]


@pytest.mark.launch
def test_so_many_at_a_time(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    running = Board.running
    monkeypatch.setattr(Board, "running", lambda self, names: [seen.append(len(names)), running(self, names)])
    assert swept("--grid", "seed=1,4,5,6,7", "--jobs", "3") == 0
    assert seen[0] == max(seen) == 3


def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of 4 tasks, with a stand-in for srun that notes its words and becomes what it is to start."""
    place = tmp_path / "bin" / "srun"
    place.parent.mkdir()
    place.write_text('#!/bin/sh\necho "$1 $2 $3 $4 $5" >>srun.said\nshift 5\nexec "$@"\n')
    place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place.parent}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "7", "NTASKS": "4", "CPUS_PER_TASK": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.launch
def test_runs_are_packed_into_an_allocation(
    stub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """As many at a time as have room; one that fails is told, the others go on, and are skipped the next time."""
    srun(tmp_path, monkeypatch)
    seen: list[int] = []
    running = Board.running
    monkeypatch.setattr(Board, "running", lambda self, names: [seen.append(len(names)), running(self, names)])
    assert swept("--grid", "seed=1,2,4,5,6,7", "--pack", "1") == 1
    assert seen[0] == max(seen) == 4
    said, complained = capfd.readouterr()
    assert said.splitlines()[-1] == "6 runs: 5 done, 0 skipped, 1 failed"
    assert complained == "hpcfl: fedavg-digits_seed=2 failed: exit code 3: rounds: no luck\n"
    assert Path("srun.said").read_text() == "--mpi=none --exact --cpus-per-task=2 -n 1\n" * 6
    seen.clear()
    assert swept("--grid", "seed=1,4,8,9", "--pack", "1", "--jobs", "1") == 1
    assert max(seen) == 1
    assert swept("--pack", "5") == 2
    assert "--pack: expected at most the 4 tasks of this allocation, got 5; did you mean 4?" in capfd.readouterr().err


@pytest.mark.launch
def test_a_script_packs_its_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun(tmp_path, monkeypatch)
    few = {"rounds": 1, "evaluate.every": 1}
    assert hpcfl.sweep("fedavg-digits", seeds=1, settings=few, launcher="slurm", out="s").missing == 0
    assert Path("srun.said").read_text() == "--mpi=none --exact --cpus-per-task=2 -n 1\n"
    with pytest.raises(hpcfl.RunError, match="at most the 4 tasks of this allocation, got 5"):
        hpcfl.sweep("fedavg-digits", settings=few, launcher="slurm -n 5", out="s")


def signalled(*steps: tuple[str, int]) -> threading.Thread:
    """Send this process signals, each when two stubs have left a file of a kind."""

    def act() -> None:
        for kind, number in steps:
            await_(lambda kind=kind: len(facts(kind)) == 2)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.launch
@pytest.mark.parametrize(
    ("launcher", "name", "told"),
    [("", "TERM", "SIGTERM"), ("", "INT", "SIGINT"), ("", "USR1", "SIGUSR1"), ("env", "TERM", "SIGUSR1")],
)
def test_a_signal_is_handed_on_and_all_leave(
    stub: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any, launcher: str, name: str, told: str
) -> None:
    """A launcher gets USR1, since some kill at once for anything else."""
    monkeypatch.setenv("STUB_SIGNALS", "1")
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    thread = signalled(("begun", signal.Signals[f"SIG{name}"]))
    assert swept("--seeds", "1-3", "--jobs", "2", "--launcher", launcher) == 85
    thread.join()
    assert {seed: found["signals"] for seed, found in facts("over").items()} == {"1": [told], "2": [told]}
    assert capfd.readouterr().out.splitlines()[-1] == "3 runs: 0 done, 0 skipped, 0 failed, 2 stopped, 1 not started"
    assert not any(alive(found["pid"]) for found in facts("over").values())
    assert [signal.getsignal(number) for number in numbers] == before
    assert not Path("s/fedavg-digits_seed=3.log").exists()


@pytest.mark.launch
def test_a_second_signal_is_handed_on_and_all_are_waited_for(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SIGNALS", "2")
    monkeypatch.setattr(sweep, "REPEAT_SECONDS", -1.0)
    thread = signalled(("begun", signal.SIGTERM), ("heard", signal.SIGINT))
    assert swept("--seeds", "1-2", "--jobs", "2") == 85
    thread.join()
    assert [found["signals"] for found in facts("over").values()] == [["SIGTERM", "SIGINT"]] * 2
    assert not any(alive(found["pid"]) for found in facts("over").values())


class Pretender:
    """A process that only notes what it is sent."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, number: int) -> None:
        self.got.append(number)


def test_a_signal_said_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    process: Any = Pretender()
    children = sweep.Children()
    children.running.append(sweep.Child(sweep.runs(["a"], Path("s"))[0], process, 0))
    children.pass_on([signal.SIGTERM, signal.SIGTERM, signal.SIGINT])
    assert process.got == [signal.SIGTERM]
    monkeypatch.setattr(sweep, "REPEAT_SECONDS", -1.0)
    children.pass_on([signal.SIGUSR1, signal.SIGINT])
    assert process.got == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.launch
def test_an_error_of_the_sweeps_own_leaves_nobody_behind(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def trouble(*_: Any) -> None:
        await_(lambda: len(facts("begun")) == 2)
        raise ArithmeticError("no luck")

    monkeypatch.setenv("STUB_SIGNALS", "1")
    monkeypatch.setattr(Board, "running", trouble)
    with pytest.raises(ArithmeticError):
        swept("--seeds", "1-3", "--jobs", "2")
    assert {seed: found["signals"] for seed, found in facts("over").items()} == {"1": ["SIGTERM"], "2": ["SIGTERM"]}
    assert not any(alive(found["pid"]) for found in facts("over").values())


@pytest.mark.launch
def test_a_killed_sweep_takes_its_runs_with_it(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "hpcfl", "sweep", "fedavg-digits", "--out", "s", "--seeds", "1-3", "--jobs", "2"]
    env = {**os.environ, "STUB_SIGNALS": "1"}
    process = subprocess.Popen([*command, "--launcher", shlex.join(stub)], env=env, start_new_session=True)
    try:
        await_(lambda: len(facts("begun")) == 2)
    finally:
        process.kill()
        process.wait()
    await_(lambda: len(facts("over")) == 2)
    assert {seed: found["signals"] for seed, found in facts("over").items()} == {"1": ["SIGUSR1"], "2": ["SIGUSR1"]}
    await_(lambda: not any(alive(found["pid"]) for found in facts("over").values()))


# ---- the terminal


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    threads = threading.active_count()
    board = Board(5, 1)
    board.running(["a_seed=1", "a_seed=2"])
    assert threading.active_count() == threads  # or it would not be safe to start processes
    board.over("a_seed=1", "done")
    board.running(["a_seed=3"])
    board.over("a_seed=2", "failed", "no luck")
    board.close()
    shown = capsys.readouterr()
    bare = re.sub(r"\x1b\[[0-9;]*m", "", shown.err)
    assert "1/5 a_seed=1, a_seed=2" in bare
    assert "2/5 a_seed=3" in bare
    assert bare.rpartition("runs ")[2].split()[1:] == ["3/5", "\x1b[?25h"]
    assert shown.out == ""
    board.total(2)
    shown = capsys.readouterr()
    assert shown.err == "hpcfl: a_seed=2 failed: no luck\n"
    assert shown.out == "5 runs: 1 done, 1 skipped, 1 failed, 2 not started\n"


# ---- runs


def runs_of(out: str, seed: int) -> Path:
    return Path(out) / f"fedavg-digits_seed={seed}"


@pytest.mark.launch
def test_finished_runs_are_skipped_and_others_end_as_if_nothing_had_happened(capfd: Any) -> None:
    """Of five runs one is done, one was stopped, one killed before a checkpoint, one is new, one runs elsewhere."""
    done, stopped, killed, new, elsewhere = range(1, 6)
    for seed in (done, stopped, killed, new):
        setting = f"seed={seed}"
        assert main(["run", "fedavg-digits", *FEW, "--set", setting, "--out", str(runs_of("whole", seed))]) == 0
    for seed in (done, stopped, killed, elsewhere):
        setting = f"seed={seed}"
        assert main(["run", "fedavg-digits", *FEW, "--set", setting, "--out", str(runs_of("s", seed))]) == 0
    cut_back(runs_of("s", stopped), 2)
    cut_back(runs_of("s", killed), 0)
    for seed, was, now in (
        (killed, f"pid: {os.getpid()}", "pid: 0"),
        (elsewhere, f"host: {os.uname().nodename}", "host: far"),
    ):
        store.write_status(runs_of("s", seed), "running")
        restated(runs_of("s", seed), was, now)
    states = {int(line[0]) + 1: line[1] for line in listed(capfd, *FEW, "--seeds", "1-5")}
    assert states == {done: "done", stopped: "stopped", killed: "killed", new: "new", elsewhere: "running"}
    before = (runs_of("s", done) / "run.h5").stat().st_mtime_ns
    assert swept(*FEW, "--seeds", "1-5", "--jobs", "2") == 1
    said, complained = capfd.readouterr()
    assert said.splitlines()[-1] == "5 runs: 3 done, 1 skipped, 1 failed"
    assert complained.startswith(
        "hpcfl: fedavg-digits_seed=5 failed: exit code 2: 's/fedavg-digits_seed=5' is running on far (pid "
    )
    assert (runs_of("s", done) / "run.h5").stat().st_mtime_ns == before
    for seed in (done, stopped, killed, new):
        found, whole = summary(runs_of("s", seed)), summary(runs_of("whole", seed))
        assert (found["status"], found["rounds"]) == ("done", 4)
        assert found["state_sha256"] == whole["state_sha256"]
        assert found["accuracy"] == whole["accuracy"]
    logs = {seed: [line.split()[1] for line in log(seed).splitlines()] for seed in (stopped, killed, new)}
    assert logs == {stopped: ["3/4", "4/4"], killed: ["1/4", "2/4", "3/4", "4/4"], new: ["1/4", "2/4", "3/4", "4/4"]}


@pytest.mark.launch
def test_a_diverged_run_is_finished_and_no_failure(stub: list[str], capfd: Any) -> None:
    """One had diverged before, one does so now, whatever code its process returns; both are told of."""
    from hpcfl.config import load

    for seed in (1, 2, 4):
        config = load("fedavg-digits", [f"seed={seed}"])
        store.create(runs_of("s", seed), {"config": config.text(), "data_dir": ""})
    for seed, state in ((1, "diverged"), (2, "stopped"), (4, "done")):
        store.write_status(runs_of("s", seed), state, "round 3: the loss is not finite")
    ends: Any = sweep.Children.ended

    def diverges(children: sweep.Children) -> list[sweep.Child]:
        over: list[sweep.Child] = ends(children)
        for child in over:
            if child.run.index == 1:
                assert child.process.returncode == 3
                store.write_status(child.run.folder, "diverged", "round 3: the loss is not finite")
        return over

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.Children, "ended", diverges)
        assert swept("--seeds", "1,2,4,5") == 0
    assert sorted(facts("begun")) == ["2", "5"]
    said, complained = capfd.readouterr()
    assert complained == ""
    assert said.splitlines() == [
        "3/4  diverged  fedavg-digits_seed=2",
        "4/4  done  fedavg-digits_seed=5",
        "4 runs: 1 done, 1 skipped, 0 failed, 2 diverged",
    ]


CHANGED = "its bytes are not those that were written"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no metrics": (lambda folder: shutil.rmtree(folder / "metrics"), "metrics/segment-000.h5", "it is missing"),
    "a bit": (lambda folder: flip(folder / "metrics/segment-000.h5"), "metrics/segment-000.h5", CHANGED),
    "a bit of the table": (lambda folder: flip(folder / "run.h5"), "run.h5", CHANGED),
    "no table": (lambda folder: (folder / "run.h5").unlink(), "run.h5", "it is missing"),
    "no table, no manifest": (
        lambda folder: [(folder / name).unlink() for name in ("run.h5", "manifest.json")],
        "run.h5",
        "it is missing",
    ),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.launch
@pytest.mark.parametrize("state", ["done", "diverged"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_finished_run_that_is_damaged_has_failed(name: str, state: str, stub: list[str], capfd: Any) -> None:
    from hpcfl.config import load

    for seed in (1, 4):
        write_run(runs_of("s", seed), load("fedavg-digits", [f"seed={seed}"]).text(), curve([0.5], [1]))
        store.seal(runs_of("s", seed))
    store.write_status(runs_of("s", 4), state)
    act, file, reason = DAMAGES[name]
    act(runs_of("s", 4))
    before = contents(runs_of("s", 4))
    assert swept("--seeds", "1,4,5") == 1
    said, complained = capfd.readouterr()
    damaged = f"fedavg-digits_seed=4 failed: s/fedavg-digits_seed=4/{file} is damaged: {reason}"
    assert complained == f"hpcfl: {damaged}\n"
    assert said.splitlines() == [
        "2/3  failed  fedavg-digits_seed=4",
        "3/3  done  fedavg-digits_seed=5",
        "3 runs: 1 done, 1 skipped, 1 failed",
    ]
    assert list(facts("begun")) == ["5"]
    assert contents(runs_of("s", 4)) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.launch
def test_a_sweep_that_is_told_to_end_while_it_looks_at_finished_runs(
    stub: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from hpcfl.config import load

    for seed in (1, 2):
        write_run(runs_of("s", seed), load("fedavg-digits", [f"seed={seed}"]).text(), [])
    monkeypatch.setattr(sweep, "damage", lambda run: os.kill(os.getpid(), signal.SIGTERM) or "")
    assert swept("--seeds", "1-2") == 85
    assert swept("--seeds", "1-4") == 85
    assert facts("begun") == {}
    assert capfd.readouterr().out.splitlines()[-1] == "4 runs: 0 done, 2 skipped, 0 failed, 2 not started"


def log(seed: int) -> str:
    path = Path(f"s/fedavg-digits_seed={seed}.log")
    return path.read_text() if path.exists() else ""


@pytest.mark.launch
def test_a_sweep_that_is_told_to_end_saves_its_runs() -> None:
    settings = ["--set", "rounds=100000", "--set", "checkpoint.every=100000", "--set", "evaluate.every=1"]
    command = [sys.executable, "-m", "hpcfl", "sweep", "fedavg-digits", "--out", "s", *settings, "--seeds", "1-3"]
    process = subprocess.Popen([*command, "--jobs", "2"], start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        await_(lambda: "round 3/" in log(1) and "round 3/" in log(2))
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 85
    assert said.splitlines()[-1] == "3 runs: 0 done, 0 skipped, 0 failed, 2 stopped, 1 not started"
    assert len(family) == 3
    assert not any(alive(pid) for pid in family)
    for seed in (1, 2):
        status = store.read_status(runs_of("s", seed))
        assert (status.state, status.reason) == ("stopped", "signal TERM")
        newest = store.latest(runs_of("s", seed))
        assert newest is not None
        assert store.load(newest).round >= 3
        assert log(seed).splitlines()[-1].startswith(f"stopped after round {store.load(newest).round} ")
