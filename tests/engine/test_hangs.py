"""A run that does not move says where it stands: rank, client, and the line of the user's file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl import store
from hpcfl.commands.cli import main
from hpcfl.engine import hangs, simulated
from hpcfl.engine.hangs import Moves, watched
from hpcfl.testing.runs import play, table, toml

SLOW = '''"""A method whose client 3 takes its time in round 1."""
import time

from hpcfl.algorithms.fedavg import FedAvg


class Slow(FedAvg):
    def client(self, task, shared, personal, visits):
        if visits.round == 1 and 3 in visits.clients:
            time.sleep(1.5)  # here
        return (yield from super().client(task, shared, personal, visits))
'''


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hangs, "TIMES", 1)
    config = table("fedavg", "mlp", False, rounds=3)
    config["algorithm"] = {**config["algorithm"], "name": "slow:Slow"}
    return config | {"patience": 0.3}


def test_a_visit_that_hangs_is_told_of_by_client_and_line(slow: dict[str, Any], tmp_path: Path, capfd: Any) -> None:
    hpcfl.run(slow, out=tmp_path / "run", quiet=True)
    said = [line for line in capfd.readouterr().err.splitlines() if "slow.py" in line]
    line = SLOW.splitlines().index("            time.sleep(1.5)  # here") + 1
    assert len(said) == 1, said
    where = rf".*slow\.py, line {line}, in client"
    wanted = rf"hpcfl: nothing has moved for [\d.]+ s in round 1, clients? [\d, ]*3[\d, ]*.*: {where}"
    assert re.fullmatch(wanted, said[0]), said


def test_it_is_said_again(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "TIMES", 1)
    monkeypatch.setattr(hangs, "AGAIN_SECONDS", 0.1)
    with watched(Moves(4, np.array([7, 9])), 0.05):
        time.sleep(1.0)
    said = capfd.readouterr().err.splitlines()
    assert len(said) >= 2
    assert all(f"in round 4, clients 7, 9: {__file__}, line " in line for line in said)


def test_who_moves_says_nothing(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves()
    with watched(moves, 0.5):
        for number in range(8):
            moves.to(number)
            time.sleep(0.1)
    assert not capfd.readouterr().err


def test_a_round_is_long_only_beside_others(capfd: Any) -> None:
    """Ten median rounds may pass, whatever the patience; so many times the patience before the first has ended."""
    moves = Moves()
    for _ in range(2):
        moves.to(moves.round + 1)
        time.sleep(0.2)
    moves.to(2)
    with watched(moves, 0.01):
        time.sleep(0.5)
    assert not capfd.readouterr().err


@pytest.mark.mpi
def test_only_who_computes_and_rank_0_say_where_they_stand(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The last rank sleeps in the first visits of round 1, here."""
    drained, slow = simulated.drained, world.rank == world.size - 1

    def sleepy(*args: Any) -> Any:
        if slow and rounds[-1] == 1:
            time.sleep(1.5)
        return drained(*args)

    def moved(self: Moves, number: int, clients: Any = None) -> None:
        rounds.append(number)
        to(self, number, clients)

    rounds, to = list[int](), Moves.to
    monkeypatch.setattr(hangs, "TIMES", 1)
    monkeypatch.setattr(simulated, "drained", sleepy)
    monkeypatch.setattr(Moves, "to", moved)
    play(world, table("fedavg", "mlp", False, rounds=3, patience=0.3), shared_dir / "run", world.comm)
    said = [line for line in capfd.readouterr().err.splitlines() if "nothing has moved" in line and "round 1" in line]
    who = f"rank {world.rank} of {world.size}: " if world.size > 1 else ""
    if slow:
        assert any(line.startswith(f"hpcfl: {who}nothing") and f"{__file__}, line" in line for line in said), said
    elif world.rank == 0:
        assert any("it waits for other ranks; those that compute say where" in line for line in said), said
    else:
        assert not any("waits" in line for line in said)


DEAF = """
import hashlib, os, sys
from hpcfl.engine import stopping
stopping.REPEAT_SECONDS = stopping.REACT_SECONDS = 0.05
stopping.install()
print("deaf", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # does not come back to Python for many minutes
"""


def test_a_second_term_ends_a_process_that_does_not_come_back_to_python() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "deaf\n"
        for _ in range(2):
            child.terminate()
            time.sleep(0.3)
        assert child.wait(60) == 128 + signal.SIGTERM


def test_a_run_that_does_not_stop_is_given_up(tmp_path: Path, capfd: Any) -> None:
    hpcfl.run(table("fedavg", "mlp", False, rounds=1), out=tmp_path / "run", quiet=True)
    store.write_status(tmp_path / "run", "running")
    assert main(["stop", "--wait", "--patience", "0.5", str(tmp_path / "run")]) == 1
    first, last = capfd.readouterr().err.splitlines()
    assert "has written nothing for 0 s; it stops after the round that it is in" in first
    assert re.search(rf"did not stop: .* its process is {os.getpid()} on ", last)


def test_show_says_that_nothing_is_written_and_that_a_run_ended_without_a_word(tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "run"
    hpcfl.run(table("fedavg", "mlp", False, rounds=1), out=folder, quiet=True)
    store.write_status(folder, "running")
    assert main(["show", str(folder)]) == 0
    assert "nothing" not in capfd.readouterr().out
    for path in (
        folder / "checkpoints",
        *folder.glob("metrics/*"),
    ):  # the status is new: a server that lives touches it
        os.utime(path, (0, time.time() - 100))
    assert main(["show", str(folder)]) == 0
    assert re.search(r"run: running, but has written nothing for 1\d\d s", capfd.readouterr().out)
    code = f"from pathlib import Path; from hpcfl import store; store.write_status(Path({str(folder)!r}), 'running')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert main(["show", str(folder)]) == 0
    assert re.search(r"run: killed: process \d+ ended without a word", capfd.readouterr().out)


def test_a_crash_leaves_the_lines_of_python(tmp_path: Path) -> None:
    """A method that reads where nothing is."""
    (tmp_path / "crash.py").write_text(SLOW.replace("time.sleep(1.5)", "__import__('ctypes').string_at(0)"))
    config = table("fedavg", "mlp", False, rounds=3)
    config["algorithm"] = {**config["algorithm"], "name": "crash:Slow"}
    toml(config, tmp_path / "my.toml")
    command = [sys.executable, "-m", "hpcfl", "run", "my.toml", "--quiet"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert re.search(r'File ".*crash\.py", line 10 in client', ended.stderr)
