"""Model families, one per file."""

from hpcfl.base.registry import section, sections
from hpcfl.models.base import Model

__all__ = ["Model", "model_class", "models"]


def models() -> dict[str, str]:
    """Return ``{name: module}`` of the model families there are."""
    return sections("hpcfl.models", Model)


def model_class(name: str) -> type[Model]:
    """Return the model family called `name`."""
    return section("hpcfl.models", Model, name, "model.name")
