"""Problems whose clients have feature spaces of their own: laws of what is drawn, and who holds what."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest

from hpcfl.base.errors import UsageError
from hpcfl.data import Source, source_class, sources
from hpcfl.data.gaussians import NARROW, WIDE, LinearMapping, NoisyFeatures, thinned
from hpcfl.data.linear_federation import LinearSpaces, spectrum, whitening

GAUSSIAN = [NoisyFeatures, LinearMapping]
ALL = [*GAUSSIAN, LinearSpaces]
SIGMAS = 5.0  # how far off an estimate may be, in its standard deviations: 1 in 1.7 million


def pairs(source: Source, clients: int, seed: int) -> list[tuple[np.ndarray, ...]]:
    """All arrays of all clients."""
    data = source.federate(clients, seed, None)
    return [tuple(vars(data.client(i)).values()) for i in range(clients)]


@pytest.mark.parametrize("cls", ALL)
def test_a_federation_is_a_function_of_the_seed(cls: type[Source]) -> None:
    assert cls().name in sources()
    assert source_class(cls().name) is cls
    first, again, other = (pairs(cls(), 4, seed) for seed in (3, 3, 4))
    for i in range(4):
        assert all(map(np.array_equal, first[i], again[i]))
        assert not np.array_equal(first[i][0], other[i][0])
        assert not np.array_equal(first[i][0], first[i - 1][0])


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("more", [{}, {"test_share": 0.5, "samples_per_class": 30, "thinning": False}])
def test_sizes_and_shapes_agree_with_the_clients(cls: type[Source], more: dict[str, Any]) -> None:
    data = cls(**({} if cls is LinearSpaces else more)).federate(15, 1, None)
    assert data.clients == 15
    for i, shape in enumerate(data.shapes):
        own = data.client(i)
        assert own.train_features.shape == (data.train_sizes[i], *shape)
        assert own.test_features.shape == (data.test_sizes[i], *shape)
        assert len(own.train_labels) == data.train_sizes[i] >= 1
        assert len(own.test_labels) == data.test_sizes[i]
        assert own.train_features.dtype == own.test_features.dtype == np.float32
        assert own.train_labels.dtype == (np.float32 if cls is LinearSpaces else np.int64)
    assert data.server_test() is None


@pytest.mark.parametrize(
    ("source", "least", "most"),
    [
        (NoisyFeatures(), 6, 15),
        (NoisyFeatures(informative=2, least_noise=0, most_noise=3), 2, 5),
        (LinearMapping(least=5, most=8), 5, 8),
        (LinearMapping(least=4, most=4), 4, 4),
        (LinearSpaces(dimension=3, least=3, most=6), 3, 6),
    ],
)
def test_numbers_of_features_are_uniform_on_their_range(source: Source, least: int, most: int) -> None:
    assert source.check(300, None).shapes == tuple((width,) for width in sorted({least, most}))
    widths = np.array(source.federate(300, 2, None).shapes).ravel()
    seen = np.bincount(widths - least, minlength=most - least + 1)
    chance = 1 / (most - least + 1)
    assert len(seen) == most - least + 1
    assert np.abs(seen - 300 * chance).max() <= SIGMAS * sqrt(300 * chance * (1 - chance))


# ---- who holds which class


@pytest.mark.parametrize("clients", [1, 4, 10, 67])
@pytest.mark.parametrize("cls", GAUSSIAN)
def test_classes_are_dealt_and_shared_out_evenly(cls: Any, clients: int) -> None:
    data = cls(samples_per_class=50).federate(clients, 7, None)
    holds = data.counts > 0
    assert (holds.sum(axis=1) == 3).all()
    assert np.ptp(holds.sum(axis=0)) <= 1
    for c in np.flatnonzero(holds.any(axis=0)):
        assert data.counts[:, c].sum() == 50
        assert np.ptp(data.counts[holds[:, c], c]) <= 1


def test_every_sample_is_trained_with_or_tested_with() -> None:
    source = NoisyFeatures(samples_per_class=100, thinning=False)
    data, header = source.federate(40, 0, None), source.check(40, None)
    assert header.train + header.test == 2000
    for i in range(40):
        own = data.client(i)
        labels = np.concatenate([own.train_labels, own.test_labels])
        assert np.bincount(labels, minlength=20).tolist() == data.counts[i].tolist()
        assert len(own.test_labels) == round(0.2 * len(labels))
    assert abs(data.test_sizes.sum() - header.test) <= 20  # at most half a sample per client by rounding


def test_the_test_part_is_drawn_at_random_from_the_clients_samples() -> None:
    data = NoisyFeatures(thinning=False).federate(20, 0, None)
    for i in range(20):
        seen = np.bincount(data.client(i).test_labels, minlength=20)
        share = data.counts[i] / data.counts[i].sum()
        limit = SIGMAS * np.sqrt(data.test_sizes[i] * share * (1 - share) * 0.8)  # hypergeometric, a fifth is drawn
        assert (np.abs(seen - data.test_sizes[i] * share) <= limit).all()


def test_a_client_of_few_samples_keeps_one_to_train_with() -> None:
    data = LinearMapping(labels=2, classes=1, samples_per_class=1, test_share=0.9).federate(2, 0, None)
    assert data.train_sizes.tolist() == [1, 1]
    assert data.test_sizes.tolist() == [0, 0]


def test_the_header_counts_classes_that_somebody_holds() -> None:
    header = NoisyFeatures(samples_per_class=10).check(2, None)
    assert (header.clients, header.train, header.test, header.classes) == (None, 48, 12, 20)


def test_thinning_keeps_the_shares_that_it_says() -> None:
    sizes = np.full(4000, 10_000)
    shares = thinned(sizes, 5) / 10_000
    assert shares.min() >= 0.05
    assert shares.max() <= 1
    mean = (sum(WIDE) + sum(NARROW)) / 4
    second = np.mean([(low**2 + low * high + high**2) / 3 for low, high in (WIDE, NARROW)])
    assert shares.mean() == pytest.approx(mean, abs=SIGMAS * sqrt((second - mean**2) / 4000))
    above = (1 - NARROW[1]) / (WIDE[1] - WIDE[0]) / 2  # only the wide half reaches there
    assert (shares > NARROW[1]).mean() == pytest.approx(above, abs=SIGMAS * sqrt(above * (1 - above) / 4000))
    assert thinned(np.ones(20, dtype=np.int64), 5).tolist() == [1] * 20


def test_thinned_samples_are_the_clients_own_with_replacement() -> None:
    whole, thin = (NoisyFeatures(thinning=thinning).federate(6, 3, None) for thinning in (False, True))
    repeated = 0
    for i in range(6):
        all_, own = whole.client(i), thin.client(i)
        np.testing.assert_array_equal(own.test_features, all_.test_features)
        rows = {row.tobytes() for row in all_.train_features}
        kept = [row.tobytes() for row in own.train_features]
        assert set(kept) <= rows
        repeated += len(kept) - len(set(kept))
    assert repeated > 0


# ---- laws of the features


def assert_gaussian(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Mean and covariance agree with a normal law's: Var of a mean is Σ_aa/n, of a moment (Σ_aa Σ_bb + Σ_ab²)/n."""
    variances, centred = np.diag(covariance), x - mean
    limit = SIGMAS * np.sqrt(variances / len(x)) + 1e-6  # features are float32
    assert (np.abs(centred.mean(axis=0)) <= limit).all()
    limit = SIGMAS * np.sqrt((np.outer(variances, variances) + covariance**2) / len(x)) + 1e-6
    assert (np.abs(centred.T @ centred / len(x) - covariance) <= limit).all()


def of_class(data: Any, client: int) -> tuple[int, np.ndarray]:
    """One class of a client, and its samples."""
    own = data.client(client)
    label = int(own.train_labels[0])
    return label, own.train_features[own.train_labels == label].astype(np.float64)


def test_noisy_features_are_the_class_and_then_noise() -> None:
    data = NoisyFeatures(samples_per_class=5000, thinning=False).federate(5, 1, None)
    for client in range(5):
        label, x = of_class(data, client)
        assert len(x) > 3000
        width = data.shapes[client][0]
        assert_gaussian(x, np.r_[data.centres[label], np.zeros(width - 5)], np.eye(width))


@pytest.mark.parametrize("covariance", ["identity", "diagonal"])
def test_a_linear_mapping_is_one_matrix_per_client(covariance: Any) -> None:
    source = LinearMapping(samples_per_class=5000, thinning=False, covariance=covariance, most=12)
    data = source.federate(5, 1, None)
    variances = data.deviations**2
    if covariance == "identity":
        assert variances.tolist() == [1.0] * 5
    else:
        assert variances.min() >= 0.5
        assert variances.max() <= 1.5
        assert np.ptp(variances) > 0
    for client in range(5):
        label, x = of_class(data, client)
        matrix = source.matrix(client, 1)
        assert matrix.shape == (5, data.shapes[client][0])
        assert_gaussian(x, data.centres[label] @ matrix, matrix.T * variances @ matrix)


def test_centres_and_maps_have_the_spread_they_say() -> None:
    source = LinearMapping(labels=400, least=50, most=50)
    data = source.federate(2, 3, None)
    entries = np.stack([source.matrix(i, 3) for i in range(40)])
    for values, deviation in ((data.centres, 0.5), (NoisyFeatures(labels=400).federate(2, 3, None).centres, 0.8)):
        assert values.std() == pytest.approx(deviation, rel=SIGMAS / sqrt(2 * values.size))
    assert entries.std() == pytest.approx(1, rel=SIGMAS / sqrt(2 * entries.size))
    assert abs(entries.mean()) <= SIGMAS / sqrt(entries.size)


# ---- linear regression in a common latent space


SPACES = LinearSpaces(dimension=4, rank=2, least=4, most=9, samples=20_000, noise=0.0)


def test_the_regression_is_as_stated() -> None:
    data = SPACES.federate(5, 9, None)
    np.testing.assert_allclose(data.truth.T @ data.truth, np.eye(2), atol=1e-12)
    assert data.truth.shape == (4, 2)
    np.testing.assert_allclose(np.linalg.norm(data.heads, axis=1), sqrt(2), rtol=1e-12)
    assert set(data.signs) == {-1.0, 1.0}
    for client in range(5):
        (x, y), (weight, bias) = data.drawn(client, 3), whitening(*data.moments(client), 4)
        latent = (x @ weight.T + bias) * data.signs
        np.testing.assert_allclose(y, latent @ data.truth @ data.heads[client], atol=1e-11)
        assert_gaussian(x, *data.moments(client))
        assert_gaussian(latent, np.zeros(4), np.eye(4))


def test_eigenvalues_are_apart_and_descend() -> None:
    source = LinearSpaces(least=50, most=50, gap=0.3)
    data = source.federate(6, 2, None)
    for client in range(6):
        values, vectors = spectrum(data.moments(client)[1])
        assert (-np.diff(values)).min() >= 0.3 * (1 - 1e-9)
        assert values[-1] >= 0.3 * (1 - 1e-9)
        assert values[0] <= 2 * 50 * 0.3
        np.testing.assert_allclose((vectors * values) @ vectors.T, data.moments(client)[1], atol=1e-12)
        assert (vectors.max(axis=0) >= -vectors.min(axis=0)).all()


def test_whitening_of_a_covariance_known_by_hand() -> None:
    """Eigenvalues 9 and 1 with eigenvectors (1, 1)/√2 and ±(1, -1)/√2, and 4 along the third axis."""
    covariance = np.array([[5.0, 4, 0], [4, 5, 0], [0, 0, 4]])
    weight, bias = whitening(np.array([1.0, 2, 3]), covariance, 2)
    np.testing.assert_allclose(weight, [[1 / sqrt(18), 1 / sqrt(18), 0], [0, 0, 0.5]], atol=1e-14)
    np.testing.assert_allclose(bias, [-3 / sqrt(18), -1.5], atol=1e-14)
    weight, _ = whitening(np.zeros(3), covariance, 3)
    np.testing.assert_allclose(weight @ covariance @ weight.T, np.eye(3), atol=1e-14)


@pytest.mark.parametrize("covariance", [np.diag([1.0, 0.0]), np.eye(1)])
def test_whitening_needs_enough_directions(covariance: np.ndarray) -> None:
    with pytest.raises(ValueError, match="at least 2 positive eigenvalues"):
        whitening(np.zeros(len(covariance)), covariance, 2)


def test_samples_are_fresh_in_each_round_and_noise_has_its_size() -> None:
    quiet = SPACES.federate(2, 9, None)
    noisy = SPACES.model_copy(update={"noise": 0.5}).federate(2, 9, None)
    (x, y), (same, loud) = quiet.drawn(1, 4), noisy.drawn(1, 4)
    np.testing.assert_array_equal(x, same)
    assert (loud - y).std() == pytest.approx(0.5, rel=SIGMAS / sqrt(2 * 20_000))
    assert not np.array_equal(quiet.drawn(1, 5)[0], x)
    np.testing.assert_array_equal(quiet.client(1).train_features, quiet.drawn(1, 0)[0].astype(np.float32))
    later = SPACES.federate(2, 9, None)  # whatever was asked for before
    np.testing.assert_array_equal(later.drawn(1, 4)[0], x)


def test_moments_of_latent_features_lead_to_the_representation() -> None:
    """``E y² φ̂φ̂ᵀ = |u|² I + 2uuᵀ``, u = diag(s) A* β*: what Algorithm S3 begins with is the span of diag(s) A*."""
    data = LinearSpaces(dimension=4, least=4, most=9, samples=4000, noise=0.0).federate(20, 1, None)
    moment = np.zeros((4, 4))
    for client in range(20):
        (x, y), (weight, bias) = data.drawn(client, 0), whitening(*data.moments(client), 4)
        latent = x @ weight.T + bias
        moment += (latent * y[:, None]).T @ (latent * y[:, None]) / len(y) / 20
    u = data.heads @ (data.signs[:, None] * data.truth).T
    expected = np.mean([(own @ own) * np.eye(4) + 2 * np.outer(own, own) for own in u], axis=0)
    # |u|² = 2: an entry's second moment is at most E y⁴ φ⁴, by Hölder 105 |u|⁴ = 420
    np.testing.assert_allclose(moment, expected, atol=SIGMAS * sqrt(420 / 80_000))
    values, found = np.linalg.eigvalsh(expected), np.linalg.eigh(moment)[1][:, -2:]
    truth = data.signs[:, None] * data.truth
    limit = 2 * np.linalg.norm(moment - expected, 2) / (values[2] - values[1])  # Davis and Kahan
    assert np.linalg.norm(found - truth @ (truth.T @ found), 2) <= limit < 0.5


# ---- what cannot be


@pytest.mark.parametrize(
    ("source", "clients", "line"),
    [
        (
            NoisyFeatures(least_noise=4, most_noise=2),
            3,
            r"data\.least_noise: .*data\.most_noise = 2, got 4; did you mean 2",
        ),
        (LinearMapping(least=60), 3, r"data\.least: expected at most data\.most = 50, got 60; did you mean 50"),
        (
            LinearMapping(least_variance=2.0),
            3,
            r"data\.least_variance: .*most_variance = 1\.5, got 2\.0; did you mean 1\.5",
        ),
        (LinearSpaces(most=9), 3, r"data\.least: expected at most data\.most = 9, got 10; did you mean 9"),
        (LinearSpaces(dimension=11), 3, r"data\.dimension: expected at most data\.least = 10, got 11; did you mean 10"),
        (LinearSpaces(rank=11), 3, r"data\.rank: expected at most data\.dimension = 10, got 11; did you mean 10"),
        (NoisyFeatures(classes=21), 3, r"data\.classes: expected at most data\.labels = 20, got 21; did you mean 20"),
        (
            LinearMapping(samples_per_class=2),
            14,
            r"data\.samples_per_class: .* at least 3.*= 14 .*got 2; did you mean 3",
        ),
        (NoisyFeatures(), 0, "clients: expected at least 1, got 0"),
        (LinearSpaces(), 0, "clients: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be(source: Source, clients: int, line: str) -> None:
    for call in (lambda: source.check(clients, None), lambda: source.federate(clients, 0, None)):
        with pytest.raises(UsageError, match=line) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_as_few_samples_as_there_are_holders_are_enough() -> None:
    data = LinearMapping(samples_per_class=3).federate(14, 0, None)
    assert (data.counts.sum(axis=1) >= 3).all()
