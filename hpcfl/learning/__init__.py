"""What a model computes for a chunk of clients: batches, gradients, tests; and what takes a step."""

from typing import TYPE_CHECKING

from hpcfl.base.lazy import Lazy

if TYPE_CHECKING:
    from hpcfl.learning import batchnorm as batchnorm
    from hpcfl.learning import build as build
    from hpcfl.learning import derivatives as derivatives
    from hpcfl.learning import fused as fused
else:
    batchnorm, build, derivatives, fused = (
        Lazy(f"{__name__}.{name}") for name in ("batchnorm", "build", "derivatives", "fused")
    )
