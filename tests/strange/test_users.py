"""What users have got wrong ends in one line that names the file; what is odd and right is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfl.data import dataset
from hpcfl.engine import trial
from strange import data, losses, methods, models
from strange.users import names, refused, right

TABLES = {"methods": methods, "models": models, "data": data, "losses": losses}
FAULTY = [(kind, name, words) for kind, table in TABLES.items() for name, words in table.FAULTY.items()]
RIGHT = [(kind, name, like) for kind, table in TABLES.items() for name, like in table.RIGHT.items()]


@pytest.mark.parametrize("kind", TABLES)
def test_the_tables_are_complete(kind: str) -> None:
    assert names(kind) == TABLES[kind].FAULTY.keys() | TABLES[kind].RIGHT.keys()


@pytest.mark.parametrize(("kind", "name", "words"), FAULTY, ids=[f"{kind}-{name}" for kind, name, _ in FAULTY])
def test_faulty(
    kind: str,
    name: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset, "MOST", 2**16)  # as many as nobody waits for
    refused(kind, name, words, tmp_path, capsys)


@pytest.mark.parametrize(("kind", "name", "like"), RIGHT)
def test_right(kind: str, name: str, like: str, tmp_path: Path) -> None:
    right(kind, name, like, tmp_path)


def test_few_samples_may_have_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "AT_ONCE", 1)
    right("losses", "among_others", "among_others", tmp_path)
