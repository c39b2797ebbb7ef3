"""A run folder keeps to itself: nothing in it leads out, since it may come from somebody else.

The folder itself may be a link, as to a scratch disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import h5py

from hpcfl.base.errors import UsageError

MAPPED = re.compile(r"metrics/segment-\d+\.h5")
"""What run.h5 maps."""
FOLDERS = ("", "metrics", "checkpoints")
LINK = "is a link: expected what it points at, in its place; only the run folder itself may be one"
_known: set[tuple[str, int, int, int]] = set()  # files, as they are, that keep to themselves


def check_folder(run_dir: Path) -> None:
    """Raise UsageError where a part of a run is a link: it would be read, written or deleted elsewhere."""
    if found := links(run_dir):
        raise UsageError(f"'{run_dir / found[0]}' {LINK}")


def links(run_dir: Path) -> list[str]:
    """Return which parts of a run are links, by their paths in the folder; ``code`` may be one, see `base.trusted`."""
    found = (entry.path for folder in FOLDERS for entry in _entries(run_dir / folder) if entry.is_symlink())
    return sorted({os.path.relpath(path, run_dir) for path in found} - {"code"})


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            for entry in found:
                yield entry
                if folder.name == "checkpoints" and entry.is_dir(follow_symlinks=False):
                    yield from _entries(Path(entry.path))
    except (FileNotFoundError, NotADirectoryError):
        return


def checked(file: h5py.File) -> h5py.File:
    """Return an HDF5 file of a run; UsageError, and closed, where it has numbers of another file than run.h5 maps."""
    path = Path(file.filename)
    about = path.stat()
    version = str(path), about.st_ino, about.st_size, about.st_mtime_ns
    if version not in _known:
        maps = MAPPED if path.name == "run.h5" else None
        if reason := next(_outside(file, maps), ""):
            file.close()
            raise UsageError(f"{path}: {reason}, expected the numbers themselves")
        _known.add(version)
    return file


def _outside(group: h5py.Group, maps: re.Pattern[str] | None) -> Iterator[str]:
    for name in group:
        where = f"{group.name.rstrip('/')}/{name}"
        kind = group.id.links.get_info(name.encode(errors="surrogateescape")).type
        if kind != h5py.h5l.TYPE_HARD:
            yield f"{where} is a link"
            continue
        item = group[name]
        if isinstance(item, h5py.Group):
            yield from _outside(item, maps)
        elif isinstance(item, h5py.Dataset):
            if item.external:
                yield f"{where} is kept in '{item.external[0][0]}'"
            for source in item.virtual_sources() if item.is_virtual else ():
                if maps is None or not maps.fullmatch(source.file_name):
                    yield f"{where} maps '{source.file_name}'"
