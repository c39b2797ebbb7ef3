"""The linear case of SRPFL (Algorithm 2), against a plain NumPy implementation and against its theory."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import put_together
from helpers.toys import Rounds, planned
from hpcfl import store
from hpcfl.algorithms import ServerState
from hpcfl.algorithms.linear_fedrep import HEAD, MOMENT, B, LinearFedRep
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.data.linear_federation import Linear, LinearSpaces
from hpcfl.engine.job import Job
from hpcfl.learning.batches import Visits
from hpcfl.learning.task import Task
from hpcfl.models import linear as models
from hpcfl.schedule.plan import Plan
from hpcfl.sums.message import ExactSums
from hpcfl.testing.runs import play, resume, same

CLIENTS = 12


def table(**more: Any) -> dict[str, Any]:
    plain = {
        "rounds": 8,
        "clients": CLIENTS,
        "seed": 5,
        "checkpoint": {"every": 1, "keep": 20},
        "algorithm": {"name": "linear_fedrep"},
        "participation": {"close": "first", "first": 2},
        "doubling": {"when": "rounds", "rounds": 2},
        "speed": {"model": "exponential", "communication": 0.5},
        "data": {"name": "linear", "dimension": 6, "samples": 30, "noise": 0.1},
        "model": {"name": "linear"},
    }
    return plain | more


def task_of(clients: int, seed: int, **data: Any) -> Task:
    source = Linear(**{"dimension": 6, "samples": 30, **data})
    return Task(models.Linear(rank=source.rank), source.federate(clients, seed, None), seed)


def distance(found: np.ndarray, truth: np.ndarray) -> float:
    """The sine of the largest angle between the two column spaces."""
    return sqrt(max(0.0, 1 - np.linalg.svd(truth.T @ found, compute_uv=False)[-1] ** 2))


def in_numpy(job: Job, rounds: int, rate: float) -> tuple[list[np.ndarray], list[float]]:
    """Algorithm 2 as printed, with the participants that the speeds say; return B and the time after each round."""
    data, seed, clients = job.task.federation, job.config.seed, job.config.clients
    times = job.config.speed.paces(seed, clients)
    order, communication = np.argsort(times), job.config.speed.communication
    rank = data.truth.shape[1]
    moment = np.mean([np.mean([y * y * np.outer(x, x) for x, y in zip(*data.drawn(i, 0))], 0) for i in order], 0)
    basis = np.linalg.eigh(moment)[1][:, -rank:]
    found, elapsed = [basis], [times.max() + communication]
    for round_ in range(1, rounds):
        fastest = order[: min(clients, 2 * 2 ** ((round_ - 1) // 2))]
        moved = []
        for client in fastest:
            x, y = data.drawn(client, round_)
            head = np.linalg.lstsq(x @ basis, y, rcond=None)[0]
            moved.append(basis - rate / len(y) * np.outer(x.T @ (x @ basis @ head - y), head))
        basis = np.linalg.qr(np.mean(moved, 0))[0]
        found.append(basis)
        elapsed.append(elapsed[-1] + times[fastest].max() + communication)
    return found, elapsed


def test_it_is_the_algorithm_as_printed(solo: Any, tmp_path: Path) -> None:
    config = from_table(table())
    config.check(None)
    job = Job.of(config, None, 1)
    run = play(solo, table(), tmp_path / "run", None)
    data, (found, elapsed) = store.open_run(run), in_numpy(job, 8, 0.1)
    assert data["stage"].values.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    np.testing.assert_allclose(data["sim_seconds"], elapsed, rtol=1e-12)
    truth = job.task.federation.truth  # type: ignore[attr-defined]
    saved = store.saved(run)
    for path, basis, measured in zip(saved, found, data["distance"].values, strict=True):
        own = store.load(path).shared[B].T
        assert measured == pytest.approx(distance(basis, truth), abs=1e-6)
        np.testing.assert_allclose(own @ own.T, basis @ basis.T, atol=1e-6)  # the same space, whatever its basis


def test_a_step_from_the_same_basis_is_the_same_to_rounding() -> None:
    """Not only the space: with the same start, QR and signs included."""
    task = task_of(3, 1)
    rounds = Rounds(LinearFedRep(initial="random"), task)
    basis = rounds.state[B].numpy().T
    rounds.step(planned([1, 1, 1], 1, 4))
    moved = []
    for client in range(3):
        x, y = task.federation.drawn(client, 4)  # type: ignore[attr-defined]
        head = np.linalg.lstsq(x @ basis, y, rcond=None)[0]
        moved.append(basis - 0.1 / len(y) * np.outer(x.T @ (x @ basis @ head - y), head))
        np.testing.assert_allclose(rounds.now.personal[0][HEAD][client, 0], head, atol=1e-10)
    q, r = np.linalg.qr(np.mean(moved, 0))
    np.testing.assert_allclose(rounds.state[B].T, q * np.sign(np.diag(r)), atol=1e-10)


def test_only_what_a_round_needs_travels() -> None:
    job = Job.of(from_table(table()), None, 1)
    plans = [job.planner.plan(job.planner.attempt(number)) for number in range(2)]
    assert [job.sent(plan) for plan in plans] == [{"loss", MOMENT}, {"loss", B}]
    nobody = replace(plans[1], depth=np.full_like(plans[1].depth, 2))
    assert job.sent(nobody) == job.sent(Plan.nobody(1, 1)) == set()


@pytest.mark.parametrize(("precision", "wanted"), [("single", torch.float32), ("double", torch.float64)])
def test_a_clients_model_has_the_precision_of_the_run(precision: Any, wanted: torch.dtype) -> None:
    source = Linear(dimension=6, samples=30)
    task = Task(models.Linear(rank=source.rank), source.federate(2, 1, None), 1, precision=precision)
    method = LinearFedRep()
    own = {name: value.unsqueeze(0) for name, value in method.init_client(task, 0).items()}
    model = method.model(task, method.init_server(task), own, Visits.for_test(0, np.array([0])))
    assert {value.dtype for value in model.values()} == {wanted}


def test_the_model_is_as_stated() -> None:
    data = Linear(dimension=7, rank=3, samples=50_000, noise=0.0).federate(4, 9, None)
    np.testing.assert_allclose(data.truth.T @ data.truth, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(data.heads, axis=1), sqrt(3), rtol=1e-12)
    x, y = data.drawn(2, 5)
    np.testing.assert_allclose(y, x @ data.truth @ data.heads[2], atol=1e-12)
    np.testing.assert_allclose(x.T @ x / len(x), np.eye(7), atol=0.03)
    noisy = Linear(dimension=7, rank=3, samples=50_000, noise=0.5).federate(4, 9, None)
    rest = noisy.drawn(2, 5)[1] - x @ data.truth @ data.heads[2]
    assert rest.std() == pytest.approx(0.5, rel=0.02)
    assert not np.array_equal(data.drawn(2, 6)[0], x)
    assert not np.array_equal(data.drawn(1, 5)[0], x)


def test_clients_draw_together_what_each_draws_alone() -> None:
    clients = np.array([3, 0, 2])
    spaces = LinearSpaces(dimension=3, least=6, most=6, samples=4).federate(4, 9, None)
    for data in (Linear(dimension=7, rank=3, samples=5).federate(4, 9, None), spaces):
        for parts, alone in zip(zip(*data.drawn_by(clients, 6)), clients.tolist()):
            for part, own in zip(parts, data.drawn(alone, 6)):
                np.testing.assert_array_equal(part, own)


def test_the_distance_is_the_sine_of_the_largest_angle() -> None:
    task = task_of(2, 3)
    truth = task.federation.truth  # type: ignore[attr-defined]
    other = np.linalg.svd(truth)[0][:, 2:3]
    angle = 0.3
    tilted = truth.copy()
    tilted[:, :1] = np.cos(angle) * truth[:, :1] + np.sin(angle) * other
    found = LinearFedRep().metrics(task, ServerState({B: torch.from_numpy(tilted.T)}))
    assert found["distance"] == pytest.approx(np.sin(angle), rel=1e-12)


# ---- theory


def bound(task: Task, first: int, rate: float, before: list[float], visits: list[int]) -> list[float]:
    """Return Theorem 4.7's bound on the distance after each round, given the one before."""
    heads, start = task.federation.heads, before[0]  # type: ignore[attr-defined]
    counts = [count for count in (first * 2**stage for stage in range(20)) if count < len(heads)] + [len(heads)]
    spectra = [np.linalg.svd(heads[:count] / sqrt(count), compute_uv=False) for count in counts]
    low, high = min(values[-1] for values in spectra), max(values[0] for values in spectra)
    assert rate <= 1 / (8 * high**2)
    a = 0.5 * rate * (1 - start**2) * low**2
    return [d * sqrt(1 - a) + a / sqrt(n / first * (1 - a)) for d, n in zip(before, visits)]


def contracted(seed: int, first: int, clients: int) -> bool:
    """Run SRPFL's rounds; return whether every one of them stays below the bound."""
    task = task_of(clients, seed, dimension=10, samples=40, noise=0.01)
    heads = task.federation.heads  # type: ignore[attr-defined]
    counts = [first * 2**stage for stage in range(10) if first * 2**stage <= clients]
    rate = min(1 / (8 * np.linalg.norm(heads[:count] / sqrt(count), 2) ** 2) for count in counts)
    rounds, distances, visits = Rounds(LinearFedRep(lr=rate), task), [], []
    rounds.step(planned([1] * clients, 1, 0))
    for round_ in range(1, 6 * len(counts) + 1):
        count = counts[(round_ - 1) // 6]
        distances.append(rounds.job.algorithm.metrics(task, rounds.server)["distance"])
        visits.append(count)
        rounds.step(planned([1] * count + [2] * (clients - count), 1, round_))
    distances.append(rounds.job.algorithm.metrics(task, rounds.server)["distance"])
    limits = bound(task, first, rate, distances[:-1], visits)
    learned = distances[-1] < 0.7 * distances[0]
    return learned and all(after <= limit for after, limit in zip(distances[1:], limits))


def test_the_distance_stays_below_the_bound() -> None:
    kept = sum(contracted(seed, 4, 16) for seed in range(100))
    assert kept >= 95


def test_it_contracts_geometrically_down_to_the_noise() -> None:
    """Everybody takes part: equal factors from round to round first, then nothing but noise, which σ scales."""
    ends = []
    for noise in (0.0, 0.01, 0.1):
        task = task_of(32, 2, samples=40, noise=noise)
        rounds, distances = Rounds(LinearFedRep(lr=0.25), task), []
        for round_ in range(150):
            rounds.step(planned([1] * 32, 1, round_))
            distances.append(rounds.job.algorithm.metrics(task, rounds.server)["distance"])
        ends.append(np.mean(distances[-20:]))
        factors = np.array(distances[2:12]) / np.array(distances[1:11])
        if noise < 0.1:
            assert factors.max() < 0.95
            assert factors.std() < 0.1 * factors.mean()
    assert ends[0] < 1e-7
    assert ends[2] / ends[1] == pytest.approx(10, rel=0.3)


# ---- ranks, going on, bad input


@pytest.mark.mpi
def test_the_same_on_any_number_of_ranks(world: Any, shared_dir: Path) -> None:
    together = play(world, table(), shared_dir / "ranks", world.comm)
    single = play(world, table(), shared_dir / "single", None)
    if world.rank == 0:
        same(together, single)
        np.testing.assert_array_equal(store.open_run(together)["distance"], store.open_run(single)["distance"])
        received = store.open_run(together)["wire_bytes_in"].values[:, 0]
        layout = Job.of(from_table(table()), None, 1).layout
        carried = [sum(each.nbytes for each in ExactSums(layout, sent={"loss", name}).buffers) for name in (MOMENT, B)]
        assert received[0] - received[1] == (carried[0] - carried[1]) * (world.size - 1)  # of each other rank
        assert len(set(received[1:3].tolist())) == 1


@pytest.mark.mpi
def test_in_real_time_the_moments_are_everybodys(world: Any, shared_dir: Path) -> None:
    if world.size == 1:
        pytest.skip("needs a server and clients")
    values = table(clock="wall", speed={"model": "none"}, threads=1, rounds=6)
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(
        world, values | {"clock": "simulated", "speed": {"model": "trace", "run": str(run)}}, shared_dir / "again", None
    )
    if world.rank == 0:
        assert (store.open_run(run)["blocks"].values[0] == 1).all()
        np.testing.assert_allclose(store.open_run(run)["distance"], store.open_run(again)["distance"], rtol=1e-9)


def test_it_goes_on_where_it_was(solo: Any, tmp_path: Path) -> None:
    whole, half = (play(solo, table(), tmp_path / name, None) for name in ("whole", "half"))
    resume(solo, half, 3, None)
    same(half, whole)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"data": {"name": "linear", "samples": 1}},
            r"data\.samples: expected at least model\.rank = 2.*did you mean 2",
        ),
        (
            {"data": {"name": "linear", "rank": 21}},
            r"data\.rank: expected at most data\.dimension = 20.*did you mean 20",
        ),
        ({"model": {"name": "linear", "rank": 3}}, r"model\.rank: expected data\.rank = 2, got 3"),
        (
            {
                "speed": {"model": "uniform-depth"},
                "participation": {"close": "deadline"},
                "doubling": {"when": "never"},
            },
            r"begins with a round that waits for everybody.* did you mean speed\.model = 'exponential'",
        ),
        ({"model": {"name": "linear", "rank": 7}}, r"model\.rank: expected 1 … 6.*got 7; did you mean 6"),
        ({"data": {"name": "digits"}}, r"needs data\.name = 'linear' and model\.name = 'linear'"),
        ({"model": {"name": "mlp"}}, r"needs data\.name = 'linear' and model\.name = 'linear'"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], line: str) -> None:
    config = from_table(table(**more))
    with pytest.raises(UsageError, match=line):
        put_together(config)
