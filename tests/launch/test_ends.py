"""How a run ends: what its files say wherever the end is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest

import hpcfl
from hpcfl import store
from hpcfl.cli import main
from hpcfl.launch import run as launched
from hpcfl.testing.runs import table

ROUNDS = 3


def play(folder: Path) -> None:
    hpcfl.run(table("fedavg", "mlp", False, rounds=ROUNDS), out=folder, quiet=True)


def rows(folder: Path) -> int:
    """Rounds that a program sees that knows nothing of hpcfl."""
    with h5py.File(folder / "run.h5", "r") as file:
        return len(file["round"])


class Killed(BaseException):
    """The process ends here."""


def test_a_run_that_says_done_has_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def write(folder: Path, state: str, *more: Any, **others: Any) -> None:
        if state == "done":
            seen.append(rows(folder))
            raise Killed
        store.write_status(folder, state, *more, **others)

    class Store:
        def __getattr__(self, name: str) -> Any:
            return write if name == "write_status" else getattr(store, name)

    monkeypatch.setattr(launched, "store", Store())
    with pytest.raises(BaseException):  # noqa: B017, PT011
        play(tmp_path / "run")
    assert seen == [ROUNDS]
    monkeypatch.undo()
    assert store.read_status(tmp_path / "run").state != "done"
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert store.read_status(tmp_path / "run").state == "done"
    assert rows(tmp_path / "run") == ROUNDS


@pytest.mark.parametrize("command", ["resume", "seal"])
def test_a_done_run_that_was_not_sealed_is_mended(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version left it that was killed after it had said done."""
    folder = tmp_path / "run"
    monkeypatch.setattr(launched.store, "seal", lambda folder, force=False: None)
    play(folder)
    monkeypatch.undo()
    for place in (folder, folder / "metrics", folder / "checkpoints"):
        (place / ".tmp-1-left").write_text("half")
    assert (store.read_status(folder).state, rows(folder)) == ("done", 0)
    assert main([command, str(folder)]) == 0
    assert (store.read_status(folder).state, rows(folder)) == ("done", ROUNDS)
    assert not list(folder.rglob(".tmp-*"))
    assert not store.verify(folder).damaged
