"""What a run was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    packages = ("hpcfl", "torch", "numpy", "h5py", "mpi4py")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def git_commit() -> str:
    """Return the commit of the checkout that this package lies in; empty where it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
