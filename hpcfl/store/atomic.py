"""Files that are either there whole or not there: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

PREFIX = ".tmp-"
SMALL = 1 << 26  # bytes: no file that is read at once is larger
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # what some network file systems answer where a folder is meant
_kept_open: list[object] = []


def keep_open(thing: object) -> None:
    """Hold a file, or what holds it, to the end of the process: HDF5 crashes when it closes one the disk refuses."""
    _kept_open.append(thing)


def temporary(path: Path) -> Path:
    """The name beside `path` under which its next version is written: every process has its own."""
    return path.with_name(f"{PREFIX}{os.getpid()}-{path.name}")


@contextlib.contextmanager
def replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file that the block writes and closes there becomes `path` at one stroke.

    OSError if it cannot be written; the temporary file is gone then, and `path` as it was before.
    """
    new = temporary(path)
    try:
        yield new
        sync(new)
        new.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(new)):
            error.filename = str(path)
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_folder(path.parent)


class _Sink(io.FileIO):
    """A file to which every write succeeds, as far as HDF5 can tell: it crashes where one fails.

    Nothing is written after the first failure, which is kept in `error`.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and self.error is None:
            try:
                done += super().write(view[done:])
            except OSError as error:
                error.filename = self.name
                self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size) if self.error is None else self.tell()
        except OSError as error:
            error.filename = self.name
            self.error = error
            return self.tell()


@contextlib.contextmanager
def created(path: Path, **options: Any) -> Iterator[h5py.File]:
    """Yield a new HDF5 file, which is closed after the block; OSError if the disk refuses any of it."""
    with _Sink(str(path), "w+") as sink:
        try:
            with h5py.File(sink, "w", **options) as file:
                yield file
        except Exception:
            if sink.error is not None:  # what HDF5 makes of it is no news
                raise sink.error from None
            raise
        if sink.error is not None:
            raise sink.error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say of an OSError in the block that it is this path's."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    with replace(path) as new:
        new.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """Return a text that was written at once, damage and all; OSError where there can be none, see `check_regular`."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(SMALL + 1)
    if len(content) > SMALL:
        raise OSError(errno.EFBIG, f"it has more than {SMALL} bytes", str(path))
    return content.decode("utf-8", errors="replace")


def check_regular(path: Path) -> None:
    """Raise OSError for a folder, a pipe or a device: opening one may take for ever, and reading it all memory."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def sync(path: Path) -> None:
    """Wait until the content of `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, where the file system can say so of a folder."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def numbered(folder: Path, stem: str, suffix: str) -> list[Path]:
    """The files ``stem-<number>`` of a folder with a suffix by rising number, whatever its digits."""
    found = [path for path in folder.glob(f"{stem}-*") if re.fullmatch(f"{stem}-[0-9]+{re.escape(suffix)}", path.name)]
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def clean(folder: Path) -> None:
    """Remove the temporary files and folders that a killed process left in `folder`."""
    for stale in folder.glob(f"{PREFIX}*"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)
