"""Classes from outside the package: found beside the config, run, resumed, swept, and refused in one line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcfl
from helpers.launcher import ROOT, alone, job, mpis
from hpcfl import store
from hpcfl.base import plugins
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.testing.runs import cut_back, same, table, toml

SHOWN = {"own-method": "class FedProx", "own-speeds": "class Lognormal", "own-data": "class Blobs", "python": "run("}
FEDPROX, LOGNORMAL, BLOBS, SCRIPT = (
    next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if what in block)
    for name, what in SHOWN.items()
    for text in [(ROOT / "docs" / "howto" / f"{name}.md").read_text(encoding="utf-8")]
)

OWN = {
    "algorithm": {"name": "mine:FedProx", "mu": 0.5},
    "speed": {"model": "own.slow:Lognormal", "sigma": 0.7},
    "participation": {"close": "first", "first": 4},
}


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no module behind that was imported by one of these tests."""
    monkeypatch.setattr(plugins, "_folders", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "own"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: an algorithm, a package with a speed model, and a config that names both."""
    place = tmp_path / "users"
    (place / "own").mkdir(parents=True)
    (place / "mine.py").write_text(FEDPROX)
    (place / "own" / "__init__.py").touch()
    (place / "own" / "slow.py").write_text(LOGNORMAL)
    toml(table("fedavg", "mlp", False, **OWN), place / "my.toml")
    return place


def run(folder: Path, *more: str, out: str = "out") -> int:
    return main(["run", str(folder / "my.toml"), "--out", str(folder / out), "--quiet", *more])


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that was said."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_it_runs_beside_its_config(folder: Path) -> None:
    assert run(folder) == 0
    data = store.open_run(folder / "out")
    recorded = json.loads(data.attrs["code"])
    assert recorded.keys() == {"mine:FedProx", "own.slow:Lognormal"}
    assert recorded["mine:FedProx"]["file"] == str((folder / "mine.py").resolve())
    assert recorded["own.slow:Lognormal"]["file"] == str((folder / "own" / "slow.py").resolve())
    assert len(recorded["mine:FedProx"]["sha256"]) == 64
    seconds = data["visit_seconds"].values
    assert (seconds[seconds > 0] != 1).all()


def test_it_is_what_the_package_has(folder: Path) -> None:
    """The same method by the package's own class."""
    assert run(folder) == 0
    assert run(folder, "--set", "algorithm.name=fedprox", out="ours") == 0
    assert summary(folder / "out")["state_sha256"] == summary(folder / "ours")["state_sha256"]


def test_mu_and_sigma_are_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, said in (
        ("algorithm.nu=1", "hpcfl: algorithm.nu: unknown key; did you mean 'mu'?"),
        ("algorithm.mu=-1", "hpcfl: algorithm.mu: expected greater than or equal to 0, got -1"),
        ("speed.sigma=0", "hpcfl: speed.sigma: expected greater than 0, got 0"),
    ):
        assert run(folder, "--set", setting) == 2
        assert line(capsys).startswith(said)
    assert not (folder / "out").exists()


def test_it_goes_on_where_it_was_even_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(folder) == 0
    shutil.copytree(folder / "out", tmp_path / "half")
    cut_back(tmp_path / "half", 2)
    monkeypatch.chdir("/")
    monkeypatch.setattr(plugins, "_folders", [])
    assert main(["resume", str(tmp_path / "half"), "--quiet"]) == 0
    same(tmp_path / "half", folder / "out")


def test_a_changed_or_lost_file_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    cut_back(folder / "out", 2)
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*.h5")}
    capsys.readouterr()
    (folder / "mine.py").write_text(FEDPROX + "# changed")
    assert main(["resume", str(folder / "out")]) == 2
    assert line(capsys).startswith(f"hpcfl: '{folder / 'mine.py'}' has changed since the run began, which found mine:")
    (folder / "mine.py").rename(folder / "other.py")
    assert main(["resume", str(folder / "out")]) == 2
    assert line(capsys).startswith(f"hpcfl: '{folder / 'mine.py'}', where the run found mine:FedProx, is not there; ")
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*.h5")} == before
    (folder / "other.py").rename(folder / "mine.py")
    assert main(["resume", str(folder / "out"), "--force", "--trust", "--quiet"]) == 0


def test_reading_a_run_imports_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    for path in (*folder.glob("*.py"), *folder.glob("own/*.py")):
        path.write_text("raise ArithmeticError")
    for name in ("mine", "own.slow", "own"):
        del sys.modules[name]
    for command in (["show"], ["plot", "-o", str(folder / "a.png")]):
        assert main([*command, str(folder / "out")]) == 0
    assert main(["list"]) == 0
    assert store.open_run(folder / "out").sizes["round"] == 4
    assert "mine" not in sys.modules
    capsys.readouterr()


def test_a_data_source_of_ones_own(folder: Path) -> None:
    (folder / "blobs.py").write_text(BLOBS)
    words = ["--set", "data.name=blobs:Blobs", "--set", "data.samples=80", "--set", "rounds=8"]
    assert main(["run", "fedavg-digits", *words, "--out", str(folder / "out"), "--quiet"]) == 2  # not beside the preset
    file = toml(table("fedavg", "mlp", False, data={"name": "blobs:Blobs", "samples": 80}), folder / "blobs.toml")
    assert main(["run", str(file), "--out", str(folder / "out"), "--quiet"]) == 0
    data = store.open_run(folder / "out")
    assert data["train_samples"].values.tolist() == [80] * 7
    assert data["client_accuracy"].dropna("round").values[-1].mean() > 0.5


def test_the_script_of_the_docs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {}
    exec(SCRIPT, space)
    assert list(dict(space["model"].named_parameters())) == list(space["run"].state_dict())
    assert space["run"].data.attrs["code"].startswith('{"mine:FedProx": ')


CASES = {
    "mine": ("algorithm.name", "mine", "hpcfl: algorithm.name: no 'mine'"),
    "form": (
        "algorithm.name",
        "mine:Fed Prox",
        "hpcfl: algorithm.name: expected package.module:Class, got 'mine:Fed Prox'",
    ),
    "module": ("algorithm.name", "yours:FedProx", "hpcfl: algorithm.name: no module 'yours'; expected it in '"),
    "class": ("algorithm.name", "mine:FedProks", "hpcfl: algorithm.name = 'mine:FedProks': no 'FedProks' in "),
    "kind": (
        "algorithm.name",
        "own.slow:Lognormal",
        "hpcfl: algorithm.name = 'own.slow:Lognormal': expected a class derived from hpcfl.algorithms.base.Algorithm, ",
    ),
    "function": (
        "speed.model",
        "own.slow:keyed",
        "hpcfl: speed.model = 'own.slow:keyed': expected a class derived from ",
    ),
    "open": ("data.name", "hpcfl:Source", "hpcfl: data.name = 'hpcfl:Source': expected a class that defines check, "),
    "broken": (
        "data.name",
        "broken:Data",
        "hpcfl: data.name: 'broken' cannot be imported: ZeroDivisionError: division by zero (",
    ),
    "syntax": ("data.name", "syntax:Data", "hpcfl: data.name: 'syntax' cannot be imported: SyntaxError: "),
    "needs": (
        "data.name",
        "needs:Data",
        "hpcfl: data.name: 'needs' cannot be imported: ModuleNotFoundError: No module named 'nothing'",
    ),
    "leaves": ("data.name", "leaves:Data", "hpcfl: data.name: 'leaves' cannot be imported: SystemExit: 3"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.py").write_text("1 / 0")
    (folder / "syntax.py").write_text("def :")
    (folder / "needs.py").write_text("import nothing")
    (folder / "leaves.py").write_text("raise SystemExit(3)")
    key, value, said = CASES[case]
    assert run(folder, "--set", f"{key}={value}") == 2
    assert line(capsys).startswith(said)
    assert not (folder / "out").exists()


TWICE = """
import json, os, sys
import hpcfl
runs = [hpcfl.run("my.toml", out=f"{sys.argv[1]}/{seed}", settings={"seed": seed}) for seed in (1, 2)]
sums = [sorted((name, value.double().sum().item()) for name, value in run.state_dict().items()) for run in runs]
with open(f"{sys.argv[1]}-{os.getpid()}.json", "w") as file:
    json.dump(sums, file)
"""


@pytest.mark.launch
def test_alone_and_on_ranks_by_command_and_by_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "script.py").write_text(TWICE)
    monkeypatch.chdir(folder)
    command = ["-m", "hpcfl", "run", "my.toml", "--set", "seed=1", "--quiet", "--out"]
    assert alone([sys.executable, *command, "command"]).code == 0
    for mpi in ("", *mpis()[-1:]):
        words = ["script.py", mpi or "alone"]
        ended = job(mpi, 3, words) if mpi else alone([sys.executable, *words])
        assert ended.code == 0, ended.err
        same(folder / "command", folder / (mpi or "alone") / "1")
    found = [path.read_text() for path in folder.glob("*-*.json")]
    assert len(found) == 1 + 3 * len(mpis()[-1:])
    assert len(set(found)) == 1


@pytest.mark.launch
def test_it_is_swept(folder: Path) -> None:
    words = ["--grid", "algorithm.mu=0.1,0.2", "--set", "rounds=1", "--out", str(folder / "sweep")]
    assert alone([sys.executable, "-m", "hpcfl", "sweep", str(folder / "my.toml"), *words]).code == 0
    whole = hpcfl.open_sweep(folder / "sweep")
    assert whole["algorithm.mu"].values.tolist() == [0.1, 0.2]
    assert whole["loss"].notnull().all()


@pytest.mark.launch
def test_it_passes_the_generic_tests(folder: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "hpcfl.testing"]
    ended = alone(["env", "-C", str(folder), sys.executable, *words, "--algorithm", "mine:FedProx"])
    assert ended.code == 0, ended.out[-3000:]
    assert "17 passed" in ended.out
