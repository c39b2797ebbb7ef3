"""Config files as nested tables: presets, TOML, and ``--set key=value`` on top."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from hpcfl.base.errors import UsageError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = dict[str, Any]


def read_toml(path: Path) -> Table:
    """Read a TOML file; UsageError where it cannot be read or is broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def presets() -> Mapping[str, Path]:
    """The presets by name: package resources where installed from a wheel, else the checkout's."""
    package = Path(str(resources.files("hpcfl")))
    for folder in (package / "presets", package.parent / "jobs" / "presets"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*/*.toml"))}
    return {}


def preset_file(name: str) -> Path:
    """The file that `name` means: a path, or a preset."""
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        return path
    if name not in presets():
        raise UsageError(f"no preset '{name}'{_near(name)}")
    return presets()[name]


def _near(name: str) -> str:
    """A hint at the preset whose name is nearest; where none is near, there are too many to name them all."""
    hint = did_you_mean(name, presets())
    return hint if "did you mean" in hint else "; hpcfl list names them all"


def read(name: str, above: tuple[Path, ...] = ()) -> Table:
    """Read a preset or file; with a key ``base`` it is another one, in which the sections given are replaced whole.

    The base is a preset or a file in the same folder. UsageError where a file cannot be read or is its own base.
    """
    path = preset_file(name)
    table = read_toml(path)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise UsageError(f"{path}: base: expected the name of a preset or file, got {base!r}")
    beside = path.parent / f"{base.removesuffix('.toml')}.toml"
    if beside.resolve() in (path.resolve(), *above):
        raise UsageError(f"{path}: base = '{base}' leads back to where it began")
    if not beside.is_file() and base not in presets():
        raise UsageError(f"{path}: base: no preset or file '{base}'{_near(base)}")
    return read(str(beside) if beside.is_file() else base, (path.resolve(), *above)) | table


def flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def apply(table: Table, setting: str) -> None:
    """Set ``a.b=value`` in a nested table; the value is TOML, or a bare word."""
    key, sign, text = setting.partition("=")
    if not sign or not key:
        raise UsageError(f"--set {setting}: expected key=value")
    try:
        value = tomllib.loads(f"x = {text.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    set_key(table, key.strip(), value, f"--set {setting}")


def set_key(table: Table, key: str, value: Any, where: str) -> None:
    """Set ``a.b`` in a nested table; UsageError, which names `where`, if it leads through a value."""
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"{where}: '{part}' is a value, not a table")
    table[last] = value
