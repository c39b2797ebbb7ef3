"""FLIC's toy problem "linear mapping": Gaussian classes that each client sees through a linear map of its own."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.gaussians import Gaussians, ordered


class LinearMapping(Gaussians):
    """Gaussian classes; each client sees ``x M_i`` with a matrix of standard normal entries and a width of its own.

    Attributes
    ----------
    covariance : {"diagonal", "identity"}
        Of all classes alike; ``diagonal``: independent directions, their variances drawn by the seed.
    least_variance, most_variance : float
        Range of the variances (diagonal), uniform over directions.
    least, most : int
        Range of the number of features, uniform over clients.
    """

    name: Literal["linear_mapping"] = "linear_mapping"
    spread: float = Field(0.5, gt=0)
    covariance: Literal["diagonal", "identity"] = "diagonal"
    least_variance: float = Field(0.5, gt=0)
    most_variance: float = Field(1.5, gt=0)
    least: int = Field(5, ge=1)
    most: int = Field(50, ge=1)

    def widths(self) -> tuple[int, int]:
        """Return the least and the largest number of features; UsageError where a range is reversed."""
        if self.least_variance > self.most_variance:
            raise UsageError(
                f"data.least_variance: expected at most data.most_variance = {self.most_variance}, "
                f"got {self.least_variance}; did you mean {self.most_variance}?"
            )
        return ordered(self.least, self.most)

    def deviations(self, seed: int) -> Floats:
        """Return the standard deviations of all classes, ``[informative]``."""
        if self.covariance == "identity":
            return super().deviations(seed)
        rng = keyed(seed, "variances")
        return np.sqrt(rng.uniform(self.least_variance, self.most_variance, self.informative))

    def matrix(self, client: int, seed: int) -> Floats:
        """Return a client's matrix M_i, ``[informative, k_i]``."""
        return keyed(seed, "linear map", client=client).standard_normal((self.informative, self.width(client, seed)))

    def view(self, latent: Floats, client: int, seed: int) -> Floats:
        """Return samples ``[n, informative]`` mapped by the client's matrix."""
        return latent @ self.matrix(client, seed)
