"""Whether all that a run folder holds is as it was written: every byte is read, and what is damaged is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError, UsageError
from hpcfl.store import live, manifest
from hpcfl.store.checkpoints import saved
from hpcfl.store.integrity import damage, one_line
from hpcfl.store.reading import (
    counts,
    is_closed,
    loss,
    read_events,
    read_part,
    run_attributes,
    segment_paths,
)
from hpcfl.store.status import STATES

NO_DIGEST = "it has no digest, so it was only read"


@dataclass
class Findings:
    """How many files were looked at, and why which are damaged or cannot be checked; by path within the folder."""

    files: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)


def verify(run_dir: Path) -> Findings:
    """Read all of a run folder, in whatever state the run is, and say what is not as it was written.

    Checked are the manifest, run.h5, segments, checkpoints and the word that the status begins with. A run may be going
    on meanwhile. UsageError where this is no run folder.
    """
    if not (run_dir / "run.h5").exists() and not (run_dir / manifest.NAME).exists():
        raise UsageError(f"'{run_dir}' is no run folder: {run_dir / 'run.h5'} does not exist")
    found = Findings()
    known = _manifest(run_dir, found)
    names = _table(run_dir, known, found)
    for name in sorted({*names, *(f"metrics/{path.name}" for path in (run_dir / "metrics").glob("segment-[0-9]*.h5"))}):
        _segment(run_dir, name, known, found)
    _lost(run_dir, found)
    for path in saved(run_dir):
        _checkpoint(path, found)
    _status(run_dir, found)
    return found


def _manifest(run_dir: Path, found: Findings) -> Mapping[str, Any] | None:
    """Return what the manifest lists, None where there is none that is whole."""
    if not (run_dir / manifest.NAME).exists():
        return None
    found.files += 1
    try:
        return manifest.read(run_dir)
    except RunError as error:
        found.damaged[manifest.NAME] = str(error).partition(" is damaged: ")[2] or str(error)
        return None


def _table(run_dir: Path, known: Mapping[str, Any] | None, found: Findings) -> Iterable[str]:
    """Look at run.h5; return the segments that must be there by what it and the manifest say."""
    found.files += 1
    names = {name for name in known or () if name.startswith("metrics/")}
    reason = manifest.damage_of(run_dir, "run.h5") if known is not None else ""
    try:
        attributes = {} if reason else run_attributes(run_dir)
    except Exception as error:  # h5py raises almost anything on a damaged file, where there is no digest
        reason = one_line(error)
    if reason:
        found.damaged["run.h5"] = reason
        return names
    if known is None:
        found.unchecked["run.h5"] = NO_DIGEST
        if "manifest" in attributes and manifest.NAME not in found.damaged:
            found.damaged[manifest.NAME] = "it is missing"
    return names | {f"metrics/{name}" for name in json.loads(attributes["segments"])}


def _segment(run_dir: Path, name: str, known: Mapping[str, Any] | None, found: Findings) -> None:
    found.files += 1
    path = run_dir / name
    try:
        with path.open("rb", buffering=0) as raw:
            if raw.read(len(live.MAGIC)) == live.MAGIC:
                reason = live.damage(raw)
            elif name in (known or {}):
                reason = manifest.damage_of(run_dir, name)
            else:
                reason = _of_earlier_version(path)
                found.unchecked |= {} if reason else {name: NO_DIGEST}
    except FileNotFoundError:
        reason = "it is missing"
    except (OSError, RunError) as error:
        reason = one_line(error)
    found.damaged |= {name: reason} if reason else {}


def _of_earlier_version(path: Path) -> str:
    """Return why a segment without digest cannot be read, "" where it can."""
    if not is_closed(path):
        return "it does not begin as a segment does"
    try:
        read_part(path, with_data=True)
        read_events(path)
    except Exception as error:  # h5py raises almost anything on a damaged file
        return one_line(error)
    return ""


def _lost(run_dir: Path, found: Findings) -> None:
    """Name what a segment had lost before it was sealed, where all else is well and nothing later makes up for it."""
    if found.damaged:
        return
    for part, rows in counts([read_part(path) for path in segment_paths(run_dir)]):
        if part.layout is None and (what := loss(part, rows)):
            found.damaged[f"metrics/{part.path.name}"] = f"{what}, since before it was sealed"


def _checkpoint(path: Path, found: Findings) -> None:
    reason = damage(path)
    if reason and not os.path.lexists(path):  # the run goes on and has removed it
        return
    found.files += 1
    name = f"checkpoints/{path.name}"
    if reason:
        found.damaged[name] = reason
    elif path.is_file() and is_closed(path):
        found.unchecked[name] = NO_DIGEST


def _status(run_dir: Path, found: Findings) -> None:
    if (run_dir / "status").exists():
        found.files += 1
        word = (run_dir / "status").read_bytes().partition(b"\n")[0].decode(errors="replace").strip()
        if word not in STATES:
            found.damaged["status"] = f"it begins with '{word}'; expected one of {', '.join(STATES)}"
