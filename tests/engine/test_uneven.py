"""Chunks whose clients have unequal numbers of steps: methods meet them by themselves, and nobody else notices."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from helpers.toys import Rounds, mlp_task, planned, same_bits, visits_of
from hpcfl.algorithms.base import Algorithm
from hpcfl.engine.uneven import evenly
from hpcfl.learning.batches import Uneven

SIZES = [5, 3, 60, 7, 20]


class Counting(Algorithm):
    """Local steps by hand; a client counts its own, and its state ages before the first one."""

    name: str = "counting"
    work: dict[str, int] = {"size": 10, "epochs": 2}  # noqa: RUF012
    met: ClassVar[list[list[int]]] = []

    def init_client(self, task: Any, client: int) -> Any:
        return {"steps": torch.zeros(()), "visits": torch.zeros(())}

    def client(self, task: Any, shared: Any, personal: Any, visits: Any) -> Any:
        personal["visits"] += 1
        params, losses = {name: value.clone() for name, value in task.replicate(shared, visits).items()}, []
        for batch in task.batches(visits, **self.work):
            if not losses:
                self.met.append(visits.clients.tolist())
            gradients, loss = task.gradients(params, batch)
            losses.append(loss)
            personal["steps"] += 1
            for name, value in params.items():
                value -= 0.1 * (gradients[name] + 0.01 * value.square())
        weight = visits.weights("samples")
        yield {"loss": (torch.stack(losses).mean(0), weight)}
        for names in reversed(task.layer_names()):
            yield {name: (params[name] - shared[name], weight) for name in names}
        return personal

    def model(self, task: Any, shared: Any, personal: Any, visits: Any) -> Any:
        params = {name: value.clone() for name, value in task.replicate(shared, visits).items()}
        for batch in task.batches(visits, **self.work, phase=1):
            gradients, _ = task.gradients(params, batch)
            params = {name: 0.9 * value - gradients[name] for name, value in params.items()}
        return params


class InLayers(Counting):
    """Layers of the last step leave one by one."""

    layerwise: ClassVar[bool] = True

    def client(self, task: Any, shared: Any, personal: Any, visits: Any) -> Any:
        params = {name: value.clone() for name, value in task.replicate(shared, visits).items()}
        for batch in task.batches(visits, **self.work):
            gradients, losses = task.gradients(params, batch)
            for name, value in params.items():
                value -= 0.1 * gradients[name]
        yield {"loss": (losses, visits.weights("samples"))}
        for number, names in reversed(list(enumerate(task.layer_names(), start=1))):
            rows = visits.in_time(number)
            if not rows:
                return personal
            change = {name: (params[name] - shared[name])[:rows] for name in names}
            yield {name: (value, visits.weights("samples")[:rows]) for name, value in change.items()}
        return personal


def played(method: type[Counting], per_chunk: int | None, depth: Any = (1, 1, 1, 1, 1), **work: int) -> Rounds:
    rounds = Rounds(method(work=work) if work else method(), mlp_task(SIZES, precision="double"), per_chunk)
    Counting.met.clear()
    rounds.step(planned(depth, len(rounds.layers)))
    return rounds


def test_clients_of_equal_steps_are_met_together() -> None:
    """Two passes in batches of 10 over 5, 3, 60, 7 and 20 samples are 2, 2, 12, 2 and 4 steps."""
    rounds = played(Counting, None)
    assert Counting.met == [[0, 1, 3], [4], [2]]
    assert rounds.now.personal[0]["steps"].tolist() == [2, 2, 12, 2, 4]
    assert rounds.now.personal[0]["visits"].tolist() == [1] * 5  # though visits began anew
    assert rounds.job.task.oracle_calls[:-1].tolist() == [2 * size for size in SIZES]


@pytest.mark.parametrize("work", [{"size": 10, "steps": 3}, {"size": 0, "epochs": 2}, {"size": 60, "epochs": 1}])
def test_where_all_have_samples_in_each_step_all_are_met_at_once(work: dict[str, int]) -> None:
    played(Counting, None, **work)
    assert Counting.met == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("method", "depth"),
    [
        (Counting, [1, 1, 1, 1, 1]),
        (Counting, [1, 4, 1, 4, 1]),  # 4: it does not count
        (InLayers, [1, 3, 2, 4, 1]),  # down to which layer visits come
        (InLayers, [2, 3, 3, 3, 3]),
    ],
)
def test_a_chunk_gives_what_single_visits_give(method: type[Counting], depth: list[int]) -> None:
    whole, single = (played(method, per_chunk, depth) for per_chunk in (None, 1))
    for name, value in single.state.items():
        torch.testing.assert_close(whole.state[name], value, rtol=1e-12, atol=1e-12)
    assert not same_bits(single.state, single.job.task.initial())


def test_so_does_a_test() -> None:
    rounds, found = played(Counting, None), []
    task, clients = rounds.job.task, range(len(SIZES))
    model = partial(rounds.job.algorithm.model, task, rounds.state)
    whole = evenly(model, task, {}, visits_of(task, clients, round_=1))
    for client in clients:
        single = evenly(model, task, {}, visits_of(task, [client], round_=1))
        found.append(single["fc1.weight"][0])
        for name, value in single.items():
            torch.testing.assert_close(whole[name][client], value[0], rtol=1e-12, atol=1e-12)
    assert len({float(value.sum()) for value in found}) == len(SIZES)


def test_who_asks_for_batches_outside_the_engine_is_told() -> None:
    task = mlp_task(SIZES)
    batches = task.batches(visits_of(task, [0, 2]), 10, epochs=1)
    with pytest.raises(Uneven, match="different numbers of steps"):
        next(batches)
    assert [batch.sample_counts() for batch in batches.padded()][:2] == [[5, 10], [0, 10]]
