"""``python tests/helpers/held.py MARKS POINT …``: hpcfl whose ranks wait at a point of the start for MARKS/go.

Each leaves a mark named by its number there. The points are ``begin``, before MPI starts, and ``start``, once it has.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcfl.__main__ import main
from hpcfl.launch import host
from hpcfl.mpi import launcher

marks, point = Path(sys.argv.pop(1)), sys.argv.pop(1)


def held(function: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*given: Any) -> Any:
        (marks / str(launcher.launched_rank(os.environ))).touch()
        while not (marks / "go").exists():
            time.sleep(0.05)
        return function(*given)

    return waiting


if point == "begin":
    launcher.SLOW = launcher.SLOW.replace(f"seq {launcher.SLOW_SECONDS}", "seq 3")
    launcher.bind = held(launcher.bind)
else:
    host.placed = held(host.placed)
main()
