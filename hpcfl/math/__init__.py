"""Matrices and Gaussians, knowing nothing of learning."""

from typing import TYPE_CHECKING

from hpcfl.base.lazy import Lazy

if TYPE_CHECKING:
    from hpcfl.math import gaussian as gaussian
else:
    gaussian = Lazy("hpcfl.math.gaussian")
