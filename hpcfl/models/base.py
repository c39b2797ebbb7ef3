"""What every model is derived from."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.lazy import torch
from hpcfl.base.types import Shape

Width = Annotated[int, Field(ge=1)]
Chance = Annotated[float, Field(ge=0, lt=1)]
EVERYTHING = ("*",)


class Model(ConfigBase):
    """Base of the ``[model]`` sections. One file in ``hpcfl/models/`` is one family, named by ``model.name``."""

    name: str
    initial: str | None = None
    """An HDF5 file of initial values, a dataset for each tensor; ``clients/<number>/<tensor>`` is one client's own, of
    a personal layer. Or what all begin with: safetensors, or a state dict (.pt). By default drawn by the seed."""
    train: tuple[str, ...] = EVERYTHING
    """Patterns of the names of the parameters that are trained, as ``head.*`` or ``*.lora_*``. What none matches is
    frozen: neither trained nor sent; `initial` need not have the others."""
    paths: ClassVar[tuple[str, ...]] = ("initial",)
    chain: ClassVar[bool] = True
    """Whether layers follow one another, so that some of them can be computed without the others."""

    @property
    def penalty(self) -> float:
        """μ of a penalty ``μ/2 · |θ|²`` that belongs to what is minimised."""
        return 0.0

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Raise UsageError where features of `shape` cannot go through this model. Does not import torch."""

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        """Return the named layers, first one first, freshly initialised from torch's global generator.

        A layer in SALF's sense is a module with weight and bias, with what follows it up to the next.
        """
        raise NotImplementedError


class ModuleModel(Model):
    """Base of models that are one ``torch.nn.Module``; its layers are found by tracing."""

    chain: ClassVar[bool] = False

    def module(self, shape: Shape | tuple[Shape, ...], classes: int) -> torch.nn.Module:
        """Return a new module, its values drawn from torch's global generator; UsageError where it cannot be made.

        Where a sample is a tuple of tensors, shape is the tuple of their shapes, and the module is called with as many.
        """
        raise NotImplementedError
