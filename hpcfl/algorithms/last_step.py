"""Visits of several local steps that send the layers of the last one as backpropagation reaches them.

All steps but the last are taken as ever. What a visit sends of a layer is all that its steps have changed of it, as
soon as the last one has; so layers count one by one, as those of SALF's visits, which are of one step. The server's
mean of a layer is over those who have reached it, by their `weights`; where nobody has, it stays. A client's own layers
advance with all of their steps where the visit was complete, and else not at all.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from hpcfl.algorithms.base import Algorithm, Client, Message, State, Task, Visits
from hpcfl.algorithms.local_sgd import LocalSgd, some
from hpcfl.algorithms.wrapped import wrapped
from hpcfl.base.lazy import torch
from hpcfl.learning.optim import layer_by_layer

if TYPE_CHECKING:
    Wrapper = LocalSgd
else:
    Wrapper = object  # the method comes after it among the bases


def with_last_step(algorithm: Algorithm) -> Algorithm:
    """Return a method whose `Algorithm.splits_last` is true with layers of the last step that leave one by one."""
    return wrapped(algorithm, _LastStep)


class _LastStep(Wrapper):
    layerwise: ClassVar[bool] = True

    @property
    def steps_before(self) -> int:
        return self.steps - 1

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        own = self.personal(task)
        level = dict.fromkeys(own, 1) | {name: n for n, names in enumerate(self.layers(task), 1) for name in names}
        served, optimiser = task.replicate(shared, visits), self.optimiser_in(visits.round)
        params = {name: value.clone() for name, value in (served | some(personal, own)).items()}
        kept = some(personal, personal.keys() - own)
        memory = {name: value.clone() for name, value in kept.items()} or optimiser.init(params)
        weight, batches = visits.weights(self.weights), self.local_steps(task, visits)
        earlier = [optimiser.step(task, params, params, memory, batch) for batch in islice(batches, self.steps_before)]
        after = dict(personal)
        held: list[Message] = []
        for name, value in layer_by_layer(task, params, next(batches), level, optimiser, memory, visits):
            count = len(value)
            if name == "loss":
                total = sum(loss[:count] for loss in earlier) + value
                yield {name: (total / self.steps, weight[:count])}
            if name in personal:
                now = memory[name][:count] if name in kept else value
                after[name] = torch.cat([now, personal[name][count:]])
            if name in served:
                message = {name: (value.sub_(served[name][:count]), weight[:count])}
                if own and level[name] == 1:
                    held.append(message)
                else:
                    yield message
        if visits.in_time(1):
            yield from held  # a visit with layers of its own is complete when these have learnt too
        return after
