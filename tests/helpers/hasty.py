"""``python tests/helpers/hasty.py NAME=SECONDS … --``, then words of hpcfl's: it waits otherwise, see its watchdog."""

from __future__ import annotations

import sys

from hpcfl.__main__ import main
from hpcfl.engine import watchdog

while (word := sys.argv.pop(1)) != "--":
    name, _, seconds = word.partition("=")
    assert hasattr(watchdog, name)
    setattr(watchdog, name, float(seconds))
main()
