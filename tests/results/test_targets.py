"""Runs side by side: when they reached a target, and what they cost, from tables that are known to the last digit."""

from __future__ import annotations

import csv
import io
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.recorded import config, curve, restated, write_run
from hpcfl import compare
from hpcfl.commands.cli import main
from hpcfl.results.targets import interval_of_median, worded, written

FEDAVG = {"name": "fedavg", "lr": 0.1, "batch": 8}
SLOW = [1.0, 1.0, 1.0, 4.0]  # seconds of the visits of four clients


def a_run(folder: Path, accuracy: list[float], seconds: list[float], **more: Any) -> Path:
    rows = [{**row, "message_bytes": 1000 * (number + 1)} for number, row in enumerate(curve(accuracy, seconds))]
    rows[-1] |= {"client_accuracy": [0.9, 0.8, 0.7, 0.2], "visit_seconds": SLOW, "wall_seconds": 9.0}
    return write_run(folder, config(**more), rows, hosts='["h1", "h1", "h2"]')


def three(folder: Path) -> list[Path]:
    """Two runs of one config, of which one reaches .5 and one does not, and one of another that does."""
    return [
        a_run(folder / "a", [0.1, 0.5, 0.4], [1.0, 2.0, 3.0]),
        a_run(folder / "b", [0.1, 0.2, 0.3], [2.0, 4.0, 6.0], seed=2),
        a_run(folder / "c", [0.6, 0.6, 0.8], [5.0, 10.0, 15.0], algorithm=FEDAVG),
    ]


def test_what_is_compared_is_what_was_recorded(tmp_path: Path) -> None:
    table = compare(three(tmp_path), 0.5)
    salf, fedavg = table.loc["SALF"], table.loc["FedAvg"]
    assert (salf["runs"], salf["reached"], salf["rounds_to"], salf["seconds_to"]) == (2, 1, np.inf, np.inf)
    assert (salf["seconds_low"], salf["seconds_high"]) == (2.0, np.inf)
    assert (fedavg["runs"], fedavg["reached"], fedavg["rounds_to"], fedavg["seconds_to"]) == (1, 1, 1.0, 5.0)
    assert np.isnan(fedavg["seconds_low"])
    assert np.isnan(fedavg["accuracy_sd"])
    assert salf["accuracy"] == pytest.approx(0.35)
    assert salf["accuracy_sd"] == pytest.approx(np.std([0.4, 0.3], ddof=1))
    assert salf["accuracy_slow_third"] == pytest.approx((0.2 + 0.9) / 2)  # of the equals the smaller number
    assert salf["accuracy_worst_decile"] == pytest.approx(0.2)
    assert salf["bytes"] == 6000
    assert salf["node_hours"] == pytest.approx(2 * 9.0 / 3600)  # two hosts
    assert salf["steps"] == 3


def test_how_well_a_time_is_known_is_said_where_not_each_round_was_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {every: {**config(), "evaluate": {"every": every}} for every in (1, 7)}
    often, seldom = (write_run(tmp_path / str(every), table, curve([0.6], [1.0])) for every, table in tables.items())
    compare(often, 0.5)
    compare([often, seldom])  # no target, no time to it
    assert capsys.readouterr().err == ""
    compare([often, seldom], 0.5)
    assert capsys.readouterr().err == "hpcfl: times are known to the 7 rounds between tests (evaluate.every)\n"


def test_a_round_without_a_visit_is_no_step_of_the_server(tmp_path: Path) -> None:
    rows = [{**row, "void": number == 1, "message_bytes": 0} for number, row in enumerate(curve([0.1] * 3, [1, 2, 3]))]
    assert compare(write_run(tmp_path / "a", config(), rows))["steps"].item() == 2


def test_a_loss_is_to_fall_below_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.recorded.KNOWN", (*KNOWN_WITH_LOSS,))
    rows = [
        {"sim_seconds": second, "wall_seconds": 1.0, "test_loss": loss, "message_bytes": 0} for second, loss in LOSS
    ]
    table = compare(write_run(tmp_path / "a", config(), rows), 1.5, metric="test_loss")
    assert table["seconds_to"].item() == 2.0
    assert table["test_loss"].item() == 1.6


LOSS = [(1.0, 2.0), (2.0, 1.4), (3.0, 1.6)]
KNOWN_WITH_LOSS = ("test_loss", "client_test_loss", "cohort", "arrived", "void", "sim_seconds", "wall_seconds")
KNOWN_WITH_LOSS += ("message_bytes", "visit_seconds", "blocks")


@pytest.mark.parametrize("values", [[1.0, 5.0], [1.0, 2.0, 7.0], [3.0, 1.0, np.inf]])
def test_the_interval_is_that_of_all_samples_with_replacement(values: list[float]) -> None:
    medians = np.sort([np.median(some) for some in product(values, repeat=len(values))])
    ends = [medians[int(len(medians) * share)] for share in (0.025, 0.975)]
    assert interval_of_median(np.array(values)) == tuple(ends)


def test_each_form_has_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = three(tmp_path)
    table = compare(runs, 0.5)

    def printed(form: str) -> str:
        assert main(["compare", *map(str, runs), "--target", "0.5", "--as", form]) == 0
        return capsys.readouterr().out

    rows = list(csv.DictReader(io.StringIO(printed("csv"))))
    assert [row["run"] for row in rows] == list(table.index)
    assert [float(row["accuracy"]) for row in rows] == list(table["accuracy"])
    objects = list(map(json.loads, printed("json").splitlines()))
    assert [each["seconds_to"] for each in objects] == [None, 5.0]
    assert [each["bytes"] for each in objects] == list(table["bytes"])
    words = worded(table, target=0.5)
    lines = printed("markdown").splitlines()
    assert lines[0].startswith("| run | runs | reached it | rounds to accuracy 0.5 | s to accuracy 0.5 (95 %) |")
    assert lines[2].startswith("| SALF | 2 | 1 | – | – (2 to –) | 0.35 ± 0.07071 | 0.55 |")
    assert len(lines) == 2 + len(table)
    latex = printed("latex")
    assert r"(95 \%)" in latex
    assert r"0.35 $\pm$ 0.07071" in latex
    assert latex.count(r"\\") == 3
    shown = printed("table")
    assert all(str(cell) in shown for cell in words.to_numpy().ravel())


def test_a_name_with_a_bar_does_not_break_a_table_of_markdown(tmp_path: Path) -> None:
    table = compare([a_run(tmp_path / name, [0.1], [1.0]) for name in ("a", "a|b")])  # told apart by their folders
    assert written(worded(table), "markdown").splitlines()[3].startswith(r"| SALF, a\|b | 1 |")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "1.5"], "accuracy: expected a target above 0 and up to 1, got 1.5"),
        (["--metric", "acuracy"], "recorded no 'acuracy'; did you mean 'accuracy'?"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "a", [0.1], [1.0])
    assert main(["compare", str(run), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_runs_that_are_missing_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "sweep" / "a", [0.1], [1.0])
    compare(tmp_path / "sweep")
    assert capsys.readouterr().err == ""
    compare(SimpleNamespace(folder=tmp_path / "sweep", planned=[run, "another", "a third"]))
    assert capsys.readouterr().err == "hpcfl: not finished: 2 of 3 runs\n"
    restated(run, "done", "stopped")
    compare(run)
    assert capsys.readouterr().err == "hpcfl: not finished: 1 of 1 run\n"
