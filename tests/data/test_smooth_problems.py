"""The problems on which methods are compared that use the smoothness of the loss in the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil, comb
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

from helpers import toys
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.cli import main
from hpcfl.contrib.theory.optimum import Optimum, optimum
from hpcfl.data.base import Federation
from hpcfl.data.bundled import Digits, Reduced, reduced
from hpcfl.data.gaussians import NoisyFeatures
from hpcfl.data.partition import turns
from hpcfl.data.unit_cube import UnitCube
from hpcfl.learning.task import Task
from hpcfl.models.glm import Glm
from hpcfl.models.mlp import Mlp
from hpcfl.models.modules.custom import Rough
from hpcfl.models.modules.layers import Layer


def refused(call: Callable[..., Any], *args: Any) -> str:
    """The one-line message of the UsageError that the call raises."""
    with pytest.raises(UsageError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def samples(federation: Federation) -> np.ndarray:
    """All training samples with their labels as rows, the clients' and the server's, sorted."""
    held = [federation.client(i) for i in range(federation.clients)]
    parts = [(own.train_features, own.train_labels) for own in held]
    parts += [found] if (found := federation.server_train()) else []
    rows = np.concatenate([np.column_stack([x.reshape(len(x), -1), y]) for x, y in parts])
    return rows[np.lexsort(rows.T)]


# --- the server's samples -----------------------------------------------------------------------------------


def test_classes_take_turns():
    labels = np.array([2, 0, 0, 0, 2, 1])
    order = turns(labels, 6, np.random.default_rng(0))
    assert labels[order].tolist() == [0, 1, 2, 0, 2, 0]
    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    assert turns(labels, 2, np.random.default_rng(0)).tolist() == order[:2].tolist()


KEYS = [{}, {"partition": "shards", "classes": 3}, {"partition": "dirichlet", "train_samples": 500}]


@pytest.mark.parametrize("keys", KEYS)
def test_the_servers_samples_and_the_clients_are_the_pool(keys):
    section = Digits(server=24, **keys)
    federation, header = section.federate(7, 3, None), section.check(7, None)
    used = keys.get("train_samples", 1437)
    assert (header.train, header.server) == (used - 24, 24)
    parts = np.concatenate([*federation.train_parts, federation.server_part])
    assert len(np.unique(parts)) == len(parts)
    remainder = 0 if "classes" in keys else (used - 24) % 7
    assert len(parts) == used - remainder
    x, y = federation.server_train()
    assert y.tolist() == [*range(10), *range(10), 0, 1, 2, 3]
    assert x.shape == (24, 1, 8, 8)
    assert federation.train_sizes.tolist() == [len(part) for part in federation.train_parts]


@pytest.mark.parametrize("keys", KEYS)
def test_dealt_out_they_are_the_same_samples_in_all(keys):
    held, dealt = (Digits(server=24, deal=deal, **keys).federate(7, 3, None) for deal in (False, True))
    assert np.array_equal(samples(held), samples(dealt))
    assert dealt.server_train() is None
    assert (dealt.train_sizes - held.train_sizes).tolist() == [4, 4, 4, 3, 3, 3, 3]
    assert dealt.test_sizes.tolist() == held.test_sizes.tolist()
    header = Digits(server=24, deal=True, **keys).check(7, None)
    assert (header.train, header.server) == (keys.get("train_samples", 1437), 0)


def test_a_server_without_samples_says_so():
    federation = Digits().federate(7, 3, None)
    assert federation.server_train() is None
    assert sum(len(part) for part in federation.train_parts) == 1437 - 1437 % 7


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"server": 1437},
            "data.server: expected 0 … 1436 of 1437 training samples in all, got 1437; did you mean 1436?",
        ),
        ({"deal": True}, "data.server: expected at least 1 to deal out (data.deal = true), got 0; did you mean 1?"),
        (
            {"server": 1432, "deal": True},
            "clients: expected 1 … 5, one per training sample, got 7; did you mean 5?",
        ),
    ],
)
def test_impossible_shares_of_the_server_are_refused(keys, message):
    assert refused(Digits(**keys).check, 7, None) == message
    assert refused(Digits(**keys).federate, 7, 3, None) == message


# --- the unit cube ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [1, 2, 4])
def test_samples_lie_in_the_cube_and_dealt_out_are_the_same_in_all(labels):
    keys = {"labels": labels, "samples": 30, "server": 11, "noise": 0.1, "heterogeneity": 0.7, "dimension": 3}
    held, dealt = (UnitCube(**keys, deal=deal).federate(4, 1, None) for deal in (False, True))
    assert np.array_equal(samples(held), samples(dealt))
    _, y = held.server_train()
    assert dealt.server_train() is None
    assert dealt.train_sizes.tolist() == [33, 33, 33, 32]
    assert [len(dealt.client(i).train_labels) for i in range(4)] == [33, 33, 33, 32]
    every = samples(held)[:, :3]
    assert every.shape == (4 * 30 + 11, 3)
    assert every.min() >= 0
    assert every.max() <= 1
    assert y.dtype == (np.float32 if labels == 1 else np.int64)
    if labels > 1:
        assert y.tolist() == [i % labels for i in range(11)]
    header = UnitCube(**keys).check(4, None)
    assert (header.train, header.test, header.server, header.targets) == (120, 80, 11, labels == 1)
    header = UnitCube(**keys, deal=True).check(4, None)
    assert (header.train, header.test, header.server) == (131, 80, 0)
    assert len(held.server_test()[1]) == 80
    assert held.client(0).test_features.base is None  # or it would hold on to all samples


def test_targets_are_those_of_the_truth():
    federation = UnitCube(labels=1, noise=0.0, dimension=2).federate(3, 5, None)
    own = federation.client(1)
    weights = federation.truth[0]
    expected = np.tanh(weights[0] + (2 * own.train_features.astype(np.float64) - 1) @ weights[1:])
    np.testing.assert_allclose(own.train_labels, expected, atol=1e-6)


def test_classes_have_the_law_of_the_truth():
    """The mean score under the softmax's gradient is zero in expectation, within four standard errors."""
    federation = UnitCube(labels=3, samples=20_000).federate(1, 2, None)
    own, truth = federation.client(0), federation.truth
    features = np.column_stack([np.ones(20_000), 2 * own.train_features - 1])
    chances = np.exp(features @ truth.T)
    chances /= chances.sum(1, keepdims=True)
    gaps = np.eye(3)[own.train_labels] - chances
    assert np.abs(gaps.T @ features).max() / np.sqrt(20_000) < 4 * 0.5


def test_heterogeneity_narrows_the_clients_and_moves_their_truths():
    def widths(heterogeneity: float) -> np.ndarray:
        federation = UnitCube(samples=400, heterogeneity=heterogeneity).federate(5, 0, None)
        return np.array([np.ptp(federation.client(i).train_features, axis=0) for i in range(5)])

    assert widths(0.0).min() > 0.95
    assert 0.55 < widths(0.5).min() <= widths(0.5).max() <= 0.6
    assert 0.15 < widths(1.0).min() <= widths(1.0).max() <= 0.2
    alike, apart = (UnitCube(labels=1, samples=5, heterogeneity=h).federate(2, 0, None).client(1) for h in (0.0, 1.0))
    assert not np.allclose(alike.train_labels, apart.train_labels, atol=0.01)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"deal": True}, "data.server: expected at least 1 to deal out (data.deal = true), got 0; did you mean 1?"),
        (
            {"noise": 1.5},
            "data.noise: expected 0.0 … 1.0, a chance for data.labels = 2 classes, got 1.5; did you mean 1.0?",
        ),
    ],
)
def test_cubes_that_cannot_be_are_refused(keys, message):
    assert refused(UnitCube(**keys).check, 3, None) == message
    assert refused(UnitCube(**keys).federate, 3, 0, None) == message


# --- reduced tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "classes"), [("breast_cancer", 2), ("digits", 10)])
def test_reduced_tables_fill_the_cube(table, classes):
    section = Reduced(set=table, dimension=3, server=12)
    federation, header = section.federate(5, 0, None), section.check(5, None)
    every = np.concatenate([federation.pool.train_pixels, federation.pool.test_pixels])
    assert federation.pool.train_pixels.min(axis=0).tolist() == [0, 0, 0]
    assert federation.pool.train_pixels.max(axis=0).tolist() == [1, 1, 1]
    assert every.min() == 0
    assert every.max() == 1
    assert len(federation.pool.train_labels) == header.train + header.server
    assert federation.server_train()[1].tolist() == [i % classes for i in range(12)]
    assert federation.client(0).train_features.shape == (header.train // 5, 3)


def test_components_by_hand():
    """Rows on a line: the first component is the place on it, and what is not for training is clipped."""
    table = np.outer([0.0, 1.0, 4.0, 9.0], [3.0, 4.0]) + 7
    assert_close = np.testing.assert_allclose
    assert_close(reduced(table, np.array([0, 1, 2]), 1, False)[:, 0], [0, 0.25, 1, 1], atol=1e-12)
    assert_close(reduced(table * [1, 50], np.array([0, 1, 2]), 1, True)[:, 0], [0, 0.25, 1, 1], atol=1e-12)
    assert_close(reduced(-table, np.array([0, 1, 2]), 1, False)[:, 0], [1, 0.75, 0, 0], atol=1e-12)


def test_a_table_is_not_cropped():
    words = "data.augment: expected false, since data.name = 'reduced' has no images, got true; did you mean false?"
    assert refused(Reduced(augment=True).check, 3, None) == words


# --- generalised linear models ------------------------------------------------------------------------------

X = torch.tensor([[0.2, 0.7], [1.0, 0.4]], dtype=torch.float64)
THETA = {"linear.weight": torch.tensor([[1.5, -2.0]]).double(), "linear.bias": torch.tensor([0.25]).double()}
Z = [0.3 - 1.4 + 0.25, 1.5 - 0.8 + 0.25]


def outputs(section: Glm, params: dict[str, torch.Tensor], x: torch.Tensor, classes: int = 1) -> torch.Tensor:
    """The outputs ``[c, B, …]`` of the one layer."""
    ((name, modules),) = section.build(tuple(x.shape[2:]), classes)
    return Layer(name, modules, 0)(params, x, None)


def test_links_by_hand():
    params = {name: value.unsqueeze(0) for name, value in THETA.items()}
    z = np.array(Z)
    two = outputs(Glm(), params, X.unsqueeze(0), 2)[0]
    np.testing.assert_allclose(two, np.stack([0 * z, z], axis=1), rtol=1e-15)
    np.testing.assert_allclose(outputs(Glm(link="tanh"), params, X.unsqueeze(0))[0, :, 0], np.tanh(z), rtol=1e-15)
    u, j = np.tanh(z)[:, None], np.arange(41)
    series = (2.0 ** (-3.0 * j) * np.sin(2.0**j * np.pi * u)).sum(1) / np.pi / (2.0 ** (-2.0 * j)).sum()
    rough = outputs(Glm(link="rough", smoothness=2.0, roughness=0.25), params, X.unsqueeze(0))[0, :, 0]
    np.testing.assert_allclose(rough, np.tanh(z) + 0.25 * series, rtol=1e-14)


def test_a_softmax_has_a_row_for_each_class_and_all_begin_at_zero():
    ((name, modules),) = Glm(link="softmax", bias=False).build((2, 3), 4)
    assert {key: tuple(value.shape) for key, value in modules.named_parameters()} == {"1.weight": (4, 6)}
    assert name == "linear"
    assert not modules[1].weight.any()
    assert [Glm().penalty, Glm(ridge=0.5).penalty, Mlp().penalty] == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(("link", "classes"), [("logistic", 2), ("softmax", 4), ("identity", 1), ("rough", 1)])
def test_a_model_in_layers_is_the_one_in_a_single_layer(link, classes):
    federation = toys.federation([5, 7], shape=(1, 5), classes=classes)
    if classes == 1:
        for held in federation.held:
            object.__setattr__(held, "train_labels", held.train_features[:, 0, 0])
    keys = {"link": link, "ridge": 0.1, "smoothness": 2.0}
    one, three = (Task(Glm(**keys, layers=layers), federation, 0, precision="double") for layers in (1, 3))
    weight = torch.randn(one.initial()["linear.weight"].shape, dtype=torch.float64)
    bias = torch.ones(len(weight), dtype=torch.float64)
    parts = dict(zip(three.initial(), [*torch.split(weight, [2, 2, 1], 1), bias]))
    assert three.layer_names() == (("term1.weight",), ("term2.weight",), ("term3.weight", "term3.bias"))
    visits = toys.visits_of(one, [0, 1])
    for task, own in ((one, {"linear.weight": weight, "linear.bias": bias}), (three, parts)):
        assert {name: value.shape for name, value in own.items()} == {n: v.shape for n, v in task.initial().items()}
    whole, losses = one.gradients(
        one.replicate({"linear.weight": weight, "linear.bias": bias}, visits), next(one.batches(visits, 0, steps=1))
    )
    found = list(three.backprop(three.replicate(parts, visits), next(three.batches(visits, 0, steps=1)), [1, 1, 2]))
    assert [number for number, _, _ in found] == [2, 1, 0]  # the last features' layer first; one client has no time
    torch.testing.assert_close(found[0][2], losses)
    for (_, gradients, _), columns in zip(found, (slice(4, 5), slice(2, 4), slice(0, 2))):
        rows = len(next(iter(gradients.values())))
        for name, gradient in gradients.items():
            expected = whole["linear.bias"] if name.endswith("bias") else whole["linear.weight"][..., columns]
            torch.testing.assert_close(gradient, expected[:rows])


def test_more_layers_than_features_are_refused():
    words = refused(Glm(layers=4).check, (3,), 2)
    assert words == "model.layers: expected 1 … 3 for these features, got 4; did you mean 3?"


@pytest.mark.parametrize("link", ["logistic", "tanh", "rough"])
def test_clients_batched_or_one_by_one_are_the_same_in_float64(link):
    section, classes = Glm(link=link, smoothness=1.5), 2 if link == "logistic" else 1
    params = {name: torch.stack([value, -value, 2 * value]) for name, value in THETA.items()}
    whole = outputs(section, params, X.expand(3, 2, 2), classes)
    assert whole.dtype == torch.float64
    for row in range(3):
        own = {name: value[row : row + 1] for name, value in params.items()}
        torch.testing.assert_close(outputs(section, own, X.unsqueeze(0), classes)[0], whole[row], rtol=1e-13, atol=0)


def test_gradients_per_sample_are_those_of_the_samples_one_by_one():
    ((_, modules),) = Glm(link="rough", smoothness=2.5).build((2,), 1)
    modules.double()

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (functional_call(modules, params, (x.unsqueeze(0),)) - 0.3).square().sum()

    params = {name.replace("linear", "1"): value for name, value in THETA.items()}
    together = vmap(grad(loss), (None, 0))(params, X)
    for row, x in enumerate(X):
        for name, value in grad(loss)(params, x).items():
            torch.testing.assert_close(together[name][row], value, rtol=1e-12, atol=1e-14)


def slopes(smoothness: float, u: torch.Tensor, roughness: float = 0.5) -> torch.Tensor:
    """w'(u)."""
    u = u.clone().requires_grad_()
    return torch.autograd.grad(Rough(smoothness, roughness)(u).sum(), u)[0]


@pytest.mark.parametrize("smoothness", [0.3, 1.0, 2.5, 6.0])
def test_the_rough_link_is_monotone(smoothness):
    found = slopes(smoothness, torch.linspace(-1, 1, 4097, dtype=torch.float64), 0.9)
    assert found.min() > 0.1 - 1e-9
    assert found.max() == pytest.approx(1.9, abs=1e-9)  # at u = 0, where all waves rise


@pytest.mark.parametrize(("smoothness", "roughness"), [(0.5, 0.5), (1.2, 0.5), (1.8, 0.5), (2.6, 0.5), (1.2, 0.0)])
def test_the_slope_of_the_rough_link_is_of_the_order_asked_for(smoothness, roughness):
    """Its differences of a higher order m shrink like h^η, where those of a smooth function shrink like h^m."""
    order = ceil(smoothness) + 3
    signs = torch.tensor([(-1.0) ** k * comb(order, k) for k in range(order + 1)], dtype=torch.float64)
    steps, points = 2.0 ** -np.arange(5, 8), torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64)[:, None]
    # tanh in front: the composition that the model has
    sizes = [differences(smoothness, roughness, points + h * torch.arange(order + 1).double(), signs) for h in steps]
    measured = np.polyfit(np.log(steps), np.log(sizes), 1)[0]
    assert measured == pytest.approx(smoothness if roughness else order, abs=0.05)


def differences(smoothness: float, roughness: float, z: torch.Tensor, signs: torch.Tensor) -> float:
    """The largest difference of d w(tanh(z)) / dz, by points in rows of z."""
    u = torch.tanh(z)
    return float((slopes(smoothness, u, roughness) * (1 - u * u) @ signs).abs().max())


@pytest.mark.parametrize(
    ("link", "classes", "message"),
    [
        ("logistic", 10, "model.link = 'logistic' does not suit labels that are 10 classes: expected 'softmax'; "),
        ("tanh", 2, "model.link = 'tanh' does not suit labels that are 2 classes: expected 'logistic' or 'softmax'; "),
        (
            "softmax",
            1,
            "model.link = 'softmax' does not suit labels that are targets: expected 'tanh' or 'rough' or 'identity'; ",
        ),
    ],
)
def test_a_link_that_does_not_suit_the_labels_is_refused(link, classes, message):
    words = refused(Glm(link=link).check, (2,), classes)
    assert words.startswith(message)
    assert words.endswith("did you mean '" + {10: "softmax", 2: "logistic", 1: "tanh"}[classes] + "'?")


# --- the minimum --------------------------------------------------------------------------------------------


def stacked(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """All training samples, a constant in front, and their labels."""
    rows = samples(federation).astype(np.float64)
    return np.column_stack([np.ones(len(rows)), rows[:, :-1]]), rows[:, -1]


def weights(found: Optimum) -> np.ndarray:
    """The parameters as rows, the constant's in front."""
    values = found.parameters
    return np.column_stack([values["linear.bias"].numpy(), values["linear.weight"].numpy()])


CUBE = {"samples": 40, "server": 9, "heterogeneity": 0.8, "noise": 0.1}


@pytest.mark.parametrize("deal", [False, True])
@pytest.mark.parametrize(("link", "labels"), [("logistic", 2), ("softmax", 3)])
def test_the_minimum_of_a_convex_objective_is_scikit_learns(link, labels, deal):
    federation = UnitCube(**CUBE, labels=labels, deal=deal).federate(4, 1, None)
    found = optimum(Task(Glm(link=link, ridge=0.01), federation, 0))
    x, y = stacked(federation)
    assert found.samples == len(y) == 169
    from sklearn.linear_model import LogisticRegression  # takes as long as torch

    theirs = LogisticRegression(C=1 / (0.01 * 169), fit_intercept=False, tol=1e-12, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(weights(found), theirs.coef_, atol=1e-6)
    scores = x @ theirs.coef_.T if labels > 2 else np.column_stack([np.zeros(169), x @ theirs.coef_[0]])
    losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(169), y.astype(int)]
    assert found.value == pytest.approx(losses.mean() + 0.005 * np.square(theirs.coef_).sum(), abs=1e-12)


@pytest.mark.parametrize("link", ["tanh", "rough"])
def test_the_gradient_vanishes_at_the_minimum(link):
    federation = UnitCube(**CUBE, labels=1).federate(4, 1, None)
    found = optimum(Task(Glm(link=link, ridge=0.02, smoothness=2.0, roughness=0.5), federation, 0))
    x, y = stacked(federation)
    theta = weights(found)[0]
    u, j = np.tanh(x @ theta), np.arange(27)
    share = 0.5 * 4.0**-j / (4.0**-j).sum() if link == "rough" else np.zeros(27)
    waves = np.pi * 2.0**j * u[:, None]
    outputs, slopes = u + (np.sin(waves) / (np.pi * 2.0**j)) @ share, 1 + np.cos(waves) @ share
    gradient = (2 * (outputs - y) * slopes * (1 - u * u)) @ x / len(y) + 0.02 * theta
    assert np.linalg.norm(gradient) < 1e-11
    assert found.gradient < 1e-11
    assert found.value == pytest.approx(np.square(outputs - y).mean() + 0.01 * theta @ theta, rel=1e-12)


def test_without_a_penalty_two_classes_by_one_score_or_by_two_have_one_minimum():
    """The softmax's is not unique: directions in which nothing changes are left alone."""
    federation = UnitCube(**CUBE).federate(4, 1, None)
    one, two = (optimum(Task(Glm(link=link), federation, 0)) for link in ("logistic", "softmax"))
    assert two.value == pytest.approx(one.value, rel=1e-12)
    np.testing.assert_allclose(np.diff(weights(two), axis=0), weights(one), atol=1e-8)


def test_what_has_no_minimum_is_refused():
    federation = Reduced(dimension=30).federate(3, 0, None)  # separable
    with pytest.raises(
        RunError, match=r"^there is no minimum: .* separable data .*; did you mean model.ridge = 1e-6\?$"
    ):
        optimum(Task(Glm(), federation, 0), starts=1)


def test_a_descent_that_does_not_come_to_its_end_is_refused(monkeypatch):
    monkeypatch.setattr("hpcfl.contrib.theory.optimum.NEWTON", 0)
    federation = UnitCube(**CUBE, labels=1).federate(4, 1, None)
    with pytest.raises(RunError, match=r"^no minimum found: the gradient's norm is .*e-0\d, expected at most 1e-09"):
        optimum(Task(Glm(link="tanh", ridge=0.01), federation, 0), starts=1)


def test_models_that_are_too_large_or_not_one_are_refused():
    assert refused(optimum, Task(Mlp(hidden=(200,)), Digits().federate(3, 0, None), 0)) == (
        "model: expected at most 2000 parameters for a minimum to be found, got 15010"
    )
    assert "features of different shapes" in refused(
        optimum, Task(Glm(link="softmax"), NoisyFeatures(samples_per_class=40).federate(6, 0, None), 0)
    )


CONFIG = """
rounds = 1
clients = 3
algorithm = {name = "fedavg", lr = 0.1}
data = {name = "unit_cube", server = 5}
model = {name = "glm"}
"""


def test_the_command_prints_the_minimum(tmp_path, capsys):
    (tmp_path / "problem.toml").write_text(CONFIG)
    assert main(["optimum", str(tmp_path / "problem.toml"), "--set", "model.ridge=0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    task = Task(Glm(ridge=0.1), UnitCube(server=5).federate(3, 0, None), 0)
    assert found == pytest.approx(optimum(task).facts(), rel=1e-12, abs=1e-12)
    assert (found["n"], found["p"]) == (155, 3)
