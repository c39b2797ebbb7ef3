"""What methods have in common whose clients each keep a whole model of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from hpcfl.algorithms.split import Split
from hpcfl.base.errors import UsageError

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.comm.message import Layout, Message, State
    from hpcfl.learning.task import Objective, Task
    from hpcfl.learning.visits import Visits
    from hpcfl.schedule.participation import Participation


class Whole(Split):
    """Every client keeps a model of its own, of whatever shape; no layer is shared.

    Attributes
    ----------
    weights : {"samples", "uniform"}
        Weight of a client in the mean training loss: its number of samples, or 1.
    evaluation : {"stored", "tuned"}
        The model that a client is tested with. ``stored``: its own as it is. ``tuned``: its own after all layers have
        learned for `tune_epochs` more passes over its training data (FLIC), also where it never took part.
    tune_epochs : int
        Passes over its training data in which a client's model learns before the test (``tuned``).
    """

    any_shape: ClassVar[bool] = True
    # no layer is shared, so Split's other two ways to test have no meaning here, and there is one more
    evaluation: Literal["stored", "tuned"] = "stored"  # type: ignore[assignment]

    def check(self, participation: Participation, known: bool = True) -> None:
        """Refuse passes before a test that nobody would make."""
        super().check(participation, known)
        if self.evaluation == "stored" and self.tune_epochs != type(self).model_fields["tune_epochs"].default:
            raise UsageError(
                f"algorithm.tune_epochs = {self.tune_epochs} has no meaning with algorithm.evaluation = 'stored': "
                "remove it, or set algorithm.evaluation = 'tuned'"
            )

    @property
    def adapts(self) -> int:
        """No layer is shared that a client could adapt to."""
        return 0

    def kept(self, layers: int) -> range:
        """Return all layers."""
        return range(layers)

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return one layer, which is the loss: a visit has to deliver something to count."""
        return (("loss",),)

    def layout(self, task: Task) -> Layout:
        """Return the loss alone."""
        from hpcfl.comm.message import Block

        return ({"loss": Block(())},)

    def start(self, task: Task) -> State:
        """Return nothing: there is no shared state."""
        return {}

    def objective(self, task: Task, shared: State, visits: Visits) -> Objective | None:
        """Return what the clients minimise; None: the mean loss."""
        return None

    def news(self, task: Task, params: State, visits: Visits) -> Message:
        """Return what is sent beside the loss when the models are trained; by default nothing."""
        return {}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Train the clients' own models; send the objective's mean over the steps, then the `news`."""
        params = {name: value.clone() for name, value in personal.items()}
        batches = task.batches(visits, self.batch, self.epochs)
        loss = self.optimiser.train(task, params, batches, objective=self.objective(task, shared, visits))
        yield {"loss": (loss, visits.weights(self.weights))}
        news = self.news(task, params, visits)
        if news:
            yield news
        return params

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return the clients' own models, by the protocol that is asked for."""
        if self.evaluation == "stored":
            return personal
        return self.optimiser.tuned(task, personal, visits, self.batch, self.tune_epochs, self.own(task))
