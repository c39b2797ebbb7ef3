"""The fault hook of the kill tests: ``HPCFL_FAULT=metrics:17`` kills the process inside its 17th row.

The kinds are ``metrics`` (some columns of the row are written, others not), ``checkpoint`` (the shared state
is written, the personal state is not) and ``table`` (the new file is complete but not yet visible).
"""

from __future__ import annotations

import os
import signal
from collections import Counter

from hpcfl.errors import UsageError

VARIABLE = "HPCFL_FAULT"
KINDS = ("metrics", "checkpoint", "table")

_reached: Counter[str] = Counter()


def reach(kind: str) -> None:
    """Count one write of this kind, and die without a word where the variable says so.

    Raises
    ------
    UsageError
        if the variable is set to anything but ``kind:n``.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    _reached[kind] += 1
    if parse(setting) == (kind, _reached[kind]):
        os.kill(os.getpid(), signal.SIGKILL)


def parse(setting: str) -> tuple[str, int]:
    """Split ``"metrics:17"`` into the kind of write and the number of the write, counted from 1."""
    kind, _, number = setting.partition(":")
    if kind not in KINDS or not number.isdecimal() or int(number) < 1:
        raise UsageError(f"{VARIABLE} must be kind:n, kind one of {', '.join(KINDS)}, not '{setting}'")
    return kind, int(number)
