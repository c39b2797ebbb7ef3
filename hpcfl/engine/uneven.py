"""Chunks whose clients have samples in different numbers of steps: a method meets them by themselves.

Whatever a method does in a step it does for all clients of its chunk. Nothing of a client may move in a step in which
it has no samples, so clients of equal steps make their visits by themselves, and what they send and keep is put
together again. That they differ shows when the method takes the first of its batches; the visits then begin anew. Where
all have samples in each step nothing of this happens, nor where `learning.optim.train` takes the steps, which lets
clients rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from hpcfl.algorithms.base import Client, Message, Task, Visits
from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Ints, State
from hpcfl.learning.batches import Uneven

Work = Callable[[Task, State, State, Visits], Client]
"""What `Algorithm.client` is."""
Sent = tuple[list[Message], State]
"""All messages of some visits, and their state afterwards."""


def visited(client: Work, task: Task, shared: State, personal: State, visits: Visits) -> Client:
    """Do what `client` does, as `Algorithm.client`, of a chunk whose clients need not have equal steps."""
    work = np.stack([visits.samples, visits.samples if visits.steps is None else visits.steps])
    if (work == work[:, :1]).all():
        return (yield from client(task, shared, personal, visits))

    def sent(own: State, some: Visits) -> Sent:
        begun = {name: value.clone() for name, value in own.items()}  # a visit may change its state, and begin anew
        return collected(client(task, shared, begun, some))

    return (yield from told(_apart(sent, task, personal, visits)))


def evenly(compute: Callable[[State, Visits], State], task: Task, personal: State, visits: Visits) -> State:
    """Return the state that a function makes of a chunk's personal state, its clients' steps being equal or not."""
    return _apart(lambda own, some: ([], compute(own, some)), task, personal, visits)[1]


def _apart(compute: Callable[[State, Visits], Sent], task: Task, personal: State, visits: Visits) -> Sent:
    calls = task.oracle_calls.copy()
    try:
        return compute(personal, visits)
    except Uneven as found:
        groups = found.groups
    task.oracle_calls[:] = calls
    parts = []
    for rows in groups:
        places = on_device(torch.from_numpy(rows), task.device)
        own = {name: value[places] for name, value in personal.items()}
        parts.append(_apart(compute, task, own, visits.of(rows)))
    # what they have sent and kept is put together; of a block the first rows may be sent
    messages: list[Message] = []
    for sent in zip_longest(*(messages for messages, _ in parts), fillvalue={}):
        joined = {}
        for name in dict.fromkeys(name for message in sent for name in message):
            there = [(rows, *message[name]) for rows, message in zip(groups, sent) if name in message]
            which, values, weights = zip(*((rows[: len(weight)], value, weight) for rows, value, weight in there))
            joined[name] = _in_order(which, values), _in_order(which, weights)
        messages.append(joined)
    return messages, {name: _in_order(groups, [after[name] for _, after in parts]) for name in parts[0][1]}


def _in_order(rows: Sequence[Ints], values: Sequence[Tensor]) -> Tensor:
    return torch.cat([*values])[on_device(torch.from_numpy(np.concatenate(rows).argsort()), values[0].device)]


def collected(work: Client) -> Sent:
    """Let visits take place; return all that they send, and their state afterwards."""
    messages: list[Message] = []
    return messages, drained(work, messages.append)


def drained(client: Client, take: Callable[[Message], None]) -> State:
    """Hand every message to `take` and return what the generator returns."""
    while True:
        try:
            take(next(client))
        except StopIteration as end:
            result: State = end.value
            return result


def told(sent: Sent) -> Client:
    """Yield messages, return the state."""
    messages, state = sent
    yield from messages
    return state
