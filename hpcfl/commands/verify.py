"""Whether run folders are as they were written: a line for each, and one for each file that is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.results.run_table import runs_within
from hpcfl.store import Findings, manifest


def verified(folders: Iterable[Path]) -> list[tuple[Path, Findings]]:
    """Look at runs, and at those in folders of runs; UsageError for a folder that is neither."""
    found = []
    for given in folders:
        a_run = (given / manifest.NAME).is_file()  # which may have lost its run.h5
        runs = [given] if a_run else runs_within(given) or [store.run_folder(given)]
        found += [(folder, findings(folder)) for folder in runs]
    return found


def findings(folder: Path) -> Findings:
    """Look at a run; one that has lost both run.h5 and its manifest has nothing that its files can be held against."""
    if any((folder / name).exists() for name in ("run.h5", manifest.NAME)):
        return store.verify(folder)
    return Findings(1, {"run.h5": "it is missing"})


def lines(folder: Path, found: Findings) -> Iterator[str]:
    """Yield what there is to say of a run."""
    if found.damaged:
        yield f"{folder}: {len(found.damaged)} of {found.files} files are damaged"
    else:
        yield f"{folder}: {found.files} files, none is damaged"
    for name, reason in found.damaged.items():
        yield f"{folder / name}: damaged: {reason}"
    for name, reason in found.unchecked.items():
        yield f"{folder / name}: not checked: {reason}"


def as_object(folder: Path, found: Findings) -> Mapping[str, Any]:
    """The same for scripts."""
    state = {"whole": not found.damaged, "files": found.files}
    return {"run": str(folder), **state, "damaged": found.damaged, "unchecked": found.unchecked}
