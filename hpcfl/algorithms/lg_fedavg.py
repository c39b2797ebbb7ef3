"""LG-FedAvg: personal representations under shared last layers (Liang et al., 2020).

With ``participation.close = "first"`` and ``[doubling]`` this is LG-SRPFL (Tziotis et al.).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.split import Split, refuse


class LgFedAvg(Split):
    """Personal representations under shared last layers; all layers learn together.

    Attributes
    ----------
    shared_layers : int
        The last so many layers are shared (the SRPFL authors' code: 2); all of them: FedAvg.
    """

    name: Literal["lg_fedavg"] = "lg_fedavg"
    shared_layers: int = Field(2, ge=1)

    def kept(self, layers: int) -> range:
        """Return the first layers."""
        refuse("shared_layers", self.shared_layers, 1, layers)
        return range(layers - self.shared_layers)
