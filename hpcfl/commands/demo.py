"""A first look: three methods on the bundled digits, on MPI ranks where there is an MPI that works."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpcfl.base.errors import UsageError
from hpcfl.commands import sweep as sweeps
from hpcfl.mpi.launcher import starter

PRESETS = "salf-digits", "wait-digits", "drop-digits"
NEXT = (
    "try next:",
    "  hpcfl list                                                   # what else there is to run",
    "  hpcfl check salf-digits                                      # what a config would do; nothing runs",
    "  hpcfl run salf-digits --set algorithm.lr=0.1 --out runs/one  # then: hpcfl show runs/demo runs/one",
)
PROBE = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != int(sys.argv[1]))"
PROBE_SECONDS = 60.0


def demo(out: Path, ranks: int, settings: Sequence[str]) -> int:
    """Run the presets one after the other, those that are done not again; return the exit code, as of a sweep."""
    runs = sweeps.runs(PRESETS, out, settings)
    sweeps.check(runs, None)
    launcher, why = working(ranks) if ranks > 1 else ([], "as asked")
    how = f"on {ranks} MPI ranks each, by {shlex.join(launcher)}" if launcher else f"in one process each ({why})"
    print(f"{', '.join(PRESETS)}: {how}", flush=True)
    return sweeps.carry_out(runs, 1, launcher)


def working(ranks: int) -> tuple[list[str], str]:
    """Return what starts so many ranks, here and now; or nothing, and why."""
    try:
        words = starter()
    except UsageError:
        return [], "hpcfl doctor --launcher says why there is no MPI"
    words += [*(["--map-by", ":oversubscribe"] if "--bind-to" in words else []), "-n", str(ranks)]
    with suppress(OSError, subprocess.TimeoutExpired):
        probe = [*words, sys.executable, "-c", PROBE, str(ranks)]
        if not subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS).returncode:
            return words, ""
    return [], f"'{shlex.join(words)}' does not start MPI ranks here"
