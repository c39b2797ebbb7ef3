"""One folder has one owner: the process that holds the lock on the file ``lock`` in it, and is named there.

The lock is the operating system's (``flock``) and ends with its process, however that ends: a file that a killed
process has left does not block. Where a file system knows no such locks, the run's status is all there is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from hpcfl.base.errors import TakenOver, UsageError
from hpcfl.store import archive, inside
from hpcfl.store.atomic import SMALL
from hpcfl.store.status import Status, parsed, read_status, signed

FILE = "lock"
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)  # without the right to write this file nobody can go on either
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NAMED_SECONDS = 2.0  # how long an owner may take from the lock to its name in the file
_POLL_SECONDS = 0.01

_held: dict[str, FileIO] = {}


def take(run_dir: Path, force: bool = False) -> None:
    """Make this process the owner of an existing folder, until `release`.

    `force` passes over an owner, or a run that is said to be running, on another host. UsageError if another process
    owns the folder or runs its run, or the file cannot be written.
    """
    inside.check_writable(run_dir)
    try:
        file = _locked(run_dir, force)
        try:
            if other := running(run_dir, force):
                raise UsageError(_refusal(run_dir, other))
            if file is None:
                return
            # written in place, against the rule: a new file would not have the lock; a reader of a half waits
            file.truncate(0)
            file.write(signed("running", "this process owns the folder").encode())
            os.fsync(file.fileno())  # other hosts are to see it
        except BaseException:
            _drop(run_dir, file)
            raise
    except OSError as error:
        raise UsageError(f"'{run_dir / FILE}' cannot be written: {error.strerror}") from None
    _held[os.path.realpath(run_dir)] = file


def release(run_dir: Path) -> None:
    """Give a folder back and remove the file; does nothing where this process does not own the folder."""
    file = _held.pop(os.path.realpath(run_dir), None)
    if file is not None:
        _remove(run_dir, file)
        file.close()


def discard(run_dir: Path, kept: Collection[str] = ()) -> None:
    """Remove a run from a folder that this process owns; what else lies there, and what is `kept` by name, stays.

    OSError where that cannot be.
    """
    given = {each.name for pattern in inside.GIVEN for each in run_dir.glob(pattern)} - {*kept}
    for name in ("run.h5", "metrics", "checkpoints", "code", *inside.WRITTEN, *given):
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif name != FILE:
            path.unlink(missing_ok=True)


def check_owner(run_dir: Path) -> None:
    """Raise TakenOver where another process has taken over what this one owns, by `force`.

    Where the file system knows no locks, or the file has been removed, nothing tells that.
    """
    file = _held.get(os.path.realpath(run_dir))
    if file is not None and (run_dir / FILE).exists() and not _is_there(run_dir, file):
        other = parsed((run_dir / FILE).read_text(errors="replace"))
        raise TakenOver(f"'{run_dir}' was taken over by process {other.pid} on {other.host}: this run writes no more")


@contextmanager
def owned(run_dir: Path, force: bool = False) -> Iterator[None]:
    """Own a folder within the block, as `take` and `release` do, or go on owning it."""
    if os.path.realpath(run_dir) in _held:
        yield
        return
    take(run_dir, force)
    try:
        yield
    finally:
        release(run_dir)


def running(run_dir: Path, force: bool = False) -> Status | None:
    """Return the status of a run that another process is running for all that it says, None where none is.

    It counts although the lock is free: locks may not reach from host to host. `force` passes over another host's.
    """
    status = read_status(run_dir)
    own = status.here and status.pid == os.getpid()
    return status if status.state == "running" and not own and (status.here or not force) else None


def _locked(run_dir: Path, force: bool) -> FileIO | None:
    """Return the file with the lock on it, None where there can be no lock."""
    archive.check_folder(run_dir)
    until = time.monotonic() + _NAMED_SECONDS
    while True:
        try:
            file = FileIO(run_dir / FILE, "a+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
        except OSError as error:
            if error.errno in _NOT_OURS:
                return None
            raise
        with ExitStack() as closing:
            closing.callback(file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = parsed(_text(file))
                named = owner.state == "running"  # else nobody yet, or one that is dead: the owner has not signed yet
                if named and force and not owner.here:
                    _remove(run_dir, file)
                elif named or time.monotonic() > until:
                    raise UsageError(_refusal(run_dir, owner)) from None
                else:
                    time.sleep(_POLL_SECONDS)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _drop(run_dir, file)
                return None
            if _is_there(run_dir, file):  # else its owner has removed it just now
                closing.pop_all()
                return file


def _refusal(run_dir: Path, owner: Status) -> str:
    who = f"on {owner.host} (pid {owner.pid})" if owner.pid else "in a process that has not given its name"
    hint = f"hpcfl stop {run_dir} ends it" if owner.here else "if no process holds it any more, repeat with --force"
    return f"'{run_dir}' is running {who}; {hint}"


def _text(file: FileIO) -> str:
    file.seek(0)
    return file.read(SMALL).decode(errors="replace")


def _is_there(run_dir: Path, file: FileIO) -> bool:
    """True where the open file is the one that others find in the folder."""
    with suppress(OSError):  # also that the folder is gone
        return os.path.samestat(os.fstat(file.fileno()), (run_dir / FILE).stat())
    return False


def _remove(run_dir: Path, file: FileIO) -> None:
    if _is_there(run_dir, file):
        (run_dir / FILE).unlink(missing_ok=True)


def _drop(run_dir: Path, file: FileIO | None) -> None:
    """Close a file that this process has not signed; remove it unless it names somebody."""
    if file is not None:
        if not _text(file):
            _remove(run_dir, file)
        file.close()
