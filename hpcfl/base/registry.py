"""Axes that are open to new files: what lies in a package's folder is what the config may name."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from inspect import isabstract
from typing import TypeVar

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, did_you_mean

C = TypeVar("C", bound=ConfigBase)


def registered(package: str, base: type[C], by: str = "name") -> dict[str, str]:
    """Return ``{name: module}`` for every module of `package` that defines a section derived from `base`.

    Parameters
    ----------
    by : str
        The key of the section that holds its name.
    """
    path: Sequence[str] = import_module(package).__path__
    modules = (f"{package}.{info.name}" for info in pkgutil.iter_modules(path))
    found = {module: _defined(module, base, by) for module in modules}
    return {str(cls.model_fields[by].default): module for module, cls in found.items() if cls}


def lookup(package: str, base: type[C], name: str, key: str, by: str = "name") -> type[C]:
    """Return the section of `package` called `name`; UsageError says which is nearest where there is none."""
    known = registered(package, base, by)
    if name not in known:
        raise UsageError(f"{key}: no '{name}'{did_you_mean(name, known)}")
    cls = _defined(known[name], base, by)
    assert cls is not None
    return cls


def _own(value: type, module: str) -> bool:
    """Return whether a module defines it, or, where it is a folder, one of its files."""
    return f"{value.__module__}.".startswith(f"{module}.")


def _defined(module: str, base: type[C], by: str) -> type[C] | None:
    """Return the one named class of `module` that derives from `base`; helpers and bases give none."""
    for value in vars(import_module(module)).values():
        if isinstance(value, type) and issubclass(value, base) and _own(value, module) and not isabstract(value):
            field = value.model_fields.get(by)
            if field is not None and isinstance(field.default, str):
                return value
    return None
