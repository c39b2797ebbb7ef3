"""Model families, one per file. A model is a chain of layers, or any module from outside the package."""

from __future__ import annotations

from hpcfl.base.plugins import lookup, outside, registered
from hpcfl.models import foreign
from hpcfl.models.base import Chance, Model, ModuleModel, Width

__all__ = ["Chance", "Model", "ModuleModel", "Width", "model_class", "models"]


def models() -> dict[str, str]:
    """Each family's name and module."""
    return registered("hpcfl.models", Model)


def model_class(name: str) -> type[Model]:
    """Return the section of a family, of a class of the user's own, or of a factory of modules."""
    if ":" in name:
        found = outside(name, "model.name", "package.module:factory")
        if not (isinstance(found, type) and issubclass(found, Model)):
            return foreign.section(name, found)
    return lookup("hpcfl.models", Model, name, "model.name")
