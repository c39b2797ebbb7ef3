"""Scripts of `analysis/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ANALYSIS = Path(__file__).parents[2] / "analysis"


def script(name: str) -> ModuleType:
    """Return the script ``analysis/<name>.py``, loaded anew, without running its `main`."""
    spec = importlib.util.spec_from_file_location(name, ANALYSIS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
