"""Distances and barycenters of Gaussians, against POT, closed forms, finite differences and autograd."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch

from helpers.gaussians import barycenter, bures_squared, sqrtm, transport_map, w2_squared, weighted_sum
from hpcfl.math import barycenter as bary
from hpcfl.math import gaussian
from hpcfl.math.barycenter import sqrtm_and_inverse
from hpcfl.math.gaussian import bures_factor_squared


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(*shape, seed=0):
    """Covariances ``[..., k, k]`` with eigenvalues between about 0.1 and 4."""
    factor = normal(*shape, shape[-1], seed=seed)
    return factor @ factor.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=torch.float64)


def low_rank(k, rank, seed=0):
    factor = normal(k, rank, seed=seed)
    return factor @ factor.T


def leaf(value):
    return value.clone().requires_grad_()


def nuclear_norm(z):
    return gaussian.nuclear_norm(z.double(), z.dtype)


def close(one, other, atol, rtol=0.0):
    torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


# --- closed form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 8, 64])
def test_w2_is_that_of_pot(k):
    means, covs = normal(2, k), spd(2, k)
    wanted = ot.gaussian.bures_wasserstein_distance(*means.numpy(), *covs.numpy()) ** 2
    assert float(w2_squared(means[0], covs[0], means[1], covs[1])) == pytest.approx(wanted, abs=1e-9)


def test_w2_of_diagonal_covariances_is_that_of_the_roots():
    a, b = torch.tensor([1.0, 4.0, 0.0]), torch.tensor([9.0, 0.0, 0.0])
    found = w2_squared(torch.ones(3), torch.diag(a), torch.zeros(3), torch.diag(b))
    assert float(found) == 3 + (1 - 3) ** 2 + 2**2


def test_gradients_are_finite_differences():
    inputs = [leaf(x) for x in (normal(2, 3), spd(2, 3), normal(2, 3, seed=1), spd(2, 3, seed=1))]
    assert torch.autograd.gradcheck(w2_squared, inputs)


def test_gradient_of_a_broadcast_covariance_is_summed():
    a, b = leaf(spd(3)), spd(4, 3, seed=1)
    bures_squared(a, b).sum().backward()
    close(a.grad, sum(torch.eye(3) - transport_map(a.detach(), one) for one in b), 1e-12)


@pytest.mark.parametrize("cov_b", [spd(6, seed=1), low_rank(6, 2, seed=1)], ids=["regular", "singular"])
def test_gradient_of_a_factor_is_the_printed_one(cov_b):
    factor = leaf(normal(6, 6))
    bures_squared(factor @ factor.T, cov_b).backward()
    transport = transport_map(factor.detach() @ factor.detach().T, cov_b)
    close(factor.grad, 2 * (torch.eye(6) - transport) @ factor.detach(), 1e-6)


def test_transport_map_takes_one_covariance_to_the_other():
    a, b = spd(2, 5), spd(2, 5, seed=1)
    found = transport_map(a, b)
    close(found @ a @ found, b, 1e-12)
    half = sqrtm(a)
    close(found, torch.linalg.inv(half) @ sqrtm(half @ b @ half) @ torch.linalg.inv(half), 1e-11)


@pytest.mark.parametrize("cov", [spd(64), 1e-9 * spd(5), low_rank(64, 63), 1e6 * low_rank(5, 1)])
def test_equal_covariances_have_no_distance_and_no_gradient(cov):
    values, vectors = torch.linalg.eigh(cov)
    factor = leaf(vectors * values.clamp(min=0).sqrt())
    found = bures_squared(factor @ factor.T, (factor @ factor.T).detach())
    found.backward()
    assert 0 <= float(found.detach()) <= 1e-12 * float(cov.trace())
    close(factor.grad, torch.zeros_like(cov), 1e-6 * float(factor.detach().norm()))


SINGULAR = {"zero": torch.zeros(5, 5).double(), "rank 1": low_rank(5, 1), "repeated": torch.eye(5).double()}
SINGULAR |= {"tiny": torch.diag(torch.tensor([1, 1e-8, 1e-15, 1e-300, 0]).double())}


@pytest.mark.parametrize("a", SINGULAR)
@pytest.mark.parametrize("b", SINGULAR)
def test_gradients_are_finite_where_covariances_are_singular(a, b):
    means, covs = [leaf(torch.zeros(5).double()) for _ in "ab"], [leaf(SINGULAR[name]) for name in (a, b)]
    w2_squared(means[0], covs[0], means[1], covs[1]).backward()
    factor = leaf(torch.linalg.eigh(SINGULAR[a])[1] * torch.linalg.eigvalsh(SINGULAR[a]).clamp(min=0).sqrt())
    bures_squared(factor @ factor.T, SINGULAR[b]).backward()
    assert all(bool(x.grad.isfinite().all()) for x in (*means, *covs, factor))


def test_from_a_point_the_gradient_is_that_of_the_trace():
    cov = leaf(SINGULAR["zero"])
    found = bures_squared(cov, spd(5))
    found.backward()
    assert float(found.detach()) == pytest.approx(float(spd(5).trace()))
    assert torch.equal(cov.grad, torch.eye(5).double())


def test_results_come_in_the_type_of_the_input():
    a, b = spd(3).float(), spd(3, seed=1).float()
    found = bures_squared(a, b)
    assert found.dtype == transport_map(a, b).dtype == bures_factor_squared(a, b, 3).dtype == torch.float32
    assert found == bures_squared(a.double(), b.double()).float()


# --- nuclear norm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 7, 4), (6, 6), (1, 8), (8, 1)])
def test_nuclear_norm_and_its_gradient_are_those_of_the_singular_values(shape):
    own, other = leaf(normal(*shape)), leaf(normal(*shape))
    found, wanted = nuclear_norm(own), torch.linalg.svdvals(other).sum(-1)
    close(found, wanted, 1e-12)
    weights = torch.arange(1.0, found.numel() + 1).double().reshape(found.shape)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    close(own.grad, other.grad, 1e-12)


def test_zero_singular_values_cost_the_nuclear_norm_no_digits():
    z = normal(33, 64) - normal(33, 64).mean(0)
    for value in (z, torch.cat([z, z]), normal(33, 2) @ normal(2, 64, seed=1)):
        wanted = float(torch.linalg.svdvals(value).sum())
        assert float(nuclear_norm(value)) == pytest.approx(wanted, rel=1e-13)


def test_negligible_singular_values_have_no_gradient():
    u, v = torch.linalg.qr(normal(5, 3))[0], torch.linalg.qr(normal(8, 3, seed=1))[0]
    for sigma, rank in (([3, 3, 0], 2), ([3, 1e-4, 1e-12], 2), ([0, 0, 0], 0)):
        z = leaf((u * torch.tensor(sigma)) @ v.T)
        nuclear_norm(z).backward()
        close(z.grad, u[:, :rank] @ v[:, :rank].T, 1e-6)


def test_float32_rounding_is_no_direction():
    z = leaf((normal(6, 1) @ normal(1, 9, seed=1)).float())
    nuclear_norm(z).backward()
    assert int(torch.linalg.matrix_rank(z.grad)) == 1


def test_numbers_that_are_not_finite_come_through():
    z = normal(2, 3, 4)
    z[0, 1, 1] = torch.nan
    found = nuclear_norm(z)
    assert found[0].isnan()
    close(found[1], nuclear_norm(z[1]), 1e-12)
    assert bures_squared(torch.full((3, 3), torch.inf), torch.eye(3)).isnan()


# --- points -------------------------------------------------------------------------------------------------


def padded(count, n, k, seed=0):
    """Centred points of which `count` rows are real."""
    z = torch.zeros(n, k, dtype=torch.float64)
    z[:count] = normal(count, k, seed=seed)
    z[:count] -= z[:count].mean(0)
    return z


@pytest.mark.parametrize("count", [3, 20], ids=["singular", "regular"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scalar", [1.0, 0.5, 2.0])
def test_factor_form_is_the_closed_form(count, ddof, scalar):
    z = padded(count, 22, 8)
    cov, factor = z.T @ z / (count - ddof), normal(8, 8, seed=1)
    close(bures_factor_squared(factor, z, count, ddof), bures_squared(factor @ factor.T, cov), 3e-8)
    close(bures_factor_squared(scalar, z, count, ddof), bures_squared(scalar**2 * torch.eye(8), cov), 3e-8)


def test_for_the_identity_it_is_the_distance_of_deviations_from_one():
    z = padded(3, 5, 4)
    values = torch.linalg.eigvalsh(z.T @ z / 3).clamp(min=0)
    close(bures_factor_squared(1.0, z, 3), (1 - values.sqrt()).square().sum(), 3e-8)


@pytest.mark.parametrize("ddof", [0, 1])
def test_gradients_of_the_factor_form_are_finite_differences(ddof):
    count = torch.tensor([[3, 4], [4, 5]])
    z = leaf(torch.stack([torch.stack([padded(int(n), 5, 3) for n in row]) for row in count]))
    factor = leaf(normal(2, 3, 3, seed=1))
    assert torch.autograd.gradcheck(lambda x, y: bures_factor_squared(x, y, count, ddof), (factor, z))
    assert torch.autograd.gradcheck(lambda y: bures_factor_squared(0.7, y, count, ddof), (z,))


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("ddof", [0, 1])
def test_one_sample_or_none_has_no_covariance(count, ddof):
    factor, z = leaf(normal(4, 4)), leaf(torch.zeros(6, 4).double())
    found = bures_factor_squared(factor, z, count, ddof)
    found.backward()
    assert float(found.detach()) == pytest.approx(float(factor.detach().square().sum()))
    close(factor.grad, 2 * factor.detach(), 1e-12)
    assert not z.grad.any()
    assert float(bures_factor_squared(3.0, z, count, ddof).detach()) == 9 * 4


def test_points_with_the_covariance_of_the_factor_have_no_distance_and_no_gradient():
    factor, z = leaf(normal(6, 6)), leaf(normal(6, 6).T * math.sqrt(6))
    found = bures_factor_squared(factor, z, 6)
    found.backward()
    assert 0 <= float(found.detach()) < 1e-12
    close(torch.stack([factor.grad, z.grad]), torch.zeros(2, 6, 6).double(), 1e-12)


def test_moments_are_those_of_the_rows_that_count():
    points, mask = normal(2, 6, 3), torch.tensor([[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    points[0, 1] = torch.nan
    found = gaussian.moments(points, mask)
    rows = points[0, [0, 2, 3]]
    close(found.mean, torch.stack([rows.mean(0), torch.zeros(3).double()]), 1e-15)
    close(found.centred[0].T @ found.centred[0] / 3, torch.from_numpy(np.cov(rows.T, ddof=0)), 1e-15)
    assert not found.centred[~mask].any()
    assert found.count.tolist() == [3, 0]


# --- barycenter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 16])
def test_barycenter_is_that_of_pot(k):
    means, covs, weights = normal(4, k), spd(4, k), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mean, cov = ot.gaussian.bures_wasserstein_barycenter(
        means.numpy(), covs.numpy(), weights.numpy(), num_iter=1000, eps=1e-12
    )
    found = barycenter(means, covs, 5 * weights)
    close(found.mean, torch.from_numpy(mean), 1e-12)
    close(found.cov, torch.from_numpy(cov), 1e-8)
    assert float(found.change) <= 1e-12
    assert int(found.iterations) < 200


@pytest.mark.parametrize("rank", [0, 2, 5])
def test_barycenter_of_commuting_covariances_is_the_mean_root_squared(rank):
    basis, roots, weights = torch.linalg.qr(normal(5, 5))[0], normal(3, 5).abs(), torch.tensor([2.0, 1.0, 1.0])
    roots[:, rank:] = 0
    mean_root = (roots * weights[:, None]).sum(0) / 4
    found = barycenter(normal(3, 5), (basis * roots.square()[:, None]) @ basis.T, weights)
    close(found.cov, (basis * mean_root.square()) @ basis.T, 1e-12)


def test_barycenter_satisfies_its_equation_where_covariances_are_singular():
    covs, weights = torch.stack([low_rank(6, rank, seed=rank) for rank in (2, 3, 4)]), torch.ones(3) / 3
    found = barycenter(torch.zeros(3, 6), covs, weights, tol=1e-10, iterations=1000)
    assert float(found.change) <= 1e-10
    close(bary.barycenter_term(sqrtm(found.cov), covs).mean(0), found.cov, 1e-8)


def test_a_class_has_the_same_bits_in_any_batch():
    means, covs = normal(3, 4, 7), spd(3, 4, 7)
    weights = normal(3, 4).abs()
    together = barycenter(means, covs, weights)
    half = sqrtm(covs[0])
    for c in range(4):
        alone = barycenter(means[:, c], covs[:, c], weights[:, c])
        assert all(torch.equal(one[c], other) for one, other in zip(together, alone))
        assert torch.equal(bary.barycenter_term(half, covs[1])[c], bary.barycenter_term(half[c], covs[1, c]))
        assert torch.equal(bary.fixed_point(half, covs[1])[c], bary.fixed_point(half[c].clone(), covs[1, c].clone()))
        assert torch.equal(transport_map(covs[0], covs[1])[c], transport_map(covs[0, c], covs[1, c]))


def test_one_iteration_consists_of_the_pieces():
    covs, weights = spd(3, 5), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    start = weighted_sum(weights, covs)
    half, inverse = sqrtm_and_inverse(start)
    close(inverse @ half, torch.eye(5).double(), 1e-12)
    total = weighted_sum(weights, torch.stack([bary.barycenter_term(half, cov) for cov in covs]))
    found = barycenter(torch.zeros(3, 5), covs, weights, iterations=1)
    assert torch.equal(found.cov, bary.fixed_point(inverse, total))
    assert float(found.change) == float(bary.relative_change(start, found.cov))


def test_weights_that_are_none_are_refused():
    for weights in ([0.0, 0.0], [2.0, -1.0]):
        with pytest.raises(ValueError, match="a sum above 0"):
            barycenter(torch.zeros(2, 3), spd(2, 3), torch.tensor(weights))


def test_the_factor_mean_after_a_gradient_step_is_a_bures_gradient_step():
    factor, covs, weights, rate = normal(5, 5), spd(3, 5), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 0.1
    steps = []
    for cov in covs:
        own = leaf(factor)
        bures_squared(own @ own.T, cov).backward()
        steps.append(factor - rate / 2 * own.grad)
    mean = weighted_sum(weights, torch.stack(steps))
    start = factor @ factor.T
    pushed = (1 - rate) * torch.eye(5).double() + rate * weighted_sum(weights, transport_map(start, covs))
    close(mean @ mean.T, pushed @ start @ pushed, 1e-13)
