"""Iterated reductions: further sums over the messages that counted, once a round has closed.

The visits are not asked again: who holds their messages responds for them. Where each rank holds its own visits'
messages (simulated time) all ranks iterate alike, with one all-reduce per iteration; where the server holds them (real
time) it iterates alone, so that nobody can hold it up. Sums on fixed grids (`hpcfl.comm.message`) make the two the same
to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hpcfl.algorithms import IteratedReduction
from hpcfl.base.types import State
from hpcfl.comm.message import Block, Deposits, Message, Sums

Reduce = Callable[[Deposits], Deposits]


class Responses(Deposits):
    """Sums of responses, as `IteratedReduction.query` is sent them."""

    def total(self, name: str) -> Tensor:
        """Return ``Σ weight·value``, float64, of the block's shape.

        In torch's own memory: the last bits of matrix products may depend on how memory is aligned.
        """
        return super().total(name).clone()


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
        rows = slice(len(weight))
        values, weights = (room[rows] for room in kept[name])
        values.copy_(value.detach().reshape(values.shape))
        weights.copy_(weight)
        values[weights == 0] = 0


def iterate(
    reduction: IteratedReduction, shared: State, messages: Sequence[Message], reduce: Reduce, device: torch.device | str
) -> State:
    """Let the reduction query until it has found what it looks for, and return that.

    Parameters
    ----------
    shared : State
        As it was served to the round.
    messages : sequence of Message
        What the visits that counted had sent of the blocks that are kept, those held here.
    reduce : callable
        Returns the sums over all that hold messages, the same everywhere.
    device : torch.device or str
        Where responses are computed.
    """
    queries, blocks = (
        reduction.query(_own(shared)),
        {n: block for group in reduction.layout for n, block in group.items()},
    )
    sums: Sums | None = None
    while True:
        try:
            query = next(queries) if sums is None else queries.send(sums)
        except StopIteration as end:
            state: State = end.value
            return state
        query = {name: value.to(device) for name, value in _own(query).items()}
        responses = Responses((blocks,))
        for message in messages:
            for name, (value, weight) in reduction.response(query, message).items():
                counts = weight != 0  # what has weight 0 may be anything
                responses.add({name: (value[counts.to(value.device)], weight[counts])})
        sums = reduce(responses)


def _own(state: State) -> State:
    """Return copies that lie in memory everywhere alike: the last bits of matrix products may depend on that."""
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
