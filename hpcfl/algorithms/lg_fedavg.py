"""LG-FedAvg: personal representations under shared last layers (Liang et al., 2020).

With ``participation.close = "first"`` and ``[doubling]`` this is LG-SRPFL (Tziotis et al.).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcfl.algorithms.local_sgd import PartlyPersonal, last


class LgFedAvg(PartlyPersonal):
    """Personal representations under shared last layers; all layers learn together."""

    name: Literal["lg_fedavg"] = "lg_fedavg"
    shared_layers: int = Field(2, ge=1)
    """The last so many layers are shared (the SRPFL authors' code: 2); all of them: FedAvg."""

    def personal_layers(self, layers: int) -> range:
        return range(last("shared_layers", self.shared_layers, layers).start)
