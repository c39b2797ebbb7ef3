"""Local training: clients begin from what is shared, train on their own data, and send what has changed.

A layer of the model is shared, and averaged by the server, or personal, and kept by each client. A method says which
(`personal_layers`: none, some or all), what the clients minimise (`objective`), and how they train (`train`).

`evaluation` says what a client is tested with, in the same words for all methods; each has those that it can keep:

============== ======================================================== ==============================================
``evaluation`` a client's model begins as                               then learns for `tune_epochs` on its own data
============== ======================================================== ==============================================
``shared``     the shared model                                         nothing
``stored``     the shared layers, and its own personal ones             nothing
``tuned``      the same as ``stored``                                   `tuned_layers`
``fine-tune``  the shared layers, and the mean of all personal ones     `tuned_layers`
``new-client`` the shared layers, and personal ones of initial values   `tuned_layers`
``adapted``    the shared model                                         all, by one step on all its data (HF-MAML only)
============== ======================================================== ==============================================
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm
from hpcfl.base.errors import UsageError, check_within

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.algorithms.base import Client
    from hpcfl.base.types import State
    from hpcfl.comm.message import Layout
    from hpcfl.learning.batches import Batch, Visits
    from hpcfl.learning.optim import Optimizer
    from hpcfl.learning.task import Objective, Task
    from hpcfl.schedule.participation import Participation


Personalised = Annotated[
    Literal["stored", "fine-tune", "new-client"],
    Field(
        description="A client is tested with the shared layers and, ``stored``: its own personal ones; ``fine-tune``: "
        "the mean of all, tuned for `tune_epochs` (the SRPFL authors' code); ``new-client``: initial ones, tuned so "
        "(SRPFL, remark 4.8)."
    ),
]


class LocalTraining(Algorithm):
    """Local training of a model whose layers are shared in part, by whatever steps.

    Personal state is the personal layers, and whatever else `init_client` returns: the memory that `train` is given.
    """

    lr: float = Field(0.1, gt=0)
    """Local step size."""
    batch: int = Field(10, ge=0)
    """Samples per local step; 0 for all that a client has."""
    weights: Literal["samples", "uniform"] = "samples"
    """Weight of a client in means over clients. ``samples``: its number of training samples. ``uniform``: 1."""
    evaluation: Literal["shared", "stored", "tuned", "fine-tune", "new-client", "adapted"] = "shared"
    """The model that a client is tested with, see above; for ``fine-tune`` personal layers are sent too."""
    tune_epochs: int = Field(10, ge=1)
    """Passes over its training data in which a client's own layers learn before the test."""

    def personal_layers(self, layers: int) -> range:
        """Return which of so many layers (0 … L − 1) are personal."""
        return range(0)

    def tuned_layers(self, layers: int) -> range:
        """Return which learn before a test."""
        return self.personal_layers(layers)

    @abstractmethod
    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        """Train in place, `memory` too; return each client's mean objective over its steps, ``[c]``."""

    @property
    def optimiser(self) -> Optimizer:
        """What learns before a test takes its steps."""
        from hpcfl.learning.optim import Sgd

        return Sgd(self.lr)

    def check(self, participation: Participation, known: bool = True) -> None:
        idle = self.evaluates_shared and not self.adapt_epochs
        if idle and self.tune_epochs != type(self).model_fields["tune_epochs"].default:
            raise UsageError(
                f"algorithm.tune_epochs = {self.tune_epochs} has no meaning with algorithm.evaluation = "
                f"'{self.evaluation}': remove it, or set algorithm.evaluation = 'tuned'"
            )

    @property
    def evaluates_shared(self) -> bool:
        return self.evaluation in ("shared", "stored")

    @property
    def adapt_epochs(self) -> int:
        return self.tune_epochs

    def personal_names(self, task: Task) -> set[str]:
        return _names(task, self.tuned_layers(len(task.layer_names())))

    def personal(self, task: Task) -> set[str]:
        return _names(task, self.personal_layers(len(task.layer_names())))

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the layers that are sent: the shared ones, and for ``fine-tune`` the personal ones too.

        Where there are none it is the loss: a visit has to deliver something to count.
        """
        personal = set() if self.evaluation == "fine-tune" else self.personal(task)
        return tuple(names for names in task.layer_names() if personal.isdisjoint(names)) or (("loss",),)

    def layout(self, task: Task) -> Layout:
        from hpcfl.comm.message import Block

        if self.personal(task) >= set(task.initial()):
            return ({"loss": Block(())},)
        return super().layout(task)

    def init_server(self, task: Task) -> State:
        return _some(task.initial(), {name for names in self.layers(task) for name in names})

    def init_client(self, task: Task, client: int) -> State:
        return _some(task.initial(client), self.personal(task))

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        own, served = self.personal(task), task.replicate(shared, visits)
        params = {name: value.clone() for name, value in (served | _some(personal, own)).items()}
        memory = _some(personal, personal.keys() - own)
        loss = self.train(task, shared, params, memory, visits)
        weight = visits.weights(self.weights)
        yield {"loss": (loss, weight)}
        for names in reversed(task.layer_names()):
            if served.keys() >= set(names):
                yield {name: (params[name] - served[name], weight) for name in names}
        return {name: params[name] if name in own else memory[name] for name in personal}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        if self.evaluation == "new-client":
            return self.adapted(task, shared, visits, self.tune_epochs)
        params = task.replicate(shared, visits)
        if self.evaluation in ("stored", "tuned"):
            params |= personal
        return params if self.evaluates_shared else self._tuned(task, params, visits, self.tune_epochs)

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        begun = shared | _some(task.initial(int(visits.clients[0])), self.personal(task))
        return self._tuned(task, task.replicate(begun, visits), visits, epochs)

    def _tuned(self, task: Task, params: State, visits: Visits, epochs: int) -> State:
        own = self.personal_names(task)
        return self.optimiser.fine_tuned(task, params, visits, self.batch, epochs, own) if own else params


class LocalSgd(LocalTraining):
    """Local training by steps of an optimiser on batches."""

    epochs: int = Field(1, ge=0)
    """Local passes over a client's data per visit; 0 where `steps` counts instead."""
    steps: int = Field(0, ge=0)
    """Local steps per visit; 0 where `epochs` counts instead."""
    decay: float = Field(0.0, ge=0)
    """The step size of round k, counted from 0, is ``lr / (1 + decay·k)``; what learns before a test takes `lr`."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """The local optimiser; its memory starts anew with each visit, unless the method says otherwise."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Heavy-ball momentum of ``sgd``."""
    weight_decay: float = Field(0.0, ge=0)
    """Penalty on the weights, not on the biases."""

    def objective(self, task: Task, shared: State, visits: Visits) -> Objective | None:
        """Return what the clients minimise; None: the mean loss."""
        return None

    def local_steps(self, task: Task, visits: Visits, phase: int = 0) -> Iterator[Batch]:
        """Yield the batches of a visit's steps; each phase has an order of samples of its own."""
        return task.batches(visits, self.batch, self.epochs, self.steps, phase)

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        objective = self.objective(task, shared, visits)
        batches = self.local_steps(task, visits)
        return self.optimiser_in(visits.round).train(task, params, batches, memory or None, objective=objective)

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        if (self.epochs > 0) == (self.steps > 0):
            raise UsageError(
                "algorithm: expected one of epochs and steps above 0 and the other 0, "
                f"got epochs = {self.epochs}, steps = {self.steps}"
            )
        if self.optimizer == "adam" and self.momentum:
            raise UsageError(
                f"algorithm.momentum = {self.momentum} has no meaning with algorithm.optimizer = 'adam': "
                "remove it, or set algorithm.optimizer = 'sgd'"
            )

    @property
    def optimiser(self) -> Optimizer:
        from hpcfl.learning.optim import Adam, Sgd

        if self.optimizer == "adam":
            return Adam(self.lr, decay=self.weight_decay)
        return Sgd(self.lr, momentum=self.momentum, decay=self.weight_decay)

    def optimiser_in(self, round: int) -> Optimizer:
        return replace(self.optimiser, lr=self.learning_rate(round))


def last(key: str, value: int, layers: int, least: int = 1, most: int | None = None) -> range:
    """Return the last `value` of so many layers; UsageError naming `key` where that is not `least` … `most` of them."""
    most = layers if most is None else most
    check_within(f"algorithm.{key}", value, least, most, " for this model")
    return range(layers - value, layers)


def _names(task: Task, numbers: range) -> set[str]:
    layers = task.layer_names()
    return {name for number in numbers for name in layers[number]}


def _some(state: State, names: Set[str]) -> State:
    return {name: value for name, value in state.items() if name in names}
