"""The linear case of FLIC (Algorithm S3), against a plain NumPy implementation and against its theory (Theorem 1)."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import put_together
from helpers.toys import Rounds, planned, visits_of
from hpcfl import store
from hpcfl.algorithms.linear_fedrep import BIAS, WEIGHT, B, LinearFedRep
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.data.linear_federation import LinearSpaces, SpacesFederation, whitening
from hpcfl.engine.job import Job
from hpcfl.learning.task import Task
from hpcfl.models.linear import Linear
from hpcfl.testing.runs import play, resume, same

Embeddings = Callable[[SpacesFederation, int], tuple[np.ndarray, np.ndarray]]


def table(**more: Any) -> dict[str, Any]:
    plain = {
        "rounds": 6,
        "clients": 12,
        "seed": 5,
        "checkpoint": {"every": 1, "keep": 20},
        "algorithm": {"name": "linear_fedrep"},
        "participation": {"invite": "uniform", "size": 7},
        "speed": {"model": "exponential"},
        "data": {"name": "linear_spaces", "dimension": 4, "least": 4, "most": 6, "samples": 30, "noise": 0.1},
        "model": {"name": "linear", "dimension": 4},
    }
    return plain | more


def task_of(clients: int, seed: int, samples: int = 40) -> Task:
    source = LinearSpaces(dimension=6, rank=2, least=6, most=10, samples=samples, noise=0.0)
    return Task(Linear(rank=2, dimension=6), source.federate(clients, seed, None), seed)


def embedded(data: Any, client: int, round_: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of a round, embedded as Algorithm S3 prints it, with P_iᵀ; each eigenvector's largest entry positive."""
    (x, y), (mean, covariance) = data.drawn(client, round_), data.moments(client)
    values, vectors = np.linalg.eigh(covariance)
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), range(len(values))])
    leading = np.argsort(-values)[: len(data.truth)]
    return (x - mean) @ vectors[:, leading] / np.sqrt(values[leading]), y


def in_numpy(job: Job, rounds: int, rate: float, signs: np.ndarray) -> list[np.ndarray]:
    """A after each round, the start's columns turned by `signs`, which eigenvectors do not have."""
    data, config = job.task.federation, job.config
    moments = [np.mean([y * y * np.outer(x, x) for x, y in zip(*embedded(data, i, 0))], 0) for i in range(12)]
    found = [np.linalg.eigh(np.mean(moments, 0))[1][:, -2:] * signs]
    for round_ in range(1, rounds):
        basis, moved = found[-1], []
        for client in config.participation.cohort(config.seed, round_, config.clients):
            x, y = embedded(data, client, round_)
            head = np.linalg.lstsq(x @ basis, y, rcond=None)[0]
            moved.append(basis - rate / len(y) * np.outer(x.T @ (x @ basis @ head - y), head))
        q, r = np.linalg.qr(np.mean(moved, 0))
        found.append(q * np.sign(np.diag(r)))
    return found


def test_it_is_the_algorithm_as_printed(solo: Any, tmp_path: Path) -> None:
    run = play(solo, table(), tmp_path / "run", None)
    job = Job.of(from_table(table()), None, 1)
    data: Any = job.task.federation
    assert len(set(data.shapes)) == 3
    own = [store.load(path).shared[B].T for path in store.saved(run)]
    wanted = in_numpy(job, 6, 0.1, np.ones(2))
    wanted = in_numpy(job, 6, 0.1, np.sign((wanted[0] * own[0]).sum(0)))
    target = np.diag(data.signs) @ data.truth
    for found, basis, measured in zip(own, wanted, store.open_run(run)["distance"].values, strict=True):
        np.testing.assert_allclose(found, basis, atol=1e-6)
        angles = np.linalg.svd(target.T @ basis, compute_uv=False)
        assert measured == pytest.approx(sqrt(1 - angles[-1] ** 2), abs=1e-6)


def test_embeddings_are_the_true_ones_up_to_signs_in_common() -> None:
    """Without noise ``y = Σ s_j φ̂_j (A* β_i*)_j`` tells the factor of each coordinate, for each client by itself."""
    task = task_of(9, 4)
    data: Any = task.federation
    for client in range(9):
        (x, y), own = data.drawn(client, 2), LinearFedRep().init_client(task, client)
        latent = x @ own[WEIGHT].numpy().T + own[BIAS].numpy()
        factors = np.linalg.lstsq(latent * (data.truth @ data.heads[client]), y, rcond=None)[0]
        np.testing.assert_allclose(factors, data.signs, atol=1e-9)
    assert set(data.signs) == {-1.0, 1.0}


def test_each_client_predicts_through_its_embedding() -> None:
    rounds = Rounds(LinearFedRep(lr=0.2), task_of(8, 1))
    task = rounds.job.task
    for round_ in range(120):
        rounds.step(planned([1] * 8, 1, round_))
    for chunk in rounds.job.chunks:
        seen = visits_of(task, chunk.clients)
        params = rounds.job.algorithm.model(task, rounds.state, rounds.now.personal[chunk.number], seen)
        held = [task.federation.client(int(client)) for client in chunk.clients]
        x = torch.stack([torch.from_numpy(own.train_features) for own in held])
        y = np.stack([own.train_labels for own in held])
        np.testing.assert_allclose(task.forward(params, x)[..., 0], y, atol=1e-4)


# ---- theory


def distances(task: Task, rate: float, rounds: int, embeddings: Embeddings | None = None) -> np.ndarray:
    """The distance after each round in which everybody takes part, with other embeddings if they are given."""
    played = Rounds(LinearFedRep(lr=rate), task)
    for chunk in played.job.chunks if embeddings else ():
        for row, client in enumerate(chunk.clients):
            pair = embeddings(task.federation, int(client))  # type: ignore[misc, arg-type]
            for name, value in zip((WEIGHT, BIAS), pair):
                played.now.personal[chunk.number][name][row] = torch.from_numpy(value)
    found = []
    for round_ in range(rounds):
        played.step(planned([1] * task.federation.clients, 1, round_))
        found.append(played.job.algorithm.metrics(task, played.server)["distance"])
    return np.array(found)


@pytest.mark.parametrize("seed", range(3))
def test_the_distance_contracts_geometrically(seed: int) -> None:
    """For η = 1/(4 σ²_max) at least by ``√(1 − κ)`` per round, ``κ = η E0 σ²_min / 2``; in the end by ``1 − η σ²_min``.

    σ are singular values of the true heads over √b. ``E0 = 1 − dist²(A(0), Q A*)`` as in the theorem that this one
    rests on (Collins et al., Theorem 1); FLIC prints κ for 1 − κ, and E0 without the 1 − that its proof has. The last
    factor is the limit of many samples: heads that are exact up to the angle leave ``I − η mean ββᵀ``.
    """
    task = task_of(32, seed, samples=100)
    heads = task.federation.heads  # type: ignore[attr-defined]
    highest, lowest = np.linalg.svd(heads / sqrt(32), compute_uv=False) ** 2
    rate = 1 / (4 * highest)
    found = distances(task, rate, 90)
    kappa = rate * (1 - found[0] ** 2) * lowest / 2
    assert (found <= found[0] * sqrt(1 - kappa) ** np.arange(90)).all()
    factors = found[21:61] / found[20:60]
    assert factors.std() < 0.02 * factors.mean()
    assert factors.mean() == pytest.approx(1 - rate * lowest, rel=0.01)
    assert found[-1] < 1e-8


def signs_of_its_own(data: SpacesFederation, client: int) -> tuple[np.ndarray, np.ndarray]:
    """φ̂ with eigenvectors whose signs are arbitrary."""
    signs = np.random.default_rng(client).choice([-1.0, 1.0], 6)
    weight, bias = whitening(*data.moments(client), 6)
    return signs[:, None] * weight, signs * bias


def estimated(data: SpacesFederation, client: int) -> tuple[np.ndarray, np.ndarray]:
    """φ̂ of the moments of a few hundred samples."""
    x = np.concatenate([data.drawn(client, 1000 + part)[0] for part in range(8)])
    return whitening(x.mean(0), np.cov(x.T), 6)


@pytest.mark.parametrize("embeddings", [signs_of_its_own, estimated])
def test_it_needs_known_moments_and_signs_in_common(embeddings: Embeddings) -> None:
    task = task_of(32, 1)
    assert distances(task, 0.22, 60, embeddings)[-10:].min() > 0.1
    assert distances(task, 0.22, 60)[-1] < 1e-5


# ---- ranks, going on, bad input


@pytest.mark.mpi
def test_the_same_on_any_number_of_ranks(world: Any, shared_dir: Path) -> None:
    values = table(rounds=4, checkpoint={"every": 4})
    together, single = (play(world, values, shared_dir / name, comm) for name, comm in (("n", world.comm), ("1", None)))
    if world.rank == 0:
        same(together, single)


def test_it_goes_on_where_it_was(solo: Any, tmp_path: Path) -> None:
    whole, half = (play(solo, table(), tmp_path / name, None) for name in ("whole", "half"))
    resume(solo, half, 3, None)
    same(half, whole)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"model": {"name": "linear"}},
            r"model\.dimension: expected data\.dimension = 4.* got nothing; did you",
        ),
        (
            {"model": {"name": "linear", "dimension": 3}},
            r"model\.dimension: expected data\.dim.* got 3; did you mean 4",
        ),
        ({"model": {"name": "linear", "dimension": 4, "rank": 3}}, r"model\.rank: .* 2, got 3; did you mean 2"),
        ({"model": {"name": "linear", "dimension": 4, "rank": 5}}, r"model\.rank: .* 1 … 4.* got 5; did you mean 4"),
        ({"model": {"name": "mlp"}}, r"needs .* or data\.name = 'linear_spaces' and the same model with its key"),
        (
            {"data": {"name": "linear"}},
            r"model\.dimension: expected none, .* got 4; did you mean none, or data\.name = 'li",
        ),
        ({"data": {"name": "noisy_features"}}, r"algorithm\.name = 'linear_fedrep' needs data\.name = 'linear' and "),
        ({"algorithm": {"name": "fedavg"}}, r"features of different shapes: algorithm 'fedavg' .* linear_fedrep"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], line: str) -> None:
    config = from_table(table(**more))
    with pytest.raises(UsageError, match=line):
        put_together(config)
