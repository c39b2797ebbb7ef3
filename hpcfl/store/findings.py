"""Whether all that a run folder holds is as it was written: every byte is read, and what is damaged is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfl.base.digests import changed, copy_of
from hpcfl.base.errors import RunError, UsageError, UserError
from hpcfl.store import growing_file, manifest, reading, status
from hpcfl.store.atomic import number_of, numbered, read_text
from hpcfl.store.attributes import FormatError
from hpcfl.store.checkpoints import damage, lacking, saved
from hpcfl.store.inside import LINK, links, one_line

INITIAL = "model.initial"
NO_DIGEST = "it has no digest, so it was only read"


@dataclass
class Findings:
    """How many files were looked at, and why which are damaged or cannot be checked; by path within the folder."""

    files: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, reason: str) -> None:
        """Count a file of which `reason` is what is wrong, "" where nothing is."""
        self.files += 1
        if reason:
            self.damaged[name] = reason


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
    found, known = Findings(), None
    if (run_dir / manifest.NAME).exists():
        try:
            known, reason = manifest.read(run_dir), ""
        except RunError as error:
            reason = str(error).partition(" is damaged: ")[2] or str(error)
        found.note(manifest.NAME, reason)
    try:
        names = _table(run_dir, known, found)
    except FormatError as error:  # what its other files should be is not known
        return Findings(1, {"run.h5": str(error)})
    for name in sorted({*names, *(f"metrics/{path.name}" for path in there)}):
        _segment(run_dir, name, known or {}, found)
    if os.path.lexists(run_dir / "status"):
        try:
            reason = status.damage(read_text(run_dir / "status"))
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        found.note("status", reason)
    for path in saved(run_dir):
        reason = damage(path)
        if not reason or os.path.lexists(path):  # else the run goes on and has removed it
            found.note(f"checkpoints/{path.name}", reason)
    try:
        if "run.h5" not in found.damaged:
            _lacking(run_dir, found)
    except UserError as error:  # what is said to be there cannot be
        found.damaged.setdefault("run.h5", str(error))
    return found


def _table(run_dir: Path, known: Mapping[str, Any] | None, found: Findings) -> Iterable[str]:
    """Look at run.h5; return the segments that must be there by what it and the manifest say."""
    names = {name for name in known or () if name.startswith("metrics/")}
    reason = manifest.damage_of(run_dir, "run.h5") if known is not None else ""
    try:
        attributes = {} if reason else reading.run_attributes(run_dir)
    except FormatError:
        raise
    except Exception as error:  # h5py raises almost anything on a damaged file, where there is no digest
        reason = one_line(error)
    found.note("run.h5", reason)
    if reason:
        return names
    began = json.loads(attributes.get("files", "{}")).get(INITIAL)
    if began and json.loads(attributes.get("tensors", "{}")).get("frozen"):
        copy = copy_of(INITIAL, began)
        found.note(copy, changed(INITIAL, began, "it is missing", run_dir / copy))
    if known is None:
        found.unchecked["run.h5"] = NO_DIGEST
        found.damaged.setdefault(manifest.NAME, "it is missing")
    return names | {f"metrics/{name}" for name in json.loads(attributes["segments"])}


def _segment(run_dir: Path, name: str, known: Mapping[str, Any], found: Findings) -> None:
    path, reason = run_dir / name, ""
    try:
        with reading.opened_segment(path) as (file, layout):
            if layout is not None:
                reason = growing_file.damage(file)
            elif name not in known:
                reading.read_part(path, with_data=True)
                reading.read_events(path)
                found.unchecked[name] = NO_DIGEST
    except FileNotFoundError:
        reason = "it is missing"
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    except UserError as error:
        reason = one_line(error)
    found.note(name, reason)


def _lacking(run_dir: Path, found: Findings) -> None:
    """Name what is not there though it has been done, or was lost before a segment was sealed."""
    known = done, checkpoints = reading.promises(run_dir)
    try:
        parts = [reading.read_part(path) for path in reading.segment_paths(run_dir)]
    except RunError:  # a segment is missing, and named already
        return
    if reason := reading.other_clients(parts, reading.read_facts(run_dir)):
        found.damaged.setdefault("run.h5", reason)
    for part, rows in reading.counts(parts, reading.reached(known, parts)):
        if what := reading.loss(part, rows):
            since = "though they were done" if part.layout else "since before it was sealed"
            found.damaged.setdefault(f"metrics/{part.path.name}", f"{what}, {since}")
    missing = []
    if checkpoints and f"checkpoints/{checkpoints[-1].name}" not in found.damaged:
        missing = lacking(checkpoints[-1])
    if done and parts and parts[-1].total not in {number_of(path) for path in checkpoints}:
        missing.append(f"round-{parts[-1].total:06d}")
    found.damaged |= {f"checkpoints/{name}": "it is missing" for name in missing}
