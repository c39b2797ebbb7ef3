"""The files of a data source: where they lie in the data folder, and whether those of lines are whole."""

from __future__ import annotations

import os
from pathlib import Path

from hpcfl.base.errors import UsageError


def check_last_line(path: Path) -> None:
    """Raise UsageError where a file of lines breaks off within one; OSError where it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if size and file.read(1) != b"\n":
            raise UsageError(f"{path}: truncated: its last line is not complete; expected a line break at its end")


def folder(source: str, data_dir: Path | None, *names: str) -> Path:
    """Return the first of the folders `names` that is there in the data folder.

    Raises
    ------
    UsageError
        If no data folder is named, or if it has none of them.
    """
    wanted = " or ".join(f"{name}/" for name in names)
    if data_dir is None:
        raise UsageError(f"data.name = '{source}': --data-dir or HPCFL_DATA must name the folder of {wanted}")
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    raise UsageError(f"data.name = '{source}': {data_dir} has no folder {wanted}")
