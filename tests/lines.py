"""``python tests/lines.py``: the package's lines of code by room, against ``lines.json``; 1 where a room has more.

Blank lines, comments and docstrings do not count. Who needs more raises the number in the commit that does, and says
why; who needs less lowers it.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hpcfl"
CEILINGS = Path(__file__).with_suffix(".json")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def lines_of_code(source: str) -> int:
    """Return how many lines hold code, those within a statement included."""
    docs = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docs)


def rooms(package: Path = PACKAGE) -> Counter[str]:
    """Return the lines of code of each room, by its name; a module beside them is one too."""
    found = Counter[str]()
    for path in package.rglob("*.py"):
        found[path.relative_to(package).parts[0].removesuffix(".py")] += lines_of_code(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Print the table."""
    found, most = rooms(), json.loads(CEILINGS.read_text(encoding="utf-8"))
    for room, lines in sorted(found.items(), key=lambda each: -each[1]):
        more = lines - most.get(room, 0)
        print(f"{room:12} {lines:6} of {most.get(room, 0):6}" + (f"   {more} too many" if more > 0 else ""))
    print(f"{'all':12} {found.total():6} of {sum(most.values()):6}")
    return int(any(lines > most.get(room, 0) for room, lines in found.items()))


if __name__ == "__main__":
    sys.exit(main())
