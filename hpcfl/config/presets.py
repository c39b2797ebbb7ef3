"""Config files as nested tables: presets, TOML, overlays, and ``--set key=value`` on top."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.algorithms.compression import Compression
from hpcfl.algorithms.server_optimizer import ServerOptimizer
from hpcfl.base.config import DEPTH, ConfigBase, check_plain
from hpcfl.base.digests import is_file
from hpcfl.base.errors import VALUE, UsageError, cut, did_you_mean
from hpcfl.data import source_class, sources
from hpcfl.models import model_class, models
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds import speed_class, speeds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = dict[str, Any]
Settings = Iterable[str] | Mapping[str, Any]


class Pick(NamedTuple):
    """The key `by` picks a section's class: what it is where it is not given, what it may be, which class that is."""

    by: str
    default: str | None
    names: Callable[[], Iterable[str]]
    find: Callable[[str], type[ConfigBase]]


PICKED = {
    "algorithm": Pick("name", None, algorithms, algorithm_class),
    "speed": Pick("model", "none", speeds, speed_class),
    "data": Pick("name", None, sources, source_class),
    "model": Pick("name", None, models, model_class),
}
VARIANTS = "variants.toml"
LIST = "; hpcfl list presets names them all"
DOTTED = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*)""" + f"{{{DEPTH + 1}}}")
LARGEST = 4 << 20
"""Bytes that a config file may have."""


# --- files and names


def read_toml(path: Path) -> Table:
    """Read a TOML file; UsageError where it cannot be read or is broken."""
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{path}: {path.stat().st_size} bytes, expected a config of at most {LARGEST}")
        return _loaded(path.read_text(encoding="utf-8"), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _loaded(text: str, where: str) -> Table:
    """Return what TOML says; TOMLDecodeError where it is broken, UsageError where no config can hold it."""
    deep = UsageError(f"{where}: expected tables and lists at most {DEPTH} deep in one another")
    if DOTTED.search(text):  # of a key of n parts the parser notes n(n + 1)/2
        raise deep
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise deep from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise UsageError(f"{where}: not valid TOML: {error}") from None
    check_plain(table, where)
    return table


def _files(pattern: str) -> list[Path]:
    """Return files below the presets' folder: the package's where installed from a wheel, else the checkout's.

    The folder of examples, whose presets stand beside the modules that they name, is in a wheel among the others.
    """
    package = Path(str(resources.files("hpcfl")))
    if (package / "presets").is_dir():
        return sorted((package / "presets").glob(pattern))
    patterns = f"jobs/presets/{pattern}", pattern.replace("*", "examples", 1)
    return sorted(path for each in patterns for path in package.parent.glob(each))


@functools.cache
def variants() -> Mapping[str, tuple[Path, Table]]:
    """Presets that are others with overlays on top: the file that lists each, and what it says there.

    ``base`` is a preset, ``with`` the names of overlays, ``set`` keys as after ``--set``, ``about`` one line.
    """
    return {name: (path, entry) for path in _files(f"*/{VARIANTS}") for name, entry in read_toml(path).items()}


@functools.cache
def presets() -> Mapping[str, Path]:
    """The presets by name, and the files that they stand in."""
    whole = {path.stem: path for path in _files("*/*.toml") if path.name != VARIANTS}
    found = whole | {name: path for name, (path, _) in variants().items()}
    return dict(sorted(found.items(), key=lambda item: (item[1].parent, item[0])))


def overlays() -> Mapping[str, Path]:
    """The overlays that have names: partial configs in a folder beside the presets that they go with, and worlds."""
    files = _files("*/overlays/*.toml")
    return {f"world/{path.stem}" if path.parents[1].name == "worlds" else path.stem: path for path in files}


def preset_file(name: str) -> Path:
    """The file that `name` means: a path, or a preset."""
    return _named_file(name, presets(), "preset", LIST)


def overlay_file(name: str) -> Path:
    """The file that `name` means: a path, or an overlay."""
    return _named_file(
        name, overlays(), "overlay", "; expected a TOML file, or one of those that hpcfl list overlays names"
    )


def _named_file(name: str, known: Mapping[str, Path], kind: str, otherwise: str) -> Path:
    path = Path(name)
    try:
        there = path.suffix == ".toml" or path.exists()
    except OSError:  # too long for a name
        there = False
    if there:
        if not is_file(path):
            raise UsageError(f"{path}: no such file")
        return path
    if name not in known:
        raise UsageError(f"no {kind} '{name}'{_near(name, known, otherwise)}")
    return known[name]


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint at the name that is nearest; where none is near, there are too many to name them all."""
    hint = did_you_mean(name, known)
    return hint if "did you mean" in hint else otherwise


def about(name: str) -> str:
    """Return the line in which a preset or an overlay says what it is; "" where it does not."""
    if name in variants():
        return str(variants()[name][1]["about"])
    path = overlays()[name] if name in overlays() else preset_file(name)
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first[1:].strip() if first.startswith("#") else ""


# --- one on top of another


def read(name: str) -> Table:
    """Read a preset or file; with a key ``base`` it is another one, in which the sections given are replaced whole.

    The base is a preset or a file in the same folder. UsageError where a file cannot be read or is its own base.
    """
    whole: Table = {}
    for _, table in chain(name):
        whole |= table
    return whole


def chain(name: str, above: tuple[Path, ...] = ()) -> list[tuple[Path, Table]]:
    """Return the files that `read` puts together, the lowest base first, each with what it says."""
    path = preset_file(name)
    if path.name == VARIANTS and name in variants():
        _, variant = variants()[name]
        below = chain(variant["base"])
        table, _ = on_top(read(variant["base"]), map(read_overlay, variant.get("with", [])), variant.get("set", []))
        return [*below, (path, table)]
    table = read_toml(path)
    base = table.pop("base", None)
    if base is None:
        return [(path, table)]
    if not isinstance(base, str):
        raise UsageError(f"{path}: base: expected the name of a preset or file, got {base!r}")
    beside = path.parent / f"{base.removesuffix('.toml')}.toml"
    if beside.resolve() in (path.resolve(), *above):
        raise UsageError(f"{path}: base = '{base}' leads back to where it began")
    if not is_file(beside) and base not in presets():
        raise UsageError(f"{path}: base: no preset or file '{base}'{_near(base, presets(), LIST)}")
    return [*chain(str(beside) if is_file(beside) else base, (path.resolve(), *above)), (path, table)]


def read_overlay(name: str) -> Table:
    """Read an overlay, by its name or as a file; it may have a base as a whole config may."""
    return read(str(overlay_file(name)))


def on_top(table: Table, overlays: Iterable[Table], settings: Settings) -> tuple[Table, list[str]]:
    """Return a config with overlays and then keys on top, and in words what of the config has no meaning there.

    Keys of `table` that the class lacks which overlays or settings pick for a section are dropped, as are those that
    are only for another word than the one that these set; keys that they give themselves are not.
    """
    result, own = deepcopy(table), set[str]()
    for overlay in overlays:
        result = merged(result, overlay)
        own.update(key for key, _ in flat(overlay))
    for key, value, where in assignments(settings):
        *path, last = key.split(".")
        if len(path) > DEPTH:
            raise UsageError(f"{where}: expected tables at most {DEPTH} deep in one another")
        inner: Any = result
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{where}: '{part}' is a value, not a table")
        inner[last] = value
        own.update(each for each, _ in flat({key: value}))
    dropped = []
    for section, before in table.items():
        if isinstance(before, dict) and isinstance(now := result[section], dict):
            rest = [key for key in before if key in now and f"{section}.{key}" not in own]
            for lost, why in _without_meaning(section, before, now, rest):
                for key in lost:
                    del now[key]
                dropped.append(f"{', '.join(f'{section}.{key}' for key in lost)}, which {why}")
    return result, dropped


def merged(below: Table, above: Mapping[str, Any]) -> Table:
    """Return a table with the keys of another set in it."""
    tables = [key for key, value in above.items() if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)]
    return {**below, **deepcopy(dict(above)), **{key: merged(below[key], above[key]) for key in tables}}


def _without_meaning(section: str, before: Table, now: Table, rest: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield keys among `rest` that go, and why.

    They are those that the section's class lacks, if it is another one than before, and each that is only for the word
    that the section had before.
    """
    if pick := PICKED.get(section):
        name, was = (table.get(pick.by, pick.default) for table in (now, before))
        fields = pick.find(name).model_fields if isinstance(name, str) and name != was else before
        if lost := [key for key in rest if key not in fields]:
            yield lost, f"{section}.{pick.by} = '{name}' does not have"
    rules: Mapping[str, Mapping[str, tuple[str, Any]]]
    rules = {
        "participation": Participation.only_for,
        "server": ServerOptimizer.only_for,
        "message": Compression.only_for,
    }
    if section == "data" and isinstance(name := now.get("name"), str):
        rules = {"data": source_class(name).only_for}
    for key, (choice, given) in rules.get(section, {}).items():
        words = (given,) if isinstance(given, str) else given
        if key == "deadline" and now.get(choice) == "all":  # with any other word it would bound a round
            words = (before.get(choice, "all"),)
        if key in rest and before.get(choice) in words and now.get(choice) not in words:
            yield [key], f"is for {section}.{choice} = {' or '.join(map(repr, words))}"


# --- keys


def flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def assignments(settings: Settings) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and what an error begins with, of values by dotted key or of texts ``a.b=value``."""
    if isinstance(settings, Mapping):
        yield from ((key, value, f"settings: {key}") for key, value in settings.items())
        return
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise UsageError(f"--set {setting}: expected key=value")
        where, word = f"--set {cut(setting, VALUE)}", text.strip()
        check_plain([key, word], where)
        value: Any = word
        with suppress(tomllib.TOMLDecodeError):  # a bare word
            table = _loaded(f"x = {word}", where)
            value = table["x"] if len(table) == 1 else word  # else the word has lines of its own
        yield key.strip(), value, where
