"""The commands as functions: the same results, without a line printed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl import store
from hpcfl.commands import functions
from hpcfl.commands.cli import main
from hpcfl.config import load
from hpcfl.testing.runs import same, table

VALUES = table("fedavg", "mlp", True)


def test_show_has_the_commands_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        hpcfl.run(VALUES, settings={"seed": seed}, out=tmp_path / "runs" / str(seed))
    frame = hpcfl.show(tmp_path / "runs")
    capsys.readouterr()
    assert main(["show", str(tmp_path / "runs"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert frame.index.tolist() == [row["run"] for row in rows]
    for name in ("status", "rounds", "accuracy", "state_sha256"):
        assert frame[name].tolist() == [row[name] for row in rows]
    assert hpcfl.show([tmp_path / "runs" / "2"]).index.tolist() == [rows[1]["run"]]
    with pytest.raises(hpcfl.UsageError, match="is no run folder"):
        hpcfl.show(tmp_path / "nowhere")


def test_check_says_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    facts = hpcfl.check("salf-digits", settings={"rounds": 7})
    capsys.readouterr()
    assert main(["check", "salf-digits", "--set", "rounds=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert facts == {line.split()[0]: line.partition(" ")[2].strip() for line in lines}
    assert facts["config"] == "valid: salf, 7 rounds, 8 clients"
    with pytest.raises(hpcfl.UsageError, match=r"^algorithm\.lr: "):
        hpcfl.check("salf-digits", settings={"algorithm.lr": -1.0})


def test_check_names_the_clients_that_are_always_late(tmp_path: Path) -> None:
    clients = {"north": 2.0, "c2": 3.5, "c10": 8.0, "south": 3.0}  # the deadline itself is in time
    speeds = tmp_path / "speeds.csv"
    names = hpcfl.save_data(tmp_path / "mine.h5", dict.fromkeys(clients, (np.eye(4), np.arange(4) % 2)))
    rows = [f"{place},{clients[name]}" for place, name in enumerate(names)]
    speeds.write_text("\n".join(["client,seconds", *rows]))
    table = {"name": "hdf5", "file": str(tmp_path / "mine.h5")}, {"model": "table", "file": str(speeds)}
    values = {**VALUES, "clients": 4, "participation": {}, "data": table[0], "speed": table[1]}
    late = {"participation": {"close": "deadline", "deadline": 3.0}}
    facts = hpcfl.check(values, overlays=late, settings={"rounds": 5})
    assert facts["never"] == "no visit of 2 clients counts in these rounds: c2, c10"
    assert "never" not in hpcfl.check(values, overlays=late, settings={"participation.deadline": 8.0})
    assert "never" not in hpcfl.check(values, overlays={"participation": {"close": "all"}})


def test_resume_goes_on(tmp_path: Path) -> None:
    whole = hpcfl.run(VALUES, settings={"rounds": 6}, out=tmp_path / "whole")
    hpcfl.run(VALUES, out=tmp_path / "run")
    run = hpcfl.resume(tmp_path / "run", rounds=6)
    np.testing.assert_array_equal(run.data["loss"].values, whole.data["loss"].values)
    hpcfl.run(VALUES, out=tmp_path / "half", on_round=lambda row: row["round"] == 1)
    same(hpcfl.resume(tmp_path / "half").folder, hpcfl.run(VALUES, out=tmp_path / "other").folder)
    with pytest.raises(hpcfl.UsageError, match="is no run folder"):
        hpcfl.resume(tmp_path / "nowhere")


@pytest.mark.launch
def test_a_sweep_runs_all_and_goes_on_where_it_was(tmp_path: Path) -> None:
    grid = {"algorithm.lr": [0.1, 0.2]}
    swept = hpcfl.sweep(VALUES, grid, seeds=2, out=tmp_path / "s", jobs=2)
    assert [run.name for run in swept.planned] == [
        f"config_algorithm.lr={rate}_seed={seed}" for rate in (0.1, 0.2) for seed in (1, 2)
    ]
    assert swept.missing == 0
    assert dict(swept.data.sizes).items() >= {"seed": 2, "algorithm.lr": 2}.items()
    alone = hpcfl.run(VALUES, settings={"algorithm.lr": 0.2, "seed": 2}, out=tmp_path / "alone")
    same(swept.planned[3].folder, alone.folder)
    assert swept.table["status"].tolist() == ["done"] * 4
    assert "<p>4 runs, 0 of them not finished</p><table" in swept._repr_html_()
    assert swept._repr_html_().count("<svg") == 1
    when = swept.time_to(accuracy=0.01)
    assert list(when.columns) == ["runs", "reached", "rounds_to", "seconds_to", "seconds_low", "seconds_high"]
    assert set(when["reached"]) == {2}
    with pytest.raises(hpcfl.UsageError, match="expected one metric, as in time_to"):
        swept.time_to()
    more = hpcfl.sweep(VALUES, grid, seeds=[1, 2, 5], out=tmp_path / "s")
    assert (len(more.planned), more.missing) == (6, 0)


def test_tables_of_a_sweep_are_numbered_and_a_list_of_overlays_is_an_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = list[str]()
    monkeypatch.setattr(functions.subprocess, "Popen", lambda line, **_: words.extend(line))
    few, long = {"rounds": 2}, {"algorithm": {"lr": 0.2}, "rounds": 3}
    swept = hpcfl.sweep([VALUES, VALUES], overlays=["wait", [few, long]], out=tmp_path / "s", wait=False)
    assert [run.name for run in swept.planned] == [
        f"config-{config}_wait_overlay-{overlay}" for config in (1, 2) for overlay in (2, 3)
    ]
    loaded = [load(run.config, run.settings, run.overlays) for run in swept.planned]
    assert [config.rounds for config in loaded] == [2, 3, 2, 3]
    assert [config.algorithm.lr for config in loaded] == [loaded[0].algorithm.lr, 0.2] * 2
    assert repr(swept) == f"4 runs: 4 new, in {tmp_path / 's'}"
    several = [words[place + 1] for place, word in enumerate(words) if word == "--with"]
    assert several == ["wait", f"{tmp_path}/s/overlay-2.toml,{tmp_path}/s/overlay-3.toml"]
    assert words[4:6] == [f"{tmp_path}/s/config-{number}.toml" for number in (1, 2)]
    (one,) = hpcfl.sweep(VALUES, overlays=few, out=tmp_path / "t", wait=False).planned
    assert one.name == "config_overlay-1"
    with pytest.raises(hpcfl.UsageError, match=r"run 0 .*algorithm\.lr"):
        hpcfl.sweep(VALUES, overlays={"algorithm": {"lr": -1.0}}, out=tmp_path / "u")
    assert not (tmp_path / "u").exists()


@pytest.mark.launch
def test_a_sweep_that_is_not_waited_for_can_be_asked_and_stopped(tmp_path: Path) -> None:
    long = {**VALUES, "rounds": 100000, "evaluate": {"every": 1000, "last": 1}}
    swept = hpcfl.sweep(long, seeds=2, out=tmp_path / "s", wait=False)
    assert swept.missing == 2
    assert swept._repr_html_().startswith("<p>2 runs, 2 of them not finished</p>")
    first: Any = swept.planned[0].folder
    until = time.monotonic() + 300
    while store.read_status(first).state != "running":
        assert time.monotonic() < until
        time.sleep(0.05)
    with pytest.raises(hpcfl.UsageError, match=r"is still running|is running on"):
        hpcfl.resume(first)
    swept.stop()
    assert [run.state for run in swept.planned] == ["stopped", "new"]
    hpcfl.stop(first, wait=True)
    assert (first / "stop").exists()  # for a batch job that may start it again


@pytest.mark.launch
def test_stop_waits_for_a_run(tmp_path: Path) -> None:
    long = {**VALUES, "rounds": 100000, "evaluate": {"every": 1000, "last": 1}}
    swept = hpcfl.sweep(long, out=tmp_path / "s", wait=False)
    folder = swept.planned[0].folder
    until = time.monotonic() + 300
    while store.read_status(folder).state != "running":
        assert time.monotonic() < until
        time.sleep(0.05)
    hpcfl.stop(folder, wait=True)
    assert store.read_status(folder).state == "stopped"
    with pytest.raises(hpcfl.RunError, match="stopped"):
        swept.wait()


def test_a_sweep_with_a_wrong_value_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(hpcfl.UsageError, match=r"run 1 .*algorithm\.lr"):
        hpcfl.sweep("fedavg-digits", {"algorithm.lr": [0.1, -1.0]}, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.launch
def test_a_sweep_with_a_failure_says_which(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "fedavg-digits_seed=1").write_text("no folder")
    with pytest.raises(hpcfl.RunError, match=r"1 failed|fedavg-digits_seed=1"):
        hpcfl.sweep("fedavg-digits", seeds=2, settings={"rounds": 1}, out=tmp_path / "s")
