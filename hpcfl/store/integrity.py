"""Whether a checkpoint is whole: its manifest has the digest of every file, and it is of its run and round."""

from __future__ import annotations

from pathlib import Path

from hpcfl.store import manifest
from hpcfl.store.atomic import number_of, numbered
from hpcfl.store.columns import whole
from hpcfl.store.inside import opened

SERVER = "server.h5"  # of a checkpoint: what the server holds
RUN = "run_id"


def damage(path: Path) -> str:
    """Return why a checkpoint cannot be read whole, "" where it can.

    Every byte is read; memory stays within a few MiB.
    """
    try:
        if SERVER not in manifest.read(path):
            return f"{path / manifest.NAME} lists no {SERVER}"
        reasons = [f"{name}: {reason}" for name, reason in manifest.damage(path).items()]
        return "; ".join(reasons) or _stranger(path)
    except Exception as error:  # h5py raises almost anything on a damaged file
        return one_line(error)


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
