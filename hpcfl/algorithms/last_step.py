"""Visits of several local steps that send the layers of the last one as backpropagation reaches them.

All steps but the last are taken as ever. What a visit sends of a layer is all that its steps have changed of it, as
soon as the last one has; so layers count one by one, as those of SALF's visits, which are of one step. The server's
mean of a layer is over those who have reached it, by their `weights`; where nobody has, it stays.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from hpcfl.algorithms.local_sgd import LocalSgd
from hpcfl.algorithms.wrapped import wrapped

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Algorithm, Client
    from hpcfl.base.types import State
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task

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
        import torch

        level = {name: number for number, names in enumerate(self.layers(task), start=1) for name in names}
        rows = [visits.in_time(max(level[name] for name in names)) for names in task.layer_names()]
        served, optimiser = task.replicate(shared, visits), self.optimiser_in(visits.round)
        params = {name: value.clone() for name, value in served.items()}
        memory = {name: value.clone() for name, value in personal.items()} or optimiser.init(params)
        reached = dict.fromkeys(level, 0)
        weight, batches = visits.weights(self.weights), self.local_steps(task, visits)
        earlier = [optimiser.step(task, params, params, memory, batch) for batch in islice(batches, self.steps_before)]
        for number, gradients, last in task.backprop(params, next(batches), rows, visits.closed):
            if number == len(rows) - 1:
                total = sum(loss[: len(last)] for loss in earlier) + last
                yield {"loss": (total / self.steps, weight[: len(last)])}
            for name in reversed(list(gradients)):
                count = visits.in_time(level[name])
                if not count:  # nobody has come further
                    break
                moved = {name: params[name][:count].clone()}  # what lies below may still need this layer as it was
                past = {name: memory[name][:count]} if memory else {}
                optimiser.apply(moved, {name: gradients[name][:count]}, past)
                reached[name] = count
                yield {name: (moved[name].sub_(served[name][:count]), weight[:count])}
        return {
            name: torch.cat([memory[name][: reached[name]], before[reached[name] :]])
            for name, before in personal.items()
        }
