"""Pixels as features: the ranges to which sources of images scale them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcfl.data.base import Features

Pixels = NDArray[np.uint8] | Features
Scale = Literal["unit", "centred"]
BLACK: dict[Scale, float] = {"unit": 0.0, "centred": -1.0}


def scaled(pixels: Pixels, peak: int, scale: Scale) -> Features:
    """Return pixels of ``0 .. peak`` as new float32 numbers of [0, 1] (unit) or [-1, 1] (centred)."""
    found: Features = pixels.astype(np.float32)
    found /= peak
    if scale == "centred":
        found -= 0.5
        found /= 0.5
    return found
