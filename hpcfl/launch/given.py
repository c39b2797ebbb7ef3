"""What a script or a cell of a notebook gives as an object: a class or function, as source that a run folder keeps.

A module that Python can import is named as it is. What was defined in a script or a cell is written to a module of its
own, with all that it uses of there, whose name follows from its text: so every rank has the same, and no other.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import functools
import inspect
import linecache
import shutil
import symtable
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from hpcfl.base import plugins
from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError

MAIN = "__main__"
HEAD = '"""What a script or notebook gave to `hpcfl.run`, with all that it uses of there."""\n\n'


@functools.cache
def folder() -> Path:
    """Return where the modules lie that this process has written; it is gone when the process ends."""
    made = Path(tempfile.mkdtemp(prefix="hpcfl-given-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def written(modules: Mapping[str, str]) -> None:
    """Write modules, ``{name: source}``, and look for classes there too."""
    for name, source in modules.items():
        (folder() / f"{name}.py").write_text(source, encoding="utf-8")
    if modules:
        plugins.look_in(folder())


def named(found: Any, key: str) -> tuple[str, dict[str, str]]:
    """Return by which name a config has a class or function under a key, and the modules to be `written` for that.

    Text is a name already; a section of this package has one.

    Raises
    ------
    UsageError
        In one line, where it cannot be written down: a lambda, what stands within a function, what uses an object that
        is no number, text, class, function or module, or what was typed where no source is kept.
    """
    if isinstance(found, str):
        return found, {}
    if not isinstance(found, type | FunctionType):
        raise UsageError(f"{key}: expected a name, a class or a function, got {_told(found)}")
    if isinstance(found, type) and issubclass(found, ConfigBase) and found.__module__.startswith("hpcfl."):
        return str(found.model_fields[key.rpartition(".")[2]].default), {}
    if found.__qualname__ != found.__name__ or not found.__name__.isidentifier():
        what = "a lambda" if "<lambda>" in found.__qualname__ else f"'{found.__qualname__}'"
        raise UsageError(
            f"{key}: {what} cannot be saved with the run: expected one at the top of a file or cell, by name"
        )
    if found.__module__ != MAIN and (file := getattr(sys.modules[found.__module__], "__file__", None)):
        path, up = Path(file).resolve(), found.__module__.count(".") + (Path(file).name == "__init__.py")
        plugins.look_in(path.parents[up])
        return f"{found.__module__}:{found.__name__}", {}
    source = _Source(key)
    source.add(found.__name__, found, sys.modules[found.__module__])
    text = source.text()
    module = f"main_{sha256(text.encode()).hexdigest()[:8]}"
    return f"{module}:{found.__name__}", {module: text}


class _Source:
    """The source of what is given under a key, and of what it uses, each before what uses it."""

    def __init__(self, key: str) -> None:
        self.key, self.whose = key, ""
        self.parts: dict[str, str] = {}  # by the name that it has there
        self.future = False

    def text(self) -> str:
        ahead = "from __future__ import annotations\n\n" if self.future else ""
        return HEAD + ahead + "\n\n".join(self.parts.values()) + "\n"

    def add(self, name: str, found: Any, module: ModuleType) -> None:
        """Add what a name stands for in a module; what it uses comes first."""
        if name in self.parts:
            return
        if isinstance(found, type | FunctionType) and found.__module__ == module.__name__ == MAIN:
            outer, self.whose = self.whose, found.__name__
            self.parts[name] = ""  # it may use itself
            source, file = _source_of(found, self.key)
            for used in sorted(_used(source)):
                if used in vars(module) and not (
                    hasattr(builtins, used) and vars(module)[used] is vars(builtins)[used]
                ):
                    self.add(used, vars(module)[used], module)
            own = [each.__code__ for each in _functions(found) if each.__code__.co_filename == file]
            self.future |= any(code.co_flags & annotations.compiler_flag for code in own)
            alias = "" if name == found.__name__ else f"\n\n{name} = {found.__name__}"
            del self.parts[name]
            self.parts[name], self.whose = source + alias, outer
        else:
            self.parts[name] = self._simple(name, found)

    def _simple(self, name: str, found: Any) -> str:
        """Return the line that makes a name what it is: an import, or a value."""
        if isinstance(found, ModuleType):
            top = f"import {found.__name__}"
            return top if name == found.__name__ else f"{top} as {name}"
        home = getattr(found, "__module__", None)
        own = getattr(found, "__qualname__", getattr(found, "__name__", ""))
        if home not in (None, MAIN) and own.isidentifier() and getattr(sys.modules.get(home), own, None) is found:
            return f"from {home} import {own}" + ("" if own == name else f" as {name}")
        with suppress(Exception):  # literal_eval raises almost anything
            if type(ast.literal_eval(repr(found))) is type(found) and ast.literal_eval(repr(found)) == found:
                return f"{name} = {found!r}"
        what = f"'{self.whose}' uses '{name}', {_told(found)}, which cannot be saved with the run"
        raise UsageError(f"{self.key}: {what}: expected numbers, text, classes, functions and modules alone")


def _told(found: Any) -> str:
    kind = type(found)
    return f"an object of {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def _functions(found: Any) -> Iterator[FunctionType]:
    """Yield a function, or those of a class, without what is wrapped around them."""
    for each in [*vars(found).values()] if isinstance(found, type) else [found]:
        function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
        if isinstance(function, FunctionType):
            yield inspect.unwrap(function)


def _source_of(found: Any, key: str) -> tuple[str, str]:
    """Return the source of a function or class of the main module, and its file; of a cell's class Python has none."""
    kind = ast.ClassDef if isinstance(found, type) else ast.FunctionDef
    files = [each.__code__.co_filename for each in _functions(found)]
    main = getattr(sys.modules[MAIN], "__file__", None)
    cells = [name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]
    for file in dict.fromkeys([*files, *([main] if main else []), *reversed(cells)]):
        text = "".join(linecache.getlines(file))
        with suppress(SyntaxError):
            for node in reversed(ast.parse(text).body):
                if isinstance(node, kind) and node.name == found.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "\n".join(text.splitlines()[first - 1 : node.end_lineno]), file
    where = "expected it in a file, a script or a notebook"
    raise UsageError(f"{key}: no source of '{found.__name__}' is kept where it was typed: {where}")


def _used(source: str) -> set[str]:
    """Return the names that some source takes from its module."""

    def inside(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        for child in table.get_children():
            yield from inside(child)

    return {*inside(symtable.symtable(source, "<given>", "exec"))}
