"""Files that a run depends on: what it records of them, and whether they are still what it was given."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

PIECE = 1 << 20


def is_file(path: Path) -> bool:
    """Return whether there is such a file; no name is too long, or too strange, to ask."""
    return os.path.isfile(path)  # noqa: PTH113  # which raises nothing


def origin(file: Path) -> dict[str, str]:
    """Return what a run records of a file: ``{"file": …, "sha256": …}``."""
    return {"file": str(file), "sha256": digest(file)}


def copy_of(key: str, recorded: Mapping[str, str]) -> str:
    """Return the name of the copy that a run folder may keep of a file that the run has recorded under a key."""
    return f"{key.rpartition('.')[2]}-{recorded['sha256'][:8]}{Path(recorded['file']).suffix}"


def kept(folder: Path, key: str, recorded: Mapping[str, str]) -> Path:
    """Return where a run folder keeps a file that the run has recorded under a key, if it does."""
    copy = folder / copy_of(key, recorded)
    return copy if is_file(copy) else folder / Path(recorded["file"]).name


def changed(what: str, recorded: Mapping[str, str], instead: str, now: Path | None = None) -> str:
    """Return in one line that the file in which a run found `what` has changed or is gone, "" where it has not.

    `now` is where it is to be, by default where it was; where it is gone the line says what to do `instead`.
    """
    file = Path(recorded["file"])
    now = now or file
    if not is_file(now):
        return f"'{file}', where the run found {what}, is not there; {instead}"
    if digest(now) == recorded["sha256"]:
        return ""
    where = "there" if now == file else f"in '{file}'"
    line = f"'{now}' has changed since the run began, which found {what} {where}"
    then = f"expected the file of then (SHA-256 {recorded['sha256'][:12]}…)"
    return f"{line}: {then}; --force (force=True) goes on with it as it is"


def digest(file: Path) -> str:
    """Return the SHA-256 of a file's bytes; OSError where it cannot be read."""
    sha256 = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            sha256.update(piece)
    return sha256.hexdigest()
