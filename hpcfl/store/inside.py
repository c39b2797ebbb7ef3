"""A run folder keeps to itself: nothing in it leads out, since it may come from somebody else.

The folder itself may be a link, as to a scratch disk. Nor does an HDF5 file in it claim more than it has, or hold
groups in a circle: what walks through it, or reads it, comes to an end.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import h5py

from hpcfl.base.errors import LINE, UsageError, cut
from hpcfl.base.terminal import say
from hpcfl.store.atomic import SMALL, check_regular

MAPPED = re.compile(r"metrics/segment-\d+\.h5")
"""What run.h5 maps."""
FOLDERS = ("", "metrics", "checkpoints")
WRITTEN = ("run.h5", "status", "manifest.json", "lock", "stop", "error.txt")
"""What lies in a run folder itself and is replaced while a run goes on."""
GIVEN = (f"data-{'[0-9a-f]' * 8}.h5", f"speeds-{'[0-9a-f]' * 8}.csv", f"initial-{'[0-9a-f]' * 8}*")
"""Patterns of what a script gave to a run, or a model began with, and the folder keeps."""
RATIO = 1032
"""How many bytes one byte can stand for: deflate makes no more of it."""
LINK = "is a link: expected what it points at, in its place; only the run folder itself may be one"
RUN = "run_id"
DEEPEST = 5
"""Names on the way to a dataset, at most."""
_known: set[tuple[str, int, int, int]] = set()  # files, as they are, that keep to themselves
told: set[str] = set()


def tell(line: str, again: bool = False) -> None:
    """Warn of damage, of each once in a process, or `again`."""
    line = cut(line, LINE)
    if again or line not in told:
        told.add(line)
        say(line)


def check_folder(run_dir: Path) -> None:
    """Raise UsageError where a part of a run is a link: it would be read, written or deleted elsewhere."""
    if found := links(run_dir):
        raise UsageError(f"'{run_dir / found[0]}' {LINK}")


def links(run_dir: Path) -> list[str]:
    """Return which parts of a run are links, by their paths in the folder; ``code`` may be one, see `base.loaded`."""
    found = (entry.path for folder in FOLDERS for entry in _entries(run_dir / folder) if entry.is_symlink())
    return sorted({os.path.relpath(path, run_dir) for path in found} - {"code"})


def check_writable(run_dir: Path) -> None:
    """Raise UsageError where something else is in the place of a file or folder that a run that goes on writes."""
    for names, test, kind in ((WRITTEN, stat.S_ISREG, "file"), (FOLDERS, stat.S_ISDIR, "folder")):
        for name in names:
            with suppress(FileNotFoundError):
                mode = (run_dir / name).stat().st_mode
                if not test(mode):
                    what = "Is a directory" if stat.S_ISDIR(mode) else f"it is no {kind}"
                    raise UsageError(f"'{run_dir / name}' cannot be written: {what}; expected a {kind}, or nothing")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            for entry in found:
                yield entry
                if folder.name == "checkpoints" and entry.is_dir(follow_symlinks=False):
                    yield from _entries(Path(entry.path))
    except (FileNotFoundError, NotADirectoryError):
        return


def opened(path: Path) -> h5py.File:
    """Open an HDF5 file of a run to be read.

    Raises
    ------
    UsageError
        If it has numbers of another file than run.h5 maps, or claims more than it can have.
    OSError
        If it cannot be opened.
    """
    check_regular(path)
    file = h5py.File(path, "r")
    about = path.stat()
    version = str(path), about.st_ino, about.st_size, about.st_mtime_ns
    if version not in _known:
        maps = MAPPED if path.name == "run.h5" else None
        if reason := next(_strange(file, maps, about.st_size), ""):
            file.close()
            raise UsageError(f"{path}: {reason}, expected the numbers themselves")
        _known.add(version)
    return file


def run_of(run_dir: Path) -> str:
    """Return what a run calls itself since it began, "" where that is not known."""
    try:
        with opened(run_dir / "run.h5") as file:
            return str(file.attrs.get(RUN, ""))
    except Exception:  # h5py raises almost anything on a damaged file
        return ""


def of_another(run: str, run_dir: Path) -> str:
    """Return that a file of this `run` is of another one than the folder, "" where it is not, or that is not known."""
    own = run_of(run_dir) if run else ""
    return f"it belongs to another run ({run[:8]}…, not {own[:8]}…)" if own and own != run else ""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _strange(file: h5py.File, maps: re.Pattern[str] | None, size: int) -> Iterator[str]:
    groups, claimed = [("", file["/"])], 0
    while groups:
        above, group = groups.pop()
        for name in group:
            where = f"{above}/{name}"
            if where.count("/") > DEEPEST:
                yield f"{where} lies deeper than anything of ours"
            kind = group.id.links.get_info(name.encode(errors="surrogateescape")).type
            if kind != h5py.h5l.TYPE_HARD:
                yield f"{where} is a link"
                continue
            item = group[name]
            if h5py.h5o.get_info(item.id).rc > 1:
                yield f"{where} has several names"
            if isinstance(item, h5py.Group):
                groups.append((where, item))
            elif isinstance(item, h5py.Dataset):
                if item.external:
                    yield f"{where} is kept in '{item.external[0][0]}'"
                for source in item.virtual_sources() if item.is_virtual else ():
                    if maps is None or not maps.fullmatch(source.file_name):
                        yield f"{where} maps '{source.file_name}'"
                claimed += 0 if item.is_virtual else math.prod(item.shape or ()) * item.dtype.itemsize
                if claimed > max(SMALL, RATIO * size):
                    yield f"{where} claims the shape {item.shape} in a file of {size} bytes"
