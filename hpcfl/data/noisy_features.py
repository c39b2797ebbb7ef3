"""FLIC's toy problem "noisy features": Gaussian classes, and features that say nothing, a number per client."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.gaussians import Gaussians, ordered


class NoisyFeatures(Gaussians):
    """Gaussian classes ``N(centre, I)``; to each client's samples a number of standard normal features is appended.

    Attributes
    ----------
    least_noise, most_noise : int
        Range of the number of appended features, uniform over clients.
    """

    name: Literal["noisy_features"] = "noisy_features"
    spread: float = Field(0.8, gt=0)
    least_noise: int = Field(1, ge=0)
    most_noise: int = Field(10, ge=0)

    def widths(self) -> tuple[int, int]:
        """Return the least and the largest number of features; UsageError where the range is reversed."""
        least, most = ordered(self.least_noise, self.most_noise, ("least_noise", "most_noise"))
        return self.informative + least, self.informative + most

    def view(self, latent: Floats, client: int, seed: int) -> Floats:
        """Return samples ``[n, informative]`` with the client's spurious features after them."""
        spurious = self.width(client, seed) - self.informative
        noise = keyed(seed, "spurious features", client=client).standard_normal((len(latent), spurious))
        return np.hstack([latent, noise])
