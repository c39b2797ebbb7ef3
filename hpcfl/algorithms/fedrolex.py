"""FedRolex: sub-models whose window of units moves on by one in each round (Alam, Liu, Yan & Zhang, NeurIPS 2022).

In round j a client of rate β holds the units j, j + 1, …, j + ⌊βK⌋ − 1 (mod K) of each hidden layer of K units (eq. 3):
all clients' windows begin alike, and all units have their turn. All else is as in HeteroFL.
"""

from __future__ import annotations

from math import floor
from typing import Literal

from hpcfl.algorithms.base import Client, Ints, Message, State, Task, Visits
from hpcfl.algorithms.heterofl import HeteroFl
from hpcfl.algorithms.wrapped import changed
from hpcfl.base.lazy import Tensor
from hpcfl.models.modules import narrow
from hpcfl.sums.message import HELD


class FedRolex(HeteroFl):
    """HeteroFL with windows that roll over the units of each hidden layer.

    Visits compute their window, and send it at its place in the whole model: what comes late is of the units that the
    client had, whichever windows have followed.
    """

    name: Literal["fedrolex"] = "fedrolex"  # type: ignore[assignment]
    windows: Literal["paper", "released"] = "paper"
    """``paper``: ⌊βK⌋ units, at least one, from unit j in round j (eq. 3). ``released``: ⌈βK⌉ from unit −j, as in the
    authors' code."""

    @property
    def sends_whole(self) -> bool:
        return True

    def units(self, rate: float, whole: int) -> int:
        return super().units(rate, whole) if self.windows == "released" else max(1, floor(rate * whole + 1e-9))

    def placed(self, task: Task, shared: State, round: int) -> State:
        axes, start = narrow.hidden_axes(task.layers), self._start(round)
        return {name: turned(value, axes[name], start) for name, value in shared.items()}

    def holders(self, task: Task, clients: Ints, round: int) -> State:
        axes, start, found = narrow.hidden_axes(task.layers), self._start(round), super().holders(task, clients, round)
        return {name: turned(value, axes[name], -start) for name, value in found.items()}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        axes, start = narrow.hidden_axes(task.layers), self._start(visits.round)

        def back(name: str, value: Tensor) -> Tensor:
            whole = value.new_zeros(len(value), *shared[name].shape)
            whole[tuple(map(slice, value.shape))] = value
            return turned(whole, {axis + 1: units for axis, units in axes[name].items()}, -start)

        def sent(message: Message) -> Message:
            found = dict(message)
            for name, (value, weight) in message.items():
                if (of := name.removeprefix(HELD)) in shared:
                    found[name] = back(of, value), weight
                masked = HELD + name in message or name not in shared
                if not masked and self.narrows(shared[name].shape, axes[name]):
                    found[HELD + name] = back(name, value.new_ones(value.shape)), weight
            return found

        return (yield from changed(super().client(task, shared, personal, visits), sent))

    def _start(self, round: int) -> int:
        return round if self.windows == "paper" else -round


def turned(value: Tensor, axes: dict[int, int], start: int) -> Tensor:
    """Return a tensor with the units of hidden layers from number `start` on first; `axes` have so many units."""
    for axis, whole in axes.items():
        value = value.roll(-(start % whole) * (value.shape[axis] // whole), axis)
    return value
