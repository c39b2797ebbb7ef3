"""Lines of finished runs, a JSON object each, by which studies go on where they stopped (atlas, FLamby, the papers)."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

Line = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]


def read(file: Path) -> list[Line]:
    """Return what is there; nothing where the file is not."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def append(file: Path, line: Line) -> None:
    """Write one line more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")


def origin() -> dict[str, str]:
    """Return what a line says of the code and the machine it comes from."""
    return {"versions": versions(), "commit": commit(), "processor": processor()}


def commit() -> str:
    """Return the commit, with a + where the working tree has changed since."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


@cache
def versions() -> str:
    """Return the versions of what computes."""
    import numpy as np
    import torch

    return f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"


@cache
def processor() -> str:
    """Return the name of the processor."""
    known = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    names = [row.partition(":")[2].strip() for row in known.splitlines() if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean over seeds, by Student's law; 0 of a single one."""
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def shard(text: str) -> tuple[int, int]:
    """Return the number and the count of "0/2"."""
    number, _, count = text.partition("/")
    return int(number), int(count)
