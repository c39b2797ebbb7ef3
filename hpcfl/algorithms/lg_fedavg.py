"""LG-FedAvg: personal representations under shared last layers (Liang et al., 2020).

With ``participation.close = "first"`` and ``[doubling]`` this is LG-SRPFL (Tziotis et al.). Clients' features may have
several shapes where all layers that know the shape are personal.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import State, Task
from hpcfl.algorithms.local_sgd import PartlyPersonal, last
from hpcfl.base.errors import refusal


class LgFedAvg(PartlyPersonal):
    """Personal representations under shared last layers; all layers learn together."""

    name: Literal["lg_fedavg"] = "lg_fedavg"
    shared_layers: int = Field(2, ge=1)
    """The last so many layers are shared (the SRPFL authors' code: 2); all of them: FedAvg."""
    any_shape: ClassVar[bool] = True

    def init_server(self, task: Task) -> State:
        shared, shapes = super().init_server(task), task.federation.shapes
        if task.frozen and not self.personal(task):
            fewer = f"fewer than the {len(task.layer_names())} layers that model.train leaves to train"
            raise refusal("algorithm.shared_layers", fewer, self.shared_layers)
        for client in (shapes.index(shape) for shape in dict.fromkeys(shapes)):
            own = task.initial(client)
            for name in (name for name, value in shared.items() if own[name].shape != value.shape):
                of = "whose mean the server holds" if self.averages_personal else "which is shared"
                raise refusal("algorithm.shared_layers", f"fewer: clients differ in {name}, {of}", self.shared_layers)
        return shared

    def personal_layers(self, layers: int) -> range:
        return range(last("shared_layers", self.shared_layers, layers).start)
