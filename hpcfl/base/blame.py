"""Whose code an error comes from: one line with the config's key, the error, and the user's file and line."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError, UserError, cut
from hpcfl.base.loaded import is_of_user, reached

MOST = 500  # characters of an error's own words
PLACE = re.compile(r", line \d+\)")
MEMORY = re.compile(r"^\w*MemoryError|can't allocate memory")

_named: dict[str, tuple[str, Any]] = {}  # what the config names, by ``package.module:Class``: under which key, what


def named(spec: str, key: str, found: Any) -> None:
    """Note what ``package.module:Class`` of the config is, named under a key."""
    _named[spec] = key, found


def forget() -> None:
    """Forget what a config has named: another one follows."""
    _named.clear()


def frames(error: BaseException | None) -> list[tuple[str, int]]:
    """Return files and lines of the user's by way of which an error came, or else what it comes from, the last last."""
    while error is not None:
        steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        users = {file for file in {file for file, _ in steps} if is_of_user(Path(file))}
        if users:
            return [(file, line) for file, line in steps if file in users]
        error = error.__cause__
    return []


def words(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    return cut(" ".join(f"{type(error).__name__}: {error}".split()), MOST).removesuffix(":")


def place(file: object, line: int) -> str:
    return f" ({file}, line {line})"


def place_of(spec: str) -> str:
    """Return the place where ``package.module:Class`` begins."""
    for where, first, _ in _spans(_named[spec][1]) if spec in _named else ():
        return place(where, first)
    file: str | None = getattr(sys.modules.get(spec.partition(":")[0]), "__file__", None)
    return f" ({file})" if file else ""


def blamed(error: BaseException, when: str = "", of: Collection[str] = ()) -> BaseException:
    """Return what is told in one line of an error that has come by way of the user's code, others as they are.

    Another error is taken for the doing of what the first of the keys `of` names that names any of the user's. What is
    one line already is given the user's file and line, where it names a class but no place.
    """
    if isinstance(error, UserError):
        spec = next((spec for spec in _named if f"= '{spec}'" in str(error)), None)
        if spec is not None and not PLACE.search(str(error)):
            error.args = (f"{error}{place_of(spec)}",)
        return error
    last = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    by_signal = isinstance(error, KeyboardInterrupt) and not any(is_of_user(Path(file)) for file in last)
    if by_signal or not _named:
        return error
    if not (steps := frames(error)):
        behind = {key: spec for spec, (key, _) in _named.items() if key in of}
        key = next((key for key in of if key in behind), "")
        known = key and isinstance(error, Exception)
        return RunError(f"{key} = '{behind[key]}': {words(error)}{when}{place_of(behind[key])}") if known else error
    first = error.__traceback__
    while first is not None and not is_of_user(Path(first.tb_frame.f_code.co_filename)):
        first = first.tb_next
    error.__traceback__ = first or error.__traceback__  # the user's own frames first
    owner, text = _owner(steps), words(error)
    hint = "; did you mean a smaller batch_clients?" if MEMORY.search(text) and not owner.startswith("data") else ""
    return RunError(f"{owner}{text}{hint}{when}{place(*steps[-1])}")


@contextmanager
def blaming(when: Callable[[], str] = str, of: Collection[str] = ()) -> Iterator[None]:
    """Raise within the block what `blamed` makes of an error; ``when()`` says of which round it is."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        told = blamed(error, when(), of)
        if told is error:
            raise
        raise told from error


def _owner(steps: list[tuple[str, int]]) -> str:
    """Return ``key = 'package.module:Class': `` of what the config names that an error came by way of."""
    for file, line in reversed(steps):
        for spec, (key, found) in _named.items():
            if any(file == own and first <= line <= last for own, first, last in _spans(found)):
                return f"{key} = '{spec}': "
    for spec, (key, _) in _named.items():
        if {file for file, _ in steps} & {str(each.file) for each in reached(spec.partition(":")[0]).values()}:
            return f"{key} = '{spec}': "
    return ""


def _spans(found: Any) -> Iterator[tuple[str, int, int]]:
    """Yield file, first and last line of a function, or of a class and of those of the user's that it derives from."""
    for each in found.__mro__ if isinstance(found, type) else (found,):
        with suppress(OSError, TypeError):
            if (file := inspect.getsourcefile(each)) and is_of_user(Path(file)):
                lines, first = inspect.getsourcelines(each)
                yield file, first, first + len(lines) - 1
