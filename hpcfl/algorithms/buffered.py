"""Buffers that training steps change, such as running statistics, sent and kept beside what a method does.

The method knows nothing of them: `with_buffers` puts them around it. They travel with the loss, since a forward pass
has changed them before any gradient is ready. The server takes means; of integers the largest, for which each client
tells its own at a place of its own: a largest number is no sum, but sums are all that ranks form.
"""

from __future__ import annotations

from dataclasses import replace

from hpcfl.algorithms.base import Algorithm, Block, Client, Layout, Message, ServerState, State, Sums, Task, Visits
from hpcfl.algorithms.wrapped import Wrapper, changed, without, wrapped
from hpcfl.base.errors import refusal
from hpcfl.base.lazy import torch
from hpcfl.models.modules import module
from hpcfl.sums.message import moved

LOSS = "loss"


def with_buffers(algorithm: Algorithm, task: Task) -> Algorithm:
    """Return the method that also handles the buffers of the task's module; where no step changes any, the method."""
    if task.whole is None or not task.whole.buffers or task.buffers == "keep":
        return algorithm
    # where all of them are the clients' own the shared model alone cannot predict
    return wrapped(algorithm, _Buffered, **({"evaluates_shared": False} if task.buffers == "local" else {}))


class _Buffered(Wrapper):
    """Its helpers are functions, whose names no method can have.

    Static buffers are at the server alone, as they were gathered for tests: steps keep none, and clients send none.
    """

    def init_server(self, task: Task) -> State:
        if task.buffers == "static" and self.personal(task):
            raise refusal("task.buffers", "'mean' or 'local' where layers are personal", "static", "mean")
        return super().init_server(task) | {name: _whole(task).buffers[name] for name in _served(self, task)}

    def init_client(self, task: Task, client: int) -> State:
        own = _own(self, task)
        return super().init_client(task, client) | {name: _whole(task).buffers[name].clone() for name in own}

    def layout(self, task: Task) -> Layout:
        sent = {name: _block(task, name) for name in _sent(self, task)}
        return tuple({**group, **sent} if LOSS in group else group for group in super().layout(task))

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        begun, own = _begun(self, task, shared, personal, visits), _own(self, task)
        before = {name: begun[name] for name in _sent(self, task)}

        def with_changes(message: Message) -> Message:
            """Return the message with what steps have changed of the buffers, if it is that of the loss."""
            if LOSS not in message:
                return message
            _, weight = message[LOSS]
            clients = visits.clients[: len(weight)]
            now, changes = _whole(task).now(clients), dict(message)
            for name, value in before.items():
                change = now[name].double() - value[: len(weight)]
                if _whole(task).integer(name):
                    places = change.new_zeros(len(clients), *_block(task, name).shape)
                    for row, client in enumerate(clients.tolist()):  # by numbers: a list of them would wait for a GPU
                        places[row, client] = change[row]
                    changes[name] = places, visits.ones(len(clients))
                else:
                    changes[name] = change, weight
            return changes

        rest = without(shared, _served(self, task)), without(personal, own)
        after = yield from changed(super().client(task, *rest, visits), with_changes)
        now = _whole(task).now(visits.clients)
        return {**after, **{name: now[name] for name in own}}

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        buffers = {name: state.shared[name] for name in _served(self, task)}
        after = super().step(task, replace(state, shared=without(state.shared, buffers)), sums)
        for name in _sent(self, task):
            if _whole(task).integer(name):  # who told nothing has 0 at its place: such a buffer never falls
                buffers[name] = moved(buffers[name], sums.total(name).amax(0).clamp(min=0))
            else:
                buffers[name] = self.buffer_after(name, buffers[name], sums)
        return replace(after, shared={**after.shared, **buffers})

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        _begun(self, task, shared, personal, visits)
        rest = without(shared, _served(self, task)), without(personal, _own(self, task))
        return super().model(task, *rest, visits) | _whole(task).now(visits.clients)

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        served = _served(self, task)
        if shared.keys() >= set(served):  # asked for by itself, not by `model`
            _begun(self, task, shared, {}, visits)
        return super().adapted(task, without(shared, served), visits, epochs) | _whole(task).now(visits.clients)


def _own(method: Algorithm, task: Task) -> list[str]:
    """Return the buffers that are a client's own: those of layers that are, or all."""
    personal = method.personal(task)
    if task.buffers == "static":
        return []
    if task.buffers == "local" or personal >= set(task.initial()):
        return list(task.buffer_names)
    owners = {name.rpartition(".")[0] for name in personal}
    return [name for name in task.buffer_names if name.rpartition(".")[0] in owners]


def _served(method: Algorithm, task: Task) -> list[str]:
    own = _own(method, task)
    return [name for name in task.buffer_names if name not in own]


def _sent(method: Algorithm, task: Task) -> list[str]:
    return [] if task.buffers == "static" else _served(method, task)


def _begun(method: Algorithm, task: Task, shared: State, personal: State, visits: Visits) -> State:
    """Let the visits' steps begin with what is shared or the clients' own; return it, ``{name: [c, …]}``."""
    count = len(visits.clients)
    begun = {name: shared[name].expand(count, *shared[name].shape) for name in _served(method, task)}
    begun |= {name: personal[name] for name in _own(method, task) if name in personal}
    _whole(task).begin(visits.clients.tolist(), begun)
    return begun


def _block(task: Task, name: str) -> Block:
    shape, clients = tuple(_whole(task).buffers[name].shape), task.federation.clients
    if _whole(task).integer(name):
        return Block((clients, *shape), torch.float64, places=clients)
    return Block(shape, torch.float64)


def _whole(task: Task) -> module.Whole:
    assert task.whole is not None
    return task.whole
