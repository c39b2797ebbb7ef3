"""Modules from files of the user's: which bytes of them were loaded, and loading anew what has changed since.

Python keeps a module that it has loaded, whatever becomes of its file, and may take a file of the same second and
length for the one that it has compiled before. Here a file is read once, and what was read is compiled and hashed.

Code that has run here under this user is known by the SHA-256 of its files. A digest says which bytes were meant, not
who wrote them: a user who trusts the code that a folder names says so once.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType

ASK = "look at it; --trust (trust=True) imports it, now and later"
OURS = ("hpcfl", "numpy", "torch")
"""What a run is computed by. It is no code of the user's, even where it lies in the user's folder."""
INSTALLED = {"site-packages", "dist-packages"}
LIBRARY, PACKAGE = Path(os.__file__).resolve().parent, Path(__file__).resolve().parents[1]
_ROOTS = [LIBRARY, PACKAGE, PACKAGE.parent / "examples"]  # the last one where the package is a checkout
_ROOTS += [path for path in map(Path.resolve, map(Path, sys.path)) if path.name in INSTALLED]


BEGAN = time.time()
"""When this process began, in seconds as files have them; where the system does not tell, when this is loaded."""
with suppress(OSError, ValueError, IndexError, AttributeError):
    _ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    BEGAN += _ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME)

_folders: set[Path] = set()
_guarded: dict[Path, frozenset[str]] = {}
_running: list[bool] = []  # whether what is loaded runs here, and is noted
_known: dict[str, Loaded] = {}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A module that is loaded from a file.

    Attributes
    ----------
    sha256 : str
        Digest of what was loaded; "" where the file may have changed since.
    imports : frozenset of str
        What its import statements name, wherever they stand, and the packages around; some may be no modules.
    renewable : bool
        Whether it can be loaded anew.
    """

    module: ModuleType
    file: Path
    sha256: str
    imports: frozenset[str]
    renewable: bool

    @property
    def changed(self) -> bool:
        """Whether the file has changed since it was loaded, or is gone."""
        try:
            return self.renewable and sha256(self.file.read_bytes()).hexdigest() != self.sha256
        except OSError:
            return True


def load(name: str) -> ModuleType:
    """Import a module, and all that it needs of its folder as the files are now, or as they were loaded before.

    What others have loaded stays, unless its file has changed since this process began.
    """
    with suppress(ValueError):  # of __main__ Python does not know where it was found
        if spec := find_spec(name.partition(".")[0]):  # a package without a file may be found in several folders
            there = spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
            _folders.update(Path(each).absolute().parent for each in there)
    if FINDER not in sys.meta_path:
        place = next((i for i, each in enumerate(sys.meta_path) if each is PathFinder), len(sys.meta_path))
        sys.meta_path.insert(place, FINDER)
    module = importlib.import_module(name)
    if doubtful := [other for other, each in reached(name).items() if not each.sha256]:
        _forget(doubtful)
        module = importlib.import_module(name)
    return module


def reached(name: str) -> dict[str, Loaded]:
    """Return a loaded module, first, and what it has imported of the user's, directly or not, by name.

    Raises
    ------
    OSError
        If the file of one that others have loaded cannot be read.
    """
    found: dict[str, Loaded] = {}
    todo = [name]
    while todo:
        each = todo.pop(0)
        if each not in found and (known := _seen(each, each == name)) is not None:
            found[each] = known
            todo += sorted(known.imports)
    return found


def remembering(files: Mapping[str, str]) -> str:
    """Note from now on what is loaded as having run here, these files, ``{digest: file}``, first; return why not."""
    _running[:] = [True]
    return remember(files)


def guard(folder: Path, digests: frozenset[str]) -> None:
    """Load from now on nothing of a folder but files with these digests, or others that are installed there."""
    folder = folder.resolve()
    _guarded[folder] = _guarded.get(folder, frozenset()) | digests


@contextmanager
def guarded(folders: Iterable[Path], digests: frozenset[str]) -> Iterator[None]:
    """Load within the block nothing of these folders but files with these digests, or others that are installed."""
    before = dict(_guarded)
    for folder in folders:
        guard(folder, digests)
    try:
        yield
    finally:
        _guarded.clear()
        _guarded.update(before)


def is_installed(file: Path) -> bool:
    """Return whether a file belongs to what is installed: packages, the standard library, this one.

    Not whether its path looks so: a run folder may have any.
    """
    return any(file.is_relative_to(root) for root in _ROOTS)


def renew() -> None:
    """Forget modules whose files have changed since they were loaded, and those that import them.

    They are loaded anew when they are next asked for. Nothing is renewed while a run is put together or runs.
    """
    for name in [name for name, each in _known.items() if sys.modules.get(name) is not each.module]:
        del _known[name]
    _forget(name for name, each in _known.items() if each.changed)


def _forget(changed: Iterable[str]) -> None:
    gone = set(changed)
    while more := {
        name for name, each in _known.items() if name not in gone and each.renewable and each.imports & gone
    }:
        gone |= more
    for name in gone:
        del _known[name]
        sys.modules.pop(name, None)
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(last, None)  # or "from package import last" would find it there
    if gone:
        importlib.invalidate_caches()


def _seen(name: str, always: bool) -> Loaded | None:
    """Return what is known of a module; None if it is not loaded, or is no code of the user's, unless `always`."""
    module = sys.modules.get(name)
    if name in _known and _known[name].module is module:
        return _known[name]
    file = getattr(module, "__file__", None)
    if module is None or file is None or not (always or _is_users(name, Path(file))):
        return None
    path = Path(file)
    source, users = path.read_bytes(), _is_users(name, path)
    renewable = users and isinstance(getattr(module, "__loader__", None), SourceFileLoader) and name != "__main__"
    digest = "" if renewable and path.stat().st_ctime > BEGAN else sha256(source).hexdigest()
    imports = frozenset(_imports(module, source)) if users and path.suffix == ".py" else frozenset[str]()
    _known[name] = Loaded(module, path, digest, imports, renewable)
    return _known[name]


def _imports(module: ModuleType, source: bytes) -> Iterator[str]:
    package = module.__package__ or ""
    named = [module.__name__]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.level:
                try:
                    base = resolve_name(base, package)
                except ImportError:  # it would fail, if it were ever carried out
                    continue
            named += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for name in named:
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _is_users(name: str, file: Path) -> bool:
    """Whether a module lies below the folder of one of the user's, and is neither installed nor ours."""
    if name.partition(".")[0] in OURS or INSTALLED & {*file.parts} or file.is_relative_to(LIBRARY):
        return False
    paths = file.absolute(), file.parent.resolve() / file.name
    return any(path.is_relative_to(folder) for path in paths for folder in (*_folders, *map(Path.resolve, _folders)))


def is_of_user(file: Path) -> bool:
    """Return whether a file is one of the user's from which modules are loaded."""
    return file.is_file() and not file.resolve().is_relative_to(PACKAGE) and _is_users("", file)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        source, name = self.get_data(self.path), module.__name__
        digest = sha256(source).hexdigest()
        if _running:  # late, by a run that has begun
            remember({digest: self.path})
        code = self.source_to_code(source, self.path)
        _known[name] = Loaded(module, Path(self.path), digest, frozenset(_imports(module, source)), True)
        exec(code, vars(module))


class _Finder:
    """Finds what Python does by its path, and has the user's modules loaded here, those too that are imported late."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return spec
        file = Path(spec.origin).resolve() if _guarded else Path(spec.origin)
        folders = [folder for folder in _guarded if file.is_relative_to(folder)]
        if folders and not is_installed(file) and file.is_file():
            digest = sha256(file.read_bytes()).hexdigest()
            if digest not in _guarded[max(folders, key=lambda folder: len(folder.parts))]:
                raise ImportError(f"'{file}' (SHA-256 {digest[:12]}…) has not run here: {ASK}")
        if type(spec.loader) is not SourceFileLoader:
            return spec
        if _is_users(name, Path(spec.origin)):
            spec.loader = _Loader(name, spec.origin)
        return spec


FINDER = _Finder()


# code that has run here under this user: a run folder has no other imported
def known_file() -> Path:
    """Return the file with a line for each digest, and the file that it was of."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "hpcfl" / "code"


def known() -> frozenset[str]:
    """Return the digests of code that has run here; none where that cannot be read."""
    try:
        return frozenset(line.partition(" ")[0] for line in known_file().read_text(errors="replace").splitlines())
    except (OSError, RuntimeError):  # there may be no home
        return frozenset()


def remember(files: Mapping[str, str]) -> str:
    """Add files, ``{digest: file}``, to those that have run here; return why that cannot be, "" if it can."""
    before = known()
    new = {digest: file for digest, file in files.items() if digest not in before}
    if not new:
        return ""
    try:
        path = known_file()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a", errors="surrogateescape") as out:  # appended, so that two runs do not lose each other's
            out.write("".join(f"{digest}  {' '.join(file.splitlines())}\n" for digest, file in new.items()))
    except (OSError, RuntimeError) as error:
        return f"code cannot be noted as having run here ({error}): what goes on with this run needs --trust"
    return ""
