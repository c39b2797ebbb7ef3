"""Which runs are one group, what it is called, and which runs are in a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import config, curve, write_run
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.results.run_table import Recorded, differing, groups, run_folders
from hpcfl.store import inside


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


@pytest.mark.parametrize("left", ["metrics", "checkpoints", "status"])
def test_a_run_of_a_sweep_that_has_lost_its_table_is_told_of(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    whole, lost = (write_run(tmp_path / "sweep" / name, config(seed=name), curve([0.5], [1])) for name in "12")
    for path in list(lost.iterdir()):
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "sweep" / "notes").mkdir()
    assert main(["verify", str(tmp_path / "sweep")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "none is damaged" in line] == [f"{whole}: 5 files, none is damaged"]
    assert [line for line in said if "run.h5" in line] == [f"{lost}/run.h5: damaged: it is missing"]
    for words in (["show", "--json"], ["plot", "-o", str(tmp_path / "it.png")]):
        caplog.clear()
        monkeypatch.setattr(inside, "told", set())
        assert main([*words, str(tmp_path / "sweep")]) == 0
        assert caplog.messages == [f"'{lost}' lacks run.h5: left out"]
    assert (tmp_path / "it.png").exists()
    capsys.readouterr()
    for words in (["show"], ["plot", "-o", str(tmp_path / "it.png")]):
        assert main([*words, str(lost)]) == 2
        assert f"'{lost}' is no run folder: {lost / 'run.h5'} does not exist" in capsys.readouterr().err


def test_a_sweep_without_a_run_that_can_be_read_is_refused(tmp_path: Path, capsys: Any) -> None:
    lost = write_run(tmp_path / "sweep" / "1", config(), curve([0.5], [1]))
    (lost / "run.h5").unlink()
    assert main(["show", str(tmp_path / "sweep")]) == 2
    said = f"hpcfl: '{tmp_path / 'sweep'}' holds no run that can be read: expected a run.h5 in '{lost}'\n"
    assert capsys.readouterr().err == said


def test_checkpoints_are_no_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "1", config(), [])
    (folder / "checkpoints" / "000001").mkdir()
    for name in ("manifest.json", "server.h5"):
        (folder / "checkpoints" / "000001" / name).touch()
    with pytest.raises(UsageError, match="checkpoints' is no run folder"):
        list(run_folders([folder / "checkpoints"]))
