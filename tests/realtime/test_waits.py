"""Waits of the server: it says for whom, goes on when somebody is back, and leaves when it is told to."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from helpers.launcher import ROOT, mpis
from helpers.live import Live, live
from hpcfl import store
from hpcfl.engine import stopping
from hpcfl.testing.runs import table, toml

pytestmark = pytest.mark.launch

CONFIG = table(
    "fedavg",
    "mlp",
    False,
    rounds=100000,
    clients=2,
    clock="wall",
    threads=1,
    patience=0.5,
    evaluate={"every": 1},  # a line for every round
    checkpoint={"every": 100000},
    algorithm={"name": "fedavg", "momentum": 0.5, "persist_optimizer": True},
    participation={"close": "deadline", "deadline": 0.2},
    speed={"model": "none"},
)
WORDS = r"^\W?hpcfl: still waiting \([\d.]+ s\) for (1 free client for round \d+|scores): ranks 1, 2 with clients 0, 1$"


def told(job: Live) -> int:
    return sum(line.startswith("round ") for line in job.out.splitlines())


@pytest.mark.parametrize("mpi", mpis())
def test_who_is_suspended_is_named_and_a_wish_to_stop_is_heard(mpi: str, tmp_path: Path) -> None:
    """All clients are suspended, then one wakes, then all are again: the run says so, goes on, and stops."""
    file, folder = toml(CONFIG, tmp_path / "run.toml"), tmp_path / "run"
    command = [
        str(ROOT / "tests" / "helpers" / "hasty.py"),
        "LEAVE_SECONDS=1.0",
        "--",
        "run",
        str(file),
        "--out",
        str(folder),
    ]
    with live(mpi, 3, command, tmp_path) as job:
        job.until(lambda: told(job) > 2)
        pids = [
            int(number) for number in re.findall(r"^rank [12]: process (\d+)", (folder / "status").read_text(), re.M)
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job.until(lambda: re.search(WORDS, job.err, re.M))
        before = told(job)
        os.kill(pids[0], signal.SIGCONT)
        job.until(lambda: told(job) > before + 2)
        os.kill(pids[0], signal.SIGSTOP)  # in its sleep or in a visit: the round closes without it
        stopping.request(folder)
        assert job.wait() == 85, job.err
    assert store.read_status(folder).state == "stopped"
    newest = store.latest(folder)
    assert newest is not None
    saved = store.load(newest)
    assert saved.round == store.open_run(folder).sizes["round"] > before
    assert 1 in saved.stale  # client 1 was suspended all the time
