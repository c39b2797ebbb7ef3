"""Chunks that are computed at once: not a bit of sums or state depends on how many are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, cnn_task, federation, mlp_task, planned, same_bits
from hpcfl.algorithms import Algorithm
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fednova import FedNova
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.algorithms.local import Local
from hpcfl.base.memory import last_level_cache
from hpcfl.engine import chunk_batches
from hpcfl.engine.border import Border
from hpcfl.engine.hangs import Moves
from hpcfl.learning.task import Task
from hpcfl.models.mlp import Mlp

EQUAL, TWO_SIZES = [10] * 22, [10, 9] * 11
CHUNKS = [6, 6, 6, 4]
METHODS: dict[str, Callable[[], Algorithm]] = {
    "fedavg": lambda: FedAvg(lr=0.1, batch=4, epochs=2),
    "momentum kept": lambda: FedAvg(lr=0.1, batch=4, momentum=0.9, weight_decay=0.01, persist_optimizer=True),
    "full batches": lambda: FedAvg(lr=0.1, batch=0, epochs=0, steps=3, weight_decay=0.01),
    "fedrep": lambda: FedRep(lr=0.1, batch=4, head_epochs=2, blocks=2, momentum=0.5),
    "fedrep averaged": lambda: FedRep(lr=0.1, batch=4, head_epochs=1, newcomer="averaged"),
    "lg_fedavg": lambda: LgFedAvg(lr=0.1, batch=4, shared_layers=1),
    "local": lambda: Local(lr=0.1, batch=4),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Counted:
    """The bundles of a run, computed up to so many clients at once, and with how many clients a method was called."""

    def __init__(self, rounds: Rounds, most: int) -> None:
        job, self.called = rounds.job, []  # type: ignore[var-annotated]
        work = job.bundles._client
        job.bundles.bytes = most * job.task.nbytes
        job.bundles._client = lambda shared, part: (  # type: ignore[method-assign]
            self.called.append(len(part.visits.clients)) or work(shared, part)
        )


def both(method: Algorithm, task: Callable[[], Task], most: int, rounds: int = 2) -> tuple[list[int], list[int]]:
    """Assert that rounds in which `most` clients are computed at once are those of one chunk at a time.

    Return how many clients the method was called for in the first and in the last round.
    """
    runs = [Rounds(method, task(), CHUNKS[0]) for _ in range(2)]
    layers, called = len(method.layers(runs[0].job.task)), Counted(runs[0], most).called
    runs[1].job.bundles.bytes = 0
    assert [len(chunk.clients) for chunk in runs[0].job.chunks] == CHUNKS
    first: list[int] = []
    for number in range(rounds):
        first = first or list(called)
        called.clear()
        one, other = (run.step(planned([1] * sum(CHUNKS), layers, number)) for run in runs)
        for group in one.layout:
            for name in group:
                assert torch.equal(one.total(name), other.total(name)), name
                assert one.weight(name) == other.weight(name) > 0
        same_bits(runs[0].state, runs[1].state)
        for number_, state in runs[0].now.personal.items():
            same_bits(state, runs[1].now.personal[number_])
        calls = [run.job.task.oracle_calls for run in runs]
        assert calls[0].any()
        np.testing.assert_array_equal(*calls)
    return first, list(called)


@pytest.mark.parametrize("sizes", [EQUAL, TWO_SIZES], ids=["equal", "two sizes"])
@pytest.mark.parametrize("method", METHODS)
def test_no_bit_depends_on_how_many_are_computed_at_once(method: str, sizes: list[int]) -> None:
    """In the first round a chunk of each size is computed by itself as well, at each place where one begins.

    These layers' matrices begin anywhere in a cache line, on which last bits depend on some processors.
    """
    first, last = both(METHODS[method](), lambda: mlp_task(sizes, hidden=(33, 7), dropout=0.2), 16)
    if last != CHUNKS:
        assert last == [12, 10]
        assert first == [12, 6, 6, 10, 4]


def test_so_it_is_with_the_size_of_models_that_are_common(threads: Callable[[int], None]) -> None:
    def task() -> Task:
        return Task(Mlp(hidden=(200,), softmax=True), federation(EQUAL, shape=(28, 28), classes=10), 0)

    for count in (1, 2):
        threads(count)
        assert both(FedAvg(lr=0.1, batch=4), task, 100)[1] == [22]


def test_a_method_whose_visits_look_at_others_is_computed_chunk_by_chunk() -> None:
    class Company(FedAvg):
        """Its gradients are counted too, though all the visits are done twice."""

        name: Any = "company"

        def train(self, task: Any, shared: Any, params: Any, memory: Any, visits: Any) -> Any:
            loss = super().train(task, shared, params, memory, visits)
            for value in params.values():
                value.mul_(1 + 1e-6 * len(visits.clients))
            return loss

        def samples_per_step(self, samples: int) -> int:
            return 4

    method = Company(lr=0.1, batch=4, momentum=0.9, persist_optimizer=True)
    first, last = both(method, lambda: mlp_task(EQUAL), 100)
    assert first == [22, 6, 4, *CHUNKS]
    assert last == CHUNKS


class Own(FedAvg):
    """Does something of its own with its steps."""

    name: Any = "own"

    def local_steps(self, *args: Any) -> Any:
        return super().local_steps(*args)


def test_chunks_of_other_sizes_are_computed_one_by_one() -> None:
    assert both(FedAvg(lr=0.1, batch=4), lambda: mlp_task(range(4, 26)), 100, rounds=1)[1] == CHUNKS


@pytest.mark.parametrize(
    ("method", "task", "wanted", "able"),
    [
        (FedAvg(), mlp_task(EQUAL), True, True),
        (FedAvg(), mlp_task(EQUAL), False, False),
        (FedAvg(), cnn_task(EQUAL), True, False),
        (FedAvg(optimizer="adam"), mlp_task(EQUAL), True, False),
        (FedNova(), mlp_task(EQUAL), True, False),
        (Own(), mlp_task(EQUAL), True, False),
    ],
    ids=["able", "not wanted", "convolutions", "adam", "other clients", "other steps"],
)
def test_who_may_be_computed_at_once(
    monkeypatch: pytest.MonkeyPatch, method: Algorithm, task: Task, wanted: bool, able: bool
) -> None:
    monkeypatch.setattr(chunk_batches, "last_level_cache", lambda: 2**20)
    bundles = chunk_batches.Bundles(Border(method, task, ()), [0] * len(EQUAL), wanted, True, Moves())
    assert bundles.bytes == able * 2**18


def test_clients_that_are_alone_in_their_chunk_are_computed_alone() -> None:
    """Other chunks of their round are not."""
    run = Rounds(FedAvg(lr=0.1, batch=4), mlp_task(EQUAL), 6)
    called = Counted(run, 100).called
    depth = np.full(22, 4)
    depth[[0, 1, 2, 6, 12, 13, 14, 18, 19]] = 1
    run.step(planned(depth, 3))
    assert called == [3, 1, 5, 3, 2]


def test_the_last_level_of_cache_is_read(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([(1, "48K"), (1, "32K"), (3, "30720K"), (2, "2048K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    (tmp_path / "index9").mkdir()
    assert last_level_cache(tmp_path) == 30720 * 1024
    assert last_level_cache(tmp_path / "nothing") == 0
