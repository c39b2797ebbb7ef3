"""The protocol between an algorithm and the engine. The defaults are FedAvg's; only `client` must be written.

An algorithm is one file in this folder with one class, a frozen and strict section: its fields become the keys
of ``[algorithm]``. It imports what a learner needs (`hpcfl.learning.task`, `hpcfl.comm.message`) and nothing that knows
MPI, files or clocks, nor another algorithm, unless it is that one with something more. Where clients train a model, or
layers of it, `local_sgd` is what to begin from.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar

from hpcfl.base.section import Section

if TYPE_CHECKING:
    from hpcfl.comm.message import Layout, Message, State, Sums
    from hpcfl.data import Header
    from hpcfl.learning.task import Task
    from hpcfl.learning.visits import Visits
    from hpcfl.models import Model
    from hpcfl.schedule.participation import Participation

    Client = Generator[Message, None, State]
    """Yields messages as they become ready, returns the rows' new personal state."""

    Asking = Generator[State, Sums, State]
    """Yields questions, is sent the sums over the answers, returns what it has found."""


class Algorithm(Section):
    """Base of all algorithms.

    Attributes
    ----------
    layerwise : bool
        Whether layers leave one by one while the visit goes on (last layer first). If not, a visit that is not
        complete when the round closes has sent nothing.
    any_shape : bool
        Whether clients may differ in the shape of their features: what depends on it is never shared then.
    fresh : bool
        Whether it needs new samples of a linear model in each round, and can do nothing with other data.
    figures : dict of str to str
        What `measured` says of the shared state after each round: name and meaning, recorded beside the metrics.
    """

    name: str
    layerwise: ClassVar[bool] = False
    any_shape: ClassVar[bool] = False
    fresh: ClassVar[bool] = False
    figures: ClassVar[dict[str, str]] = {}

    def check(self, participation: Participation, known: bool = True) -> None:
        """Raise UsageError where a key's value is out of range or does not go with the participation.

        Parameters
        ----------
        known : bool
            Whether the speed model gives the chance that a layer arrives in time.
        """

    def suits(self, model: Model, header: Header) -> None:
        """Raise UsageError where a key does not go with the model or with what is known of the data."""

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the names of the blocks of layers 1 … L, first layer first: what a depth counts in."""
        return task.layers()

    def layout(self, task: Task) -> Layout:
        """Return the groups of blocks a visit sends, in the order they leave: the loss, then layers L … 1."""
        from hpcfl.comm.message import Block

        shapes = task.initial()
        groups = [
            {name: Block(tuple(shapes[name].shape), shapes[name].dtype) for name in names}
            for names in self.layers(task)
        ]
        return ({"loss": Block((), task.dtype)}, *reversed(groups))

    def start(self, task: Task) -> State:
        """Return the shared state before round 0. Names that begin with ``server.`` never leave the server."""
        return task.initial()

    def enter(self, task: Task, client: int) -> State:
        """Return a client's personal state before its first visit, without a client axis."""
        return {}

    @property
    def rate(self) -> float:
        """The learning rate: an update divided by it is taken for the averaged gradient."""
        return 1.0

    def rate_in(self, round: int) -> float:
        """Return the learning rate in a round; by default the same in all."""
        return self.rate

    @property
    def alike(self) -> bool:
        """Whether clients predict with what is shared as it is: only then is a test of it one of the method."""
        return True

    @property
    def adapts(self) -> int:
        """Passes over its own data in which a client adapts that never took part; 0: this method has no such thing."""
        return 0

    def own(self, task: Task) -> set[str]:
        """Return the names of the tensors that are a client's own: those that learn when it adapts."""
        return set()

    def invites(self, round: int) -> bool:
        """Return whether anybody is invited in this round."""
        return not self.over(round)

    def over(self, round: int) -> bool:
        """Return whether nobody is invited from this round on, so that clients are needed no more.

        Once true it stays so. The ranks of the clients are then released, and the server goes on alone.
        """
        return False

    def everyone(self, round: int) -> bool:
        """Return whether this round invites all clients and waits for all, whatever the participation says."""
        return False

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

    @property
    def asks(self) -> bool:
        """Whether it asks for further sums, which ranks that share a lane in real time cannot give."""
        return False

    def keeps(self, task: Task) -> frozenset[str]:
        """Return the blocks of the layout that are held after they were sent, for `further`; by default none.

        Those of each visit that counted: in simulated time where it was computed, in real time at the server.
        """
        return frozenset()

    def further_layout(self, task: Task) -> Layout:
        """Return the blocks of one further sum; they travel together."""
        return ()

    def further(self, task: Task, shared: State) -> Asking:
        """Ask for further sums over what counted, once the round has closed; only where something is kept.

        Yield a question, named tensors of any shapes; be sent the sums over the visits' answers to it; and so on.
        Return what was found: the server's step reads it in ``sums.found``. In simulated time all ranks run this
        alike, so it may depend on nothing but `shared` and the sums, and all must ask equally often. The sums are the
        same to the bit everywhere, what is computed from them is not where ranks' processors differ: if the sums shall
        tell when to stop, sum up what does (a distance, say) as a block. Where nobody counted they have weight 0.

        Parameters
        ----------
        shared : State
            As it was served to the round, without what never leaves the server.
        """
        yield from ()
        return {}

    def answer(self, task: Task, question: State, message: Message) -> Message:
        """Return some visits' answers, ``{block: (value [c, …], weight [c])}`` in the blocks of `further_layout`.

        A pure function of each row by itself. Weights are whole numbers, so that their sums are exact.

        Parameters
        ----------
        message : Message
            What the c visits have sent of each block that is kept, ``(value [c, …], weight [c])``, in the block's type.
            What one has not sent is 0 and has weight 0, and an answer of weight 0 may be anything.
        """
        raise NotImplementedError

    def measured(self, task: Task, shared: State) -> dict[str, float]:
        """Return the `figures` of the shared state."""
        return {}

    def remarks(self, task: Task, shared: State) -> dict[str, str]:
        """Return what is worth a word to the user now, by name: said and recorded once per start of a run."""
        return {}

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return the parameters ``{name: [c, …]}`` that the clients predict with."""
        return task.spread(shared, visits)

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        """Return the parameters ``{name: [c, …]}`` of clients that never took part, where the method `adapts`.

        What is their `own` has learned from its initial values for so many passes over their training data (0: none),
        all else is as it is shared.
        """
        raise NotImplementedError
