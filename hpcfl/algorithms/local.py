"""Every client for itself: what methods that share have to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from hpcfl.algorithms.split import Split

if TYPE_CHECKING:
    from hpcfl.message import Layout, State
    from hpcfl.task import Task


class Local(Split):
    """Every client for itself: nothing but the training loss is sent."""

    name: Literal["local"] = "local"
    any_shape: ClassVar[bool] = True
    evaluation: Literal["stored"] = "stored"

    @property
    def adapts(self) -> int:
        """Nothing is shared that a client could adapt to."""
        return 0

    def kept(self, layers: int) -> range:
        """Return all layers."""
        return range(layers)

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return one layer, which is the loss: a visit has to deliver something to count."""
        return (("loss",),)

    def layout(self, task: Task) -> Layout:
        """Return the loss alone."""
        from hpcfl.message import Block

        return ({"loss": Block(())},)

    def start(self, task: Task) -> State:
        """Return nothing: there is no shared state."""
        return {}
