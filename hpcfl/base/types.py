"""Arrays and shapes by the names that all rooms use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = tuple[int, ...]
"""Shape of one sample's features."""
