"""One folder has one owner, for as long as its process lives and no longer."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import faults
from helpers.launcher import LIMIT
from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.store import owner
from hpcfl.store.status import _checked, parsed, signed
from hpcfl.testing.runs import cut_back, play, table, toml

HOST = os.uname().nodename
ROUNDS = 6
OWN = rf"'.*' is running on {HOST} \(pid {os.getpid()}\); hpcfl stop .* ends it$"


def lock(folder: Path) -> Path:
    return folder / owner.FILE


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    """Leave no folder owned, whatever has failed."""
    yield
    for folder in list(owner._held):
        store.release(Path(folder))


class Other:
    """An owner as another process would be: the operating system tells open files apart, not processes."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file = lock(folder).open("w+")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.sign(text)

    def sign(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


def far() -> str:
    return signed("running", "").replace(f"host: {HOST}", "host: far")


def test_the_second_is_refused_by_name_until_the_first_lets_go(tmp_path: Path) -> None:
    store.take(tmp_path)
    found = parsed(lock(tmp_path).read_text())
    assert (found.host, found.pid) == (HOST, os.getpid())
    for force in (False, True):
        with pytest.raises(UsageError, match=OWN):
            store.take(tmp_path, force)
    store.release(tmp_path)
    assert not list(tmp_path.iterdir())
    store.take(tmp_path)
    store.release(tmp_path)
    store.release(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_owner_on_another_host_is_passed_over_by_force_alone(tmp_path: Path) -> None:
    other = Other(tmp_path, far())
    with pytest.raises(UsageError, match=r"on far \(pid .*; if no process holds it any more, repeat with --force$"):
        store.take(tmp_path)
    store.take(tmp_path, force=True)
    with pytest.raises(UsageError, match=OWN):
        store.take(tmp_path)
    other.file.close()
    with pytest.raises(UsageError, match=OWN):
        store.take(tmp_path)


def test_what_another_has_taken_by_force_is_not_removed(tmp_path: Path) -> None:
    store.take(tmp_path)
    lock(tmp_path).unlink()
    text = far()
    other = Other(tmp_path, text)
    store.release(tmp_path)
    assert lock(tmp_path).read_text() == text
    other.file.close()


def test_an_owner_that_has_not_signed_yet_is_waited_for(tmp_path: Path) -> None:
    gone = signed("running", "").replace(f"pid: {os.getpid()}", "pid: 0")  # left by one that was killed
    other = Other(tmp_path, gone)
    timer = threading.Timer(0.2, lambda: (other.file.seek(0), other.sign(signed("running", ""))))
    timer.start()
    with pytest.raises(UsageError, match=OWN):
        store.take(tmp_path)
    timer.join()


def test_an_owner_without_a_name_is_one_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_NAMED_SECONDS", 0.05)
    other = Other(tmp_path, "")
    with pytest.raises(UsageError, match="is running in a process that has not given its name"):
        store.take(tmp_path)
    other.file.close()


def running(folder: Path, **changes: Any) -> None:
    """Let the status say that a run is running: this process's, but for the changes."""
    text = signed("running", "")
    for key, value in changes.items():
        line = next(line for line in text.splitlines() if line.startswith(f"{key}: "))
        text = text.replace(line, f"{key}: {value}")
    (folder / "status").write_text(_checked(text))


@pytest.fixture
def sleeper() -> Iterator[dict[str, Any]]:
    """Process id and start of another process that lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        yield {"pid": process.pid, "started": fields[19]}
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("locks", [True, False])
def test_the_status_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: dict[str, Any], locks: bool
) -> None:
    """A run of another host, where locks may not reach, or any run on a file system that knows no locks."""

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", fails)
    running(tmp_path, host="far")
    with pytest.raises(UsageError, match=r"is running on far \(pid .*--force$"):
        store.take(tmp_path)
    store.take(tmp_path, force=True)
    store.release(tmp_path)
    running(tmp_path, **sleeper)
    for force in (False, True):
        with pytest.raises(UsageError, match=rf"is running on {HOST} \(pid {sleeper['pid']}\); hpcfl stop"):
            store.take(tmp_path, force)
    running(tmp_path, pid=0)
    store.take(tmp_path)
    store.release(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["status"]


def test_who_is_refused_leaves_the_name_of_another(tmp_path: Path) -> None:
    text = far()
    lock(tmp_path).write_text(text)  # locks do not reach that far
    running(tmp_path, host="far")
    with pytest.raises(UsageError, match="far"):
        store.take(tmp_path)
    assert lock(tmp_path).read_text() == text


def test_where_nothing_can_be_written_there_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(owner, "FileIO", fails)
    store.take(tmp_path)
    running(tmp_path, host="far")
    with pytest.raises(UsageError, match="far"):
        store.take(tmp_path)


def test_a_lock_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    lock(tmp_path).mkdir()
    with pytest.raises(UsageError, match="lock' cannot be written: Is a directory"):
        store.take(tmp_path)


# ---- processes


def python(code: str, *args: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


HOLD = "import sys, pathlib; from hpcfl import store; store.take(pathlib.Path(sys.argv[1])); print(flush=True); input()"
CONTEND = """
import os, pathlib, sys, time
from hpcfl import store
from hpcfl.base.errors import UsageError
folder, inside = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1] + ".inside")
won, end = 0, time.monotonic() + 500
while won < 200 and time.monotonic() < end:
    try:
        store.take(folder)
    except UsageError as error:
        assert "(pid " in str(error), error
        continue
    inside.touch(exist_ok=False)
    won += 1
    inside.unlink()
    store.release(folder)
print(won)
"""


@pytest.mark.launch
def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    process = python(HOLD, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(UsageError, match=rf"\(pid {process.pid}\)"):
        store.take(tmp_path)
    process.kill()
    process.communicate()
    assert f"pid: {process.pid}\n" in lock(tmp_path).read_text()
    store.take(tmp_path)
    assert f"pid: {os.getpid()}\n" in lock(tmp_path).read_text()


@pytest.mark.launch
def test_of_many_at_once_one_owns_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock(tmp_path / "run").write_text(signed("running", "").replace(f"pid: {os.getpid()}", "pid: 0"))
    processes = [python(CONTEND, tmp_path / "run") for _ in range(3)]
    ends = [process.communicate(timeout=LIMIT) for process in processes]
    assert [(process.returncode, said) for process, said in zip(processes, ends)] == [(0, ("200\n", ""))] * 3
    assert not list((tmp_path / "run").iterdir())


@pytest.fixture(scope="module")
def undisturbed(solo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after every round."""
    return play(solo, values(), tmp_path_factory.mktemp("owner") / "whole", None)


def values() -> dict[str, Any]:
    return table("salf", "mlp", batched=True, rounds=ROUNDS, checkpoint={"every": 1, "keep": 9})


def hpcfl(*words: Any, fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*faults.COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, faults.VARIABLE: fault},
    )


def await_(path: Path) -> None:
    end = time.monotonic() + LIMIT
    while not path.exists() or not path.read_bytes():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, complained = process.communicate(timeout=LIMIT)
    return process.returncode, complained


def same_end(folder: Path, undisturbed: Path) -> None:
    found, whole = summary(folder), summary(undisturbed)
    assert (found["status"], found["rounds"]) == ("done", ROUNDS)
    assert found["state_sha256"] == whole["state_sha256"]
    assert {path.name for path in folder.iterdir()} == {"run.h5", "manifest.json", "metrics", "checkpoints", "status"}


@pytest.mark.launch
def test_of_two_that_resume_one_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    cut_back(folder, 1)
    first = hpcfl("resume", folder)
    await_(lock(folder))  # it loads what it needs, and has not said yet that it is running
    first.send_signal(signal.SIGSTOP)
    config = toml(values(), tmp_path / "run.toml")
    others = [("resume", folder), ("resume", folder, "--force"), ("run", config, "--out", folder, "--resume")]
    line = f"hpcfl: '{folder}' is running on {HOST} (pid {first.pid}); hpcfl stop {folder} ends it\n"
    for process in [hpcfl(*words) for words in (*others, ("seal", folder))]:
        code, said = ended(process)
        assert code == 2
        assert said == line
    assert main(["show", str(folder)]) == 0
    first.send_signal(signal.SIGCONT)
    assert ended(first) == (0, "")
    same_end(folder, undisturbed)


@pytest.mark.launch
def test_of_two_that_begin_one_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    folder, config = tmp_path / "run", toml(values(), tmp_path / "run.toml")
    pair = [hpcfl("run", config, "--out", folder) for _ in range(2)]
    ends = sorted(ended(process) for process in pair)
    assert [code for code, _ in ends] == [0, 2]
    assert f"'{folder}' is running on {HOST} (pid " in ends[1][1] or "already holds a run" in ends[1][1]
    same_end(folder, undisturbed)


@pytest.mark.launch
def test_a_killed_run_is_gone_on_with(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = hpcfl("run", toml(values(), tmp_path / "run.toml"), "--out", folder, fault="checkpoint:2")
    assert ended(first)[0] == -signal.SIGKILL
    assert lock(folder).exists()
    assert main(["resume", str(folder), "--quiet"]) == 0
    same_end(folder, undisturbed)


@pytest.mark.launch
def test_whose_folder_is_taken_over_from_another_host_ends_without_writing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = hpcfl("run", toml(values() | {"rounds": 5000}, tmp_path / "run.toml"), "--out", folder)
    await_(folder / "checkpoints" / "round-000002" / "manifest.json")
    first.send_signal(signal.SIGSTOP)
    lock(folder).unlink()
    other = Other(folder, far())
    running(folder, host="far")
    kept = [folder / "status", lock(folder)]
    before = [path.read_text() for path in kept], store.saved(folder)
    first.send_signal(signal.SIGCONT)
    code, said = ended(first)
    told = f"hpcfl: '{folder}' was taken over by process {os.getpid()} on far: this run writes no more\n"
    assert (code, said) == (1, told)
    assert [path.read_text() for path in kept] == before[0]
    assert len(store.saved(folder)) <= len(before[1]) + 1  # one that was written when it was stopped
    assert not (folder / "error.txt").exists()
    other.file.close()


def test_a_lock_that_was_removed_ends_no_run(tmp_path: Path) -> None:
    store.take(tmp_path)
    lock(tmp_path).unlink()
    store.check_owner(tmp_path)


# ---- who owns while a run runs


def failing(*_: Any) -> None:
    raise RunError("no more of this")


def test_a_run_owns_its_folder_and_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = tmp_path / "run", toml(values(), tmp_path / "run.toml")
    seen = []

    def looked(*given: Any) -> None:
        seen.append(parsed(lock(folder).read_text()).pid)
        failing()

    monkeypatch.setattr("hpcfl.engine.loop.evaluate", looked)
    for words in (["run", str(config), "--out", str(folder)], ["resume", str(folder)]):
        assert main(words) == 1
        assert not lock(folder).exists()
    assert seen == [os.getpid()] * 2
    monkeypatch.setattr("hpcfl.launch.request.store.latest", failing)
    assert main(["resume", str(folder)]) == 1  # refused by rank 0 before anything starts
    assert not lock(folder).exists()


@pytest.mark.mpi
@pytest.mark.parametrize("clock", ["simulated", "wall"])
def test_only_rank_0_owns(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, clock: str) -> None:
    if clock == "wall" and world.size == 1:
        pytest.skip("needs a server and a client")
    more = {"clock": "wall", "batch_clients": False, "speed": {"model": "none"}, "participation": {"close": "all"}}
    table_ = values() | (more if clock == "wall" else {})
    folder, taken = shared_dir / "run", []
    locked = owner._locked
    monkeypatch.setattr(owner, "_locked", lambda *given: [taken.append(1), locked(*given)][1])
    if world.rank:
        monkeypatch.setattr(owner, "_remove", failing)
    play(world, table_, folder, world.comm)
    assert len(taken) == (world.rank == 0)
    assert not owner._held
    assert not lock(folder).exists()
    assert store.read_status(folder).state == "done"
