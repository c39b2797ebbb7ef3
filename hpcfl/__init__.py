"""Federated learning as an ordinary MPI batch job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfl.engine.trained import open_models
    from hpcfl.store import open_run

__all__ = ["open_models", "open_run"]


def __getattr__(name: str) -> Any:
    """Return what is first asked for here: commands note signals before NumPy and HDF5 are loaded."""
    if name == "open_run":
        from hpcfl.store import open_run

        return open_run
    if name == "open_models":
        from hpcfl.engine.trained import open_models

        return open_models
    raise AttributeError(f"module 'hpcfl' has no attribute '{name}'")
