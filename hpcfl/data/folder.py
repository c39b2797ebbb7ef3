"""Where the files of a data source lie: in a folder of its own in the data folder."""

from __future__ import annotations

from pathlib import Path

from hpcfl.errors import UsageError


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
