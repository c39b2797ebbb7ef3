"""The protocol between an algorithm and the engine. The defaults are FedAvg's; only `client` must be written.

An algorithm is one file in this folder with one class, a frozen and strict section: its fields become the keys
of ``[algorithm]``. It imports what a learner needs (`hpcfl.task`, `hpcfl.message`) and nothing that knows MPI,
files, clocks or other algorithms.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar

from hpcfl.section import Section

if TYPE_CHECKING:
    from hpcfl.message import Layout, Message, State, Sums
    from hpcfl.participation import Participation
    from hpcfl.task import Task
    from hpcfl.visits import Visits

    Client = Generator[Message, None, State]
    """Yields messages as they become ready, returns the rows' new personal state."""


class Algorithm(Section):
    """Base of all algorithms.

    Attributes
    ----------
    layerwise : bool
        Whether layers leave one by one while the visit goes on (last layer first). If not, a visit that is not
        complete when the round closes has sent nothing.
    any_shape : bool
        Whether clients may differ in the shape of their features: what depends on it is never shared then.
    figures : dict of str to str
        What `measured` says of the shared state after each round: name and meaning, recorded beside the metrics.
    """

    name: str
    layerwise: ClassVar[bool] = False
    any_shape: ClassVar[bool] = False
    figures: ClassVar[dict[str, str]] = {}

    def check(self, participation: Participation, known: bool = True) -> None:
        """Raise UsageError where a key's value is out of range or does not go with the participation.

        Parameters
        ----------
        known : bool
            Whether the speed model gives the chance that a layer arrives by a deadline.
        """

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the names of the blocks of layers 1 … L, first layer first: what a depth counts in."""
        return task.layers()

    def layout(self, task: Task) -> Layout:
        """Return the groups of blocks a visit sends, in the order they leave: the loss, then layers L … 1."""
        from hpcfl.message import Block

        shapes = task.initial()
        groups = [{name: Block(tuple(shapes[name].shape)) for name in names} for names in self.layers(task)]
        return ({"loss": Block(())}, *reversed(groups))

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
        return True

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
        from hpcfl.message import moved

        return {name: moved(value, sums.mean(name)) if name in sums else value for name, value in shared.items()}

    def measured(self, task: Task, shared: State) -> dict[str, float]:
        """Return the `figures` of the shared state."""
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
