"""Axes that are open: the config may name what lies in a package's folder, and classes from outside (`plugins`)."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import TypeVar

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, did_you_mean
from hpcfl.base.plugins import plugin

C = TypeVar("C", bound=ConfigBase)


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
