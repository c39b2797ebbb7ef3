"""SALF and FedAvg whose visits take no time: where clients learn nothing, a schedule is all messages and waits.

A visit moves each tensor by what depends on client, round and the state that it was served, and on what the client
keeps: so sums and personal state tell whose visits have counted, and how often. `FURTHER` are the same with further
sums over the messages that counted.
"""

from __future__ import annotations

from typing import Any

from hpcfl.algorithms.base import Block, Client, IteratedReduction, Message, Queries, State, Task, Visits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.salf import Salf
from hpcfl.base.lazy import Tensor, torch


def _stamp(visits: Visits) -> Tensor:
    """Return a number for each visit, ``[c]``."""
    return torch.from_numpy((visits.clients * 31 + visits.round * 7) % 17 / 256).float()


def _moved(stamp: Tensor, value: Tensor) -> Tensor:
    return stamp.view(-1, *[1] * (value.dim() - 1)) - value / 64


class QuickSalf(Salf):
    """SALF without a gradient."""

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        stamp, served, kept = _stamp(visits), task.replicate(shared, visits), dict(personal)
        layers = self.layers(task)
        yield {"loss": (stamp, visits.ones(len(stamp)))}
        for number in range(len(layers), 0, -1):
            rows = visits.in_time(number)
            task.oracle_calls[visits.clients[:rows]] += number
            for name in layers[number - 1] if rows else ():
                moved = _moved(stamp[:rows], served[name][:rows])
                if name in kept:
                    moved += kept[name][:rows] / 2
                    kept[name] = torch.cat([moved, kept[name][rows:]])
                yield {name: (moved, visits.ones(rows))}
        return kept


class QuickFedAvg(FedAvg):
    """FedAvg without a gradient."""

    def train(self, task: Task, shared: State, params: State, memory: State, visits: Visits) -> Tensor:
        stamp = _stamp(visits)
        task.oracle_calls[visits.clients] += 1 + visits.clients
        if visits.steps is not None:  # as many as there is time for
            stamp += sum(1 for _ in self.local_steps(task, visits)) / 64
        for name, value in params.items():
            moved = _moved(stamp, value)
            if name in memory:
                memory[name] = moved = memory[name] / 2 + moved
            value += moved
        return stamp


class Spread(IteratedReduction):
    """The mean squared distance of messages to their mean, entry by entry."""

    def __init__(self, task: Task) -> None:
        initial = task.initial()
        self.kept = frozenset(initial)
        self.layout = ({name: Block(tuple(value.shape), value.dtype) for name, value in initial.items()},)

    def query(self, shared: State) -> Queries:
        means = yield {}
        sums = yield {name: means.mean(name) for name in sorted(self.kept) if means.weight(name)}
        return {name: sums.mean(name) for name in sorted(self.kept) if sums.weight(name)}

    def response(self, query: State, message: Message) -> Message:
        weights = {name: (weight != 0).double() for name, (_, weight) in message.items()}
        if not query:
            return {name: (value, weights[name]) for name, (value, _) in message.items()}
        known = {name: value for name, (value, _) in message.items() if name in query}
        return {name: ((value - query[name]).square(), weights[name]) for name, value in known.items()}


class Further:
    """What such a method has."""

    iterates = True

    def iterated_reduction(self, task: Task) -> IteratedReduction:
        return Spread(task)


class FurtherSalf(Further, QuickSalf):
    """SALF without a gradient, with further sums."""


class FurtherFedAvg(Further, QuickFedAvg):
    """FedAvg without a gradient, with further sums."""


QUICK: dict[str, Any] = {"salf": QuickSalf, "fedavg": QuickFedAvg}
FURTHER: dict[str, Any] = {"salf": FurtherSalf, "fedavg": FurtherFedAvg}
