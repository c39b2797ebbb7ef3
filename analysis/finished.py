"""What scripts of this folder read of a run, if it has finished."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpcfl

if TYPE_CHECKING:
    import xarray


def finished(folder: Path) -> tuple[xarray.Dataset, dict[str, Any]] | None:
    """Return a run's rounds and its config; None, and a line of why, if it has not finished."""
    data = hpcfl.open_run(folder)
    if data.attrs["status"] != "done":
        print(f"{folder}: left out, it is {data.attrs['status']}", file=sys.stderr)
        return None
    return data, json.loads(data.attrs["config"])
