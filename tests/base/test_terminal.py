"""What is said on stderr goes by the logger ``hpcfl``."""

from __future__ import annotations

import logging

import pytest

from hpcfl.base.terminal import LOGGER, say


def test_a_line_is_printed_and_logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    say("100 %s of it")
    assert capsys.readouterr() == ("", "hpcfl: 100 %s of it\n")
    assert [(each.name, each.levelname, each.getMessage()) for each in caplog.records] == [
        ("hpcfl", "WARNING", "100 %s of it")
    ]


def test_a_level_silences_it(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert logging.getLogger("hpcfl") is LOGGER
    with caplog.at_level(logging.ERROR, "hpcfl"):
        say("nothing")
    assert capsys.readouterr() == ("", "")


def test_without_its_handler_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "handlers", [])
    say("for others")
    assert capsys.readouterr() == ("", "")
    assert caplog.messages == ["for others"]
