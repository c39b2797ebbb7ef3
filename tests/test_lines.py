"""The count of lines of code."""

from __future__ import annotations

import json

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
