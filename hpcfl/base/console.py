"""Tables of `rich` on a terminal, in a log, or for another program."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console


def width_of(table: Any) -> int:
    """The characters that a `rich` table takes where nothing is cut."""
    return Console(width=100_000, markup=False, emoji=False).measure(table).maximum


def terminal_width() -> int | None:
    """The width of the terminal; a log has none."""
    return Console().width if sys.stdout.isatty() else None


def print_table(table: Any) -> None:
    """Print a `rich` table as wide as it is: what is read by another program, or does not fit, is not cut either."""
    width = max(width_of(table), terminal_width() or 0)
    Console(width=width, color_system=None, markup=False, emoji=False).print(table, crop=False)
