"""The fault hook of the tests: ``HPCFL_FAULT=metrics:17`` kills the process inside its 17th row.

The kinds are ``metrics`` (some columns of the row are written, others not), ``checkpoint`` (the shared state
is written, the personal state is not) and ``table`` (the new file is complete but not yet visible).
``HPCFL_FAULT=checkpoint-seconds:0.2`` kills nobody: every checkpoint takes so much longer, at that same place.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter

from hpcfl.base.errors import UsageError

VARIABLE = "HPCFL_FAULT"
KINDS = ("metrics", "checkpoint", "table")
SLOW = "checkpoint-seconds"

_reached: Counter[str] = Counter()


def reach(kind: str) -> None:
    """Count one write of this kind, and die without a word, or dawdle, where the variable says so.

    Raises
    ------
    UsageError
        if the variable is set to anything but ``kind:n`` or ``checkpoint-seconds:s``.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    _reached[kind] += 1
    wanted, number = parse(setting)
    if (wanted, number) == (kind, _reached[kind]):
        os.kill(os.getpid(), signal.SIGKILL)
    if wanted == SLOW and kind == "checkpoint":
        time.sleep(number)


def parse(setting: str) -> tuple[str, float]:
    """Split ``"metrics:17"`` into the kind of write and the number of the write, from 1; or `SLOW` and seconds."""
    kind, _, number = setting.partition(":")
    if kind == SLOW and _seconds(number) >= 0:
        return kind, _seconds(number)
    if kind not in KINDS or not number.isdecimal() or int(number) < 1:
        kinds = f"kind one of {', '.join(KINDS)}, or {SLOW}:s"
        raise UsageError(f"{VARIABLE} must be kind:n, {kinds}, not '{setting}'")
    return kind, int(number)


def _seconds(text: str) -> float:
    """Return finite seconds, -1 for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        return -1.0
    return seconds if math.isfinite(seconds) else -1.0
