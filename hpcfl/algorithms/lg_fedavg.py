"""LG-FedAvg: personal representations under shared last layers (Liang et al., 2020).

With ``participation.close = "first"`` and ``[doubling]`` this is LG-SRPFL (Tziotis et al.).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.algorithms.split import Split, refuse

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.message import State
    from hpcfl.task import Task
    from hpcfl.visits import Visits


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

    def trained(self, task: Task, params: State, own: set[str], visits: Visits) -> Tensor:
        """Train all layers together."""
        return self.sgd.train(task, params, task.batches(visits, self.batch, self.epochs))
