"""FLIC's anchors reduced to their barycenters by further sums, against the barycenter of all covariances at once."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from helpers.gaussians import Barycenter, barycenter
from helpers.toys import Rounds, federation, planned, same_bits, visits_of
from hpcfl.algorithms.flic.algorithm import Flic
from hpcfl.algorithms.flic.barycenters import Barycenters, sent
from hpcfl.algorithms.flic.config import FACTORS, MEANS
from hpcfl.base.rng import keyed
from hpcfl.engine.iterated import iterate
from hpcfl.engine.simulated import drained
from hpcfl.learning.task import Task
from hpcfl.models.latent import Latent
from hpcfl.sums.message import Block, ExactSums

CLIENTS, C, K = 7, 3, 4
EVERYBODY = range(CLIENTS)


class Few(Flic):
    """The reduction alone: three anchors in four dimensions, whatever the data."""

    covariances: str = "bures"

    def size(self, task):
        return C, K


def normal(*shape, seed=0):
    return torch.from_numpy(keyed(3, "factors", seed).normal(size=shape)).float()


def turned(roots):
    """Symmetric matrices ``[..., K, K]`` with these eigenvalues and the same eigenvectors."""
    basis = torch.linalg.qr(normal(K, K, seed=1).double())[0]
    return ((basis * roots.double().unsqueeze(-2)) @ basis.mT).float()


SERVED = torch.eye(K) + 0.3 * normal(C, K, K)
CHANGES = 0.5 * normal(CLIENTS, C, K, K, seed=2)
for client in EVERYBODY:
    CHANGES[client, client % C] = 0  # what a client does not hold it returns as served
WEIGHTS = torch.tensor([5.0, 3, 8, 1, 2, 9, 4]).double().unsqueeze(1).expand(CLIENTS, C).clone()


def message(clients, changes=CHANGES, weights=WEIGHTS):
    """What is kept of some clients' visits."""
    rows = list(clients)
    return {sent(c): (changes[rows, c], weights[rows, c]) for c in range(C)}


def reduced(messages, served=SERVED, reduce=lambda own: own, **keys):
    reduction = Barycenters(C, K, **{"tolerance": 1e-9, "iterations": 100, **keys})
    return iterate(reduction, {FACTORS: served}, messages, reduce)


def covariances(factors):
    return factors.double() @ factors.double().mT


def at_once(changes=CHANGES, weights=WEIGHTS, served=SERVED, tol=1e-9, iterations=100) -> Barycenter:
    """The barycenters by one process that has all covariances."""
    return barycenter(torch.zeros(len(changes), C, K), covariances(served + changes), weights, tol, iterations)


def close(one, other, atol):
    torch.testing.assert_close(one.double(), other.double(), atol=atol, rtol=0)


# ---- what it is


WEIGHTINGS = {"equal": torch.ones_like(WEIGHTS), "by client": WEIGHTS}
WEIGHTINGS["of holders"] = WEIGHTS * CHANGES.flatten(2).any(-1)


@pytest.mark.parametrize("weights", WEIGHTINGS.values(), ids=WEIGHTINGS)
@pytest.mark.parametrize("per_message", [1, 3])
def test_it_is_the_barycenter_of_all_at_once_and_that_of_pot(weights, per_message):
    from ot.gaussian import bures_wasserstein_barycenter

    starts = range(0, CLIENTS, per_message)
    messages = [message(EVERYBODY[start : start + per_message], weights=weights) for start in starts]
    got, wanted = reduced(messages, tolerance=1e-12), at_once(weights=weights, tol=1e-12)
    close(covariances(got["factors"]), wanted.cov, 1e-12)
    assert got["iterations"].tolist() == wanted.iterations.tolist()
    for c in range(C):
        covs, shares = covariances(SERVED + CHANGES)[:, c], weights[:, c] / weights[:, c].sum()
        _, cov = bures_wasserstein_barycenter(
            np.zeros((CLIENTS, K)), covs.numpy(), shares.numpy(), num_iter=1000, eps=1e-12
        )
        close(covariances(got["factors"])[c], torch.from_numpy(cov), 1e-8)


def test_factors_that_commute_have_the_mean_root_for_a_barycenter_and_for_a_mean():
    """Only symmetric roots of matrices that commute: of others the mean of the factors is something else."""
    roots = normal(CLIENTS, C, K, seed=4).abs()
    shares = WEIGHTS / WEIGHTS.sum(0)
    changes = turned(roots) - SERVED
    got = reduced([message(EVERYBODY, changes)])["factors"]
    close(got, turned((shares[..., None] * roots).sum(0)), 1e-6)  # of float32 factors
    close(got, (shares[..., None, None] * (SERVED + changes)).sum(0), 1e-6)
    mean = SERVED + (shares[..., None, None] * CHANGES).sum(0)
    apart = covariances(reduced([message(EVERYBODY)])["factors"]) - covariances(mean)
    assert (apart.flatten(1).norm(dim=1) > 0.1).all()


@pytest.mark.parametrize("scale", [1e-3, 1 / 3, 1024.0])
def test_only_the_ratio_of_weights_counts(scale):
    one, other = (reduced([message(EVERYBODY, weights=weights)]) for weights in (WEIGHTS, scale * WEIGHTS))
    close(one["factors"], other["factors"], 1e-12)
    assert torch.equal(one["iterations"], other["iterations"])


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("average", ["active", "holders"])
def test_a_round_ends_at_the_barycenters_of_the_visits_that_counted(weights, average):
    """Of five clients the second does not count; the first and the last hold few classes."""
    task = Task(Latent(widths=(), dimension=K), federation([1, 6, 9, 5, 2]), 0)
    keys = {"lambda1": 1.0, "lr": 0.05, "anchor_lr": 0.3, "epochs": 1, "batch": 4}
    algorithm = Flic(covariances="bures", weights=weights, average=average, **keys)
    rounds, counted = Rounds(algorithm, task, per_chunk=1), [0, 2, 3, 4]
    served, changes, shares = rounds.state, [], []
    for client in counted:
        own = rounds.now.personal[[chunk.clients.tolist() for chunk in rounds.job.chunks].index([client])]
        got: dict[str, Any] = {}
        drained(algorithm.client(task, served, own, visits_of(task, [client])), got.update)
        changes.append(torch.stack([got[sent(c)][0][0] for c in range(C)]))
        holds = torch.tensor([c in task.samples(client).y for c in range(C)])
        assert torch.equal(changes[-1].flatten(1).any(1), holds)
        size = float(task.federation.train_sizes[client]) if weights == "samples" else 1.0
        shares.append(size * (holds if average == "holders" else torch.ones(C)))
    assert not torch.stack(changes).flatten(2).any(-1).all()
    wanted = at_once(torch.stack(changes), torch.stack(shares), served[FACTORS])
    sums = rounds.step(planned([1, 2, 1, 1, 1], 1))
    close(covariances(sums.iterated["factors"]), wanted.cov, 1e-12)
    assert torch.equal(rounds.state[FACTORS], sums.iterated["factors"].float())
    assert algorithm.metrics(task, rounds.server) == {"barycenter_iterations": float(wanted.iterations.max())}


# ---- when it ends


@pytest.mark.parametrize("keys", [{"iterations": 3}, {"tolerance": 1e-3}, {"tolerance": 0.9}])
def test_it_ends_at_the_tolerance_or_after_so_many_iterations(keys):
    got = reduced([message(EVERYBODY)], **keys)
    wanted = at_once(tol=keys.get("tolerance", 1e-9), iterations=keys.get("iterations", 100))
    assert 1 <= int(got["iterations"].max()) < int(at_once().iterations.min())
    assert torch.equal(got["iterations"], wanted.iterations)
    close(covariances(got["factors"]), wanted.cov, 1e-12)


def test_a_tolerance_that_is_never_met_leaves_the_number_of_iterations():
    asked = []
    got = reduced([message(EVERYBODY)], reduce=lambda own: asked.append(own) or own, tolerance=1e-300, iterations=6)
    assert got["iterations"].tolist() == [6] * C
    assert len(asked) == 1 + 6


@pytest.mark.parametrize("case", ["nobody counted", "nobody changed any"])
def test_where_there_is_nothing_to_reduce_nobody_is_asked_twice(case):
    asked = []
    messages = [] if case == "nobody counted" else [message(EVERYBODY, torch.zeros_like(CHANGES))]
    got = reduced(messages, reduce=lambda own: asked.append(own) or own)
    assert (got["changed"].tolist(), got["iterations"].tolist()) == ([False] * C, [0] * C)
    assert len(asked) == 1


def test_an_anchor_that_nobody_changed_keeps_its_bits():
    """And the others have the bits that they have without it."""
    changes = CHANGES.clone()
    changes[:, 1] = 0
    algorithm, task = Few(), None
    shared = {MEANS: normal(C, K), FACTORS: SERVED}
    blocks = {MEANS: Block((K,)), FACTORS: Block((K, K))}
    sums = ExactSums(({f"{kind}.{c}": block for kind, block in blocks.items() for c in range(C)},))
    sums.add(message(EVERYBODY, changes))
    sums.iterated = reduced([message(EVERYBODY, changes)])
    after = algorithm.server(task, shared, sums)  # type: ignore[arg-type]
    assert sums.iterated["changed"].tolist() == [True, False, True]
    assert torch.equal(after[FACTORS][1], SERVED[1])
    assert torch.equal(after[FACTORS][[0, 2]], reduced([message(EVERYBODY)])["factors"][[0, 2]].float())
    assert sums.iterated["iterations"][1] == 0


# ---- what may come


def test_singular_and_zero_covariances_have_finite_barycenters():
    """Of anchor 0 all covariances have rank 2, of anchor 1 some have rank 1 or are zero, of anchor 2 all are zero."""
    served, changes = SERVED * torch.tensor([0.0, 0, 1])[:, None, None], SERVED + CHANGES
    changes[:, 0, :, 2:], changes[::2, 1, :, 1:], changes[1::4, 1] = 0, 0, 0
    changes[:, 2] = -served[2]
    got = reduced([message(EVERYBODY, changes)], served)
    assert got["factors"].isfinite().all()
    close(covariances(got["factors"]), at_once(changes, served=served).cov, 1e-8)
    assert (got["changed"].all(), got["factors"][2].any()) == (True, False)


def test_a_visit_that_diverged_spoils_its_anchor_alone():
    changes = CHANGES.clone()
    changes[0, 2, 0, 0] = torch.nan
    got, clean = reduced([message(EVERYBODY, changes)]), reduced([message(EVERYBODY)])
    assert got["factors"][2].isnan().all()
    assert torch.equal(got["factors"][:2], clean["factors"][:2])
    assert got["iterations"].tolist() == [*clean["iterations"][:2].tolist(), 1]


# ---- any number of ranks


@pytest.mark.mpi
def test_any_number_of_ranks_finds_the_same_to_the_bit_whoever_holds_which_message(
    world: Any, facts: dict[str, Any]
) -> None:
    keys = {"tolerance": 1e-2, "iterations": 3}
    alone = reduced([message([client]) for client in EVERYBODY], **keys)
    if world.comm is not None:
        from hpcfl.mpi.collective import Collective

        tree = Collective(world.comm)
        own = EVERYBODY[::-1][world.rank :: world.size]  # another deal, in another order, on each number of ranks
        together = reduced([message([client]) for client in own], reduce=tree.share, **keys)
        tree.leave()
        assert same_bits(together, alone)
    facts["barycenters"] = hashlib.sha256(alone["factors"].numpy().tobytes()).hexdigest()
