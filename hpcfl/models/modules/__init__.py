"""What models are made of: torch's own classes, so modules that import torch, here and elsewhere by name alone."""

from typing import TYPE_CHECKING

from hpcfl.base.lazy import Lazy

if TYPE_CHECKING:
    from hpcfl.models.modules import custom as custom
    from hpcfl.models.modules import layers as layers
    from hpcfl.models.modules import module as module
    from hpcfl.models.modules import narrow as narrow
    from hpcfl.models.modules import tracing as tracing
else:
    custom, layers, module, narrow, tracing = (
        Lazy(f"{__name__}.{name}") for name in ("custom", "layers", "module", "narrow", "tracing")
    )
