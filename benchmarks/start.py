"""What `hpcfl check` of a preset costs beside ``import torch`` alone: CPU seconds of whole processes, and their ratio.

    python benchmarks/start.py [PRESET ...] [--pairs 7]

The two take turns, so that a busy machine slows both down; a preset's ratio is the median of its pairs. Needs neither
MPI nor data. 4 CPU seconds per preset and pair, about 5 minutes in all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from launching import load

PRESETS = (
    *("salf-digits", "salf-ridge", "fedprox-digits", "srpfl-fedrep-digits", "srpfl-linear"),
    *("flic-digits", "flic-toy", "flic-linear", "fedlrgd-breast-cancer", "fedlrgd-rough"),
)
TORCH = (sys.executable, "-c", "import torch")


def cpu_seconds(command: Sequence[str]) -> float:
    """Return what a command takes of the processor, in user and system mode."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measured(preset: str, pairs: int) -> dict[str, float]:
    """Return medians over pairs: of both commands' CPU seconds, and of their ratio."""
    check = (sys.executable, "-m", "hpcfl", "check", preset)
    seconds = [(cpu_seconds(TORCH), cpu_seconds(check)) for _ in range(pairs)]
    torch, checks = (median(each) for each in zip(*seconds))
    figures = {"torch_s": torch, "check_s": checks, "ratio": median(check / torch for torch, check in seconds)}
    print(f"{preset:24}{torch:6.2f} s{checks:8.2f} s{figures['ratio']:8.2f}", flush=True)
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Print a line per preset, and all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=PRESETS, metavar="PRESET")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    cpu_seconds(TORCH)  # files into memory
    found = {preset: measured(preset, options.pairs) for preset in options.presets}
    print(json.dumps({"pairs": options.pairs, "load": load(), "presets": found}))


if __name__ == "__main__":
    main()
