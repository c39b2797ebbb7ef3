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
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hpcfl.algorithms.hooks import By, Extras, Hooks, Recalled
from hpcfl.base.types import Floats, Ints, Shape, State
from hpcfl.data import Header
from hpcfl.learning.batches import Batch, Visits
from hpcfl.learning.task import Objective, Task
from hpcfl.models import Model
from hpcfl.schedule.participation import Participation
from hpcfl.sums.message import Block, Layout, Message, Sums

# what methods are written with is imported from here
__all__ = ["Algorithm", "Batch", "Block", "By", "Client", "Extras", "Floats", "Header", "Ints", "IteratedReduction"]
__all__ += ["Layout", "Message", "Model", "Objective", "Participation", "Queries", "Recalled", "ServerState", "Shape"]
__all__ += ["State", "Sums", "Task", "Visits"]

Client = Generator[Message, None, State]
"""Yields messages as they become ready, returns the clients' new personal state."""

Queries = Generator[State, Sums, State]
"""Yields queries, is sent the sums over the responses, returns what it has found."""


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


class Algorithm(Hooks):
    """Base of all algorithms: the two functions, then what is optional, by what it is for. Defaults are FedAvg's.

    What few methods need, and wrappers ask of all, is in `Hooks`.

    Attributes
    ----------
    layerwise : bool
        Layers leave one by one while the visit goes on, the last layer first, and each counts if it arrives in time.
        Otherwise a visit counts only if it is complete when the round closes.
    any_shape : bool
        Clients may differ in the shape of their features; then nothing that depends on this shape is shared.
    metric_columns : dict of str to str
        Names and meanings of its `metrics`.
    """

    layerwise: ClassVar[bool] = False
    any_shape: ClassVar[bool] = False
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

    # ---- state: what is shared (the model), what each client keeps (nothing), what the server alone knows (nothing)

    def init_server(self, task: Task) -> State:
        """Return the shared state before round 0."""
        return task.initial()

    def init_client(self, task: Task, client: int) -> State:
        """Return a client's personal state before its first visit, without a client axis."""
        return {}

    def init_extras(self, task: Task) -> Extras:
        """Return what never leaves the server, before round 0."""
        return {}

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        """Return what the server holds after the round. A method with extras overrides this, others `server`."""
        return replace(state, shared=self.server(task, state.shared, sums))

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

    # ---- what is refused

    def check(self, participation: Participation, known: bool = True) -> None:
        """Raise UsageError where a key's value is out of range or does not go with the participation.

        `known` is True where the speed model gives the chance that a layer arrives in time.
        """

    def check_model(self, model: Model, header: Header) -> None:
        """Raise UsageError where a key does not go with the model or with what is known of the data."""

    # ---- sums that iterate

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
