"""Fragments: in each round a part of the model's tensors is sent and moved, and the others rest.

The tensors that a method shares make up P fragments: by falling size, each is put into the smallest fragment so far;
where there are embeddings, the last fragment is theirs. Visits that begin with the state of round t send fragment
t mod P, and what they have changed of the others is forgotten; the server moves what was sent. Where arrivals end
rounds a step may move several fragments, since its visits began in several rounds. What is not moved keeps its
momentum, and whatever else a server optimiser knows of it.

The parts are Streaming DiLoCo's (Douillard et al., arXiv 2501.18512), whose workers go on with what they have not sent:
that is `hpcfl.algorithms.decoupled_diloco` here. A visit of other methods still begins with the whole model, and links
take their time for it. Workers of that one are sent what has been merged; links count the fragment of the last round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, By, Client, ServerState, State, Sums, Task, Visits
from hpcfl.algorithms.wrapped import Wrapper, changed, wrapped
from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import no_meaning, refusal
from hpcfl.base.rng import keyed
from hpcfl.sums.message import HELD


class Fragments(ConfigBase):
    """Which part of the model is sent and moved in which round."""

    count: int = Field(1, ge=1)
    """P, the number of fragments. 1: rounds move all of the model."""
    schedule: Literal["cyclic", "shuffled"] = "cyclic"
    """Whose turn it is. ``cyclic``: fragment t mod P in round t. ``shuffled``: each once in P rounds, in an order drawn
    anew."""

    def check(self, algorithm: Algorithm, alike: str) -> None:
        """Raise UsageError where a key has no meaning, or all of the model is needed in each round.

        `alike`: why, beside the method.
        """
        if self.count == 1:
            if self.schedule != "cyclic":
                raise no_meaning("fragments.schedule", self.schedule, "fragments.count = 1", "fragments.count = 2")
            return
        method, why = f"algorithm.name = '{algorithm.name}'", algorithm.needs_whole
        own = (algorithm.own_step, algorithm.needs_rounds, not algorithm.shares_model, algorithm.clients_done(2))
        if any(own) or (algorithm.iterates and not algorithm.goes_on):
            why = why or f"{method} does more than to send changes of a model"
        if algorithm.moves_parts:
            why = why or f"{method} sends other parts of the model in each round"
        if algorithm.keeps_sent and not algorithm.goes_on:
            why = why or f"with {method} clients keep what they have sent of the whole model"
        if why := why or alike:
            raise refusal("fragments.count", f"1, since {why}", self.count, 1)

    def turn(self, seed: int, round: int) -> int:
        """Return whose turn it is in a round, 0 … P − 1."""
        cycle, place = divmod(round, self.count)
        if self.schedule == "cyclic":
            return place
        return int(keyed(seed, "fragments", cycle).permutation(self.count)[place])


def dealt(sizes: Mapping[str, int], embeddings: Collection[str], count: int) -> list[frozenset[str]]:
    """Return the names in each of so many fragments of tensors of these `sizes`."""
    tables = frozenset(sizes.keys() & set(embeddings))
    alone = count > 1 and 0 < len(tables) < len(sizes)
    fragments: list[list[str]] = [[] for _ in range(count - alone)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if not (alone and name in tables):
            min(fragments, key=lambda each: sum(sizes[own] for own in each)).append(name)
    return [frozenset(each) for each in fragments] + [tables] * alone


def with_fragments(algorithm: Algorithm, task: Task, fragments: Fragments, seed: int) -> Algorithm:
    """Return the method of which each round moves a fragment; UsageError where it has fewer tensors than these."""
    if fragments.count == 1:
        return algorithm
    shared, own = algorithm.init_server(task), algorithm.personal(task)
    names = [name for layer in task.layer_names() for name in layer if name in shared and name not in own]
    parts = dealt({name: shared[name].numel() for name in names}, task.embeddings, fragments.count)
    if not all(parts):
        tables = len(task.embeddings & {*names})
        most = len(names) - (tables - 1 if 0 < tables < len(names) else 0)
        one = ", embeddings being one" if tables > 1 else ""
        what = f"at most {most}, as many as the model has tensors that are shared{one}"
        raise refusal("fragments.count", what, fragments.count, most)
    held = {"fragments": fragments, "in_turn": tuple(parts), "drawn_by": seed, "without_fragments": algorithm}
    return wrapped(algorithm, _Fragmented, **held)


class _Fragmented(Wrapper):
    fragments: Fragments
    drawn_by: int
    without_fragments: Algorithm

    def withholds(self, round: int) -> frozenset[str]:
        turn = self.fragments.turn(self.drawn_by, round)
        others = frozenset().union(*(names for place, names in enumerate(self.in_turn) if place != turn))
        return others | {HELD + name for name in others}

    def mean_weights(self) -> By:
        return self.without_fragments.mean_weights()

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        rests = self.withholds(visits.round)
        return changed(
            super().client(task, shared, personal, visits),
            lambda message: {name: part for name, part in message.items() if name not in rests},
        )

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        after = super().step(task, state, sums)
        rounds = [sums.round] if sums.arrived is None else sums.arrived.versions.tolist()
        moved = frozenset().union(*(self.in_turn[self.fragments.turn(self.drawn_by, each)] for each in rounds))
        rest = {name: state.shared[name] for names in self.in_turn for name in names - moved}
        return replace(after, shared={**after.shared, **rest})
