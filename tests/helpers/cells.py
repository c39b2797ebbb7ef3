"""Cells of a notebook, without one."""

from __future__ import annotations

import linecache
import textwrap
from types import ModuleType


def run_cell(text: str, main: ModuleType) -> None:
    """Carry out a text in the main module, and keep its source as IPython does."""
    text = textwrap.dedent(text).lstrip()
    name = f"<ipython-input-{len(linecache.cache)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec", dont_inherit=True), vars(main))
