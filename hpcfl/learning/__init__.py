"""What a model computes for a chunk of clients: batches, gradients, tests; and what takes a step."""

from typing import TYPE_CHECKING

from hpcfl.base.lazy import Lazy

__all__ = ["batchnorm", "build", "derivatives", "fused"]

if TYPE_CHECKING:
    from hpcfl.learning import batchnorm, build, derivatives, fused
else:
    batchnorm, build, derivatives, fused = (Lazy(f"{__name__}.{name}") for name in __all__)
