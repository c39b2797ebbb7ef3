"""The script for a GPU, whole, on a device that is none: minutes of a card are not spent on a traceback."""

from __future__ import annotations

import json
import subprocess
import sys

from helpers.launcher import ROOT


def test_the_script_for_a_gpu_runs_whole() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    parts = json.loads(ended.stdout.splitlines()[-1])["parts"]
    assert {"anchors", "profile", "neighbours", "methods", "determinism", "presets", "busy", "1GB"} <= parts.keys()
    assert not [name for name, found in parts.items() if "error" in found]
    assert {name for name, found in parts.items() if "skipped" in found} == {"wall", "sharing"}  # they need an MPI
