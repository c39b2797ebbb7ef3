"""What a run shows in a notebook: a bar below the cell. Jupyter's display needs no widgets for that."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any


def display() -> Any:
    """Return IPython's module ``display`` where this process is the kernel of a notebook, else None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return sys.modules["IPython"].display if hasattr(shell, "kernel") else None


class Bar:
    """A bar of so many `total` rounds, of which some are `done`; it is drawn anew at most ten times a second."""

    def __init__(self, shown: Any, total: int, done: int) -> None:
        self.shown, self.total, self.first = shown, total, done
        self.start, self.drawn = time.monotonic(), 0.0
        self.handle = shown.display(self._html(done, ""), display_id=True)

    def update(self, done: int, text: str) -> None:
        """Say how many rounds are done, with figures of the last test."""
        now = time.monotonic()
        if done == self.total or now > self.drawn + 0.1:
            self.drawn = now
            self.handle.update(self._html(done, text))

    def _html(self, done: int, text: str) -> Any:
        new = done - self.first
        left = (time.monotonic() - self.start) / new * (self.total - done) if new else None
        said = [f"round {done}/{self.total}", text.strip(), "" if left is None else f"{left:.0f} s left"]
        bar = f'<progress value="{done}" max="{self.total}" style="width: 20em"></progress>'
        return self.shown.HTML(f"{bar} {escape(' · '.join(filter(None, said)))}")
