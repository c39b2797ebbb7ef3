"""Which runs are one group, what it is called, and which runs are in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import config, write_run
from hpcfl.base.errors import UsageError
from hpcfl.commands.groups import Recorded, differing, groups, run_folders


def found(folder: Path, *tables: Any) -> list[tuple[str, list[str]]]:
    """Return labels and folders of the groups of runs with these configs, called 0, 1, …"""
    runs = [Recorded.of(write_run(folder / str(place), table, [])) for place, table in enumerate(tables)]
    return [(group.label, [run.name for run in group.runs]) for group in groups(runs)]


def seeds(**sections: Any) -> list[dict[str, Any]]:
    return [config(**sections, seed=seed) for seed in (1, 2)]


FEDAVG = {"name": "fedavg", "lr": 0.1, "batch": 8}


def test_methods_over_seeds(tmp_path: Path) -> None:
    assert found(tmp_path, *seeds(), *seeds(algorithm=FEDAVG)) == [
        ("algorithm.name=salf", ["0", "1"]),
        ("algorithm.name=fedavg", ["2", "3"]),
    ]


def test_a_label_has_the_keys_that_tell_its_runs_apart_and_no_others(tmp_path: Path) -> None:
    tables = [
        config(algorithm={"lr": 0.2}),
        config(algorithm=FEDAVG, rounds=3),
        config(algorithm={"lr": 0.1}),
        config(algorithm=FEDAVG, rounds=3, model={"hidden": [8, 4]}),
    ]
    assert found(tmp_path, *tables) == [
        ("algorithm.name=salf, lr=0.2", ["0"]),
        ("algorithm.name=fedavg, hidden=[16]", ["1"]),
        ("algorithm.name=salf, lr=0.1", ["2"]),
        ("algorithm.name=fedavg, hidden=[8, 4]", ["3"]),
    ]
    assert list(differing([Recorded.of(tmp_path / name) for name in "0123"])) == [
        "algorithm.name",
        "rounds",
        "algorithm.lr",
        "model.hidden",
    ]


def test_a_key_of_two_sections_is_written_whole(tmp_path: Path) -> None:
    tables = [{**config(model={"lr": value}), "rounds": rounds} for value, rounds in ((1, 3), (2, 3))]
    assert [label for label, _ in found(tmp_path, *tables)] == ["model.lr=1", "model.lr=2"]


def test_a_key_that_an_earlier_version_did_not_have_tells_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, config(), config(seed=2, patience=30.0)) == [("algorithm.name=salf", ["0", "1"])]


def test_one_run_is_called_as_its_folder(tmp_path: Path) -> None:
    assert found(tmp_path, config()) == [("0", ["0"])]


def test_runs_that_have_the_seed_in_common_are_no_sample(tmp_path: Path) -> None:
    assert found(tmp_path, config(), config(), config(algorithm=FEDAVG)) == [
        ("algorithm.name=salf 0", ["0"]),
        ("algorithm.name=salf 1", ["1"]),
        ("algorithm.name=fedavg", ["2"]),
    ]


def test_a_file_from_outside_that_was_changed_makes_another_group(tmp_path: Path) -> None:
    def code(sha256: str) -> str:
        return json.dumps({"mine:Prox": {"file": f"/{sha256}/mine.py", "sha256": sha256 * 64}})

    table = {"algorithm": {"name": "mine:Prox"}}
    for name, sha256, seed in (("one", "a", 1), ("two", "a", 2), ("three", "b", 3)):
        write_run(tmp_path / name, config(**table, seed=seed), [], code=code(sha256))
    found = groups([Recorded.of(tmp_path / name) for name in ("one", "two", "three")])
    assert [(group.label, len(group.runs)) for group in found] == [
        (f"mine:Prox={'a' * 12}", 2),
        (f"mine:Prox={'b' * 12}", 1),
    ]


def test_a_config_that_is_no_table_has_no_keys(tmp_path: Path) -> None:
    assert found(tmp_path, "no JSON") == [("0", ["0"])]
    assert found(tmp_path / "list", "[1]") == [("0", ["0"])]


def test_a_sweep_is_its_runs_by_name_and_number(tmp_path: Path) -> None:
    for name in ("sweep/n=16", "sweep/n=8", "sweep/n=0.1", "sweep/n=0.05", "alone"):
        write_run(tmp_path / name, config(), [])
    (tmp_path / "sweep" / "n=8.log").write_text("")
    assert [path.name for path in run_folders([tmp_path / "sweep", tmp_path / "alone", tmp_path / "alone/run.h5"])] == [
        "n=0.05",
        "n=0.1",
        "n=8",
        "n=16",
        "alone",
        "alone",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"'.*empty' is no run folder: .*run.h5 does not exist"):
        list(run_folders([tmp_path / "empty"]))
