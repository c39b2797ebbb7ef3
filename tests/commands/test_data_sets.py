"""`hpcfl data`: what is said to be needed is what is read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.data import source_class, sources
from test_presets import images

FROM_FILES = {name: source for name in sources() if (source := source_class(name)).published}


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCFL_DATA", raising=False)


def test_a_source_whose_files_are_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "t10k"):
        images(tmp_path / "mnist", "", part, np.arange(50) % 10)
    file = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    assert main(["data", "get", "mnist", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mnist: MNIST, in the folder")
    assert "  licence  not stated by its authors; the documentation of Keras says CC BY-SA 3.0" in lines
    assert f"  there    {file}" in lines
    source_class("mnist")().check(2, tmp_path)
    file.unlink()
    assert main(["data", "get", "mnist", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"  lacking  mnist/{file.name} or mnist/{file.name}.gz in {tmp_path}" in said
    with pytest.raises(UsageError, match=f"neither {file.name} nor"):
        source_class("mnist")().check(2, tmp_path)


@pytest.mark.parametrize("name", FROM_FILES)
def test_what_is_lacking_is_what_is_looked_for(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Empty files by these names are found, and are what the source then complains of."""
    assert main(["data", "get", name]) == 1
    assert "in --data-dir or HPCFL_DATA" in capsys.readouterr().out
    published = FROM_FILES[name].published
    assert published
    for file in published.files:
        path = tmp_path / file.split(" or ")[0].replace("*", "all")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert main(["data", "get", name, "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("  there  ") == len(published.files)
    with pytest.raises(UsageError) as error:
        source_class(name)().check(2, tmp_path)
    named = next(word for word in re.sub("[:,]", " ", str(error.value)).split() if word.startswith(str(tmp_path)))
    assert f"there    {named}" in said


def test_all_sources_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--data-dir", str(tmp_path)]) == 0
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    states = {name.strip(): state.strip() for name, state in rows}
    assert states == {name: "lacking" if name in FROM_FILES else "none needed" for name in sources()}
    assert main(["data", "get", "digits"]) == 0


def test_an_unknown_source_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "minst"]) == 2
    assert capsys.readouterr().err == "hpcfl: data.name: no 'minst'; did you mean 'mnist'?\n"
    assert main(["data", "get"]) == 2
    assert capsys.readouterr().err == "hpcfl: hpcfl data get: expected a NAME of those that hpcfl data lists\n"
