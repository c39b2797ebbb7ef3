"""What a run is asked to be: a table of sections, judged whole, and the presets that it may begin with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfl.config.config import Config, ConfigLike, Overlay, from_table, from_text, load, of_run, to_read

__all__ = ["Config", "ConfigLike", "Overlay", "from_table", "from_text", "load", "of_run", "to_read"]


def __getattr__(name: str) -> Any:
    """Return what is first asked for here: presets are listed without PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module 'hpcfl.config' has no attribute '{name}'")
    return getattr(import_module("hpcfl.config.config"), name)
