"""One rank equals n ranks, to the bit: written once, run alone and on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.toys import planner
from hpcfl import config as configs
from hpcfl import store
from hpcfl.commands.show import summary
from hpcfl.mpi import placement as ranks
from hpcfl.testing.runs import METHODS, MODELS, play, resume, same, table


@pytest.mark.mpi
@pytest.mark.parametrize(("model", "batched"), [("mlp", True), ("cnn", False)], ids=["mlp-batched", "cnn-single"])
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_ranks_gives_the_same_bits(
    world: Any, shared_dir: Path, facts: dict[str, Any], method: str, model: str, batched: bool
) -> None:
    values = table(method, model, batched)
    together = play(world, values, shared_dir / "ranks", world.comm)
    single = play(world, values, shared_dir / "single", None)
    if world.rank == 0:
        same(together, single)
        facts[f"{method} {model} {batched}"] = summary(together)["state_sha256"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_batched_clients_equal_single_ones(solo: Any, tmp_path: Path, method: str, model: str) -> None:
    runs = [play(solo, table(method, model, batched), tmp_path / str(batched), None) for batched in (True, False)]
    one, other = (store.load(store.latest(run)).shared for run in runs)  # type: ignore[arg-type]
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_run_to_run_the_same_bits(solo: Any, tmp_path: Path, method: str) -> None:
    values = table(method, "mlp", batched=True)
    same(play(solo, values, tmp_path / "first", None), play(solo, values, tmp_path / "second", None))


@pytest.mark.mpi
@pytest.mark.parametrize("start", ["alone", "ranks"])
def test_resumed_on_another_number_of_ranks(world: Any, shared_dir: Path, start: str) -> None:
    values = table("salf", "mlp", batched=True, rounds=6)
    whole = play(world, values, shared_dir / "whole", None)
    first, then = (None, world.comm) if start == "alone" else (world.comm, None)
    half = play(world, values, shared_dir / "half", first)
    resume(world, half, 2, then)
    if world.rank == 0:
        same(half, whole)
        assert summary(half)["rounds"] == 6


@pytest.mark.mpi
def test_work_is_balanced_and_the_server_trains_nobody(world: Any, shared_dir: Path) -> None:
    values = table("salf", "mlp", batched=True, speed={"model": "none"}, participation={"close": "all"})
    run = play(world, values, shared_dir / "run", world.comm)
    if world.rank == 0:
        visits = store.open_run(run)["visits"].values
        assert visits.shape == (4, world.size)
        assert (visits.sum(1) == 7).all()
        if world.size > 1:
            assert (visits[:, 0] == 0).all()
            assert np.ptp(visits[:, 1:], axis=1).max() <= 2  # one chunk


@pytest.mark.mpi
def test_bytes_into_the_server_do_not_grow_with_the_clients(world: Any, shared_dir: Path) -> None:
    counts = []
    for clients in (6, 12):
        values = table("salf", "mlp", batched=True, clients=clients)
        run = play(world, values, shared_dir / str(clients), world.comm)
        if world.rank == 0:
            counts.append(store.open_run(run)["wire_bytes_in"].values[:, 0])
    if world.rank == 0:
        np.testing.assert_array_equal(counts[0], counts[1])
        assert (counts[0] > 0).all() == (world.size > 1)


@pytest.mark.mpi
def test_an_error_on_one_rank_is_everybodys(world: Any) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    from hpcfl.base.errors import ErrorOnOtherRank, UsageError
    from hpcfl.mpi.waiting import settle

    settle(world.comm, None)
    last = world.size - 1
    own = UsageError("only here") if world.rank == last else None
    with pytest.raises((UsageError, ErrorOnOtherRank)) as caught:
        settle(world.comm, own)
    assert isinstance(caught.value, UsageError) == (own is not None)
    assert own is not None or caught.value.code == 2
    line = f"only here (rank {last}, host {os.uname().nodename})"
    assert line == (str(caught.value) if isinstance(caught.value, UsageError) else caught.value.line)


@pytest.mark.mpi
@pytest.mark.parametrize("together", [1, 2])
def test_the_transport_carries_any_type(world: Any, together: int) -> None:
    import torch

    if world.comm is None:
        pytest.skip("needs MPI")
    from hpcfl.mpi.collective import Collective

    mine = {"a": torch.arange(3.0), "b": torch.tensor([[1, 2]]), "c": torch.tensor(2.5, dtype=torch.float64)}
    start = mine if world.rank == 0 else {name: torch.zeros_like(value) for name, value in mine.items()}
    got = Collective(world.comm, hosts=[f"host {rank // together}" for rank in range(world.size)]).invite(start)
    for name, value in mine.items():
        assert torch.equal(got[name], value)
    assert got.keys() == mine.keys()


def test_the_loop_names_no_algorithm() -> None:
    import inspect

    from hpcfl.engine import loop as engine

    assert len(inspect.getsource(engine.run).splitlines()) < 40
    source = inspect.getsource(engine).lower()
    assert not any(name in source for name in ("fedavg", "salf"))


def test_the_demo_runs_the_headline_formula() -> None:
    config = configs.load("salf-digits")
    shares = np.array([1, 2 / 3, 1 / 3])
    own = planner(config.participation, config.speed, config.clients, shares, config.seed)
    plan = own.plan(own.attempt(0))
    assert config.algorithm.missing == "exact"  # type: ignore[attr-defined]
    assert (plan.miss_probability > 0).all()


@pytest.mark.mpi
def test_every_rank_knows_every_host(world: Any) -> None:
    if world.comm is None:
        pytest.skip("needs MPI")
    from hpcfl.mpi.waiting import texts

    assert texts(world.comm, f"host{world.rank}") == [f"host{rank}" for rank in range(world.size)]


def test_chunks_are_dealt_like_cards_fastest_first() -> None:
    paces = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    chunks = ranks.cut(2, paces, 3)
    assert [chunk.clients.tolist() for chunk in chunks] == [[1, 3], [4, 2], [0]]
    assert [chunk.rank for chunk in chunks] == [1, 2, 1]
    assert [chunk.rank for chunk in ranks.cut(2, paces, 1)] == [0, 0, 0]
    assert chunks[1].places(np.array([2, 4])).tolist() == [1, 0]


def test_the_automatic_chunk_size_follows_from_the_config_alone() -> None:
    assert ranks.chunk_size("auto", 100, 640_000) == 10
    assert ranks.chunk_size("auto", 8, 640_000) == 1
    assert ranks.chunk_size("auto", 10_000, 10_000) == 256
    assert ranks.chunk_size("auto", 10_000, 10**9) == 1
    assert ranks.chunk_size(False, 100, 1) == 1
    assert ranks.chunk_size(6, 4, 1) == 4
    assert ranks.chunk_size("auto", 10_000, 10_000, one_by_one=True) == 1
    assert ranks.chunk_size(6, 10, 1, one_by_one=True) == 6
    assert [ranks.chunk_size("auto", count, 1_200_000) for count in (4, 10, 100)] == [1, 2, 5]
    assert [ranks.chunk_size("auto", count, 1_200_000, heavy=True) for count in (4, 10, 100)] == [1, 1, 5]
