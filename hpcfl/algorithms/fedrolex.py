"""FedRolex: sub-models whose window of units moves on by one in each round (Alam, Liu, Yan & Zhang, NeurIPS 2022).

In round j a client of rate β holds the units j, j + 1, …, j + ⌊βK⌋ − 1 (mod K) of each hidden layer of K units (eq. 3):
all clients' windows begin alike, and all units have their turn. All else is as in HeteroFL.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcfl.algorithms.base import ServerState
from hpcfl.algorithms.heterofl import HeteroFl
from hpcfl.models.modules import narrow

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Extras
    from hpcfl.base.types import State
    from hpcfl.learning.task import Task
    from hpcfl.sums.message import Sums


class FedRolex(HeteroFl):
    """HeteroFL with windows that roll over the units of each hidden layer."""

    name: Literal["fedrolex"] = "fedrolex"  # type: ignore[assignment]
    windows: Literal["paper", "released"] = "paper"
    """``paper``: ⌊βK⌋ units, at least one, from unit j in round j (eq. 3). ``released``: ⌈βK⌉ from unit −j, as in the
    authors' code."""
    needs_rounds: ClassVar[str] = "its windows of units roll with them, so that older changes belong to other units"
    own_step: ClassVar[bool] = True  # it adds up windows, and puts them back to their units itself

    def units(self, rate: float, whole: int) -> int:
        return super().units(rate, whole) if self.windows == "released" else max(1, floor(rate * whole + 1e-9))

    def init_extras(self, task: Task) -> Extras:
        return {"rounds": 0.0}

    def placed(self, task: Task, shared: State, round: int) -> State:
        return self._turned(task, shared, round if self.windows == "paper" else -round)

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        """Take the step with the units in the order in which clients had them, and bring them back to theirs."""
        done = int(state.extras["rounds"])
        shared = self.server(task, self.placed(task, state.shared, done), sums)
        return ServerState(self.placed(task, shared, -done), {**state.extras, "rounds": done + 1.0})

    def _turned(self, task: Task, shared: State, start: int) -> State:
        """Return the model with the units of hidden layers from number `start` (mod K) on first."""
        turned, axes = dict(shared), narrow.hidden_axes(task.layers)
        for name in shared:
            for axis, whole in axes[name].items():
                turned[name] = turned[name].roll(-(start % whole) * (shared[name].shape[axis] // whole), axis)
        return turned
