"""A run folder says of which format it is; one of another is refused in a line and left as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

import hpcfl
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.schedule.tape import Tape
from hpcfl.testing.runs import play, table, toml
from strange.test_folders import content, listed_anew

VALUES = table("fedavg", "mlp", True, rounds=2)
HAS: dict[Any, str] = {2: "format 2", "1": "format 1", None: "no format number"}
READERS: list[Callable[[Path], Any]] = [
    hpcfl.open_run,
    hpcfl.open_models,
    store.run_attributes,
    store.events,
    store.seal,
    lambda folder: Tape.read(str(folder)),
]


@pytest.fixture(scope="module")
def today(solo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(solo, VALUES, tmp_path_factory.mktemp("format") / "run", None)


def numbered(run: Path, number: Any) -> Path:
    """Give a run folder another format number, or none."""
    with h5py.File(run / "run.h5", "r+") as file:
        assert file.attrs.pop("format") == 1
        if number is not None:
            file.attrs["format"] = number
    listed_anew(run)
    (run / ".tmp-1-left").touch()
    return run


@pytest.mark.parametrize("number", HAS)
def test_another_format_is_refused_in_a_line(
    number: Any, today: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = numbered(shutil.copytree(today, tmp_path / "runs" / "odd"), number)
    shutil.copytree(today, tmp_path / "runs" / "whole")
    before, line = content(odd), f"run folder '{odd}' has {HAS[number]}, this version of hpcfl reads format 1"
    for read in READERS:
        with pytest.raises(UsageError) as caught:
            read(odd)
        assert str(caught.value).removeprefix("speed.run: ") == line
    config = str(toml(VALUES, tmp_path / "my.toml"))
    for words in (["show"], ["plot", "-o", str(tmp_path / "a.png")], ["resume"], ["seal"], ["adapt"]):
        assert main([*words, str(odd)]) == 2
        assert capsys.readouterr().err == f"hpcfl: {line}\n"
    assert main(["run", config, "--out", str(odd), "--resume"]) == 2
    assert capsys.readouterr().err == f"hpcfl: {line}\n"
    assert content(odd) == before


def test_its_neighbours_are_shown_and_verified(today: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd, whole = (shutil.copytree(today, tmp_path / name) for name in ("odd", "whole"))
    line = f"run folder '{numbered(odd, 2)}' has format 2, this version of hpcfl reads format 1"
    assert main(["show", "--json", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert (said.out.count("\n"), str(whole) in said.out, said.err) == (1, True, f"hpcfl: {line}\n")
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{odd}: 1 of 1 files are damaged",
        f"{odd / 'run.h5'}: damaged: {line}",
        f"{whole}: 5 files, none is damaged",
    ]


def test_a_sweep_does_not_take_it_for_one_of_its_runs(
    today: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", str(toml(VALUES, tmp_path / "my.toml")), "--seeds", "1", "--out", str(tmp_path / "sweep")]
    numbered(shutil.copytree(today, tmp_path / "sweep" / "my_seed=1"), 2)
    assert main(words) == 2
    assert "has format 2, this version of hpcfl reads format 1\n" in capsys.readouterr().err
