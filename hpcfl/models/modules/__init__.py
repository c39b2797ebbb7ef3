"""What models are made of: torch's own classes, so modules that import torch, here and elsewhere by name alone."""

from typing import TYPE_CHECKING

from hpcfl.base.lazy import Lazy

__all__ = ["custom", "layers", "module", "narrow", "tracing"]

if TYPE_CHECKING:
    from hpcfl.models.modules import custom, layers, module, narrow, tracing
else:
    custom, layers, module, narrow, tracing = (Lazy(f"{__name__}.{name}") for name in __all__)
