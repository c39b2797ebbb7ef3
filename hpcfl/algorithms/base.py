"""The protocol between an algorithm and the engine.

Two functions make a method, and this is a whole one:

```python
from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm
from hpcfl.comm.message import moved


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
        return {name: moved(value, sums.mean(name)) for name, value in shared.items()}
```

A file like this in this folder is a new method: its fields are the keys of ``[algorithm]``, the string below a field is
the key's meaning. It imports what a learner needs (`hpcfl.learning`, `hpcfl.comm.message`) and nothing that knows MPI,
files or clocks, nor another algorithm, unless it is that one with something more. `local_sgd` is what to begin from
where clients train a model, or layers of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hpcfl.base.config import ConfigBase

if TYPE_CHECKING:
    from hpcfl.base.types import State
    from hpcfl.comm.message import Layout, Message, Sums
    from hpcfl.data import Header
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task
    from hpcfl.models import Model
    from hpcfl.schedule.participation import Participation

    Client = Generator[Message, None, State]
    """Yields messages as they become ready, returns the rows' new personal state."""

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

    The visits are not asked again. In simulated time all ranks iterate alike, each for the messages that it holds; in
    real time the server holds them all. What `query` returns is ``sums.iterated`` in the server's step.

    Attributes
    ----------
    kept : frozenset of str
        The blocks of the method's layout that are held for it after they were sent.
    layout : Layout
        The blocks of one response; they travel together.
    """

    kept: frozenset[str]
    layout: Layout

    @abstractmethod
    def query(self, shared: State) -> Queries:
        """Yield a query, named tensors of any shapes; be sent the sums over the responses; and so on.

        It may depend on nothing but `shared`, as it was served to the round, and the sums, and all ranks must ask
        equally often. The sums are the same to the bit everywhere, what is computed from them is not where ranks'
        processors differ: if the sums shall tell when to stop, sum up what does (a distance, say) as a block. Where
        nobody counted they have weight 0.
        """

    @abstractmethod
    def response(self, query: State, message: Message) -> Message:
        """Return some visits' responses, ``{block: (value [c, …], weight [c])}`` in the blocks of `layout`.

        A pure function of each row by itself. Weights are whole numbers, so that their sums are exact.

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
        Layers leave one by one while the visit goes on (last layer first). If not, a visit that is not complete when
        the round closes has sent nothing.
    any_shape : bool
        Clients may differ in the shape of their features: what depends on it is never shared then.
    fresh : bool
        It needs new samples of a linear model in each round, and can do nothing with other data.
    metric_columns : dict of str to str
        Names and meanings of its `metrics`.
    """

    name: str
    layerwise: ClassVar[bool] = False
    any_shape: ClassVar[bool] = False
    fresh: ClassVar[bool] = False
    metric_columns: ClassVar[dict[str, str]] = {}

    # ---- the two functions that make a method

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Do one chunk's visits: yield messages, return the personal state ``{name: [c, …]}``.

        What is yielded may be on its way while the generator goes on: it is not changed afterwards. In real time the
        returned state is provisional. Of a layerwise algorithm, what bears the name of a block advances with that
        block, and everything else with visits that were complete.
        """
        raise NotImplementedError

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        """Return the shared state after the round: by default each tensor moves by its mean update.

        In new tensors: those of `shared` may still be on their way to a client that is late.
        """
        from hpcfl.comm.message import moved

        return {name: moved(value, sums.mean(name)) if name in sums else value for name, value in shared.items()}

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
        """Return what the server holds after the round; where there are extras, this is overridden, not `server`."""
        return replace(state, shared=self.server(task, state.shared, sums))

    # ---- what is sent: in which layers, in which order

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the names of the blocks of layers 1 … L, first layer first: what a depth counts in."""
        return task.layer_names()

    def layout(self, task: Task) -> Layout:
        """Return the groups of blocks a visit sends, in the order they leave: the loss, then layers L … 1."""
        from hpcfl.comm.message import Block

        shapes = task.initial()
        groups = [
            {name: Block(tuple(shapes[name].shape), shapes[name].dtype) for name in names}
            for names in self.layers(task)
        ]
        return ({"loss": Block((), task.dtype)}, *reversed(groups))

    # ---- what is refused

    def check(self, participation: Participation, known: bool = True) -> None:
        """Raise UsageError where a key's value is out of range or does not go with the participation.

        Parameters
        ----------
        known : bool
            The speed model gives the chance that a layer arrives in time.
        """

    def check_model(self, model: Model, header: Header) -> None:
        """Raise UsageError where a key does not go with the model or with what is known of the data."""

    # ---- rounds of several kinds

    def invites(self, round: int) -> bool:
        """Return whether anybody is invited in this round."""
        return not self.clients_done(round)

    def invites_all(self, round: int) -> bool:
        """Return whether this round invites all clients and waits for all, whatever the participation says."""
        return False

    def clients_done(self, round: int) -> bool:
        """Return True once no later round invites clients: their ranks are then released, the server goes on alone."""
        return False

    def learning_rate(self, round: int) -> float:
        """Return a round's step size, by default the key ``lr``; an update over it is taken for the mean gradient."""
        return float(getattr(self, "lr", 1.0))

    # ---- sums that iterate

    @property
    def iterates(self) -> bool:
        """There is an iterated reduction, which ranks that share a lane in real time cannot take part in."""
        return False

    def iterated_reduction(self, task: Task) -> IteratedReduction | None:
        """Return the further sums over each round's messages, None where `iterates` is false."""
        return None

    # ---- what is reported

    def metrics(self, task: Task, state: ServerState) -> dict[str, float]:
        """Return the values of `metric_columns` after a round, recorded beside the accuracy."""
        return {}

    def warnings(self, task: Task, state: ServerState) -> dict[str, str]:
        """Return what is worth a word to the user now, by name: said and recorded once per start of a run."""
        return {}

    # ---- evaluation, and clients that join after training

    @property
    def evaluates_shared(self) -> bool:
        """Clients predict with what is shared as it is: only then is a test of it one of the method."""
        return True

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return the parameters ``{name: [c, …]}`` that the clients predict with."""
        return task.replicate(shared, visits)

    @property
    def adapt_epochs(self) -> int:
        """Passes over its own data in which a client adapts that never took part; 0: this method has no such thing."""
        return 0

    def personal_names(self, task: Task) -> set[str]:
        """Return the names of the tensors that are a client's own: those that learn when it adapts."""
        return set()

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        """Return the parameters ``{name: [c, …]}`` of clients that never took part, where there are `adapt_epochs`.

        What is their own has learned from its initial values for so many passes over their training data (0: none),
        all else is as it is shared.
        """
        raise NotImplementedError
