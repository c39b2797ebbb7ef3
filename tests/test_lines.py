"""The count of lines of code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lines import CEILINGS, lines_of_code, rooms

SOURCE = '''"""A module."""

# a comment
from x import (
    y,
)


def function(
    a: int,
) -> str:
    """Say something.

    At length.
    """
    text = """two
lines"""
    return text  # behind code
'''


def test_what_counts() -> None:
    assert lines_of_code(SOURCE) == 3 + 3 + 2 + 1


def test_each_room_has_a_ceiling_near_its_height() -> None:
    """As `make check` prints; where a room has much less than it may, others would fill it unseen."""
    most, found = json.loads(CEILINGS.read_text(encoding="utf-8")), rooms()
    assert most.keys() == found.keys()
    assert {room: lines for room, lines in found.items() if not 0 <= most[room] - lines <= 40} == {}


def test_the_docs_have_these_numbers() -> None:
    """Nearly: within the fortieth part by which a room may grow before somebody has to say why."""
    page = (Path(__file__).parents[1] / "docs" / "developers" / "architecture.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"(?s)## How large it is.*?(?=\n## |\Z)", page)
    found = rooms()
    whole, alone = re.findall(r"([\d,]{6})(?:, of which| without)", part)
    said = {"all": whole, "alone": alone, **dict(re.findall(r"^- `(\w+)/` ([\d,]+):", part, re.M))}
    found |= {"all": found.total(), "alone": found.total() - found["testing"]}
    assert len(said) > 4
    assert {
        room: found[room] for room, told in said.items() if abs(int(told.replace(",", "")) - found[room]) > 40
    } == {}
