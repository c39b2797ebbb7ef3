"""The table of runs: a row for each config over its seeds, every number whole, seconds called what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.recorded import config, curve, write_run
from hpcfl import store
from hpcfl.commands import show
from hpcfl.commands.cli import main
from hpcfl.store import run_file

FEDAVG = {"name": "fedavg", "lr": 0.1, "batch": 8}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "sweep"
    for seed, last in ((1, 0.5), (2, 0.75), (3, 0.25)):
        write_run(folder / f"a-{seed}", config(seed=seed), curve([0.25, last], [1, 10.0 * seed]))
    write_run(folder / "b-1", config(algorithm=FEDAVG), curve([0.5, 0.125], [1, 4]))
    return folder


def cells(capsys: Any, *words: str | Path) -> list[list[str]]:
    """Return the cells of the table that ``hpcfl show`` prints."""
    capsys.readouterr()
    assert main(["show", *map(str, words)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [
        [cell.strip() for cell in line.strip("┃│ ").replace("┃", "│").split("│")]
        for line in lines
        if "─" not in line and "━" not in line
    ]


def test_seeds_are_one_row(capsys: Any, sweep: Path) -> None:
    heads, salf, fedavg = cells(capsys, sweep)
    assert heads[:6] == ["run", "seeds", "status", "rounds", "accuracy", "last 10"]
    assert heads[6:] == ["clients", "arrived", "void", "simulated s", "wall s", "state"]
    assert salf == [
        *("algorithm.name=salf", "3", "done", "2", "0.5000 ± 0.2500", "0.3750 ± 0.1250", "-", "1.0000 ± 0.0000", "0"),
        *("20.0 ± 10.0", "2.0 ± 0.0", "-"),
    ]
    assert fedavg[:5] == ["algorithm.name=fedavg", "1", "done", "2", "0.1250"]


def test_each_run_is_a_row_where_wanted(capsys: Any, sweep: Path) -> None:
    heads, *rows = cells(capsys, sweep, "--each")
    assert "seeds" not in heads
    assert [row[0] for row in rows] == ["a-1", "a-2", "a-3", "b-1"]
    assert [row[3] for row in rows] == ["0.5000", "0.7500", "0.2500", "0.1250"]


def test_runs_of_one_seed_go_by_their_folders(capsys: Any, sweep: Path) -> None:
    heads, *rows = cells(capsys, sweep / "a-1", sweep / "b-1")
    assert heads[:3] == ["run", "status", "rounds"]
    assert [row[0] for row in rows] == ["a-1", "b-1"]


def test_what_only_some_seeds_have(capsys: Any, sweep: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "early", config(seed=4), [])
    write_run(tmp_path / "failed", config(seed=5), curve([0.375], [3]))
    store.write_status(tmp_path / "failed", "failed")
    _, row = cells(capsys, sweep / "a-1", sweep / "a-2", tmp_path / "early", tmp_path / "failed")
    assert row[:5] == ["algorithm.name=salf", "4", "3 done, 1 failed", "1.2 ± 1.0", "0.5417 ± 0.1909 (3)"]


def test_json_is_of_single_runs(capsys: Any, sweep: Path) -> None:
    capsys.readouterr()
    assert main(["show", "--json", str(sweep)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["run"] for row in rows] == [str(sweep / name) for name in ("a-1", "a-2", "a-3", "b-1")]
    assert [row["accuracy"] for row in rows] == [0.5, 0.75, 0.25, 0.125]
    assert list(rows[0]) == ["run", "status", *show.FIGURES]


def test_real_seconds_are_called_so(capsys: Any, sweep: Path, tmp_path: Path) -> None:
    real = write_run(tmp_path / "real", config(clock="wall"), curve([0.5], [3]))
    assert cells(capsys, real)[0][-3:] == ["wall s in rounds", "wall s", "state"]
    heads, first, second = cells(capsys, real, sweep / "b-1")
    assert heads[-3:] == ["s in rounds", "wall s", "state"]
    assert (first[-3], second[-3]) == ("3.0 wall", "4.0 simulated")


def test_no_number_is_cut_on_a_narrow_terminal(capsys: Any, monkeypatch: Any, sweep: Path, tmp_path: Path) -> None:
    name = "salf-digits_algorithm.lr=0.1_participation.deadline=12.5_seed=1234567890"
    write_run(tmp_path / name, config(algorithm={"lr": 0.25}), curve([0.1, 123456.7890], [1, 12345678.9]))
    _, *rows = cells(capsys, sweep, tmp_path / name)
    numbers = {cell for row in rows for cell in row[3:]}
    assert "123456.7890" in numbers
    monkeypatch.setattr("hpcfl.commands.cli.terminal_width", lambda: 80)
    assert main(["show", str(sweep), str(tmp_path / name)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    for number in numbers:
        assert number in printed


def test_a_run_that_was_lost_to_is_told_of_by_its_folder(capsys: Any, sweep: Path) -> None:
    rows = [{**show.summary(sweep / f"a-{seed}"), "lost": [(7, "in round 1")], "rejected": 2} for seed in (1, 2)]
    assert list(show.remarks(rows)) == [
        "a-1: client 7 was lost in round 1",
        "a-1: 2 visits were rejected, in whole or in part",
        "a-2: client 7 was lost in round 1",
        "a-2: 2 visits were rejected, in whole or in part",
    ]


def test_an_odd_run_does_not_keep_its_neighbours_from_being_shown(capsys: Any, sweep: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "first", config(), curve([0.5], [1]))
    odd = write_run(tmp_path / "odd", config(seed=2), curve([0.5], [1]))
    write_run(tmp_path / "third", config(seed=3), curve([0.25], [1]))
    facts = [store.Fact("features", np.arange(12), "of other clients than the rows are of")]
    run_file._write(odd, store.run_attributes(odd), facts, [])
    run_file.rebuild(odd)
    line = f"'{odd}' does not fit together: run.h5 knows of 12 clients, metrics/segment-000.h5 of 1"
    for words, count in ((["show", "--json"], 2), (["show", "--json", "--groups"], 2), (["show", "--each"], 6)):
        capsys.readouterr()
        assert main([*words, str(tmp_path)]) == 1
        said = capsys.readouterr()
        assert (len(said.out.splitlines()), said.err) == (count, f"hpcfl: {line}\n")
    assert main(["show", str(odd)]) == 1
    assert capsys.readouterr().err == f"hpcfl: {line}\n"
    assert main(["verify", str(tmp_path)]) == 1
    assert f"{odd / 'run.h5'}: damaged: {line.partition(': ')[2]}" in capsys.readouterr().out


def test_a_run_that_raises_what_nobody_foresaw_is_passed_over(
    capsys: Any, sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = store.open_run

    def opened(folder: Path) -> Any:
        if folder.name == "a-2":
            raise ValueError("conflicting sizes")
        return whole(folder)

    monkeypatch.setattr(store, "open_run", opened)
    assert main(["show", "--json", str(sweep)]) == 1
    said = capsys.readouterr()
    assert [json.loads(line)["run"][-3:] for line in said.out.splitlines()] == ["a-1", "a-3", "b-1"]
    assert said.err == f"hpcfl: '{sweep / 'a-2'}' cannot be shown: ValueError: conflicting sizes\n"
