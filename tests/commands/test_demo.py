"""`hpcfl demo`: a first look, with nothing but the package."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from hpcfl.base.errors import UsageError
from hpcfl.commands import demo
from hpcfl.commands.cli import cli, main
from hpcfl.config import load

TINY = ["--set", "rounds=2", "--set", "evaluate.every=1"]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcfl.mpi.launcher.launched", lambda: False)


@pytest.mark.launch
def test_it_ends_with_a_table_a_picture_and_what_to_try(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PRESETS", demo.PRESETS[:1])
    assert main(["demo", "--ranks", "1", *TINY]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "salf-digits: in one process each (as asked)"
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["salf-digits"]
    assert "runs/demo/accuracy.png" in lines
    assert Path("runs/demo/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert tuple(lines[-len(demo.NEXT) :]) == demo.NEXT


def test_what_it_says_to_try_can_be_typed() -> None:
    for name in demo.PRESETS:
        load(name).check(None)
    for line in demo.NEXT[1:]:
        program, name, *words = shlex.split(line, comments=True)
        context = cli.commands[name].make_context(name, words)
        assert program == "hpcfl"
        if "config" in context.params:
            load(context.params["config"], context.params["settings"])


def starts(code: int, where: Path) -> list[str]:
    """A stand-in for mpiexec, which notes its words and says whether its ranks could be started."""
    where.write_text(f'#!/bin/sh\necho "$@" >"$0.said"\nexit {code}\n')
    where.chmod(0o755)
    return [str(where), "--bind-to", "none"]


def test_mpi_is_taken_where_it_starts_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpiexec = tmp_path / "mpiexec"
    wanted = [str(mpiexec), "--bind-to", "none", "--map-by", ":oversubscribe", "-n", "3"]
    monkeypatch.setattr(demo, "starter", lambda: starts(0, mpiexec))
    assert demo.working(3) == (wanted, "")
    assert Path(f"{mpiexec}.said").read_text().startswith(f"{shlex.join(wanted[1:])} {sys.executable} -c import sys;")
    monkeypatch.setattr(demo, "starter", lambda: starts(1, mpiexec))
    assert demo.working(3) == ([], f"'{shlex.join(wanted)}' does not start MPI ranks here")

    def none() -> list[str]:
        raise UsageError("MPI cannot be loaded")

    monkeypatch.setattr(demo, "starter", none)
    assert demo.working(3) == ([], "hpcfl doctor --launcher says why there is no MPI")


def test_an_interrupted_command_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == ""
