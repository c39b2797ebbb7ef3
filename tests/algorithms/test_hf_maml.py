"""HF-MAML against its closed form on quadratics, and its Hessian against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, full_batch, mlp_task, plain, planned, visits_of
from hpcfl.algorithms.hf_maml import HfMaml
from hpcfl.learning.batches import Visits
from hpcfl.learning.derivatives import hessian_vector_product

SIZES = [6, 9, 7]


class Quadratic:
    """``f(w; b) = ½ wᵀ A_b w − v_bᵀ w`` for three batches, of two clients at once: w is ``[2, 3]``."""

    whole = None

    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        roots = torch.randn(3, 2, 3, 3, generator=draw, dtype=torch.float64)
        self.a = roots @ roots.transpose(-1, -2)
        self.v = torch.randn(3, 2, 3, generator=draw, dtype=torch.float64)

    def gradients(self, params, batch):
        w = params["w"]
        return {"w": torch.einsum("cij,cj->ci", self.a[batch], w) - self.v[batch]}, torch.zeros(2)

    def losses(self, params, batch):
        w = params["w"]
        return torch.einsum("ci,cij,cj->c", w, self.a[batch], w) / 2 - (self.v[batch] * w).sum(1)

    def batches(self, visits, size, steps, phase):
        return [phase] * steps

    def count(self, batch, calls):
        assert calls == 2


@pytest.mark.parametrize("hessian", ["exact", "difference"])
def test_a_step_on_a_quadratic_is_the_closed_form(hessian):
    task, alpha, beta = Quadratic(), 0.01, 0.1
    w = torch.arange(6, dtype=torch.float64).view(2, 3)
    params = {"w": w.clone()}
    method = HfMaml(lr=beta, inner_lr=alpha, hessian=hessian)
    method.train(task, {}, params, {}, Visits.for_test(0, np.arange(2)))
    eye = torch.eye(3, dtype=torch.float64)
    for client in range(2):
        (a1, a2, a3), (v1, v2, _) = task.a[:, client], task.v[:, client]
        adapted = w[client] - alpha * (a1 @ w[client] - v1)
        wanted = w[client] - beta * (eye - alpha * a3) @ (a2 @ adapted - v2)
        torch.testing.assert_close(params["w"][client], wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("clients", [[1], [0, 1, 2]])
def test_the_hessian_is_torchs(clients):
    task = mlp_task(SIZES, hidden=(4,))
    visits = visits_of(task, clients)
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    along = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) for name, value in params.items()
    }
    found = hessian_vector_product(task, params, next(task.batches(visits, 0, steps=1)), along)
    for row, client in enumerate(clients):
        x, y = full_batch(task, client)
        net = plain(task, task.initial())
        names = [name for name, _ in net.named_parameters()]

        def loss(*values, net=net, names=names, x=x, y=y):
            out = torch.func.functional_call(net, dict(zip(names, values)), (x,))
            return torch.nn.functional.cross_entropy(out, y)

        given = tuple(value.detach() for value in net.parameters())
        _, wanted = torch.autograd.functional.hvp(loss, given, tuple(value[row] for value in along.values()))
        for name, value in zip(params, wanted):
            torch.testing.assert_close(found[name][row], value, atol=1e-5, rtol=1e-4)


def test_exact_and_difference_agree():
    ends = []
    for hessian in ("exact", "difference"):
        rounds = Rounds(HfMaml(batch=3, steps=4, inner_lr=0.05, hessian=hessian), mlp_task(SIZES, hidden=()))
        start = rounds.state
        for round_ in range(3):
            rounds.step(planned([1] * 3, 1, round_))
        ends.append(torch.cat([value.flatten() for value in rounds.state.values()]))
    began = torch.cat([value.flatten() for value in start.values()])
    assert (ends[0] - ends[1]).norm() <= 1e-3 * (ends[0] - began).norm()


def steps_of_one_client(algorithm, task, state, client, round_):
    """What becomes of the state: an ordinary network, torch's own Hessian, and three batches for each step."""
    visit = visits_of(task, [client], round_=round_)
    params = [value.clone() for value in state.values()]
    net = plain(task)
    names = [name for name, _ in net.named_parameters()]

    def loss(batch):
        def at(*values):
            out = torch.func.functional_call(net, dict(zip(names, values)), (batch.x[0],))
            return torch.nn.functional.cross_entropy(out, batch.y[0])

        return at

    def gradient(batch, values):
        leaves = [value.detach().requires_grad_() for value in values]
        return torch.autograd.grad(loss(batch)(*leaves), leaves)

    phases = [task.batches(visit, algorithm.batch, steps=algorithm.steps, phase=phase) for phase in range(3)]
    for one, two, three in zip(*phases):
        assert not torch.equal(one.x, two.x)
        assert not torch.equal(two.x, three.x)
        inner = [value - algorithm.inner_lr * slope for value, slope in zip(params, gradient(one, params))]
        second = gradient(two, inner)
        _, bent = torch.autograd.functional.hvp(loss(three), tuple(params), second)
        params = [
            value - algorithm.lr * (slope - algorithm.inner_lr * curve)
            for value, slope, curve in zip(params, second, bent)
        ]
    return params


@pytest.mark.parametrize(("hessian", "hidden"), [("exact", (4,)), ("difference", ())])
def test_rounds_are_the_plain_loop(hessian, hidden):
    """The difference where the loss has no kinks."""
    algorithm = HfMaml(batch=3, steps=4, inner_lr=0.3, delta=1e-2, hessian=hessian)
    task = mlp_task(SIZES, hidden=hidden)
    rounds = Rounds(algorithm, task)
    for round_ in range(2):
        before = rounds.state
        rounds.step(planned([1] * 3, len(rounds.layers), round_))
        ends = [steps_of_one_client(algorithm, task, before, client, round_) for client in range(3)]
        for number, name in enumerate(before):
            wanted = sum(size * own[number] for size, own in zip(SIZES, ends)) / sum(SIZES)
            torch.testing.assert_close(rounds.state[name], wanted, atol=1e-4, rtol=1e-3)


def test_clients_are_tested_one_step_further():
    task = mlp_task(SIZES)
    algorithm = HfMaml(inner_lr=0.2)
    rounds = Rounds(algorithm, task)
    rounds.step(planned([1] * 3, 3))
    found = algorithm.model(task, rounds.state, {}, visits_of(task, range(3)))
    for client in range(3):
        net = plain(task, rounds.state)
        x, y = full_batch(task, client)
        gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(net(x), y), list(net.parameters()))
        for name, value, gradient in zip(task.initial(), net.parameters(), gradients):
            torch.testing.assert_close(found[name][client], value - 0.2 * gradient, atol=1e-6, rtol=1e-5)
