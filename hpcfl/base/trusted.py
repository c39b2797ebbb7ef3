"""Code that has run here under this user, by the SHA-256 of its files: a run folder has no other imported.

A digest says which bytes were meant, not who wrote them: a user who trusts the code that a folder names says so once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ASK = "look at it; --trust (trust=True) imports it, now and later"


def known_file() -> Path:
    """Return the file with a line for each digest, and the file that it was of."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "hpcfl" / "code"


def known() -> frozenset[str]:
    """Return the digests of code that has run here; none where that cannot be read."""
    try:
        return frozenset(line.partition(" ")[0] for line in known_file().read_text(errors="replace").splitlines())
    except (OSError, RuntimeError):  # there may be no home
        return frozenset()


def remember(files: Mapping[str, str]) -> str:
    """Add files, ``{digest: file}``, to those that have run here; return why that cannot be, "" if it can."""
    before = known()
    new = {digest: file for digest, file in files.items() if digest not in before}
    if not new:
        return ""
    try:
        path = known_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a", errors="surrogateescape") as out:  # appended, so that two runs do not lose each other's
            out.write("".join(f"{digest}  {' '.join(file.splitlines())}\n" for digest, file in new.items()))
    except (OSError, RuntimeError) as error:
        return f"code cannot be noted as having run here ({error}): what goes on with this run needs --trust"
    return ""
