"""Model families, one per file."""

from hpcfl.base.registry import lookup, registered
from hpcfl.models.base import Model

__all__ = ["Model", "model_class", "models"]


def models() -> dict[str, str]:
    """Return ``{name: module}`` of the model families there are."""
    return registered("hpcfl.models", Model)


def model_class(name: str) -> type[Model]:
    """Return the model family called `name`."""
    return lookup("hpcfl.models", Model, name, "model.name")
