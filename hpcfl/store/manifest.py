"""What a folder holds: size and SHA-256 of each of its files in ``manifest.json``, which is written last.

A manifest has a digest of itself too, so that damage to it is told from damage to the files that it lists. Files that
are replaced one by one are listed before they get their name, beside what they replace: a kill may come at any moment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcfl.base.digests import digest
from hpcfl.base.errors import VALUE, RunError, cut
from hpcfl.store.atomic import check_regular, read_text, replace, write_text

NAME = "manifest.json"


class DamagedError(RunError):
    """A manifest, or a segment, whose content is not what was written."""


def write(folder: Path, files: Iterable[str]) -> None:
    """Write the manifest of a folder over `files`, paths relative to it, as they are now; OSError if one is missing."""
    write_entries(folder, {name: entry(folder / name) for name in files})


def write_entries(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest of a folder over files of which the entries are known, see `entry`."""
    write_text(folder / NAME, _text(dict(sorted(entries.items()))))


@contextmanager
def replaced(folder: Path, name: str) -> Iterator[Path]:
    """Yield a temporary path, as `replace`; the file is listed before it becomes `name`, beside what it replaces.

    It begins the manifest where there is none. RunError as `read`.
    """
    with replace(folder / name) as new:
        yield new
        listed = read(folder) if (folder / NAME).exists() else {}
        there = name in listed and (folder / name).exists()
        earlier = [version["sha256"] for version in _versions(listed[name])] if there else []
        listed[name] = entry(new)
        if there and (present := entry(folder / name))["sha256"] in earlier:
            listed[name]["before"] = present
        write_entries(folder, listed)
    if listed[name].pop("before", None) is not None:
        write_entries(folder, listed)


def entry(path: Path) -> dict[str, Any]:
    """Return what a manifest has of a file: its bytes and their sha256; OSError if it cannot be read."""
    check_regular(path)
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return ``{file: {"bytes": size, "sha256": digest}}``.

    RunError if the manifest is not there or cannot be read, `DamagedError` if it is not whole.
    """
    path = folder / NAME
    try:
        text = read_text(path)
        listed = json.loads(text)["files"]
        whole = text == _text(listed)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise DamagedError(f"{path} is damaged: its digest is not that of its content")
    if not isinstance(listed, dict) or not all(
        name and "\0" not in name and isinstance(known, dict) and all(map(_is_version, _versions(known)))
        for name, known in listed.items()
    ):
        raise RunError(f"{path}: files: expected bytes and sha256 of each file, got {cut(repr(listed), VALUE)}")
    if outside := [name for name in listed if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise RunError(f"{path} lists '{outside[0]}', which is not in its folder: expected files of the run alone")
    return listed


def _is_version(version: Any) -> bool:
    size, sha256 = (version.get(key) if isinstance(version, dict) else None for key in ("bytes", "sha256"))
    return type(size) is int and size >= 0 and isinstance(sha256, str)


def damage(folder: Path) -> dict[str, str]:
    """Return what is wrong with each file that is not as the manifest has it, by name; empty where all is whole.

    Every byte is read. RunError as `read`.
    """
    return {name: reason for name, known in read(folder).items() if (reason := _reason(folder / name, known))}


def damage_of(folder: Path, name: str) -> str:
    """Return what is wrong with one file, "" where nothing is, or it is not listed; RunError as `read`."""
    for _ in range(2):  # it may be replaced while it is read
        known = read(folder).get(name)
        reason = "" if known is None else _reason(folder / name, known)
        if not reason:
            break
    return reason


def _reason(path: Path, known: Mapping[str, Any]) -> str:
    try:
        check_regular(path)
        size = path.stat().st_size
        digests = [version["sha256"] for version in _versions(known) if version["bytes"] == size]
        if not digests:
            return f"it has {size} bytes instead of {known['bytes']}"
        return "" if digest(path) in digests else "its bytes are not those that were written"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _versions(known: Mapping[str, Any]) -> list[Any]:
    """What a file may be: as it is listed, or as it was before it was replaced."""
    return [known, known["before"]] if "before" in known else [known]


def _text(listed: Mapping[str, Any]) -> str:
    """What stands in the file, to the letter."""
    sha256 = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": listed, "sha256": sha256}, indent=1) + "\n"
