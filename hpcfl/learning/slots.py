"""Slots: on a device that is not the CPU, visits train so many at a time, always, and their steps are replayed.

There an operation costs the host as long as small ones take the device. So the steps of a filling are recorded once, as
a graph of operations on held tensors, and started as one from then on. What differs between visits are numbers in these
tensors: parameters, state, and what the host draws, such as the order of samples (`batches.Feeds`). Every filling has
the same width, empty slots repeating the first visit: libraries choose their ways by shape, so a visit's bits depend
neither on how many others there are nor on which.

What is recorded is what training did to tensors. So it may depend on nothing else that changes: a method says what it
depends on beside them, and the first replay is compared with plain steps to the bit. Where steps cannot be recorded, or
a replay differs, visits take plain steps, as many at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcfl.base.device_copy import backend, on_device
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Ints, State
from hpcfl.learning.batches import Feeds, Visits

Task = Any
"""`hpcfl.learning.task.Task`, which knows slots."""
Train = Callable[[Task, State, State, State, Visits], Tensor]
"""What `LocalTraining.train` is."""
Steps = Callable[[State, Sequence[Tensor], Visits], list[Tensor]]
"""From the shared state, the visits' own and the visits to each one's mean objective, and their own state then."""
Taken = Callable[[Sequence[Tensor]], list[Tensor]]
"""The same of one filling's own tensors, whatever the visits."""
MOST = 16  # graphs: each keeps the tensors that it works on


@dataclass
class Recorded:
    """The steps of one kind of filling.

    Attributes
    ----------
    inputs, outputs : list of Tensor
        What the graph works on, filled before a replay, and what a replay leaves.
    calls : int64 [width]
        Gradients of one sample that each visit computes.
    sure : bool
        Whether a replay was found to be equal to plain steps.
    """

    graph: Any
    feeds: Feeds
    inputs: list[Tensor]
    outputs: list[Tensor]
    calls: Ints
    sure: bool = False

    def replayed(self, inputs: list[Tensor], drawn: Ints) -> list[Tensor]:
        """Return what the steps make of other inputs; the next replay overwrites it."""
        self.feeds.fill(drawn)
        torch._foreach_copy_(self.inputs, inputs)
        self.graph.replay()
        return self.outputs


@dataclass
class Slots:
    """The fillings of one rank, of `width` visits each.

    Attributes
    ----------
    why : str
        Why visits take plain steps; "" where nothing is known against replays.
    """

    width: int
    why: str = ""
    _recorded: dict[Hashable, Recorded | None] = field(default_factory=dict)
    """By kind of filling; None: there was one, or its steps cannot be recorded."""
    _first: tuple[Recorded, Visits] | None = None
    """The first filling of the newest round."""
    _ahead: tuple[Recorded, Visits, Ints] | None = None
    """What is drawn for the next one already."""
    _pool: Any = None

    def trained(
        self, train: Train, task: Task, shared: State, params: State, memory: State, visits: Visits, fixed: Hashable
    ) -> Tensor:
        """Put into `params` and `memory` what `train` makes of them; return each client's mean objective, ``[c]``.

        They may be views, which stay as they are. `fixed` is what `train` depends on beside tensors and what the host
        draws for its batches; None: that is not known.
        """
        count, clients, whole = len(visits.clients), visits.clients.tolist(), task.whole
        buffers = {} if whole is None else whole.now(clients)
        states = [*params.values(), *memory.values(), *buffers.values()]
        if count < self.width:
            rows = np.where(np.arange(self.width) < count, np.arange(self.width), 0)
            places = on_device(torch.from_numpy(rows), task.device)
            states = [
                each[:1].expand(self.width, *each.shape[1:]) if is_one(each) else each.index_select(0, places)
                for each in states
            ]
            visits = visits.of(rows)

        def steps(shared: State, own: Sequence[Tensor], visits: Visits) -> list[Tensor]:
            each = iter(own)
            trained, kept, begun = ({name: next(each) for name in names} for names in (params, memory, buffers))
            if whole is not None:
                whole.begin(visits.clients.tolist(), begun)
            loss = train(task, shared, trained, kept, visits)
            left = {} if whole is None else whole.now(visits.clients)
            return [loss, *trained.values(), *kept.values(), *left.values()]

        loss, *after = (each[:count] for each in self._filled(steps, task, shared, states, visits, fixed))
        found = iter(after)
        for state in (params, memory, buffers):
            state.update({name: next(found) for name in state})
        if whole is not None:
            whole.begin(clients, buffers)
        return loss

    def _filled(
        self, steps: Steps, task: Task, shared: State, states: list[Tensor], visits: Visits, fixed: Hashable
    ) -> list[Tensor]:
        """Return what steps of a whole filling make of its state, in memory of its own."""
        given = [*shared.values(), *(each[0] if is_one(each) else each for each in states)]
        ones = [is_one(each) for each in states]
        like = tuple((each.shape, each.dtype) for each in given)
        kind = fixed, tuple(shared), like, tuple(ones), np.unique(visits.samples).tobytes()

        def taken(given: Sequence[Tensor]) -> list[Tensor]:
            own = given[len(shared) :]
            begun = [one.expand(each.shape) if alone else one for one, each, alone in zip(own, states, ones)]
            return steps(dict(zip(shared, given)), [each.clone() for each in begun], visits)

        able = fixed is not None and hasattr(backend(task.device), "CUDAGraph")
        if not able or kind not in self._recorded:
            self._recorded[kind] = None
            return taken(given)
        recorded = self._recorded[kind]
        if recorded is None and not self.why and sum(each is not None for each in self._recorded.values()) < MOST:
            return self._record(kind, taken, task, given, visits)
        drawn = None if recorded is None else self._drawn(recorded, visits)
        if recorded is None or drawn is None:
            return taken(given)
        if not recorded.sure:
            plain = taken(given)
            pairs = zip(plain, recorded.replayed(given, drawn), strict=True)
            recorded.sure = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)
            if not recorded.sure:
                self._recorded[kind], self.why = None, "a replay of the steps differs from them"
            return plain
        task.oracle_calls[visits.clients] += recorded.calls
        if self._first is None or self._first[1].round != visits.round:
            self._first = recorded, visits
        return _copied(recorded.replayed(given, drawn))

    def _record(self, kind: Hashable, taken: Taken, task: Task, given: list[Tensor], visits: Visits) -> list[Tensor]:
        """Take a filling's steps, and record them."""
        device, before = backend(task.device), task.oracle_calls.copy()
        inputs = _copied(given)
        task.feeds = feeds = Feeds(visits, task.device)
        try:
            aside = device.Stream()  # where torch wants what comes before a recording
            aside.wait_stream(device.current_stream())
            with device.stream(aside):
                plain = taken(inputs)
            device.current_stream().wait_stream(aside)
            done = task.oracle_calls.copy()
            feeds.settle()
            self._pool, graph = self._pool or device.graph_pool_handle(), device.CUDAGraph()
            with device.graph(graph, pool=self._pool):
                outputs = taken(inputs)
        except Exception as error:  # if it is the steps' own, plain ones have it too
            self.why, task.feeds = f"its steps cannot be recorded ({str(error).splitlines()[0]})", None
            task.oracle_calls[:] = before
            return taken(given)
        task.feeds, task.oracle_calls[:] = None, done
        self._recorded[kind] = Recorded(graph, feeds, inputs, outputs, (done - before)[visits.clients])
        return plain

    def draw_ahead(self) -> None:
        """Draw what the next round's first filling takes if the same clients come, while the device computes."""
        if self._first is not None:
            recorded, visits = self._first
            later = replace(visits, round=visits.round + 1)
            drawn = recorded.feeds.drawn(later)
            self._ahead = None if drawn is None else (recorded, later, drawn)

    def _drawn(self, recorded: Recorded, visits: Visits) -> Ints | None:
        if self._ahead is not None and self._ahead[0] is recorded:
            _, known, drawn = self._ahead
            same = (known.round, known.number) == (visits.round, visits.number)
            if same and np.array_equal(known.clients, visits.clients):
                return drawn
        return recorded.feeds.drawn(visits)


def is_one(value: Tensor) -> bool:
    """Return whether a tensor ``[c, …]`` is one client's, expanded."""
    return len(value) > 1 and value.stride(0) == 0


def _copied(values: Sequence[Tensor]) -> list[Tensor]:
    """Return copies, made by one operation."""
    made = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]
    if made:
        torch._foreach_copy_(made, list(values))
    return made
