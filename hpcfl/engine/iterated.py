"""Iterated reductions: further sums over the messages that counted, once a round has closed.

The visits are not asked again: who holds their messages responds for them. Where each rank holds its own visits'
messages (simulated time) all ranks iterate alike, with one all-reduce per iteration; where the server holds them (real
time) it iterates alone, so that nobody can hold it up. Exact sums (`hpcfl.sums.message`) make the two the same to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpcfl.algorithms.base import Block, IteratedReduction, Message, Sums
from hpcfl.base.device_copy import on_host
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import State
from hpcfl.sums.message import ExactSums


class Responses(ExactSums):
    """Sums of responses, as `IteratedReduction.query` is sent them."""

    def total(self, name: str) -> Tensor:
        return super().total(name).clone()  # torch's own memory: the bits of matrix products depend on its alignment


def blank(blocks: Mapping[str, Block], rows: int) -> Message:
    """Return room for what so many visits send of `blocks`: nothing yet, so all values and weights are 0."""
    weights = torch.zeros(rows, dtype=torch.float64)
    return {
        name: (torch.zeros(rows, *block.shape, dtype=block.dtype), weights.clone()) for name, block in blocks.items()
    }


def keep(message: Message, kept: Message) -> None:
    """Copy what of a message is to be kept, for its first rows; what has weight 0 is 0, as if it were not sent."""
    names = sorted(kept.keys() & message.keys())
    for name, value in zip(names, on_host([message[name][0] for name in names])):
        weight = message[name][1]
        values, weights = (room[: len(weight)] for room in kept[name])
        if value.numel() == values.numel():
            values.copy_(value.reshape(values.shape))
        else:  # a part of the block
            values[(slice(None), *map(slice, value.shape[1:]))] = value
        weights.copy_(weight)
        values[weights == 0] = 0


def iterate(
    reduction: IteratedReduction,
    shared: State,
    messages: Sequence[Message],
    reduce: Callable[[ExactSums], ExactSums],
    ranks: int = 1,
) -> State:
    """Let the reduction query `messages`, those held here, until it has found what it looks for, and return that.

    `shared` is as it was served to the round; `reduce` adds up what all `ranks` that hold messages
    respond, alike everywhere.
    All of it is in main memory, whatever else computes: these are many small steps, each of which must be looked at.
    """
    queries = reduction.query(_own(shared))
    blocks = {name: block for group in reduction.layout for name, block in group.items()}
    sums: Sums | None = None
    while True:
        try:
            query = next(queries) if sums is None else queries.send(sums)
        except StopIteration as end:
            state: State = end.value
            return state
        query = _own(query)
        responses = Responses((blocks,), ranks=ranks)
        for message in messages:
            for name, (value, weight) in reduction.response(query, message).items():
                counts = weight != 0  # what has weight 0 may be anything
                responses.add({name: (value[counts], weight[counts])})
        sums = reduce(responses)


def _own(state: State) -> State:
    """Return copies in memory that is everywhere alike: the last bits of matrix products may depend on that."""
    values = zip(state, on_host(list(state.values())))
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in values}
