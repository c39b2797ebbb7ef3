"""What methods have in common that share some layers and leave the others with each client."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm
from hpcfl.base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.algorithms.base import Client
    from hpcfl.comm.message import State
    from hpcfl.learning.optim import Optimizer
    from hpcfl.learning.task import Task
    from hpcfl.learning.visits import Visits
    from hpcfl.schedule.participation import Participation


class Split(Algorithm):
    """Some layers are averaged, the others are personal.

    Attributes
    ----------
    lr : float
        Local step size.
    batch : int
        Samples per local step; 0 for all that a client has.
    epochs : int
        Local passes over a client's data.
    optimizer : {"sgd", "adam"}
        The local optimiser; it starts anew with each visit.
    momentum : float
        Heavy-ball momentum of ``sgd``.
    weight_decay : float
        Penalty on the weights, not on the biases.
    weights : {"samples", "uniform"}
        Weight of a client in the mean: its number of samples, or 1.
    evaluation : {"stored", "fine-tune", "new-client"}
        The model that a client is tested with. ``stored``: the shared layers and its own personal ones. ``fine-tune``:
        the shared layers and the mean of all personal ones, which then learn for `tune_epochs` on its training data
        (the SRPFL authors' code); personal layers are sent for that. ``new-client``: the shared layers, and personal
        ones that learn so from their initial values (SRPFL, remark 4.8).
    tune_epochs : int
        Passes over its training data in which a client's personal layers learn before the test.
    """

    lr: float = Field(0.1, gt=0)
    batch: int = Field(10, ge=0)
    epochs: int = Field(1, ge=1)
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    weights: Literal["samples", "uniform"] = "samples"
    evaluation: Literal["stored", "fine-tune", "new-client"] = "stored"
    tune_epochs: int = Field(10, ge=1)

    @abstractmethod
    def kept(self, layers: int) -> range:
        """Return which of so many layers (0 … L − 1) are personal."""

    def trained(self, task: Task, params: State, own: set[str], visits: Visits) -> Tensor:
        """Train in place, the personal tensors being `own`; return each client's mean loss over its steps, ``[c]``.

        By default all layers together.
        """
        return self.optimiser.train(task, params, task.batches(visits, self.batch, self.epochs))

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.lr

    @property
    def alike(self) -> bool:
        """Whether nothing learns before the test."""
        return self.evaluation == "stored"

    @property
    def adapts(self) -> int:
        """`tune_epochs`."""
        return self.tune_epochs

    def check(self, participation: Participation, known: bool = True) -> None:
        """Refuse a momentum that nothing would use."""
        if self.optimizer == "adam" and self.momentum:
            raise UsageError(
                f"algorithm.momentum = {self.momentum} has no meaning with algorithm.optimizer = 'adam': "
                "remove it, or set algorithm.optimizer = 'sgd'"
            )

    @property
    def optimiser(self) -> Optimizer:
        """The local optimiser."""
        from hpcfl.learning.optim import Adam, Sgd

        if self.optimizer == "adam":
            return Adam(self.lr, decay=self.weight_decay)
        return Sgd(self.lr, momentum=self.momentum, decay=self.weight_decay)

    def own(self, task: Task) -> set[str]:
        """Return the names of the personal tensors."""
        layers = task.layers()
        return {name for number in self.kept(len(layers)) for name in layers[number]}

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the layers that are sent: the shared ones, and for ``fine-tune`` the personal ones too."""
        if self.evaluation == "fine-tune":
            return task.layers()
        own = self.own(task)
        return tuple(names for names in task.layers() if own.isdisjoint(names))

    def start(self, task: Task) -> State:
        """Return the initial values of what is sent."""
        initial = task.initial()
        return {name: initial[name] for names in self.layers(task) for name in names}

    def enter(self, task: Task, client: int) -> State:
        """Return the initial values of the personal layers."""
        own = self.own(task)
        return {name: value for name, value in task.initial(client).items() if name in own}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Train locally; when done, send the change of each layer that is sent, last layer first."""
        served = task.spread(shared, visits)
        params = {name: value.clone() for name, value in (served | personal).items()}
        loss = self.trained(task, params, set(personal), visits)
        weight = visits.weights(self.weights)
        yield {"loss": (loss, weight)}
        for names in reversed(task.layers()):
            if served.keys() >= set(names):
                yield {name: (params[name] - served[name], weight) for name in names}
        return {name: params[name] for name in personal}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return the parameters that the clients predict with, by the protocol that is asked for."""
        if self.evaluation == "stored":
            return task.spread(shared, visits) | personal
        if self.evaluation == "new-client":
            return self.adapted(task, shared, visits, self.tune_epochs)
        return self._tuned(task, shared, visits, self.tune_epochs)

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        """Return the shared layers, and personal ones that learn from their initial values (SRPFL, remark 4.8)."""
        return self._tuned(task, shared | self.enter(task, int(visits.clients[0])), visits, epochs)

    def _tuned(self, task: Task, start: State, visits: Visits, epochs: int) -> State:
        """Return what becomes of a whole model in which the personal layers, if there are any, learn."""
        params, own = task.spread(start, visits), self.own(task)
        return self.optimiser.tuned(task, params, visits, self.batch, epochs, own) if own else params


def refuse(key: str, value: int, least: int, most: int) -> None:
    """Raise UsageError where a number of layers does not fit the model."""
    if not least <= value <= most:
        near = min(max(value, least), most)
        raise UsageError(f"algorithm.{key}: expected {least} … {most} for this model, got {value}; nearest: {near}")
