"""What is judged before round 0 costs hpcfl's own methods nothing and leaves no trace; what is told, and where."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.launcher import job, mpis
from helpers.warm import Warm
from hpcfl.algorithms import algorithms
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.config import Config, from_table
from hpcfl.engine import border, trial
from hpcfl.engine.job import Job
from hpcfl.launch.failure import ERROR_FILE
from hpcfl.sums.exact import PIECE
from hpcfl.testing.runs import cut_back, table, toml
from hpcfl.testing.test_algorithms import values
from strange import methods
from strange.test_users import FAULTY, TABLES
from strange.users import ended, line_of, written

SLOW = ("Endless", "EndlessItems")  # as many samples as are read of them take seconds
DRAWN = random.Random(5).sample([fault for fault in FAULTY if fault[1] not in SLOW], len(FAULTY) // 10)


def forbidden(*_: Any) -> None:
    raise AssertionError("nothing of the user's is to be tried")


def test_processes_of_a_drawn_tenth(tmp_path: Path) -> None:
    warm = Warm({"PYTHONWARNINGS": "ignore"})
    for number, (kind, name, words) in enumerate(DRAWN):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = ["run", str(written(kind, name, folder)), "--out", str(folder / "out")]
        ended = warm.start(command, tmp_path / f"{number}.said")
        assert ended.wait() in (1, 2), ended.err
        assert words in line_of(kind, name, ended.err)
    warm.end()


@pytest.mark.launch
@pytest.mark.parametrize("name", ["Forgotten", "RaisesLater"])
def test_one_rank_speaks_for_all(name: str, tmp_path: Path) -> None:
    if "openmpi" not in mpis():
        pytest.skip("openmpi is not installed")
    file = written("methods", name, tmp_path)
    over = job("openmpi", 3, ["-m", "hpcfl", "run", str(file), "--out", str(tmp_path / "out")])
    assert over.code != 0
    (said,) = over.said
    assert methods.FAULTY[name] in said
    assert "user_methods.py, line " in said
    assert "Traceback" not in over.err


@pytest.mark.parametrize("debug", [False, True])
def test_where_it_came_from_is_written_down(debug: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback begins in the user's file."""
    words = ["run", str(written("methods", "RaisesLater", tmp_path)), "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*["--debug"] * debug, *words]) == 1
    said, kept = capsys.readouterr().err, (tmp_path / "out" / ERROR_FILE).read_text()
    assert ("Traceback" in said) == debug
    for text in [kept, *[said] * debug]:
        first = text[text.index("Traceback") :].splitlines()[1]
        assert first.startswith(f'  File "{tmp_path}/user_methods.py", line ')
    assert kept.splitlines()[0] == said.splitlines()[-1].removeprefix("hpcfl: ")


def test_a_trial_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in what a run gives, nor in anybody's generators."""

    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    untouched = drawn()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert ended("methods", "Fair", tmp_path, "tried") == 0
    assert drawn() == untouched
    monkeypatch.setattr("hpcfl.launch.run.tried", lambda *_: None)
    assert ended("methods", "Fair", tmp_path, "untried") == 0
    assert len({summary(tmp_path / out)["state_sha256"] for out in ("tried", "untried")}) == 1


def test_what_is_ours_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_try_batch", forbidden)
    monkeypatch.setattr(trial, "_try_method", forbidden)
    monkeypatch.setattr(border.Border, "_judged", forbidden)
    file = toml(table("fedavg", "mlp", False, rounds=1, clients=4, participation={}), tmp_path / "ours.toml")
    assert main(["run", str(file), "--out", str(tmp_path / "out"), "--quiet"]) == 0


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_ours_would_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the user's methods that those of hpcfl do not keep."""
    monkeypatch.setattr(border.Border, "users", True)
    monkeypatch.setattr(Config, "named", [("algorithm.name", name), ("model.name", ""), ("task.loss", "")])
    job = Job.of(from_table(values(name)), None, 1)
    trial.tried(job, job.begin(0), None)


def test_a_run_that_goes_on_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended("methods", "Fair", tmp_path) == 0
    cut_back(tmp_path / "out", 0)
    monkeypatch.setattr("hpcfl.launch.run.tried", forbidden)
    assert main(["resume", str(tmp_path / "out"), "--rounds", "3", "--quiet"]) == 0


@pytest.mark.parametrize(("kind", "name"), [("methods", "Transposed"), ("models", "Counts"), ("losses", "detached")])
def test_check_tries_it_too(kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(written(kind, name, tmp_path))]) in (1, 2)
    said = [line for line in capsys.readouterr().err.splitlines() if "imports" not in line]
    assert TABLES[kind].FAULTY[name] in line_of(kind, name, "\n".join(said))


def test_a_method_that_is_right_is_let_pass_with_a_large_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside the shared state in one piece of memory may be written."""
    monkeypatch.chdir(tmp_path)
    Path("large.py").write_text("from hpcfl.algorithms.fedavg import FedAvg\n\n\nclass Large(FedAvg):\n    pass\n")
    given = {"model": {"name": "mlp", "hidden": [PIECE // 64 + 1]}, "rounds": 3, "participation": {}}
    given["algorithm"] = {"name": "large:Large", "epochs": 1, "batch": 500}
    toml({**table("fedavg", "mlp", True), **given}, Path("large.toml"))
    assert main(["run", "large.toml", "--quiet"]) == 0
