"""SALF's exact variance against the sum over all outcomes, the bound (14) and Theorem III.1 against cases by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hpcfl.algorithms.salf import Salf
from hpcfl.contrib.theory.salf_bounds import Convergence, uniform_reach, variance_bound, variance_factors


def test_factors_of_two_users_by_hand():
    own, spread = variance_factors(2, np.array([0.5, 1.0]))
    # p = 1/4; one user alone comes with chance 1/2, and then 1/K - 1/U = 1/2
    np.testing.assert_allclose(own, [1 / 3, 0], rtol=1e-14)
    np.testing.assert_allclose(spread, [0.25 / 0.75**2, 0], rtol=1e-14)
    own, spread = variance_factors(1, np.array([0.25]))
    np.testing.assert_allclose(own, [3.0], rtol=1e-14)
    assert spread == 0


def test_the_variance_is_that_over_all_depths_of_three_users():
    users, layers, rng = 3, 2, np.random.default_rng(1)
    gradients = rng.normal(size=(users, layers, 4))  # four parameters in each layer
    reach, total, mean = uniform_reach(layers), np.zeros(layers), gradients.mean(0)
    steps = np.zeros((layers, 4))
    for depths in product(range(1, layers + 2), repeat=users):
        for layer in range(layers):
            came = [u for u in range(users) if depths[u] <= layer + 1]
            p = (1 - reach[layer]) ** users
            step = gradients[came, layer].mean(0) / (1 - p) if came else np.zeros(4)  # eq. 9
            steps[layer] += step / 3**users
            total[layer] += ((step - mean[layer]) ** 2).sum() / 3**users
    np.testing.assert_allclose(steps, mean, rtol=1e-12)  # Lemma 2
    own, spread = variance_factors(users, reach)
    sample = gradients.var(0, ddof=1).sum(-1)
    np.testing.assert_allclose(own * (mean**2).sum(1) + spread * sample, total, rtol=1e-12)
    assert total.sum() < variance_bound(users, layers) * (gradients**2).sum((1, 2)).max()


def test_the_bound_of_the_variance_by_hand():
    assert variance_bound(2, 1) == pytest.approx(8 * (5 / 4) / (3 / 4))  # q = 1/4
    assert variance_bound(3, 2) == pytest.approx(4 * 3 * 2 / 2 * (35 / 27) / (19 / 27))  # q = (2/3)^3
    assert variance_bound(1, 2) == np.inf


TOY = Convergence(users=2, layers=1, smooth=2.0, convex=1.0, gap=0.5, gradient=3.0, distance=4.0, noise=0.25)


def test_the_theorem_by_hand():
    assert TOY.gamma == 16
    assert TOY.b == 0.25 + 6 * 2 * 0.5
    assert TOY.c == pytest.approx(40)
    lr, decay = TOY.step
    assert (lr, decay) == (2 / 16, 1 / 16)
    assert [Salf(lr=lr, decay=decay).learning_rate(k) for k in (0, 1, 16)] == [2 / 16, pytest.approx(2 / 17), 2 / 32]
    np.testing.assert_allclose(TOY.bound(np.array([0, 34]), lr, decay), np.array([2 / 16, 2 / 50]) * (92.5 + 32))


@pytest.mark.parametrize(("lr", "decay"), [TOY.step, (0.1, 0.05), (0.05, 0.02)])
def test_the_bound_is_above_the_recursion_that_it_follows_from(lr, decay):
    assert TOY.covers(lr, decay)
    distance, method = TOY.distance, Salf(lr=lr, decay=decay)
    for rounds in range(2000):
        assert TOY.smooth / 2 * distance <= TOY.bound(rounds, lr, decay) * (1 + 1e-12)
        step = method.learning_rate(rounds)
        distance = (1 - step * TOY.convex) * distance + step**2 * (TOY.b + TOY.c)
    assert TOY.smooth / 2 * distance > TOY.bound(2000, lr, decay) / 4  # and not far above


def test_steps_that_are_too_long_or_shrink_too_fast_are_not_covered():
    lr, decay = TOY.step
    assert not TOY.covers(lr * 1.01, decay * 0.5)
    assert not TOY.covers(lr, decay * 1.01)
    assert not TOY.covers(lr, 0.0)
    assert replace(TOY, convex=1.01).covers(lr, decay)
