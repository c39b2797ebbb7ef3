"""Runs that end before their last round: by a target, without progress, or because a script says so."""

from __future__ import annotations

import json
import shutil
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from helpers.launcher import job
from hpcfl import store
from hpcfl.commands.cli import main
from hpcfl.engine.ending import Ending, score
from hpcfl.schedule.cadence import Target
from hpcfl.testing.runs import play, recorded, same, table

VALUES = table("fedavg", "mlp", True, rounds=12, evaluate={"every": 2, "last": 1})


def test_patience_counts_tests_that_are_no_better() -> None:
    ending = Ending(Target(patience=2), None)
    told = [ending.after({"accuracy": value} if value else {}) for value in (0.5, 0.4, None, 0.6, 0.6, None, 0.3)]
    assert [bool(each) for each in told] == [False] * 6 + [True]
    assert told[-1] == "no test was better than 0.6000 for stop.patience = 2"
    again = Ending(Target(patience=2), None, [0.5, 0.4, nan, 0.6, 0.6])
    assert again.after({"accuracy": 0.3}) == told[-1]


def test_what_a_test_is_judged_by() -> None:
    assert score({"accuracy": 0.5, "mean_client_accuracy": 0.9, "test_loss": 3.0}) == 0.5
    assert score({"accuracy": nan, "mean_client_accuracy": 0.9}) == 0.9
    assert score({"test_loss": 3.0, "mean_client_test_loss": 1.0}) == -3.0
    assert np.isnan(score({"loss": 1.0}))


def test_a_run_ends_at_its_target_and_is_done(tmp_path: Path, solo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    whole = play(solo, VALUES, tmp_path / "whole", None)
    tests = hpcfl.open_run(whole)["accuracy"].dropna("round")
    target = float(tests[2]) - 1e-6
    first = int(tests["round"][int(np.argmax(tests.values >= target))])
    folder = play(solo, {**VALUES, "stop": {"accuracy": target}}, tmp_path / "run", None)
    data = hpcfl.open_run(folder)
    assert (data.attrs["status"], data.sizes["round"]) == ("ended", first + 1)
    assert data.attrs["reason"].endswith(f"has reached stop.accuracy = {target:g}")
    for name, values in recorded(folder).items():
        if name != "fate":
            each = recorded(whole)[name]
            np.testing.assert_array_equal(values, each[: first + 1] if len(each) == VALUES["rounds"] else each)
    assert store.verify(folder).damaged == {}
    assert not main(["verify", str(folder)])
    capsys.readouterr()
    assert not main(["resume", str(folder)])
    assert "is done already: accuracy " in capsys.readouterr().out
    assert not main(["show", str(folder)])
    assert "run: ended: accuracy " in capsys.readouterr().out


def test_a_resumed_run_ends_where_one_that_was_left_alone_does(tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 40, "stop": {"patience": 2}, "algorithm": {**VALUES["algorithm"], "lr": 1e-9}}
    whole = hpcfl.run(values, out=tmp_path / "whole")
    assert whole.data.attrs["status"] == "ended"
    assert whole.data.sizes["round"] == 6  # tests after rounds 2, 4 and 6 give the same
    hpcfl.run(values, out=tmp_path / "run", on_round=lambda row: row["round"] == 2)
    again = hpcfl.run(values, out=tmp_path / "run", resume=True)
    same(whole.folder, again.folder)


def test_tests_that_are_done_again_count_once(tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 40, "stop": {"patience": 4}, "algorithm": {**VALUES["algorithm"], "lr": 1e-9}}
    whole = hpcfl.run({**values, "checkpoint": {"every": 2, "keep": 9}}, out=tmp_path / "whole")
    assert whole.data.sizes["round"] == 10
    run = hpcfl.run(
        {**values, "checkpoint": {"every": 2, "keep": 9}}, out=tmp_path / "run", on_round=lambda row: row["round"] == 7
    )
    assert run.data.sizes["round"] == 8
    for number in (4, 6, 8):  # a kill has left rows of rounds after the newest checkpoint that is whole
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"round-{number:06d}")
    same(whole.folder, hpcfl.resume(tmp_path / "run").folder)


def test_a_script_hears_of_each_round_and_may_stop_the_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []

    def told(row: Any) -> bool:
        rows.append(dict(row))
        return bool(row["round"] == 5)

    run = hpcfl.run(VALUES, out=tmp_path / "run", on_round=told)
    assert (run.data.attrs["status"], run.data.attrs["reason"]) == ("stopped", "on_round")
    assert [row["round"] for row in rows] == list(range(6))
    for name in ("loss", "sim_seconds", "accuracy", "mean_client_accuracy"):
        wanted = run.data[name].values if name in run.data else [nan] * 6
        np.testing.assert_array_equal([row.get(name, nan) for row in rows], wanted, err_msg=name)
    np.testing.assert_array_equal([row["arrived"] for row in rows], run.data["arrived"].sum("client").values)
    whole = hpcfl.run(VALUES, out=tmp_path / "whole")
    same(whole.folder, hpcfl.run(VALUES, out=tmp_path / "run", resume=True).folder)


def test_what_a_script_raises_is_raised(tmp_path: Path) -> None:
    def told(row: Any) -> None:
        raise LookupError("no tracker")

    with pytest.raises(LookupError, match="no tracker"):
        hpcfl.run(VALUES, out=tmp_path / "run", on_round=told)
    assert store.read_status(tmp_path / "run").state == "failed"


@pytest.mark.launch
@pytest.mark.parametrize("clock", ["simulated", "wall"])
def test_all_ranks_return(clock: str, tmp_path: Path) -> None:
    values = {**VALUES, "clock": clock, "speed": {"model": "none"}, "participation": {}}
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, hpcfl\n"
        "values, out = json.loads(sys.argv[1]), sys.argv[2]\n"
        'run = hpcfl.run(values, out=out, on_round=lambda row: row["round"] == 2, quiet=True)\n'
        'assert run.data.attrs["status"] == "stopped"\n'
        'run = hpcfl.run({**values, "stop": {"accuracy": 0.01}}, out=out + "2", quiet=True)\n'
        'assert run.data.attrs["status"] == "ended"\n'
    )
    ended = job("openmpi", 3, ["-m", "mpi4py", str(script), json.dumps(values), str(tmp_path / "run")])
    assert ended.code == 0, ended.err
    assert [hpcfl.open_run(tmp_path / name).sizes["round"] for name in ("run", "run2")] == [3, 2]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"stop.accuracy": 1.5}, "stop.accuracy: expected less than or equal to 1, got 1.5; did you mean 1.0?"),
        ({"stop.patience": 0}, "stop.patience: expected greater than or equal to 1, got 0; did you mean 1?"),
        (
            {"stop.accuracy": 0.5, "task.metrics": []},
            "stop.accuracy = 0.5: no test of this task gives an accuracy; did you mean stop.patience?",
        ),
    ],
)
def test_bad_input(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(hpcfl.UsageError) as raised:
        hpcfl.run("fedavg-digits", settings=keys, out=tmp_path / "run")
    assert said in str(raised.value)
