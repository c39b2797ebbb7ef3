"""The protocol between an algorithm and the engine.

A method is two functions: `client` says what a visit computes and sends, `server` what becomes of it. This is a whole
method:

```python
from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm


class FedSgd(Algorithm):
    "FedSGD: each client sends one gradient step on all its data, the server averages (McMahan et al., 2017)."

    name: Literal["fedsgd"] = "fedsgd"
    lr: float = Field(0.1, gt=0)
    "Step size."

    def client(self, task, shared, personal, visits):
        params = task.replicate(shared, visits)  # {name: [c, …]}: a chunk of c clients at a time
        batch = next(task.batches(visits, 0, steps=1))  # all that each client has
        gradients, losses = task.gradients(params, batch)
        weight = visits.weights("samples")  # whole numbers, so that sums are exact: here the samples
        yield {"loss": (losses, weight)}
        for names in reversed(task.layer_names()):  # in the order of `layout`: the loss, then the last layer first
            yield {name: (-self.lr * gradients[name], weight) for name in names}
        return personal

    def server(self, task, shared, sums):  # the default does the same
        return {name: sums.moved(name, value) for name, value in shared.items()}
```

A file like this in this folder is a new method: its fields are the keys of ``[algorithm]``, the string below a field
explains the key. It imports what a learner needs (`hpcfl.learning`, `hpcfl.sums.message`) and nothing that knows MPI,
files or clocks. It derives from another algorithm only if it is that one with something more; a method whose clients
train a model, or layers of it, begins from `local_sgd`.

In each round the engine invites clients and serves them the shared state. It calls `client` for some of them at a time,
a chunk, all of which have samples in every step that `Task.batches` yields. A visit sends named tensors, the blocks, in
the order of `layout`; a layer is some of these blocks, and a visit's depth is the first layer that arrives in time. The
engine adds up each block over the visits that counted, and calls `step` with these sums, once, at the server. Between
rounds there are three kinds of state, and checkpoints hold all of them: what is shared (by default the model), what is
personal to each client (by default nothing), and extras, which never leave the server (by default nothing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError
from hpcfl.sums.message import Block

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.base.types import Ints, State
    from hpcfl.data import Header
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task
    from hpcfl.models import Model
    from hpcfl.schedule.participation import Participation
    from hpcfl.sums.message import Layout, Message, Sums

    By = Literal["samples", "uniform"]

    Client = Generator[Message, None, State]
    """Yields messages as they become ready, returns the clients' new personal state."""

    Recalled = Callable[[], Iterator[tuple[int, State]]]
    """Yields all clients and their personal state, without a client axis."""

    Queries = Generator[State, Sums, State]
    """Yields queries, is sent the sums over the responses, returns what it has found."""

Extras = Mapping[str, Any]
"""What never leaves the server: tensors, floats and strings by name."""


@dataclass(frozen=True)
class ServerState:
    """What the server holds between rounds, all of it in checkpoints.

    Attributes
    ----------
    shared : State
        What clients are served.
    extras : Extras
        What never leaves the server.
    """

    shared: State
    extras: Extras = field(default_factory=dict)


class IteratedReduction(ABC):
    """Further sums over the messages that counted, once a round has closed: a barycenter, a median.

    Clients are not asked again: the engine keeps their messages. In simulated time all ranks run `query` alike, and
    each responds for the messages that it holds; in real time the server holds them all. The server's step finds what
    `query` returns in ``sums.iterated``.

    Attributes
    ----------
    kept : frozenset of str
        The blocks of the method's layout that the engine keeps for it.
    layout : Layout
        The blocks of one response; they travel together.
    """

    kept: frozenset[str]
    layout: Layout

    @abstractmethod
    def query(self, shared: State) -> Queries:
        """Yield a query, named tensors of any shapes; be sent the sums over all responses to it; and so on.

        It may depend only on `shared`, as it was served to the round, and on the sums, and all ranks must ask equally
        often. The sums are the same to the bit everywhere, but what is computed from them may differ between kinds of
        processors. So the sums themselves must tell when to stop: make what decides (a distance, say) a block of the
        response. Where nobody counted they have weight 0.
        """

    @abstractmethod
    def response(self, query: State, message: Message) -> Message:
        """Return some visits' responses, ``{block: (value [c, …], weight [c])}`` in the blocks of `layout`.

        A row's response depends on this row alone. Weights are whole numbers, so that their sums are exact.

        Parameters
        ----------
        message : Message
            What the c visits have sent of each block in `kept`, ``(value [c, …], weight [c])``, in the block's type.
            What one has not sent is 0 and has weight 0, and a response of weight 0 may be anything.
        """


class Algorithm(ConfigBase):
    """Base of all algorithms: the two functions, then what is optional, by what it is for. Defaults are FedAvg's.

    Attributes
    ----------
    layerwise : bool
        Layers leave one by one while the visit goes on, the last layer first, and each counts if it arrives in time.
        Otherwise a visit counts only if it is complete when the round closes.
    snapshots : bool
        What a visit would send if it stopped where it is can be told at each of its steps.
    any_shape : bool
        Clients may differ in the shape of their features; then nothing that depends on this shape is shared.
    fresh : bool
        The method needs new samples of a linear model in each round, and can do nothing with other data.
    needs_rounds : str
        Why messages of visits that began with different states cannot be added; empty where they can be.
    shares_model : bool
        Something of the model is shared. Otherwise there is nothing that a server optimiser could step along, or that
        could count by its staleness.
    sends_loss_only : bool
        Nothing is sent but the training loss.
    steps_alone : bool
        The server takes a step with each visit, so that it takes no means over clients.
    keeps_sent : bool
        Clients keep what they have sent, and the server must know the sum of it: nothing may count by its staleness.
    own_step : bool
        The server's step gives what is shared a property that the step of a server optimiser would not keep, or adds
        up numbers at other places than theirs.
    metric_columns : dict of str to str
        Names and meanings of its `metrics`.
    """

    name: str
    layerwise: ClassVar[bool] = False
    snapshots: ClassVar[bool] = False
    any_shape: ClassVar[bool] = False
    fresh: ClassVar[bool] = False
    needs_rounds: ClassVar[str] = ""
    shares_model: ClassVar[bool] = True
    sends_loss_only: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    keeps_sent: ClassVar[bool] = False
    own_step: ClassVar[bool] = False
    metric_columns: ClassVar[dict[str, str]] = {}

    # ---- the two functions that make a method

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Do one chunk's visits: yield messages, return the personal state ``{name: [c, …]}``.

        A message is ``{block: (value [c, …], weight [c])}``; a layerwise algorithm may send fewer rows, those of the
        first clients (`Visits.in_time`). A value has the shape of its block or of one of its `parts`, as `holds` says;
        `hpcfl.sums.message.masked` sends one that is held in part by a mask. Do not change a tensor once it is yielded:
        it may still be on its way.

        The engine keeps the returned state only of visits that counted. In a layerwise algorithm, a personal tensor
        that has the name of a block, or one that ends in a colon and this name, advances where that block counted, and
        all others where the visit was complete.
        """
        raise NotImplementedError

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        """Return the shared state after the round: by default each tensor moves by its mean update.

        Return new tensors and leave those of `shared` as they are: they may still be on their way to a late client.
        """
        return {name: sums.moved(name, value) if name in sums else value for name, value in shared.items()}

    def buffer_after(self, name: str, value: Tensor, sums: Sums) -> Tensor:
        """Return a buffer of the model after the round, of which the shared model has `value`: by default as `server`.

        `hpcfl.algorithms.buffered` asks for those that are no integers; `server` is told nothing of them.
        """
        return sums.moved(name, value)

    # ---- state: what is shared (the model), what each client keeps (nothing), what the server alone knows (nothing)

    def init_server(self, task: Task) -> State:
        """Return the shared state before round 0."""
        return task.initial()

    def init_client(self, task: Task, client: int) -> State:
        """Return a client's personal state before its first visit, without a client axis."""
        return {}

    def personal(self, task: Task) -> set[str]:
        """Return the names of the model's tensors that `init_client` begins with a client's own initial values."""
        return set()

    def init_extras(self, task: Task) -> Extras:
        """Return what never leaves the server, before round 0."""
        return {}

    def recalled(self, task: Task, extras: Extras, personal: Recalled) -> Extras:
        """Return the extras with which a run goes on where some clients' personal state is of before their last visits.

        So it is where a rank did not answer in time when a checkpoint was written, in real time. By default as saved.
        """
        return extras

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        """Return what the server holds after the round. A method with extras overrides this, others `server`."""
        return replace(state, shared=self.server(task, state.shared, sums))

    def shares_any(self, model: Model) -> bool:
        """Return whether some of the model's tensors are shared, so that a server optimiser could step along them."""
        return self.shares_model

    # ---- what is sent: in which layers, in which order

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the names of the blocks of layers 1 … L, the first layer first."""
        return task.layer_names()

    def layout(self, task: Task) -> Layout:
        """Return the groups of blocks that a visit sends, in their order: the loss, then layers L … 1."""
        shapes = task.initial()
        groups = [
            {name: Block(tuple(shapes[name].shape), shapes[name].dtype) for name in names}
            for names in self.layers(task)
        ]
        return ({"loss": Block((), task.dtype)}, *reversed(groups))

    def holds(self, task: Task) -> Ints:
        """Return which of its blocks' `parts` each client's visits hold, int64 [clients].

        The clients of a chunk hold the same one.
        """
        return np.zeros(task.federation.clients, dtype=np.int64)

    def sends(self, round: int) -> frozenset[str] | None:
        """Return the names of the blocks that visits of this round may send; None: all of the layout.

        In simulated time the others do not travel.
        """
        return None

    def mean_weights(self) -> By:
        """Return by what clients are weighted in the means of changes by which the server moves every layer.

        UsageError where it does not move them by such means and nothing else: `[weighting]` then cannot correct them.
        """
        raise UsageError(
            f"weighting.correct: algorithm.name = '{self.name}' does more with what clients send than to take weighted "
            "means of their changes: expected 'none'"
        )

    # ---- visits that are cut short

    def visit_steps(self, samples: int) -> tuple[int, int]:
        """Return the local steps of a whole visit of a client with so many training samples, and the least that count.

        By default (0, 0): a visit cannot be cut short after some of its steps. Where it can, it takes those that
        `Visits.steps` says; `Task.batches` ends by itself.
        """
        return 0, 0

    @property
    def splits_last(self) -> bool:
        """Whether visits can send the layers of the last of their steps one by one, see `last_step`."""
        return False

    @property
    def steps_before(self) -> int:
        """Return how many of a visit's local steps come before that whose layers leave one by one."""
        return 0

    # ---- what is computed at once

    def samples_per_step(self, samples: int) -> int:
        """Return how many samples a step takes of a client that has so many, where visits are computed at once.

        That is where they are steps of `Task.fused` on the mean loss and nothing else: then no bit of what a visit
        sends and keeps depends on who is in its chunk, and chunks may be computed together. By default 0: it may.
        """
        return 0

    # ---- what is refused

    def check(self, participation: Participation, known: bool = True) -> None:
        """Raise UsageError where a key's value is out of range or does not go with the participation.

        `known` is True where the speed model gives the chance that a layer arrives in time.
        """

    def check_model(self, model: Model, header: Header) -> None:
        """Raise UsageError where a key does not go with the model or with what is known of the data."""

    # ---- what all clients do, invited or not

    @property
    def between_rounds(self) -> str:
        """Return which key lets all clients learn between rounds, "" where none does; in simulated time only."""
        return ""

    def between(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return a chunk's personal state after what its clients do when a round has ended, ``{name: [c, …]}``.

        All do it, invited or not, but those held out, with what is shared by then; `visits` is as for a test then. The
        engine asks when the next round begins, never after the last one: a test must do it for itself.
        """
        return personal

    # ---- rounds of several kinds

    def invites(self, round: int) -> bool:
        """Return whether anybody is invited in this round."""
        return not self.clients_done(round)

    def invites_all(self, round: int) -> bool:
        """Return whether this round invites all clients and waits for all, whatever the participation says."""
        return False

    def clients_done(self, round: int) -> bool:
        """Return True if neither this round nor a later one invites clients; once true it stays so.

        The clients' ranks are then released, and the server goes on alone.
        """
        return False

    def learning_rate(self, round: int) -> float:
        """Return a round's step size; an update over it is taken for the mean gradient.

        By default it is the key ``lr``, over ``1 + decay·round`` where there is a key ``decay``.
        """
        return float(getattr(self, "lr", 1.0) / (1 + getattr(self, "decay", 0.0) * round))

    # ---- sums that iterate

    @property
    def iterates(self) -> bool:
        """Whether there is an iterated reduction; in real time it needs a lane for each rank."""
        return False

    def iterated_reduction(self, task: Task) -> IteratedReduction | None:
        """Return the further sums over each round's messages, None where `iterates` is false."""
        return None

    # ---- what is reported

    def metrics(self, task: Task, state: ServerState) -> dict[str, float]:
        """Return the values of `metric_columns` after a round, recorded beside the accuracy."""
        return {}

    def warnings(self, task: Task, state: ServerState) -> dict[str, str]:
        """Return what the user should know now, by name; each name is said and recorded once per start of a run."""
        return {}

    # ---- evaluation, and clients that join after training

    @property
    def evaluates_shared(self) -> bool:
        """Whether clients predict with the shared model as it is: only then is it tested on the global test set."""
        return True

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return the parameters ``{name: [c, …]}`` that the clients predict with."""
        return task.replicate(shared, visits)

    @property
    def adapt_epochs(self) -> int:
        """Passes over its own data in which a client that never took part adapts; 0: this method cannot adapt."""
        return 0

    def personal_names(self, task: Task) -> set[str]:
        """Return the names of the tensors that are a client's own and learn when it adapts."""
        return set()

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        """Return the parameters ``{name: [c, …]}`` of clients that never took part; needed where `adapt_epochs` > 0.

        What is their own begins at its initial values and learns for `epochs` passes over their training data (0: it
        does not learn). All else is as it is shared.
        """
        raise NotImplementedError
