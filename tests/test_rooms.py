"""The rooms of the package, and which way imports run between them, those for types alone included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpcfl

PACKAGE = Path(hpcfl.__file__).parent
ORDER = (
    *("__main__", "cli", "commands", "launch", "engine", "config", "presets", "algorithms"),
    *("learning", "models", "schedule", "store", "comm", "data", "math", "base"),
)
"""A room imports from those to its right alone."""
APART = {
    "learning": {"schedule"},
    "models": {"schedule"},
    "store": {"comm", "data", "math"},
    "comm": {"data", "math"},
}


def imported(path: Path) -> Iterator[str]:
    """Yield the rooms that a module imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "hpcfl":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpcfl."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hpcfl."))


def test_imports_run_one_way() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for to in set(imported(path)) - {room} if room != "__init__" else ():
            if ORDER.index(to) < ORDER.index(room) or to in APART.get(room, ()):
                wrong.append(f"{path.relative_to(PACKAGE)} imports from {to}")
    assert not wrong


def test_a_newcomer_finds_few_rooms() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__", *ORDER}
    assert len(entries) <= 18
