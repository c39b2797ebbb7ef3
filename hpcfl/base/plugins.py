"""Classes that a config names: what lies in a package's folder, and from outside ``package.module:Class``.

A module is looked for in the working directory, then where `look_in` says (beside the config), then where Python itself
looks. Which file it was, and the digest of what was loaded, is recorded with a run, for each module that it has
imported of its folder too: what goes on with the run looks there.

A config calls functions of the user's files alone, and of what is installed classes of the kind that its key wants: one
from somebody else could otherwise call whatever Python has.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.machinery import PathFinder
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from pydantic import create_model

from hpcfl.base import blame, loaded
from hpcfl.base.config import ConfigBase
from hpcfl.base.digests import changed, digest, is_file
from hpcfl.base.errors import UsageError, did_you_mean
from hpcfl.base.terminal import say

C = TypeVar("C", bound=ConfigBase)

GIVEN = re.compile("main_[0-9a-f]{8}")
"""Modules of what scripts give, whose names follow from their text: they are the same wherever they lie."""
SPEC = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")

_folders: list[Path] = []
_before: list[Path] = []  # folders that come before the working directory
_only: list[frozenset[str]] = []  # digests of what alone may be imported, if there is any such limit
_last: list[str] = []  # folders that stand last in Python's path, for what is imported late
_told: list[Callable[[str], None]] = []  # who is told what is imported


def look_in(folder: Path) -> None:
    """Look for modules in a folder too, before those that were named earlier."""
    _folders[:] = dict.fromkeys([folder.resolve(), *_folders])


def places() -> list[Path]:
    """Return the folders in which modules are looked for, first one first."""
    return list(dict.fromkeys([*_before, Path.cwd(), *_folders]))


def look_first(folders: Iterable[Path], run: Path | None = None, only: Iterable[str] | None = None) -> None:
    """Look for modules in these folders before the working directory, and no more in those that were so named before.

    A config that is new names none; one that a `run` folder has recorded names where its code is, and has `only` files
    with these digests imported. Of ``code`` of that folder nothing else ever is, what is imported late included.
    """
    blame.forget()
    _before[:] = [folder.resolve() for folder in folders]
    _only[:] = [] if only is None else [frozenset(only)]
    if run is not None and only is not None:
        loaded.guard(run / "code", _only[0])


def only() -> list[str] | None:
    """Return the digests of the files that may be imported; None: any file may."""
    return sorted(_only[0]) if _only else None


def plugin(spec: str, base: type[C], key: str, by: str) -> type[C]:
    """Return the class that ``package.module:Class`` names, as one whose key `by` has this name.

    Raises
    ------
    UsageError
        In one line: if there is no such module or class, if importing it fails, if it is not derived from `base`.
    """
    cls, where = outside(spec, key), f"{key} = '{spec}'"
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise UsageError(f"{where}: expected a class derived from {base.__module__}.{base.__name__}, got {cls!r}")
    if isabstract(cls):
        lacking = ", ".join(sorted(cls.__abstractmethods__))
        raise UsageError(f"{where}: expected a class that defines {lacking}, which {base.__name__} leaves open")
    return _named(cls, spec, by)


def outside(spec: str, key: str, form: str = "package.module:Class") -> Any:
    """Return what ``package.module:Class`` names; UsageError if there is no such thing, or importing it fails."""
    parts = SPEC.fullmatch(spec)
    if parts is None:
        raise UsageError(f"{key}: expected {form}, got '{spec}'")
    found = getattr(_module(parts[1], key), parts[2], None)
    if found is None:
        known = [name for name, value in vars(sys.modules[parts[1]]).items() if callable(value)]
        raise UsageError(f"{key} = '{spec}': no '{parts[2]}' in {file_of(parts[1])}{did_you_mean(parts[2], known)}")
    blame.named(spec, key, found)
    return found


def callable_of(spec: str, key: str, found: Any, kind: str, base: type | None = None) -> Callable[..., Any]:
    """Return what a config names and may call: of the user's files whatever can be called, else subclasses of `base`.

    UsageError, which says that it should be a `kind`, where it is neither.
    """
    where, module = f"{key} = '{spec}'", spec.partition(":")[0]
    if not callable(found):
        raise UsageError(f"{where}: expected {kind}, got {found!r:.80}")
    file = file_of(module)
    below = [file.relative_to(place) for place in map(Path.resolve, places()) if file.is_relative_to(place)]
    users = not file.is_relative_to(loaded.LIBRARY) and any(not loaded.INSTALLED & {*path.parts} for path in below)
    if not users and not (base is not None and isinstance(found, type) and issubclass(found, base)):
        kinds = f"a class derived from {base.__module__}.{base.__qualname__}, or " if base is not None else ""
        raise UsageError(
            f"{where}: a config calls no function of what is installed ({file}): expected {kinds}a function "
            "that calls it, of a file in the working directory or beside the config"
        )
    made: Callable[..., Any] = found
    return made


@contextmanager
def told(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell within the block in a line of each of the user's modules that is imported, before it is."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


@functools.cache
def _named(cls: type[C], spec: str, by: str) -> type[C]:
    """Return the class with its name's key set to `spec`, whatever the class says of it."""
    field: dict[str, Any] = {by: (Literal[spec], spec)}
    return create_model(cls.__name__, __base__=cls, __module__=cls.__module__, __doc__=cls.__doc__, **field)


def _module(name: str, key: str) -> ModuleType:
    """Import a module from one of the `places`, or wherever Python finds it."""
    top = name.partition(".")[0]
    found = PathFinder.find_spec(top, [str(place) for place in places()])
    known = top in sys.modules and not GIVEN.fullmatch(top)
    if found is not None and found.origin and known and file_of(top) != Path(found.origin).resolve():
        raise UsageError(f"{key}: this process has loaded '{top}' from {file_of(top)}, expected {found.origin}")
    if name not in sys.modules and found is not None:
        for tell in _told:
            tell(f"imports {name} from {found.origin or ', '.join(found.submodule_search_locations or ())}")
    limit = loaded.guarded(places(), _only[0]) if _only else nullcontext()
    try:
        with _first(places()), limit:
            return loaded.load(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            looked = ", ".join(f"'{place}'" for place in places())
            raise UsageError(f"{key}: no module '{name}'; expected it in {looked}") from None
        raise UsageError(f"{key}: '{name}' cannot be imported: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an error in one line, and where it was raised: where in the user's code, if by way of that."""
    text = blame.words(error)
    if own := blame.frames(error):
        return text + ("" if isinstance(error, SyntaxError) else blame.place(*own[-1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    users = frames and not loaded.is_installed(Path(frames[-1].filename).resolve())
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if users else ""
    return text + ("" if isinstance(error, SyntaxError) else place)


@contextmanager
def _first(folders: list[Path]) -> Iterator[None]:
    """Search the folders before all others within the block, and afterwards after all but earlier such ones."""
    own = [str(folder) for folder in folders]
    later = [name for name in own if name in _last or name not in sys.path]
    sys.path[:0] = own
    try:
        yield
    finally:
        del sys.path[: len(own)]
        kept = [name for name in _last if name in sys.path and name not in later]
        sys.path[:] = [name for name in sys.path if name not in _last]
        _last[:] = [*later, *kept]
        sys.path += _last


def file_of(module: str) -> Path:
    """Return the file of a module that is loaded; UsageError if it has none."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        raise UsageError(f"module '{module}' has no file: expected one that can be recorded with a run")
    return Path(file).resolve()


# those of the package


def registered(package: str, base: type[C], by: str = "name") -> dict[str, str]:
    """Return ``{name: module}`` of the sections derived from `base` in `package`; the key `by` holds their names."""
    path: Sequence[str] = import_module(package).__path__
    modules = [f"{package}.{info.name}" for info in pkgutil.iter_modules(path)]
    return {name: module for module in modules for name in _defined(module, base, by)}


def lookup(package: str, base: type[C], name: str, key: str, by: str = "name") -> type[C]:
    """Return the section of `package` called `name`, or the class from outside that it names.

    UsageError says which name is nearest where there is none, or what is wrong with the class.
    """
    if ":" in name:
        return plugin(name, base, key, by)

    def unlike(module: pkgutil.ModuleInfo) -> bool:
        file = Path(getattr(module.module_finder, "path", "")) / f"{module.name}.py"
        return module.name != name and not (file.is_file() and f'"{name}"' in file.read_text(encoding="utf-8"))

    # those first that are called so or have the name in quotes: the rest is not loaded
    for module in sorted(pkgutil.iter_modules(import_module(package).__path__), key=unlike):
        if found := _defined(f"{package}.{module.name}", base, by).get(name):
            return found
    raise UsageError(f"{key}: no '{name}'{did_you_mean(name, registered(package, base, by))}")


def _defined(module: str, base: type[C], by: str) -> dict[str, type[C]]:
    """Return the named classes of `module` that derive from `base`; helpers and bases have no names."""
    classes: dict[str, type[C]] = {}
    for value in vars(import_module(module)).values():
        if isinstance(value, type) and issubclass(value, base) and not isabstract(value):
            field = value.model_fields.get(by)
            own = f"{value.__module__}.".startswith(f"{module}.")  # or, where that is a folder, of one of its files
            if own and field is not None and isinstance(field.default, str):
                classes.setdefault(field.default, value)
    return classes


# what a run records of them


def origins(specs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what was loaded of each of these classes, ``{spec: {"file": …, "sha256": …, "modules": …}}``.

    ``modules`` are those that it has imported of its folder, each with its file and SHA-256, by name; left out where
    there are none.
    """
    found = dict[str, dict[str, Any]]()
    for spec in specs:
        module = spec.partition(":")[0]
        file_of(module)  # it has one
        parts = loaded.reached(module).items()
        own = {name: {"file": str(each.file.resolve()), "sha256": each.sha256} for name, each in parts}
        found[spec] = own.pop(module) | ({"modules": own} if own else {})
    return found


def run_here(code: Mapping[str, Mapping[str, Any]]) -> str:
    """Note that these `origins`, and what is loaded of the user's from now on, run here; return why that cannot be."""
    parts = [about for each in code.values() for about in (each, *each.get("modules", {}).values())]
    return loaded.remembering({about["sha256"]: about["file"] for about in parts})


def digests(code: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each module of these `origins`, by class and name."""
    return {
        spec: {spec.partition(":")[0]: about["sha256"]}
        | {name: module["sha256"] for name, module in about.get("modules", {}).items()}
        for spec, about in code.items()
    }


def look_for(
    recorded: Mapping[str, Mapping[str, Any]], run: Path, force: bool = False, trust: bool = False
) -> dict[str, str]:
    """Look from now on for the classes that a `run` folder has recorded where they are; return why not, by name.

    The files with the recorded digests, of a class and of what it has imported of its folder, are looked for where this
    process has them from, in ``code`` of the run folder, in the working directory, where the run found them, and where
    Python looks; with `force` any file of the class's name does. Only those are imported that have run here under this
    user, or with `trust`, which is remembered.
    """
    loaded.renew()
    found, lost, may = list[Path](), dict[str, str](), {*loaded.known()}
    elsewhere_too = "--force (force=True) looks elsewhere"
    for spec, about in recorded.items():
        file, module = Path(about["file"]), spec.partition(":")[0]
        up = module.count(".") + (file.name == "__init__.py")
        if not file.is_absolute() or len(file.parents) <= up:
            lost[spec] = f"attribute code of run.h5: {spec}: expected the path of a module's file, got '{file}'"
            continue
        before = file.parents[up]
        here = [file_of(module).parents[up]] if getattr(sys.modules.get(module), "__file__", None) else []
        elsewhere = dict.fromkeys((*here, run / "code", Path.cwd(), before, *map(Path, sys.path)))
        there = [root for root in elsewhere if is_file(root / file.relative_to(before))]
        parts = {spec: about} | {f"module '{name}' of {spec}": each for name, each in about.get("modules", {}).items()}
        odd = dict[Path, str]()  # which file of the class is another one there than it was
        for root in there:
            others = (changed(what, each, elsewhere_too, _moved(each, before, root)) for what, each in parts.items())
            odd[root] = next(filter(None, others), "")
        if found_there := [root for root in there if not odd[root]] or (there if force else []):
            files = [_moved(each, before, found_there[0]) for each in parts.values()]
            known_files = {digest(file): str(file) for file in files if not loaded.is_installed(file.resolve())}
            strange = {sha256: file for sha256, file in known_files.items() if sha256 not in may}
            if strange and not trust:
                sha256, name = next(iter(strange.items()))
                which = f"'{name}' (SHA-256 {sha256[:12]}…), which is code of {spec}"
                lost[spec] = f"{which}, has not run here: {loaded.ASK}"
                continue
            if line := loaded.remember(strange):
                say(line)
            may |= strange.keys()
            found.append(found_there[0])
        elif there:
            lost[spec] = odd[there[0]]
        elif not force:
            then = f"expected the file of then (SHA-256 {about['sha256'][:12]}…)"
            instead = f"{then} in the working directory or in code/ of the run folder; {elsewhere_too}"
            lost[spec] = changed(spec, about, instead)
    look_first(found, run, may)
    return lost


def _moved(about: Mapping[str, Any], before: Path, root: Path) -> Path:
    """Return a file's path, which lies below `root` where it lay below `before`."""
    file = Path(about["file"])
    return root / file.relative_to(before) if file.is_relative_to(before) else file
