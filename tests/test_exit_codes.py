"""The page of exit codes has those that there are, and the states that a run may be in."""

from __future__ import annotations

import re

import hpcfl
from helpers.launcher import ROOT
from hpcfl.store.status import STATES

PAGE = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")


def test_every_exit_code_has_a_row() -> None:
    errors = (hpcfl.UsageError, hpcfl.RunError, hpcfl.Diverged, hpcfl.Stopped)
    rows = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [int(code) for code in rows] == sorted({0, *(error.code for error in errors)})
    named = PAGE.partition("In Python")[2]
    for error in errors:
        after = named.partition(f"`hpcfl.{error.__name__}`")[2]
        assert int(re.findall(r"\((\d+)\)", after)[0]) == error.code


def test_every_state_of_a_run_has_a_row() -> None:
    """Those that are written, and the two that follow from what is there."""
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted((*STATES, "killed", "unknown"))
