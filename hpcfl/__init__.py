"""Federated learning as an ordinary MPI batch job.

What is named here is public; all else may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfl.base.errors import Diverged, RunError, Stopped, UsageError
    from hpcfl.config import Config
    from hpcfl.engine.trained import open_models
    from hpcfl.launch.api import Run, run
    from hpcfl.store import open_run

__all__ = ["Config", "Diverged", "Run", "RunError", "Stopped", "UsageError", "open_models", "open_run", "run"]

_PLACES = {
    **dict.fromkeys(("Diverged", "RunError", "Stopped", "UsageError"), "hpcfl.base.errors"),
    "Config": "hpcfl.config",
    **dict.fromkeys(("Run", "run"), "hpcfl.launch.api"),
    "open_models": "hpcfl.engine.trained",
    "open_run": "hpcfl.store",
}


def __getattr__(name: str) -> Any:
    """Return what is first asked for here: commands note signals before NumPy and HDF5 are loaded."""
    if name not in _PLACES:
        raise AttributeError(f"module 'hpcfl' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)
