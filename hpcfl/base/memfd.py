"""Memory without a name that processes of one host share: nothing is left behind however they end.

Others of the same user find it among the open files of the process that made it, for as long as that keeps it open;
what they have mapped stays. No limit of ``/dev/shm`` counts.
"""

from __future__ import annotations

import os
import secrets

from hpcfl.base.errors import RunError

START = 32
"""Where the contents begin; before them stands what tells this memory from any other."""


def created(size: int) -> tuple[int, str]:
    """Return a new file in memory of so many bytes, zeros from `START` on, and the words by which others open it.

    OSError where there is too little memory, AttributeError where the system has none of this kind.
    """
    nonce = secrets.token_hex(START // 2)
    file = os.memfd_create("hpcfl")
    try:
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, nonce.encode(), 0)
    except OSError:
        os.close(file)
        raise
    return file, f"{os.getpid()} {file} {nonce}"


def opened(words: str) -> int:
    """Return the file that a process has `created`.

    Raises
    ------
    RunError
        If it cannot be reached: the process has ended, or runs in a container of its own, or as another user.
    """
    process, number, nonce = words.split()
    try:
        file = os.open(f"/proc/{process}/fd/{number}", os.O_NONBLOCK)  # to read; a number given anew may be a pipe's
    except OSError as error:
        raise RunError(f"memory of process {process} cannot be opened: {error.strerror}") from None
    try:
        there = os.pread(file, START, 0)
    except OSError:
        there = b""
    if there != nonce.encode():
        os.close(file)
        raise RunError(f"memory of process {process} is not what it was said to be")
    return file
