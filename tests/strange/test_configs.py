"""Configs from somebody else: they call nothing but what lies in the user's files, whatever they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcfl.commands.cli import main
from hpcfl.testing.runs import table, toml

TOUCH = {"args": ["touch", "touched"]}
NAMED: dict[str, dict[str, Any]] = {
    "a shell as data": {"data": {"name": "subprocess:run", "arguments": TOUCH}},
    "a class that is no dataset": {"data": {"name": "subprocess:Popen", "arguments": TOUCH}},
    "a function of ours": {"data": {"name": "hpcfl.store.atomic:replace", "arguments": {}}},
    "a function of torch's": {"data": {"name": "torch.hub:load", "arguments": {"repo_or_dir": "x", "model": "y"}}},
    "a factory": {"model": {"name": "shutil:rmtree"}},
    "a class that is no module": {"model": {"name": "subprocess:Popen", "args": ["touch", "touched"]}},
    "a loss": {"task": {"loss": "shutil:copyfile"}},
    "a metric": {"task": {"metrics": ["accuracy", "os.path:samefile"]}},
    "an algorithm": {"algorithm": {"name": "subprocess:Popen"}},
    "a speed law": {"speed": {"model": "subprocess:Popen"}},
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("words", [["check"], ["run", "--out", "run"], ["sweep", "--list", "--out", "runs"]])
def test_what_is_installed_is_not_called(
    name: str, words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toml({**table("fedavg", "mlp", False), **NAMED[name]}, tmp_path / "config.toml")
    assert main([words[0], "config.toml", *words[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpcfl: ")
    assert "expected" in line
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.toml"]


OWN = """
import torch
from torch.utils.data import TensorDataset

def pool(count):
    rows = torch.arange(count * 4.0).view(count, 2, 2)
    return TensorDataset(rows, torch.arange(count) % 2)
"""


def test_a_function_beside_the_config_is_called_and_named_before(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, away = tmp_path / "beside", tmp_path / "away"
    beside.mkdir()
    away.mkdir()
    monkeypatch.chdir(away)
    (beside / "mypool.py").write_text("import sys\nprint('mypool is imported', file=sys.stderr)\n" + OWN)
    data = {"name": "mypool:pool", "arguments": {"count": 40}}
    toml({**table("fedavg", "mlp", False, clients=2, participation={}), "data": data}, beside / "config.toml")
    assert main(["check", "../beside/config.toml"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [f"hpcfl: imports mypool from {beside / 'mypool.py'}", "mypool is imported"]


def test_a_class_of_the_kind_is_made_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import sys

    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "theirs.py").write_text(
        OWN + "\nclass Pool(TensorDataset):\n    def __init__(self):\n        super().__init__(*pool(40).tensors)\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    assert importlib.util.find_spec("theirs") is not None
    for name, keys, code in (("theirs:Pool", {}, 0), ("theirs:pool", {"arguments": {"count": 40}}, 2)):
        data = {"name": name, **keys}
        toml({**table("fedavg", "mlp", False, clients=2, participation={}), "data": data}, tmp_path / "config.toml")
        assert main(["check", "config.toml"]) == code
    del sys.modules["theirs"]
