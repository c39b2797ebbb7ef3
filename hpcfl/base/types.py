"""Arrays, shapes and states by the names that all rooms use."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.lazy import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = tuple[int, ...]
"""Shape of one sample's features."""

State = dict[str, Tensor]
"""Named tensors: the server's shared state, or a chunk's personal state with a leading client axis."""

Precision = Literal["single", "double"]
"""Of parameters, samples and messages: float32, or float64."""

Computing = Literal["fused", "vmapped", "looped"]
"""How the clients of a chunk are computed: together by hand or by `torch.func.vmap`, or one after the other."""
