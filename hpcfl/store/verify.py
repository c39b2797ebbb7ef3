"""Whether all that a run folder holds is as it was written: every byte is read, and what is damaged is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError, UsageError, UserError
from hpcfl.store import growing_file, manifest, status
from hpcfl.store.atomic import check_regular, number_of, numbered, read_text
from hpcfl.store.attributes import FormatError
from hpcfl.store.checkpoints import lacking, saved
from hpcfl.store.inside import LINK, links
from hpcfl.store.integrity import damage, of_another, one_line
from hpcfl.store.reading import (
    counts,
    is_closed,
    loss,
    other_clients,
    promises,
    reached,
    read_events,
    read_facts,
    read_part,
    run_attributes,
    segment_paths,
)

NO_DIGEST = "it has no digest, so it was only read"


@dataclass
class Findings:
    """How many files were looked at, and why which are damaged or cannot be checked; by path within the folder."""

    files: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)


def verify(run_dir: Path) -> Findings:
    """Read all of a run folder, in whatever state the run is, and say what is not as it was written.

    Checked are the manifest, run.h5, segments, checkpoints and the status; and that what must be there is. Where one is
    a link, that is all that is said. A run may be going on meanwhile. UsageError where this is no run folder.
    """
    there = numbered(run_dir / "metrics", "segment", ".h5")
    begun = there or saved(run_dir) or os.path.lexists(run_dir / "status")
    if not os.path.lexists(run_dir / "run.h5") and not (begun and (run_dir / manifest.NAME).exists()):
        raise UsageError(f"'{run_dir}' is no run folder: {run_dir / 'run.h5'} does not exist")
    if linked := links(run_dir):
        return Findings(len(linked), dict.fromkeys(linked, f"it {LINK}"))
    found = Findings()
    known = _manifest(run_dir, found)
    try:
        names = _table(run_dir, known, found)
    except FormatError as error:  # what its other files should be is not known
        return Findings(1, {"run.h5": str(error)})
    for name in sorted({*names, *(f"metrics/{path.name}" for path in there)}):
        _segment(run_dir, name, known, found)
    _status(run_dir, found)
    for path in saved(run_dir):
        _checkpoint(path, found)
    try:
        _lacking(run_dir, found)
    except UserError as error:  # what is said to be there cannot be
        found.damaged.setdefault("run.h5", str(error))
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
    except FormatError:
        raise
    except Exception as error:  # h5py raises almost anything on a damaged file, where there is no digest
        reason = one_line(error)
    if reason:
        found.damaged["run.h5"] = reason
        return names
    if known is None:
        found.unchecked["run.h5"] = NO_DIGEST
        found.damaged.setdefault(manifest.NAME, "it is missing")
    return names | {f"metrics/{name}" for name in json.loads(attributes["segments"])}


def _segment(run_dir: Path, name: str, known: Mapping[str, Any] | None, found: Findings) -> None:
    found.files += 1
    path = run_dir / name
    try:
        check_regular(path)
        with path.open("rb", buffering=0) as raw:
            if raw.read(len(growing_file.MAGIC)) == growing_file.MAGIC:
                reason = growing_file.damage(raw) or of_another(growing_file.read_layout(raw).run, run_dir)
            elif name in (known or {}):
                reason = manifest.damage_of(run_dir, name)
            else:
                reason = _unreadable(path)
                found.unchecked |= {} if reason else {name: NO_DIGEST}
    except FileNotFoundError:
        reason = "it is missing"
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    except RunError as error:
        reason = str(error)
    found.damaged |= {name: reason} if reason else {}


def _unreadable(path: Path) -> str:
    """Return why a segment without digest cannot be read, "" where it can."""
    if not is_closed(path):
        return "it does not begin as a segment does"
    try:
        read_part(path, with_data=True)
        read_events(path)
    except Exception as error:  # h5py raises almost anything on a damaged file
        return one_line(error)
    return ""


def _lacking(run_dir: Path, found: Findings) -> None:
    """Name what is not there though it has been done, or was lost before a segment was sealed."""
    if "run.h5" in found.damaged:
        return
    known = done, checkpoints = promises(run_dir)
    try:
        parts = [read_part(path) for path in segment_paths(run_dir)]
    except RunError:  # a segment is missing, and named already
        return
    if reason := other_clients(parts, read_facts(run_dir)):
        found.damaged.setdefault("run.h5", reason)
    for part, rows in counts(parts, reached(known, parts)):
        name, what = f"metrics/{part.path.name}", loss(part, rows)
        if what and name not in found.damaged:
            found.damaged[name] = (
                f"{what}, though they were done" if part.layout else f"{what}, since before it was sealed"
            )
    missing = []
    if checkpoints and f"checkpoints/{checkpoints[-1].name}" not in found.damaged:
        missing = lacking(checkpoints[-1])
    if done and parts and parts[-1].total not in {number_of(path) for path in checkpoints}:
        missing.append(f"round-{parts[-1].total:06d}")
    for name in missing:
        found.damaged[f"checkpoints/{name}"] = "it is missing"


def _checkpoint(path: Path, found: Findings) -> None:
    reason = damage(path)
    if reason and not os.path.lexists(path):  # the run goes on and has removed it
        return
    found.files += 1
    if reason:
        found.damaged[f"checkpoints/{path.name}"] = reason


def _status(run_dir: Path, found: Findings) -> None:
    if not os.path.lexists(run_dir / "status"):
        return
    found.files += 1
    try:
        reason = status.damage(read_text(run_dir / "status"))
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    if reason:
        found.damaged["status"] = reason
