"""Whether a checkpoint is whole.

A folder has a manifest with the digest of every file. A single file, as earlier versions wrote it, begins with a line
that holds the digest of every byte behind it: the line lies in what HDF5 calls the user block, which its readers skip.
Files that were written before there was one begin with HDF5's own signature: all that is in them is read instead.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import h5py

from hpcfl.store import manifest
from hpcfl.store.atomic import check_regular, number_of, numbered
from hpcfl.store.columns import whole
from hpcfl.store.inside import opened

SERVER = "server.h5"  # of a folder: what the server holds
RUN = "run_id"
USER_BLOCK = 512  # bytes; the smallest that HDF5 knows
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_PIECE = 1 << 20


def damage(path: Path) -> str:
    """Return why a checkpoint, a folder or a file, cannot be read whole, "" where it can.

    Every byte is read; memory stays within a few MiB.
    """
    try:
        if not path.suffix:
            if SERVER not in manifest.read(path):
                return f"{path / manifest.NAME} lists no {SERVER}"
            reasons = [f"{name}: {reason}" for name, reason in manifest.damage(path).items()]
            return "; ".join(reasons) or _stranger(path)
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(USER_BLOCK)
            if not head.startswith(_SIGNATURE):
                return "" if head == user_block(file) else "its bytes are not those that were written"
        most = path.stat().st_size
        with opened(path) as old:
            whole(old, "round")
            dict(old.attrs)
            old.visititems(lambda _, item: _read(item, most))
    except Exception as error:  # h5py raises almost anything on a damaged file
        return one_line(error)
    return ""


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


def _stranger(path: Path) -> str:
    """Return that a checkpoint that is whole is of another run or round than its place says."""
    with opened(path / SERVER) as file:
        round_, run = whole(file, "round"), str(file.attrs.get(RUN, ""))
    if path in numbered(path.parent, "round", "") and round_ != number_of(path):
        return f"it is the state after round {round_}"
    return of_another(run, path.parents[1])


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def user_block(file: BinaryIO) -> bytes:
    """Return the user block that belongs to what lies behind it."""
    sha256, size = hashlib.sha256(), 0
    file.seek(USER_BLOCK)
    while piece := file.read(_PIECE):
        sha256.update(piece)
        size += len(piece)
    line = f"hpcfl checkpoint: {USER_BLOCK} bytes, then {size} bytes of HDF5 with sha256 {sha256.hexdigest()}\n"
    return line.encode().ljust(USER_BLOCK, b"\0")


def _read(item: Any, most: int) -> None:
    """Read one object, piece by piece; nothing is compressed, so a dataset is no larger than its file."""
    dict(item.attrs)
    if not isinstance(item, h5py.Dataset) or not item.size:
        return
    if item.nbytes > most:
        raise ValueError(f"{item.name} claims {item.nbytes} bytes of a file of {most}")
    if not item.shape:
        item[()]
        return
    rows = max(1, _PIECE * len(item) // item.nbytes)
    for start in range(0, len(item), rows):
        item[start : start + rows]
