"""The rooms of the package, and which way imports run between them, those for types alone included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import hpcfl
from hpcfl.commands.contributed import CONTRIBUTED, contributed

PACKAGE = Path(hpcfl.__file__).parent
ORDER = (
    *("__main__", "testing", "commands", "contrib", "launch", "results", "realtime", "engine", "config", "algorithms"),
    *("learning", "models", "schedule", "store", "data", "mpi", "sums", "math", "base"),
)
"""A room imports from those to its right alone."""
APART = {
    "learning": {"schedule"},
    "models": {"schedule"},
    "store": {"mpi", "sums", "data", "math"},
    "data": {"mpi", "sums", "math"},
    "mpi": {"math"},
    "sums": {"math"},
}


MODULES = {
    ".".join(("hpcfl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


@cache
def walked(path: Path) -> list[ast.AST]:
    """Return all nodes of a module."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imported(path: Path) -> Iterator[str]:
    """Yield the package's modules that a module imports from, anywhere in it."""
    for node in walked(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_run_one_way() -> None:
    wrong = []
    for name, path in MODULES.items():
        room = name.split(".")[1] if name != "hpcfl" else ""
        for to in {to.split(".")[1] for to in imported(path) if to.startswith("hpcfl.")} - {room} if room else ():
            if ORDER.index(to) < ORDER.index(room) or to in APART.get(room, ()):
                wrong.append(f"{path.relative_to(PACKAGE)} imports from {to}")
    assert not wrong


def test_no_module_needs_itself() -> None:
    TopologicalSorter(
        {name: set(imported(path)) & MODULES.keys() - {name} for name, path in MODULES.items()}
    ).prepare()  # raises CycleError, which names the circle


def test_a_newcomer_finds_few_rooms() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert entries == {"__init__", *ORDER}
    assert len(entries) <= 20


def test_a_file_is_found_by_its_name() -> None:
    names = Counter(path.name for path in MODULES.values())
    assert {name for name, count in names.items() if count > 1} <= {
        "__init__.py",
        "algorithm.py",
        "base.py",
        "config.py",
    }


LAZY = {"mpi4py", "pandas", "sklearn", "torch", "xarray"}
"""What is loaded when it is used, see `hpcfl.base.lazy`."""
UNLOADED = """
import sys
from importlib import import_module

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[2].split():
            raise RuntimeError(name)

sys.meta_path.insert(0, Refuses())
for name in sys.argv[1].split():
    import_module(name)
"""


def of_torch(path: Path) -> bool:
    """Whether a module is made of torch's own classes, and so imports it."""
    tops = walked(path)[0].body
    imports = [node.names[0].name for node in tops if isinstance(node, ast.Import)]
    return "torch" in [*imports, *(node.module for node in tops if isinstance(node, ast.ImportFrom))]


def test_what_takes_long_to_load_is_lazy() -> None:
    """But in the few modules that are made of it, which others know by name alone."""
    rooms = {name: path for name, path in MODULES.items() if not name.startswith("hpcfl.testing")}
    made_of = {name for name, path in rooms.items() if of_torch(path)}
    assert len(made_of) <= 11
    others = [name for name in rooms if name not in made_of]
    subprocess.run([sys.executable, "-c", UNLOADED, " ".join(others), " ".join(LAZY)], check=True)


def test_modules_import_at_their_top() -> None:
    """But those of each command, and a few: what need not be loaded, or may not be there."""
    within = [
        (name, node.lineno)
        for name, path in MODULES.items()
        if name != "hpcfl.commands.cli"
        for function in walked(path)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len({*within}) <= 18


HIDDEN = """
import sys
from importlib import import_module

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hpcfl.contrib"):
            raise ImportError(name)

sys.meta_path.insert(0, Hides())
for name in sys.argv[1].split():
    try:
        import_module(name)
    except (ImportError, RuntimeError) as error:  # there may be no MPI here
        if "hpcfl.contrib" in str(error):
            raise
import hpcfl
for preset in ("salf-digits", "fedlrgd-logistic"):
    hpcfl.run(preset, out=f"{sys.argv[2]}/{preset}", settings={"rounds": 1}, quiet=True)
"""


def test_nothing_but_a_few_commands_needs_what_few_need(tmp_path: Path) -> None:
    others = [name for name in MODULES if not name.startswith(("hpcfl.contrib", "hpcfl.__main__", "hpcfl.testing"))]
    subprocess.run([sys.executable, "-c", HIDDEN, " ".join(others), str(tmp_path)], check=True)


def test_what_few_need_is_found_by_name() -> None:
    assert all(map(contributed, CONTRIBUTED))


def test_nothing_is_pickled() -> None:
    """Neither on the wire nor on disk, nor between processes of a host: to read a pickle is to run it."""
    running = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    found = set()
    for name, path in MODULES.items():
        for node in walked(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found |= {f"{name} imports {each}" for each in names if each.partition(".")[0] in running}
            if isinstance(node, ast.Attribute) and node.attr in LOWER_CASE and ast.unparse(node.value).endswith("comm"):
                found.add(f"{name} calls {ast.unparse(node)}")
    assert not found


LOWER_CASE = {"bcast", "isend", "irecv", "gather", "allgather", "scatter", "alltoall", "allreduce", "sendrecv"}
"""What mpi4py pickles for."""
