"""What a folder holds: size and SHA-256 of each of its files in ``manifest.json``, which is written last.

A manifest has a digest of itself too, so that damage to it is told from damage to the files that it lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError
from hpcfl.store.atomic import write_text

NAME = "manifest.json"
_PIECE = 1 << 20


def write(folder: Path, files: Iterable[str]) -> None:
    """Write the manifest of a folder over `files`, paths relative to it, as they are now; OSError if one is missing."""
    write_entries(folder, {name: entry(folder / name) for name in files})


def write_entries(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest of a folder over files of which the entries are known, see `entry`."""
    listed = {name: dict(entries[name]) for name in sorted(entries)}
    write_text(folder / NAME, json.dumps({"files": listed, "sha256": _digest(listed)}, indent=1) + "\n")


def entry(path: Path) -> dict[str, Any]:
    """Return what a manifest has of a file: its bytes and their sha256; OSError if it cannot be read."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return ``{file: {"bytes": size, "sha256": digest}}``; RunError if the manifest is not there or not whole."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed: dict[str, dict[str, Any]] = content["files"]
        whole = content["sha256"] == _digest(listed)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise RunError(f"{path} is damaged: its digest is not that of its content")
    return listed


def damage(folder: Path) -> dict[str, str]:
    """Return what is wrong with each file that is not as the manifest has it, by name; empty where all is whole.

    Every byte is read. RunError as `read`.
    """
    return {name: reason for name, entry in read(folder).items() if (reason := _reason(folder / name, entry))}


def _reason(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"it has {size} bytes instead of {entry['bytes']}"
        return "" if _sha256(path) == entry["sha256"] else "its bytes are not those that were written"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _sha256(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            sha256.update(piece)
    return sha256.hexdigest()


def _digest(listed: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
