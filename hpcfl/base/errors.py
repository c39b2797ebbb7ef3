"""How a command ends other than well: two kinds of error, apart from defects, and a run that was asked to stop."""

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


class Stopped(Exception):  # noqa: N818
    """A run was asked to stop and has done so on every rank, after a checkpoint of the round it had come to.

    Attributes
    ----------
    round : int
        How many rounds are done.
    reason : str
        Who asked, in words.
    """

    code = 85  # the exit code by which batch scripts know that the job is to be queued again

    def __init__(self, round: int, reason: str) -> None:
        super().__init__(round, reason)
        self.round, self.reason = round, reason


class Diverged(Stopped):
    """A run whose numbers have left the finite, or of which too much was rejected: it ended on every rank.

    No checkpoint was written of that round; `round` counts those that are done, `reason` names round and layer.
    """

    code = 1


def ended(round: int, code: int) -> Stopped | None:
    """Return how the server says that a run has ended: by the exit code that all ranks leave with."""
    kinds = {kind.code: kind for kind in (Stopped, Diverged)}
    return kinds[code](round, "the server says so") if code else None


class Interrupted(Exception):  # noqa: N818
    """A round in real time is given up because the run is to stop; `wish` says why."""

    def __init__(self, wish: str) -> None:
        super().__init__(wish)
        self.wish = wish


def listed(numbers: Iterable[int], most: int = 8) -> str:
    """Return ``"1, 2, 3"``; of a long list its first `most` numbers, and how many more there are."""
    found = list(numbers)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(str, found[:most])) + more


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice nearest to `word`, or all choices where none is near."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""
