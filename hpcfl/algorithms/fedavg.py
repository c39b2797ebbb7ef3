"""FedAvg: local SGD, then the mean of the models (McMahan et al., AISTATS 2017).

With ``participation.partial = "discard"`` and a deadline this is drop-stragglers FedAvg (SALF, eq. 4).

With ``epochs = 0``, ``steps = b``, ``batch = 1``, ``weights = "uniform"``, ``lr = 4/μ`` and ``decay = b`` this is
FedPAQ without quantisation (Reisizadeh et al., AISTATS 2020), with its step size η_k = 4/(μ(kb + 1)) in round k of b
local steps. FedLRGD's authors compare themselves with it by the name FedAve (Jadbabaie, Makur & Shah, Theorem 3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.algorithms.tuned import Tuned
from hpcfl.base.errors import UsageError

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.comm.message import State
    from hpcfl.learning.optim import Sgd
    from hpcfl.learning.task import Task
    from hpcfl.learning.visits import Visits
    from hpcfl.schedule.participation import Participation


class FedAvg(Tuned):
    """Federated averaging.

    Attributes
    ----------
    epochs : int
        Local passes over a client's data per visit; 0 where `steps` counts instead.
    steps : int
        Local steps per visit; 0 where `epochs` counts instead.
    decay : float
        The local step size of round k, counted from 0, is ``lr / (1 + decay·k)``; what learns before a test takes `lr`.
    momentum : float
        Heavy-ball momentum of the local optimiser.
    persist_optimizer : bool
        Keep a client's momentum from visit to visit (the SALF authors' code), or start it anew.
    evaluation : {"shared", "fine-tune"}
        The model that a client is tested with: the shared one, or one whose last layers have learned from there on for
        `tune_epochs` on the client's training data (FedAvg-FT).
    """

    name: Literal["fedavg"] = "fedavg"
    epochs: int = Field(1, ge=0)
    steps: int = Field(0, ge=0)
    decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    persist_optimizer: bool = False
    evaluation: Literal["shared", "fine-tune"] = "shared"

    @property
    def alike(self) -> bool:
        """Whether nothing learns before the test."""
        return self.evaluation == "shared"

    @property
    def sgd(self) -> Sgd:
        """The optimiser of the layers that learn before the test."""
        from hpcfl.learning.optim import Sgd

        return Sgd(self.lr, momentum=self.momentum)

    def rate_in(self, round: int) -> float:
        """Return the local step size in a round."""
        return self.lr / (1 + self.decay * round)

    def check(self, participation: Participation, known: bool = True) -> None:
        """Refuse local work of nothing, or counted in two ways."""
        if (self.epochs > 0) == (self.steps > 0):
            raise UsageError(
                "algorithm: expected one of epochs and steps above 0 and the other 0, "
                f"got epochs = {self.epochs}, steps = {self.steps}"
            )

    def enter(self, task: Task, client: int) -> State:
        """Return zero momentum where it persists, else nothing."""
        from hpcfl.learning.optim import zeros

        return zeros(task.initial()) if self.momentum and self.persist_optimizer else {}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Train locally; when done, send the change of each layer, last layer first."""
        start = task.spread(shared, visits)
        params = {name: value.clone() for name, value in start.items()}
        sgd = replace(self.sgd, lr=self.rate_in(visits.round))
        velocity = personal or sgd.begin(params)
        batches = task.batches(visits, self.batch, self.epochs, self.steps)
        loss = sgd.train(task, params, batches, velocity)
        weight = visits.weights(self.weights)
        yield {"loss": (loss, weight)}
        for names in reversed(self.layers(task)):
            yield {name: (params[name].sub_(start[name]), weight) for name in names}
        return velocity if personal else {}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return the shared model, or what it becomes by fine-tuning."""
        if self.evaluation == "fine-tune":
            return self.adapted(task, shared, visits, self.tune_epochs)
        return task.spread(shared, visits)
