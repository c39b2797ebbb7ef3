"""Run folders from somebody else: the code that they name is imported once the user trusts it, and not before."""

from __future__ import annotations

import json
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.testing.runs import table, toml

MODEL = """
from pathlib import Path
from torch import nn

IMPORTED = Path({mark!r})
IMPORTED.write_text("mine")

def two(shape, classes):
    import besides
    return nn.Sequential(nn.Flatten(), nn.Linear(64, besides.WIDTH), nn.Linear(besides.WIDTH, classes))
"""
BESIDES = "from pathlib import Path\nPath({mark!r}).write_text('besides')\nWIDTH = {width}\n"


class Sent:
    """A run with a model of one's own and what that imports, in a folder that another user has sent."""

    def __init__(self, base: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.home, self.mark, self.folder = patch, base / "home", base / "imported", base / "theirs" / "run"
        self.home.mkdir()
        patch.setattr(sys, "path", [*sys.path])  # other tests have modules of these names too
        theirs = base / "theirs"
        theirs.mkdir()
        self.user("they")
        (theirs / "mine.py").write_text(MODEL.format(mark=str(self.mark)))
        (theirs / "besides.py").write_text(BESIDES.format(mark=str(self.mark), width=3))
        toml({**table("fedavg", "mlp", False, rounds=2), "model": {"name": "mine:two"}}, theirs / "config.toml")
        patch.chdir(theirs)
        assert main(["run", "config.toml", "--out", "run", "--quiet"]) == 0
        (theirs / "run" / "code").mkdir()
        for name in ("mine.py", "besides.py"):
            shutil.move(theirs / name, theirs / "run" / "code" / name)
        patch.chdir(self.home)
        self.forget()

    def user(self, name: str) -> None:
        self.patch.setenv("XDG_STATE_HOME", str(self.home.parent / name))

    def forget(self) -> None:
        """Be another process, as far as that goes."""
        self.mark.unlink(missing_ok=True)
        for name in ("mine", "besides", "colorful"):
            sys.modules.pop(name, None)

    def attributes(self, **changed: Any) -> None:
        store.rebuild(self.folder, changed)


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(tmp_path, monkeypatch)


REFUSED = "besides.py' (SHA-256 ", "mine.py' (SHA-256 "


@pytest.mark.parametrize("words", [["resume", "--rounds", "3"], ["adapt", "--client", "all"]])
def test_a_strangers_code_is_not_imported(sent: Sent, words: list[str], capsys: Any) -> None:
    sent.user("we")
    assert main([words[0], str(sent.folder), *words[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert any(part in line for part in REFUSED)
    assert "has not run here: look at it; --trust" in line
    assert not sent.mark.exists()


def test_it_is_imported_where_it_has_run(sent: Sent) -> None:
    assert main(["resume", str(sent.folder), "--rounds", "3", "--quiet"]) == 0
    assert sent.mark.exists()


def test_trust_is_said_once(sent: Sent, capsys: Any) -> None:
    sent.user("we")
    assert main(["resume", str(sent.folder), "--rounds", "3", "--quiet", "--trust"]) == 0
    sent.forget()
    assert main(["resume", str(sent.folder), "--rounds", "4", "--quiet"]) == 0
    assert sent.mark.exists()
    assert hpcfl.open_models(sent.folder).module() is not None


def test_models_need_trust_and_weights_do_not(sent: Sent, caplog: Any) -> None:
    sent.user("we")
    with pytest.raises(UsageError, match="has not run here"):
        hpcfl.open_models(sent.folder)
    weights = hpcfl.Run(sent.folder).state_dict()
    assert "has not run here" in caplog.text
    assert not sent.mark.exists()
    trusted = hpcfl.Run(sent.folder, trust=True).state_dict()
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in trusted.items()
    }


@pytest.mark.parametrize("words", [["show"], ["show", "--groups"], ["verify"], ["seal"], ["plot"], ["show", "--json"]])
def test_what_reads_data_imports_nothing(sent: Sent, words: list[str]) -> None:
    sent.user("we")
    assert main([words[0], str(sent.folder), *words[1:]]) == 0
    assert np.isfinite(hpcfl.open_run(sent.folder)["loss"].values).all()
    assert not sent.mark.exists()
    assert "mine" not in sys.modules


def test_what_known_code_imports_must_be_known_too(sent: Sent) -> None:
    about = json.loads(store.run_attributes(sent.folder)["code"])
    del about["mine:two"]["modules"]
    sent.attributes(code=json.dumps(about))
    (sent.folder / "code" / "besides.py").write_text(BESIDES.format(mark=str(sent.mark), width=7))
    with pytest.raises(UsageError, match=r"besides\.py' \(SHA-256 .*has not run here"):
        hpcfl.open_models(sent.folder)
    assert sent.mark.read_text() == "mine"


def test_nor_does_a_folder_stand_for_an_installed_package(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    code = sent.folder / "code"
    known = (code / "mine.py").read_text().replace("import besides", "import colorful as besides")
    (code / "mine.py").write_text(known)
    (code / "colorful.py").write_text(BESIDES.format(mark=str(sent.mark), width=3))
    about = json.loads(store.run_attributes(sent.folder)["code"])
    (code / "site-packages").mkdir()
    shutil.move(code / "mine.py", code / "site-packages" / "mine.py")
    about["mine:two"] = {"file": str(code / "site-packages" / "mine.py"), "sha256": sha256(known.encode()).hexdigest()}
    sent.attributes(code=json.dumps(about))
    with pytest.raises(UsageError, match=r"mine\.py' \(SHA-256 .*has not run here"):
        hpcfl.open_models(sent.folder)
    assert not sent.mark.exists()


def test_a_class_of_which_no_file_is_recorded_is_not_looked_for(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    sent.attributes(code="{}")
    monkeypatch.chdir(sent.folder / "code")
    with pytest.raises(UsageError, match=r"model\.name = 'mine:two': expected its file in the attribute code"):
        hpcfl.open_models(sent.folder)
    assert not sent.mark.exists()


def test_where_it_cannot_be_noted_a_line_says_so(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(tmp_path, monkeypatch)
    (tmp_path / "full").write_text("no folder")
    sent.user("full")
    assert main(["resume", str(sent.folder), "--rounds", "3", "--quiet", "--trust"]) == 0
    assert "cannot be noted as having run here" in capsys.readouterr().err
    assert main(["resume", str(sent.folder), "--rounds", "4", "--quiet"]) == 2
