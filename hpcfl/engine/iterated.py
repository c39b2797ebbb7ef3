"""Iterated reductions: once a round has closed, an algorithm may query the messages that counted, again and again.

So are formed, for instance, Wasserstein barycenters of what clients have sent. The visits are not asked again: whoever
holds their messages responds for them. Where each rank holds its own visits' messages (simulated time) all ranks
iterate alike, with one all-reduce per query; where the server holds them (real time) it iterates alone, so that nobody
can hold it up. Exact sums (`hpcfl.comm.message`) make the two the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hpcfl.algorithms import Algorithm
from hpcfl.comm.message import Block, ExactSums, Message, State, Sums
from hpcfl.comm.packing import public
from hpcfl.learning.task import Task


class ResponseSums(ExactSums):
    """Sums of responses, as the algorithm is sent them."""

    def total(self, name: str) -> Tensor:
        return super().total(name).clone()  # torch's own memory: the bits of matrix products depend on its alignment


def blank(blocks: Mapping[str, Block], rows: int, device: torch.device) -> Message:
    """Return room for what so many visits send of `blocks`: nothing yet, so all values and weights are 0."""
    return {
        name: (
            torch.zeros(rows, *block.shape, dtype=block.dtype, device=device),
            torch.zeros(rows, dtype=torch.float64),
        )
        for name, block in blocks.items()
    }


def keep(message: Message, kept: Message) -> None:
    """Copy what of a message is to be kept, for its first rows; what has weight 0 is 0, as if it were not sent."""
    for name in kept.keys() & message.keys():
        value, weight = message[name]
        values, weights = (room[: len(weight)] for room in kept[name])
        values.copy_(value.detach().reshape(values.shape))
        weights.copy_(weight)
        values[weights == 0] = 0


def found(
    algorithm: Algorithm,
    task: Task,
    shared: State,
    messages: Sequence[Message],
    reduce: Callable[[ExactSums], ExactSums],
) -> State:
    """Let the algorithm query `messages`, those held here, until it has found what it looks for, and return that.

    `shared` is as it was served to the round; `reduce` adds up what all that hold messages respond, alike everywhere.
    """
    querying = algorithm.further(task, _own(public(shared)))
    blocks = {name: block for group in algorithm.further_layout(task) for name, block in group.items()}
    sums: Sums | None = None
    while True:
        try:
            query = _own(next(querying) if sums is None else querying.send(sums))
        except StopIteration as end:
            state: State = end.value
            return state
        query = {name: value.to(task.device) for name, value in query.items()}
        own = ResponseSums((blocks,))
        for message in messages:
            for name, (value, weight) in algorithm.answer(task, query, message).items():
                counts = weight != 0  # what has weight 0 may be anything
                own.add({name: (value[counts.to(value.device)], weight[counts])})
        sums = reduce(own)


def _own(state: State) -> State:
    """Return copies in memory that is everywhere alike: the bits of matrix products depend on its alignment."""
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
