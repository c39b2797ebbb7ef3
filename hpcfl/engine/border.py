"""What comes from a method of the user's is judged where it enters: what clients send and keep, and the server's step.

What follows from that is tried before round 0 (`hpcfl.engine.trial`). Methods of hpcfl's own are judged by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from types import GeneratorType
from typing import Any, NoReturn

from hpcfl.algorithms.base import Algorithm, Block, Client, Layout, Message, ServerState, Sums, Task, Visits
from hpcfl.algorithms.wrapped import changed as each_changed
from hpcfl.base.blame import place, place_of
from hpcfl.base.errors import RunError, in_place, listed
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.loaded import is_of_user
from hpcfl.base.types import State

Marks = list[tuple[str, Tensor, int]]
"""Tensors by what they are called, and the versions that they were at."""


@dataclass(frozen=True)
class Border:
    """A method as the engine asks it: one of the user's is judged by what it returns, RunError names its file."""

    algorithm: Algorithm
    task: Task
    layout: Layout

    @property
    def users(self) -> bool:
        return ":" in self.algorithm.name

    @cached_property
    def _blocks(self) -> dict[str, Block]:
        return {name: block for group in self.layout for name, block in group.items()}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Do what `Algorithm.client` does."""
        work = self.algorithm.client(task, shared, personal, visits)
        return self._judged(work, task, shared, personal, visits) if self.users else work

    def step(self, state: ServerState, sums: Sums) -> ServerState:
        """Do what `Algorithm.step` does."""
        if not self.users:
            return self.algorithm.step(self.task, state, sums)
        marks = marked({f"'{name}' of the shared state": value for name, value in state.shared.items()})
        after = self.algorithm.step(self.task, state, sums)
        if not isinstance(after, ServerState) or not isinstance(after.shared, Mapping):
            what = kind(after.shared if isinstance(after, ServerState) else after)
            self.refuse(f"the server's step returned {what}, expected a ServerState of tensors by name")
        if wrong := differing(like(state.shared), like(after.shared)) or changed(marks):
            self.refuse(f"the server's step: {wrong}")
        return after

    def begun(self, state: State, function: str) -> State:
        """Return a state that a function of the method's begins with."""
        tensors = isinstance(state, Mapping) and all(isinstance(each, torch.Tensor) for each in state.values())
        if self.users and not tensors:
            self.refuse(f"{function} returned {kind(state)}, expected tensors by name")
        return state

    def refuse(self, what: str, work: object = None) -> NoReturn:
        """Raise RunError; the line is that at which the client is, if it is known."""
        name, at = self.algorithm.name, ""
        while isinstance(work, GeneratorType) and (frame := work.gi_frame) is not None:
            if is_of_user(Path(frame.f_code.co_filename)):
                at = place(frame.f_code.co_filename, frame.f_lineno)
            work = work.gi_yieldfrom
        raise RunError(f"algorithm.name = '{name}': {what}{at or place_of(name)}")

    def _judged(self, work: Client, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Yield and return what a client does, once judged."""
        if not isinstance(work, GeneratorType):
            self.refuse(f"client returned {kind(work)}, expected a generator, which yields messages")
        given = {f"'{name}' of the shared state": value for name, value in shared.items()}
        marks = marked(given | samples_of(task, visits))
        kept, seen, when = like(personal), set[str](), f"in round {visits.round}"

        def judged(message: Message) -> Message:
            if not isinstance(message, Mapping):
                self.refuse(f"client sent {kind(message)} {when}, expected {{block: (value, weight)}}", work)
            for name, part in message.items():
                if name not in self._blocks:
                    self.refuse(f"client sent {name!r:.80} {when}; its blocks are {listed(self._blocks)}", work)
                if name in seen:
                    self.refuse(f"client sent '{name}' twice {when}", work)
                if wrong := misfit(self._blocks[name], part, len(visits.clients)):
                    self.refuse(f"client sent '{name}' {when}: {wrong}", work)
            seen.update(message)
            return message

        after = yield from each_changed(work, judged)
        if wrong := changed(marks):
            self.refuse(f"client {when}: {wrong}")
        some = self.algorithm.sends(visits.round)
        may_lack = visits.closed is not None or (self.algorithm.layerwise and visits.depth[0] > 1)  # is cut short
        others = self.algorithm.withholds(visits.round)
        missing = [
            name for name in self._blocks if name not in seen and name not in others and (some is None or name in some)
        ]
        if lost := [] if may_lack else missing:
            self.refuse(f"client sent no {listed(map(repr, lost))} {when}; its blocks are {listed(self._blocks)}")
        if not isinstance(after, Mapping):
            self.refuse(f"client returned {kind(after)} {when}, expected its personal state, tensors by name")
        if wrong := differing(kept, like(after)):
            self.refuse(f"client {when}: personal state {wrong}")
        return after


def misfit(block: Block | None, part: Any, clients: int) -> str:
    """Return what is wrong with a block as visits of so many clients send it, "" if nothing is."""
    if block is None:
        return "expected a block of the layout"
    if not (isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(each, torch.Tensor) for each in part)):
        got = ", ".join(map(kind, part)) if isinstance(part, tuple | list) else kind(part)
        return f"expected a pair of tensors, value and weight, got {got:.100}"
    value, weight = part
    rows = len(weight) if weight.dim() else 0
    if value.shape[1:] not in block.held or weight.shape != value.shape[:1] or rows > clients:
        wanted = " or ".join(f"[{clients}, {', '.join(map(str, shape))}]".replace(", ]", "]") for shape in block.held)
        return f"expected {wanted} with weights [{clients}], got {list(value.shape)} with {list(weight.shape)}"
    if value.dtype != block.dtype:
        return f"expected {block.dtype} as in the layout, got {value.dtype}"
    if value.layout is not torch.strided or value.is_meta:
        return f"expected numbers, got a tensor {'of meta' if value.is_meta else f'laid out as {value.layout}'}"
    if weight.is_complex() or weight.is_meta or not all(isfinite(each) and each >= 0 for each in weight.tolist()):
        return f"expected weights that are finite and not negative, got {'meta' if weight.is_meta else weight.tolist()}"
    return ""


def like(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return shapes and types by name; of what is no tensor what it is."""
    return {
        name: (list(value.shape), value.dtype) if isinstance(value, torch.Tensor) else kind(value)
        for name, value in state.items()
    }


def differing(wanted: Mapping[str, Any], found: Mapping[str, Any], how: str = "as it began") -> str:
    """Return the first name that is missing, too many or of another shape or type, "" where none is."""
    for name in (*wanted, *found):
        if wanted.get(name) != found.get(name):
            return f"'{name}': expected {_kind(wanted.get(name))} {how}, got {_kind(found.get(name))}"
    return ""


def _kind(of: Any) -> str:
    return of if isinstance(of, str) else "none" if of is None else f"{of[1]} {of[0]}"


def kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def marked(tensors: Mapping[str, Tensor]) -> Marks:
    return [(name, value, value._version) for name, value in tensors.items()]


def changed(marks: Marks) -> str:
    """Return which of some tensors was changed in place since, "" where none was."""
    for name, value, version in marks:
        if value._version != version:
            return in_place(name)
    return ""


def samples_of(task: Task, visits: Visits) -> dict[str, Tensor]:
    """Return the samples of some clients, as far as they are there, by what they are called."""
    names = {"x": "features", "y": "labels", "test_x": "test features", "test_y": "test labels"}
    held = {client: task.held_now[client] for client in visits.clients.tolist() if client in task.held_now}
    return {
        f"the {name} of client {client}": getattr(samples, field)
        for client, samples in held.items()
        for field, name in names.items()
    }
