"""Faults on purpose: a process dies inside a write, or its checkpoints take their time.

``HPCFL_FAULT=metrics:17`` kills the process inside its 17th row. The kinds are ``metrics`` (half of the row's bytes are
written), ``checkpoint`` (the shared state is written, the personal state is not) and ``table`` (the new run.h5 is
complete but not yet visible). ``HPCFL_FAULT=checkpoint-seconds:0.2`` kills nobody: every checkpoint takes so much
longer, at that same place.

The package knows nothing of this. `install` patches it from outside; ``python faults.py words…`` is ``hpcfl words…``
with the faults installed, ``python faults.py -c code`` runs code so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any

VARIABLE = "HPCFL_FAULT"
KINDS = ("metrics", "checkpoint", "table")
SLOW = "checkpoint-seconds"
COMMAND = [sys.executable, str(Path(__file__).resolve())]
"""What a test starts in place of ``python -m hpcfl``."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(setting: str, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Patch the store as a setting says, "" for not at all; ValueError where it says nothing that is known."""
    kind, _, number = setting.partition(":")
    if not setting:
        return
    if kind == SLOW and 0 <= float(number) < inf:
        before_personal(lambda: time.sleep(float(number)), set_attribute)
        return
    if kind not in KINDS or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"{VARIABLE}: expected kind:n, kind one of {', '.join(KINDS)}, or {SLOW}:s, got '{setting}'")
    patch = {"metrics": inside_row, "checkpoint": before_personal, "table": before_table}[kind]
    patch(at(int(number), die), set_attribute)


def at(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts when it is called for the `number`-th time."""
    calls = 0

    def reach() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            act()

    return reach


def inside_row(reach: Callable[[], None], set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Call `reach` in each row once half of its bytes are written."""
    from hpcfl.store.growing_file import Segment

    record = Segment._record

    def watched(self: Any, area: Any, place: int, content: Any) -> None:
        if content is self._row:  # and no event
            half = content.copy()
            half.view("u1")[half.nbytes // 2 :] = 0  # what is there before anything is written
            record(self, area, place, half)
            reach()
        record(self, area, place, content)

    set_attribute(Segment, "_record", watched)


def before_personal(reach: Callable[[], None], set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Call `reach` in each checkpoint between the shared and the personal state."""
    from hpcfl.store import checkpoints

    write = checkpoints._write_personal

    def watched(group: Any, personal: Iterable[Any]) -> None:
        reach()
        write(group, personal)

    set_attribute(checkpoints, "_write_personal", watched)


def before_table(reach: Callable[[], None], set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Call `reach` whenever a complete run.h5 is about to become visible."""
    replace = Path.replace

    def watched(self: Path, target: Any) -> Path:
        if Path(target).name == "run.h5":
            reach()
        return replace(self, target)

    set_attribute(Path, "replace", watched)


def main() -> None:
    """Run a command, or code, with the faults that the environment asks for."""
    install(os.environ.get(VARIABLE, ""))
    if sys.argv[1] == "-c":
        del sys.argv[0]
        exec(compile(sys.argv.pop(1), "<code>", "exec"), {"__name__": "__main__"})
        return
    from hpcfl.__main__ import main as command

    command()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of helpers: its modules must not hide others
    main()
