"""The two ways a command ends badly, apart from a defect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Told(Exception):  # noqa: N818
    """An error that is told in one line, without a traceback.

    Attributes
    ----------
    settled : bool
        All ranks know of it, and this is the one that speaks.
    """

    settled = False


class UsageError(Told):
    """What the user asked for cannot be run (exit code 2). The message is one line."""


class RunError(Told):
    """A run could not go on (exit code 1). The message is one line."""


class Elsewhere(Exception):  # noqa: N818
    """Another rank has found the error and speaks of it; this one leaves with the same exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice nearest to `word`, or all choices where none is near."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""
