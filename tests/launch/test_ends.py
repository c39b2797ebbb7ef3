"""How a run ends: what its files say wherever the end is cut off."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

import hpcfl
from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.commands.cli import main
from hpcfl.engine import loop
from hpcfl.launch import run as launched
from hpcfl.store import atomic, status
from hpcfl.testing.runs import table

ROUNDS = 3


def play(folder: Path) -> None:
    hpcfl.run(table("fedavg", "mlp", False, rounds=ROUNDS), out=folder, quiet=True)


def rows(folder: Path) -> int:
    """Rounds that a program sees that knows nothing of hpcfl."""
    with h5py.File(folder / "run.h5", "r") as file:
        return len(file["round"])


class Killed(BaseException):
    """The process ends here."""


def test_a_run_that_says_done_has_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def write(folder: Path, state: str, *more: Any, **others: Any) -> None:
        if state == "done":
            seen.append(rows(folder))
            raise Killed
        store.write_status(folder, state, *more, **others)

    class Store:
        def __getattr__(self, name: str) -> Any:
            return write if name == "write_status" else getattr(store, name)

    monkeypatch.setattr(launched, "store", Store())
    with pytest.raises(BaseException):  # noqa: B017, PT011
        play(tmp_path / "run")
    assert seen == [ROUNDS]
    monkeypatch.undo()
    assert store.read_status(tmp_path / "run").state != "done"
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert store.read_status(tmp_path / "run").state == "done"
    assert rows(tmp_path / "run") == ROUNDS


def test_sealing_also_removes_what_a_kill_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(launched.store, "seal", lambda folder, force=False: None)
    play(folder)
    monkeypatch.undo()
    for place in (folder, folder / "metrics", folder / "checkpoints"):
        (place / ".tmp-1-left").write_text("half")
    assert (store.read_status(folder).state, rows(folder)) == ("done", 0)
    assert main(["seal", str(folder)]) == 0
    assert (store.read_status(folder).state, rows(folder)) == ("done", ROUNDS)
    assert not list(folder.rglob(".tmp-*"))
    assert not store.verify(folder).damaged


# ---- folders that go away


def deleted(folder: Path) -> None:
    while folder.exists():  # a thread that writes into it meanwhile makes shutil give up
        shutil.rmtree(folder, ignore_errors=True)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    moved(folder)
    folder.mkdir()


def without_rows(folder: Path) -> None:
    shutil.rmtree(folder / "metrics")


@pytest.mark.parametrize("vanish", [deleted, moved, replaced, without_rows])
@pytest.mark.parametrize("every", [1, None])
def test_a_folder_that_goes_away_ends_the_run(
    vanish: Callable[[Path], None], every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not made anew, and no round is called safe."""
    folder, step, done = tmp_path / "run", loop.step, list[int]()

    def stepped(job: Any, now: Any, *more: Any) -> None:
        step(job, now, *more)
        done.append(now.round)
        if now.round == 2:
            vanish(folder)

    monkeypatch.setattr(loop, "step", stepped)
    config = table("fedavg", "mlp", False, rounds=9) | ({"checkpoint": {"every": every}} if every else {})
    with pytest.raises(RunError, match=r"^'[^']*' is gone: it was deleted, moved or unmounted under the run") as caught:
        hpcfl.run(config, out=folder, quiet=True)
    assert "safe" not in str(caught.value)
    assert done[-1] <= 3
    assert "run.h5" not in {path.name for path in folder.glob("*")} or vanish is without_rows
    if vanish in (moved, replaced) and every:
        monkeypatch.undo()
        assert main(["resume", str(tmp_path / "elsewhere"), "--quiet"]) == 0
        assert rows(tmp_path / "elsewhere") == 9


# ---- what the system answers

ERRORS = (errno.EPERM, errno.EACCES, errno.EKEYEXPIRED, errno.ENOSPC, errno.ESTALE, errno.ENOTCONN)


def refusing(monkeypatch: pytest.MonkeyPatch, number: int) -> dict[str, Callable[[], None]]:
    """What lets the system refuse rows, their way to the disk, the status at the end, checkpoints."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    def end(folder: Path, state: str, *more: Any, **others: Any) -> None:
        if state != "running":
            monkeypatch.setattr(atomic.os, "fsync", refuse)
        status.write_status(folder, state, *more, **others)

    return {
        "rows": lambda: monkeypatch.setattr("hpcfl.store.growing_file.os.pwrite", refuse),
        "status": lambda: monkeypatch.setattr(launched.store, "write_status", end),
        "checkpoints": lambda: monkeypatch.setattr("hpcfl.engine.checkpointing.store.write_server", refuse),
    }


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("what", ["rows", "status", "checkpoints"])
def test_what_the_system_answers_is_told(
    what: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = tmp_path / "run"
    refusing(monkeypatch, number)[what]()
    config = table("fedavg", "mlp", False, rounds=3) | {"checkpoint": {"every": 1}}
    with pytest.raises(RunError) as caught:
        hpcfl.run(config, out=folder, quiet=True)
    part = {"rows": "metrics/segment-000.h5", "status": "status", "checkpoints": ""}[what]
    assert os.strerror(number) in str(caught.value)
    assert str(folder / part) in str(caught.value)
    monkeypatch.undo()
    assert store.read_status(folder).state == "failed"


def test_a_full_disk_takes_a_word_that_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_status(tmp_path, "running", ranks=["process 7 on host"])
    before = (tmp_path / "status").stat().st_size
    store.overwrite_status(tmp_path, "failed", "no room " * 99)
    assert (tmp_path / "status").stat().st_size == before
    found = store.read_status(tmp_path)
    assert (found.state, found.reason[:7]) == ("failed", "no room")


def test_nothing_follows_the_end_of_a_job() -> None:
    """MPICH's Abort comes back: what follows, as what writes down an error, may not run then."""
    text = """
from types import SimpleNamespace
from hpcfl.mpi import launcher
launcher.has_ulfm = lambda comm: False
try:
    launcher.end_job(SimpleNamespace(Abort=lambda code: None), 85)
finally:
    print("went on", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (85, ""), ended.stderr


@pytest.mark.parametrize("first", ["()", "[os.getpid()]"])
@pytest.mark.parametrize(("name", "code"), [("mpiexec", -signal.SIGTERM), ("another", 7)])
def test_a_launcher_that_stays_is_ended(name: str, code: int, first: str, tmp_path: Path) -> None:
    shell = shutil.copy(str(shutil.which("sh")), tmp_path / name)
    words = f"import os; it.LAUNCHER_SECONDS = 0.1; it.end_launcher({first})"
    waits = (
        f"{sys.executable} -c 'import hpcfl.mpi.launcher as it; {words}'; sleep {60 if code < 0 else 2}; exit {code}"
    )
    assert subprocess.run([shell, "-c", waits], check=False).returncode == code


def test_a_launcher_goes_on_while_the_rank_does(tmp_path: Path) -> None:
    shell = shutil.copy(str(shutil.which("sh")), tmp_path / "mpiexec")
    words = "import os, time; it.LAUNCHER_SECONDS = 0.1; it.end_launcher([os.getpid()]); time.sleep(1.0)"
    waits = f"{sys.executable} -c 'import hpcfl.mpi.launcher as it; {words}; print(1)'; exit 7"
    ended = subprocess.run([shell, "-c", waits], check=False, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (7, b"1\n")


def test_who_ends_the_launcher_is_none_of_the_ranks_that_are_ended(tmp_path: Path) -> None:
    """With ULFM a rank ends all others of its host, which it finds by their environment."""
    shell = shutil.copy(str(shutil.which("sh")), tmp_path / "mpiexec")
    job = "os.environ.update(PMIX_NAMESPACE=str(os.getpid()), PMIX_RANK=str(1))"
    words = f"import os; {job}; it.LAUNCHER_SECONDS = 0.1; it.end_launcher(); it.end_ranks()"
    waits = f"{sys.executable} -c 'import hpcfl.mpi.launcher as it; {words}'; sleep 60; exit 7"
    assert subprocess.run([shell, "-c", waits], check=False).returncode == -signal.SIGTERM
