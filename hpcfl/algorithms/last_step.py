"""Visits of several local steps that send the layers of the last one as backpropagation reaches them.

All steps but the last are taken as ever. What a visit sends of a layer is all that its steps have changed of it, as
soon as the last one has; so layers count one by one, as those of SALF's visits, which are of one step. The server's
mean of a layer is over those who have reached it, by their `weights`; where nobody has, it stays. A client's own layers
advance with all of their steps where the visit was complete, and else not at all.
"""

from __future__ import annotations

from itertools import accumulate, islice
from typing import TYPE_CHECKING, ClassVar

from hpcfl.algorithms.base import Algorithm, Client, Message, State, Task, Visits
from hpcfl.algorithms.local_sgd import LocalSgd, some
from hpcfl.algorithms.wrapped import wrapped
from hpcfl.base.lazy import torch

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
        in_time = [visits.in_time(max(level[name] for name in names)) for names in task.layer_names()]
        rows = list(accumulate(in_time, max))
        served, optimiser = task.replicate(shared, visits), self.optimiser_in(visits.round)
        params = {name: value.clone() for name, value in (served | some(personal, own)).items()}
        kept = some(personal, personal.keys() - own)
        memory = {name: value.clone() for name, value in kept.items()} or optimiser.init(params)
        weight, batches = visits.weights(self.weights), self.local_steps(task, visits)
        earlier = [optimiser.step(task, params, params, memory, batch) for batch in islice(batches, self.steps_before)]
        after = dict(personal)
        held: list[Message] = []
        for number, gradients, last in task.backprop(params, next(batches), rows, visits.closed):
            if number == len(rows) - 1:
                total = sum(loss[: len(last)] for loss in earlier) + last
                yield {"loss": (total / self.steps, weight[: len(last)])}
            for name in reversed(list(gradients)):
                count = visits.in_time(level[name])
                if not count:  # nobody has come further
                    return after
                moved = {name: params[name][:count].clone()}  # what lies below may still need this layer as it was
                past = {name: memory[name][:count]} if memory else {}
                optimiser.apply(moved, {name: gradients[name][:count]}, past)
                now = memory if name in kept else moved
                if name in personal:
                    after[name] = torch.cat([now[name][:count], personal[name][count:]])
                if name in served:
                    message = {name: (moved[name].sub_(served[name][:count]), weight[:count])}
                    if own and level[name] == 1:
                        held.append(message)
                    else:
                        yield message
        yield from held  # a visit with layers of its own is complete when these have learnt too
        return after
