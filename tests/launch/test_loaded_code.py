"""Code of the user's: what ran is what was recorded, whatever is edited between two runs, or on other ranks."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import hpcfl
from helpers.launcher import ROOT, job, mpis
from hpcfl import store
from hpcfl.base import loaded, plugins
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.launch.host import check_builds, differing, other_code, package_digest
from hpcfl.results.run_table import Recorded
from hpcfl.testing.runs import cut_back, toml

LOSS = """
import torch.nn.functional as F

def loss(outputs, labels):
    return {} * F.cross_entropy(outputs, labels, reduction="none")
"""
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, {0}), nn.ReLU(), nn.Linear({0}, classes))
"""
TABLE: dict[str, Any] = {
    **{"rounds": 1, "clients": 2, "evaluate": {"every": 1}, "checkpoint": {"every": 1, "keep": 5}},
    **{"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [4]}},
    **{"algorithm": {"name": "fedavg", "epochs": 0, "steps": 1}, "task": {"loss": "users.mine:loss"}},
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Know nothing of earlier tests' code, and leave none behind."""
    for name, empty in (("_folders", set()), ("_known", {})):
        monkeypatch.setattr(loaded, name, empty)
    monkeypatch.setattr(plugins, "_folders", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("users", "scale", "other"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a package `users`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "__init__.py").touch()
    return tmp_path


def play(out: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """Run; return the digest of the state and what is recorded of the code."""
    run = hpcfl.run({**TABLE, **more}, out=out, quiet=True)
    return summary(run.folder)["state_sha256"], json.loads(run.data.attrs["code"])


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_an_edited_loss_is_read_again_in_the_same_process(folder: Path) -> None:
    """Times 1.0 and times 0.5 ended in one state under two hashes, in files of one length and second."""
    states, hashes = [], []
    for number, factor in enumerate((1.0, 0.5, 1.0)):
        (folder / "users" / "mine.py").write_text(LOSS.format(factor))
        state, code = play(f"out-{number}")
        states.append(state)
        hashes.append(code["users.mine:loss"]["sha256"])
        assert hashes[-1] == sha(folder / "users" / "mine.py")
    assert states[0] == states[2] != states[1]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_run_after_a_change_of_width_can_be_opened(folder: Path) -> None:
    """It could never be: the old width ran under the new file's hash."""
    for width in (8, 16):
        (folder / "nets.py").write_text(NET.format(width))
        run = hpcfl.run({**TABLE, "task": {}, "model": {"name": "nets:Net"}}, out=f"out-{width}", quiet=True)
        assert run.state_dict()["1.weight"].shape == (width, 64)
        assert json.loads(run.data.attrs["code"])["nets:Net"]["sha256"] == sha(folder / "nets.py")
    with pytest.raises(UsageError, match=r"nets.py' has changed since the run began"):
        hpcfl.open_models("out-8")


def test_models_that_are_open_stay_what_they_were(folder: Path) -> None:
    """When the file has been loaded anew for another run."""
    models = []
    for width in (8, 16):
        (folder / "nets.py").write_text(NET.format(width))
        models.append(hpcfl.run({**TABLE, "task": {}, "model": {"name": "nets:Net"}}, out=f"out-{width}").models)
    for width, opened in zip((8, 16), models):
        assert dict(opened.module(0).named_parameters())["1.weight"].shape == (width, 64)


HELPED = "from users import between\n" + LOSS.format("between.factor()")
BETWEEN = "from .deep import scale\n\ndef factor():\n    return scale.FACTOR\n"


@pytest.fixture
def helped(folder: Path) -> Path:
    """A loss whose factor is in a module of a module that it imports."""
    (folder / "users" / "deep").mkdir()
    (folder / "users" / "deep" / "__init__.py").touch()
    (folder / "users" / "mine.py").write_text(HELPED)
    (folder / "users" / "between.py").write_text(BETWEEN)
    (folder / "users" / "deep" / "scale.py").write_text("FACTOR = 1.0\n")
    return folder


def test_an_edited_helper_is_loaded_anew_with_what_depends_on_it(helped: Path) -> None:
    one, code = play("one")
    modules = code["users.mine:loss"]["modules"]
    assert set(modules) == {"users", "users.between", "users.deep", "users.deep.scale"}
    scale = helped / "users" / "deep" / "scale.py"
    assert modules["users.deep.scale"] == {"file": str(scale), "sha256": sha(scale)}
    scale.write_text("FACTOR = 0.5\n")
    two, code = play("two")
    assert code["users.mine:loss"]["modules"]["users.deep.scale"]["sha256"] == sha(scale)
    assert one != two
    keys = [Recorded.of(Path(out)).keys["code.users.mine:loss"] for out in ("one", "two")]
    assert keys[0] != keys[1]  # they are no seeds of one run


def test_an_edited_helper_is_noticed_on_resume(helped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It went unnoticed. Once it is forced, what runs from then on is what is recorded."""
    play("out", rounds=2)
    cut_back(Path("out"), 1)
    scale = helped / "users" / "deep" / "scale.py"
    scale.write_text("FACTOR = 2.0\n")
    assert main(["resume", "out", "--quiet"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        f"hpcfl: '{scale}' has changed since the run began, which found module 'users.deep.scale' of "
    )
    assert main(["resume", "out", "--quiet", "--force"]) == 2
    assert f"hpcfl: '{scale}' (SHA-256 {sha(scale)[:12]}…), which is code of " in capsys.readouterr().err
    assert main(["resume", "out", "--quiet", "--force", "--trust"]) == 0
    attributes = store.run_attributes(Path("out"))
    assert json.loads(attributes["code"])["users.mine:loss"]["modules"]["users.deep.scale"]["sha256"] == sha(scale)
    (change,) = json.loads(attributes["history"])
    assert (change["key"], change["after_round"]) == ("code", 1)
    assert main(["resume", "out", "--rounds", "3", "--quiet"]) == 0  # without --force
    assert [change["key"] for change in json.loads(store.run_attributes(Path("out"))["history"])] == ["code", "rounds"]


def test_what_others_have_loaded_stays_unless_it_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script has imported its modules before; one that was edited after that is loaded anew."""
    monkeypatch.syspath_prepend(folder)
    file = folder / "users" / "mine.py"
    file.write_text(LOSS.format(1.0))
    imported = importlib.import_module("users.mine")
    monkeypatch.setattr(loaded, "BEGAN", file.stat().st_ctime + 1)
    one, code = play("one")
    assert sys.modules["users.mine"] is imported
    assert code["users.mine:loss"]["sha256"] == sha(file)
    del sys.modules["users.mine"]
    sys.meta_path.remove(loaded.FINDER)
    stale = importlib.import_module("users.mine")
    file.write_text(LOSS.format(0.5))
    monkeypatch.setattr(loaded, "BEGAN", 0.0)
    two, code = play("two")
    assert sys.modules["users.mine"] is not stale
    assert code["users.mine:loss"]["sha256"] == sha(file)
    assert one != two


def test_what_counts_of_a_users_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has imported, now or later; nothing installed, nothing that another run needs."""
    place = folder / "venv" / "site-packages"
    place.mkdir(parents=True)
    (place / "other.py").touch()
    (folder / "scale.py").touch()
    (folder / "users" / "aside.py").touch()
    (folder / "users" / "mine.py").write_text("import other, torch\ndef f():\n    import scale\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(place)
    plugins.look_first([])
    plugins.outside("users.aside:__name__", "key")
    found = plugins.outside("users.mine:f", "key")
    assert set(loaded.reached("users.mine")) == {"users.mine", "users"}
    found()
    assert set(loaded.reached("users.mine")) == {"users.mine", "users", "scale"}
    assert loaded.reached("scale")["scale"].sha256 == sha(folder / "scale.py")


def test_other_code_is_one_line() -> None:
    def code(own: str, helper: str) -> dict[str, Any]:
        return {
            "mine:A": {"file": "/a/mine.py", "sha256": own, "modules": {"h": {"file": "/a/h.py", "sha256": helper}}}
        }

    assert other_code(code("1" * 64, "2" * 64), code("1" * 64, "2" * 64), "rank 1", "rank 0") == ""
    assert other_code(code("1" * 64, "2" * 64), {"mine:A": {"file": "", "sha256": "1" * 64}}, "rank 1", "rank 0") == ""
    line = other_code(code("1" * 64, "3" * 64), code("1" * 64, "2" * 64), "rank 1", "rank 0")
    assert line == (
        "rank 1 has loaded '/a/h.py' (SHA-256 333333333333…) for mine:A, rank 0 '/a/h.py' (222222222222…): "
        "expected the same file"
    )


def build(host: str, **other: str) -> dict[str, str]:
    return {"Python": "3.12.1", "hpcfl": "0.1.0 (11)", "torch": "2.9.0 (22)", "host": host, **other}


def test_mixed_versions_are_one_line() -> None:
    assert differing([]) == differing([build("a"), build("b"), build("b")]) == ""
    found = [build("a"), build("b", torch="2.8.0 (33)"), build("a"), build("c", torch="2.8.0 (33)")]
    line = "ranks 0, 2 on a have torch 2.9.0 (22); ranks 1, 3 on b, c have torch 2.8.0 (33)"
    assert differing(found) == line
    with pytest.raises(UsageError, match=re.escape(f"{line}: expected the same on all ranks; --allow-mixed runs with")):
        check_builds(found, allow_mixed=False)


def test_what_is_allowed_to_be_mixed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = check_builds([build("a"), build("b", hpcfl="0.1.0 (44)")], allow_mixed=True)
    assert line == "rank 0 on a has hpcfl 0.1.0 (11); rank 1 on b has hpcfl 0.1.0 (44)"
    assert capsys.readouterr().err.startswith(f"hpcfl: {line}: ")


def test_a_run_records_the_digest_of_the_package(folder: Path) -> None:
    run = hpcfl.run({**TABLE, "task": {}}, out="out", quiet=True)
    assert run.data.attrs["package_sha256"] == package_digest()


COPIED = 'case ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} in 1) export PYTHONPATH="$PWD/copy";; esac; exec "$@"'


@pytest.mark.launch
@pytest.mark.parametrize("mpi", mpis())
def test_ranks_with_an_edited_copy_of_the_package_are_refused(mpi: str, folder: Path) -> None:
    """They gave another result, with exit code 0."""
    own = ROOT / "hpcfl"
    copy = shutil.copytree(own, folder / "copy" / "hpcfl", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "learning" / "loss.py").open("a") as file:
        file.write("# edited\n")
    words = ["-m", "hpcfl", "run", str(toml({**TABLE, "task": {}}, folder / "my.toml")), "--out", str(folder / "out")]
    program = ["sh", "-c", COPIED, "sh", sys.executable]
    ended = job(mpi, 2, words, program=program)
    assert ended.code == 2, ended.err
    (said,) = ended.said
    host, digests = socket.gethostname(), [package_digest(place)[:12] for place in (own, copy)]
    has = [f"rank {rank} on {host} has hpcfl {version('hpcfl')} ({digest})" for rank, digest in enumerate(digests)]
    assert said == f"hpcfl: {'; '.join(has)}: expected the same on all ranks; --allow-mixed runs with them as they are"
    assert not (folder / "out").exists()
    if mpi == mpis()[0]:
        ended = job(mpi, 2, [*words, "--allow-mixed", "--quiet"], program=program)
        assert ended.code == 0, ended.err
        assert store.run_attributes(folder / "out")["mixed"] == "; ".join(has)


MOUNTED = 'case ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} in 1) mount --bind elsewhere/users users;; esac; exec "$@"'


@pytest.mark.launch
def test_ranks_that_load_other_files_are_refused(folder: Path) -> None:
    """As on hosts with file systems of their own: at the place where rank 0 has its file, rank 1 has another."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    for place, factor in (folder, 1.0), (folder / "elsewhere", 0.0):
        (place / "users").mkdir(parents=True, exist_ok=True)
        (place / "users" / "__init__.py").touch()
        (place / "users" / "mine.py").write_text(LOSS.format(factor))
    file = toml({**TABLE}, folder / "my.toml")
    program = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", sys.executable]
    ended = job(mpis()[0], 2, ["-m", "hpcfl", "run", str(file), "--out", str(folder / "out")], program=program)
    assert ended.code == 2, ended.err
    (said,) = ended.said
    assert f"has loaded '{folder / 'users' / 'mine.py'}' (SHA-256 " in said
    assert not (folder / "out").exists()
