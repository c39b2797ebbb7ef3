"""What methods have in common that share the whole model, the last layers of which may learn before a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm
from hpcfl.base.errors import UsageError

if TYPE_CHECKING:
    from hpcfl.comm.message import State
    from hpcfl.learning.optim import Sgd
    from hpcfl.learning.task import Task
    from hpcfl.learning.visits import Visits


class Tuned(Algorithm):
    """The whole model is averaged; its last layers may learn on a client's own data before the test.

    Attributes
    ----------
    lr : float
        Local step size.
    batch : int
        Samples per local step; 0 for all that a client has.
    weights : {"samples", "uniform"}
        Weight of a client in the mean: its number of samples, or 1.
    tune_epochs : int
        Passes over its training data in which a client's last layers learn before the test (``fine-tune``).
    tune_layers : int
        The last so many layers learn then.
    """

    lr: float = Field(0.1, gt=0)
    batch: int = Field(10, ge=0)
    weights: Literal["samples", "uniform"] = "samples"
    tune_epochs: int = Field(10, ge=1)
    tune_layers: int = Field(1, ge=1)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.lr

    @property
    def adapts(self) -> int:
        """`tune_epochs`."""
        return self.tune_epochs

    @property
    def sgd(self) -> Sgd:
        """The optimiser of the layers that learn before the test."""
        from hpcfl.learning.optim import Sgd

        return Sgd(self.lr)

    def own(self, task: Task) -> set[str]:
        """Return the names of the last `tune_layers` layers' tensors; UsageError where the model has fewer."""
        layers = task.layers()
        if self.tune_layers > len(layers):
            raise UsageError(
                f"algorithm.tune_layers: expected 1 … {len(layers)} for this model, got {self.tune_layers}; "
                f"nearest: {len(layers)}"
            )
        return {name for layer in layers[-self.tune_layers :] for name in layer}

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        """Return the shared model after its last layers have learned for so many epochs."""
        return self.sgd.tuned(task, task.spread(shared, visits), visits, self.batch, epochs, self.own(task))
