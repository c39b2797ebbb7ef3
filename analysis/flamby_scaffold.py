"""SCAFFOLD as FLamby has it: c is the mean of the c_i by samples, not the plain one."""

from __future__ import annotations

from hpcfl.algorithms.base import Client, State, Sums, Task, Visits
from hpcfl.algorithms.scaffold import CONTROL, RISE, Scaffold


class BySamples(Scaffold):
    """For rounds in which all take part; its server needs no count of those who do not."""

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        sent, weight = super().client(task, shared, personal, visits), visits.weights("samples")
        while True:
            try:
                message = next(sent)
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
            yield {name: (part, weight if name.startswith(RISE) else by) for name, (part, by) in message.items()}

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        controls = {CONTROL + name: sums.moved(RISE + name, shared[CONTROL + name]) for name in task.initial()}
        return {**super().server(task, shared, sums), **controls}
