"""How a command ends other than well: two kinds of error, apart from defects, and a run that was asked to stop."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LINE, VALUE = 1000, 100
"""Characters of a line that is told, and of a value in it; of a longer one the beginning and the end."""


class UserError(Exception):
    """An error that is told in one line, without a traceback, whatever names and values it quotes."""

    code: int
    settled = False
    """All ranks know of it, and this is the one that speaks."""

    def __str__(self) -> str:
        return cut(super().__str__(), LINE)


class UsageError(UserError):
    """What the user asked for cannot be run (exit code 2). The message is one line."""

    code = 2


class RunError(UserError):
    """A run could not go on (exit code 1). The message is one line."""

    code = 1


class TakenOver(RunError):  # noqa: N818
    """Another process has taken the run folder over: nothing more is written to it."""


class ErrorOnOtherRank(Exception):  # noqa: N818
    """Another rank has found the error and speaks of it in a `line`; this one leaves with the same exit code."""

    def __init__(self, code: int, line: str = "") -> None:
        super().__init__(code, line)
        self.code, self.line = code, line


class LeftOut(Exception):  # noqa: N818
    """The job has started without this rank, which was not there in time."""


class Stopped(Exception):  # noqa: N818
    """A run was asked to stop, by `reason`, and has done so on every rank, after a checkpoint of `round` rounds."""

    code = 85  # the exit code by which batch scripts know that the job is to be queued again

    def __init__(self, round: int, reason: str) -> None:
        super().__init__(round, reason)
        self.round, self.reason = round, reason


class StoppedBefore(UserError):  # noqa: N818
    """A run that was asked to stop between two starts of its batch job: the second one ends before it has begun."""

    code = Stopped.code


class Ended(Stopped):
    """A run that has come to its end before its last round: by its config, or by what its script says of a round."""


class Diverged(Stopped):
    """A run whose numbers have left the finite, of which too much was rejected, or that learns nothing.

    It ended on every rank. No checkpoint was written of that round; `round` counts those that are done, `reason` names
    round and layer, `remedy` says what to try.
    """

    code = 1
    remedy = "try a smaller algorithm.lr, or scaled features (hpcfl check looks at their range)"


class LearntNothing(Diverged):
    """A run that cannot learn anything; it has diverged."""

    remedy = "expected visits that count, and a loss that tells how to change the model"


def ended(round: int, code: int) -> Stopped | None:
    """How a run has ended by the exit code that the server hands to all ranks; None for 0."""
    kinds = {kind.code: kind for kind in (Stopped, Diverged)}
    return kinds[code](round, "the server says so") if code else None


class Interrupted(Exception):  # noqa: N818
    """A round in real time is given up because the run is to stop; its text says why."""


def cut(text: str, most: int) -> str:
    """Return a text in one printable line of at most `most` characters, its middle left out where it is longer."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} … {text[-(most // 4) :]}"
    if text.isprintable():
        return text
    return cut("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text), most)


def listed(numbers: Iterable[object], most: int = 8) -> str:
    """Return ``"1, 2, 3"``; of a long list its first `most` numbers, and how many more there are."""
    values = list(numbers)
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def count_of(count: int, what: str) -> str:
    """Return ``"1 rank"``, ``"2 ranks"``."""
    return f"{count} {what}{'s' * (count != 1)}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice nearest to `word`, or all choices where none is near."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(known)}" if known else ""


def refusal(key: str, expected: str, got: object, nearest: object = None) -> UsageError:
    """Return the error for a value that cannot be: every refusal of a value reads like this one.

    >>> raise refusal("model.rank", "at most data.dimension = 6", 7, nearest=6)
    UsageError: model.rank: expected at most data.dimension = 6, got 7; did you mean 6?

    `got` and `nearest` are shown as TOML has them; a `nearest` that is a str as it is, so that it may name another key,
    such as ``"doubling.when = 'plateau'"``.
    """
    hint = "" if nearest is None else f"; did you mean {nearest if isinstance(nearest, str) else toml(nearest)}?"
    return UsageError(f"{key}: expected {expected}, got {toml(got)}{hint}")


def no_meaning(key: str, value: object, beside: str, instead: str = "") -> UsageError:
    """Return the error for a value that would have no effect: every option without one is refused in these words.

    >>> raise no_meaning("staleness.b", 2, "staleness.weight = 'constant'", "staleness.weight = 'hinge'")
    UsageError: staleness.b = 2 has no meaning with staleness.weight = 'constant': remove it, or set staleness.weight =
    'hinge'
    """
    other = f", or set {instead}" if instead else ""
    return UsageError(f"{key} = {toml(value)} has no meaning with {beside}: remove it{other}")


def in_place(name: str) -> str:
    """Return what is wrong with a function of the user's that changes a tensor which it is given, in these words."""
    return f"changes {name}, which it is given, in place: expected a clone to be changed"


def check_within(key: str, value: float, least: float, most: float, why: str = "") -> None:
    """Raise UsageError where a number is not `least` … `most`; `why` follows the range, as in " for this model"."""
    if not least <= value <= most:
        raise refusal(key, f"{least} … {most}{why}", value, min(max(value, least), most))


def toml(value: object) -> str:
    """Return a value as a config has it; None, which TOML lacks, as "nothing"."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return cut(repr(value) if isinstance(value, str) else str(value), VALUE)
