"""FedHeNN: the alignment of kernels against its definition, and its visits against plain torch loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, Toy, federation, mlp_task, plain, planned, read, same_bits, visits_of
from hpcfl.algorithms.fedhenn import FedHeNN
from hpcfl.algorithms.local import Local
from hpcfl.base.errors import UsageError
from hpcfl.data.gaussians import NoisyFeatures
from hpcfl.learning.task import Task
from hpcfl.math.cka import alignment, kernel_triangles, triangle_size, unit_kernel
from hpcfl.models.latent import Latent
from hpcfl.models.mlp import Mlp

KEYS: dict[str, Any] = {"lr": 0.1, "batch": 4, "momentum": 0.5}
SIZES = [8, 3, 11]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def kernel(z: torch.Tensor) -> torch.Tensor:
    """``H Z Zᵀ H``."""
    h = torch.eye(len(z), dtype=z.dtype) - 1 / len(z)
    return h @ z @ z.T @ h


def cka(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tr(K L) / √(tr K² tr L²)``."""
    return torch.trace(one @ other) / (torch.trace(one @ one) * torch.trace(other @ other)).sqrt()


def of(z: torch.Tensor, samples: int = 9) -> torch.Tensor:
    """What representations are aligned to that are to be like this one."""
    return unit_kernel(kernel_triangles(z[None])[0], samples)


# ---- the alignment of kernels


@pytest.mark.parametrize("width", [1, 4, 30])
def test_alignment_is_cka_as_defined(width: int) -> None:
    z, other = drawn(3, 9, width) + 2, drawn(9, 5, seed=1)
    wanted = torch.stack([cka(kernel(other), kernel(own)) for own in z])
    torch.testing.assert_close(alignment(of(other), z), wanted)
    assert 0 < wanted.min() <= wanted.max() < 1


def test_a_packed_kernel_is_the_kernel() -> None:
    z = drawn(2, 9, 4)
    assert kernel_triangles(z).shape == (2, triangle_size(9))
    for triangle, own in zip(kernel_triangles(z), z):
        torch.testing.assert_close(unit_kernel(triangle, 9), kernel(own) / kernel(own).norm())


def test_rotation_scale_and_place_do_not_matter() -> None:
    z = drawn(9, 4)
    rotation, _ = torch.linalg.qr(drawn(4, 4, seed=2))
    same = torch.stack([z, z @ rotation, 1e-30 * z, 1e30 * z, z + 5])
    torch.testing.assert_close(alignment(of(z), same), torch.ones(5, dtype=torch.float64))
    stretched = z @ torch.diag(torch.tensor([1.0, 1, 1, 9], dtype=torch.float64))
    assert alignment(of(z), stretched[None]) < 0.9


@pytest.mark.parametrize("width", [4, 30])
def test_its_gradient_is_that_of_finite_differences(width: int) -> None:
    target, z = of(drawn(9, 5, seed=1)), drawn(2, 9, width).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: alignment(target, z), z)


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_what_is_the_same_for_all_samples_is_aligned_to_nothing(value: float) -> None:
    z = torch.full((1, 9, 4), value) + 1e-8 * value * drawn(1, 9, 4).float()
    z.requires_grad_()
    found = alignment(of(drawn(9, 5).float()), z)
    (gradient,) = torch.autograd.grad(found.sum(), z)
    assert found.item() == 0
    assert not gradient.any()
    assert not alignment(torch.zeros(9, 9), drawn(1, 9, 4).float()).any()


# ---- the method


def test_the_strength_grows_with_the_root_of_the_round() -> None:
    assert [FedHeNN(eta=0.5).strength(round_) for round_ in (0, 3, 8)] == [0.5, 1.0, 1.5]
    assert FedHeNN().strength(99) == pytest.approx(0.1)


def played(algorithm: Any, rounds: int) -> Rounds:
    made = Rounds(algorithm, mlp_task(SIZES))
    for round_ in range(rounds):
        made.step(planned([1] * 3, 1, round_))
    return made


@pytest.mark.parametrize(("eta", "rounds", "equal"), [(0.0, 3, True), (5.0, 1, True), (5.0, 2, False)])
def test_without_anything_to_align_to_it_is_local_training_to_the_bit(eta: float, rounds: int, equal: bool) -> None:
    found = played(FedHeNN(**KEYS, eta=eta, alignment=7), rounds).now.personal[0]
    assert same_bits(found, played(Local(**KEYS), rounds).now.personal[0]) == equal


def test_the_mean_is_of_those_who_took_part_on_the_samples_of_their_round() -> None:
    task = mlp_task(SIZES)
    algorithm = FedHeNN(**KEYS, alignment=7)
    rounds = Rounds(algorithm, task)
    assert rounds.state["round"] == -1
    for round_, depth in enumerate([[1, 1, 1], [1, 2, 1]]):
        rounds.step(planned(depth, 1, round_))
    personal, kernels = rounds.now.personal[0], []
    x = algorithm.samples(task, 1, visits_of(task, [0]))[0]
    for client in (0, 2):
        net = plain(task, {name: value[client] for name, value in personal.items()})
        kernels.append(kernel(net[:-1](x).detach()))
    mean = sum(kernels) / 2
    rows, columns = torch.triu_indices(7, 7)
    torch.testing.assert_close(rounds.state["kernel"], mean[rows, columns])
    assert rounds.state["round"] == 1
    before = rounds.state
    rounds.step(planned([2, 2, 2], 1, 2))
    assert same_bits(rounds.state, before)


def test_a_visit_is_the_plain_loop() -> None:
    """The client of 3 samples rests in every second step; a large η, and a round of which √t is 3."""
    task, algorithm = mlp_task(SIZES), FedHeNN(**KEYS, eta=2.0, alignment=7)
    mean, visits = kernel(drawn(7, 5).float()), visits_of(task, [0, 1, 2], round_=8)
    rows, columns = torch.triu_indices(7, 7)
    shared = {"kernel": mean[rows, columns], "round": torch.tensor(5.0)}
    personal = dict(task.replicate(task.initial(), visits))
    client = algorithm.client(task, shared, personal, visits)
    losses, _ = next(client)["loss"]
    next(client)
    with pytest.raises(StopIteration) as end:
        next(client)
    for row in range(3):
        net, found = plain(task, task.initial()), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        own = visits_of(task, [row], round_=8)
        for batch in task.batches(own, 4, 1):
            real = slice(None) if batch.valid is None else batch.valid[0]
            loss = torch.nn.functional.cross_entropy(net(batch.x[0][real]), batch.y[0][real])
            near = cka(mean, kernel(net[:-1](algorithm.samples(task, 5, own)[0])))
            found.append(loss + 6 * (1 - near))
            optimizer.zero_grad()
            found[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[row], sum(found).detach() / len(found))
        for name, value in read(net, task).items():
            torch.testing.assert_close(end.value.value[name][row], value, atol=1e-5, rtol=1e-4)


def aligned(eta: float) -> tuple[float, float]:
    """The mean CKA of pairs of clients of different widths on samples of their own, before and after some rounds."""
    source = NoisyFeatures(labels=4, samples_per_class=60).federate(5, 2, None)
    assert len(set(source.shapes)) > 1
    task = Task(Latent(widths=(8,), dimension=6), source, 3)
    algorithm = FedHeNN(lr=0.01, optimizer="adam", eta=eta, alignment=40)
    rounds, found = Rounds(algorithm, task, 1), []
    for round_ in range(11):
        if round_ in (0, 10):
            kernels = []
            for chunk in rounds.job.chunks:
                x = algorithm.samples(task, 1000, visits_of(task, chunk.clients))
                kernels.append(kernel(task.represented(rounds.now.personal[chunk.number], x)[0]))
            pairs = [cka(one, other) for i, one in enumerate(kernels) for other in kernels[:i]]
            found.append(float(sum(pairs) / len(pairs)))
        rounds.step(planned([1] * 5, 1, round_))
    return found[0], found[1]


def test_representations_of_clients_of_different_widths_align() -> None:
    (start, alone), (same, together) = aligned(0.0), aligned(3.0)
    assert start == same
    assert together > max(start, alone) + 0.1


# ---- samples for the alignment


@pytest.mark.parametrize("shapes", [[(3,), (5,), (4,)], [(1, 4, 6), (1, 5, 3), (1, 4, 4)]])
def test_each_client_sees_the_first_coordinates_of_the_same_samples(shapes: list[tuple[int, ...]]) -> None:
    held = [federation([4], shape).client(0) for shape in shapes]
    task = Task(Mlp(hidden=(4,)), Toy(3, np.full(3, 4), np.zeros(3, dtype=np.int64), shapes, held), 0)
    algorithm = FedHeNN(alignment=2000)
    parts = [algorithm.samples(task, 4, visits_of(task, [client])) for client in range(3)]
    for part, shape in zip(parts, shapes):
        assert part.shape == (1, 2000, *shape)
        for other in parts:
            common = tuple(slice(min(a, b)) for a, b in zip(part.shape, other.shape))
            assert torch.equal(part[common], other[common])
    values = parts[0].numpy()
    mean, deviation = (0.5, 12**-0.5) if len(shapes[0]) == 3 else (0.0, 1.0)
    assert abs(values.mean() - mean) < 5 * deviation / values.size**0.5
    assert values.std() == pytest.approx(deviation, rel=5 / (2 * values.size) ** 0.5)
    assert not torch.equal(parts[0], algorithm.samples(task, 5, visits_of(task, [0])))


# ---- what cannot be


def test_a_model_needs_a_layer_before_the_last_one() -> None:
    with pytest.raises(
        UsageError, match=r"^algorithm\.name = 'fedhenn': .* at least 2 layers, .* got 1; did you mean .*'local'\?$"
    ):
        FedHeNN().init_server(mlp_task([3], hidden=()))


def test_features_need_the_same_number_of_axes() -> None:
    held = [federation([4], shape).client(0) for shape in [(4,), (2, 2)]]
    task = Task(Mlp(hidden=(4,)), Toy(3, np.full(2, 4), np.zeros(2, dtype=np.int64), [(4,), (2, 2)], held), 0)
    with pytest.raises(
        UsageError, match=r"same number of axes for all clients, got \[1, 2\]; did you mean .*'local'\?$"
    ):
        FedHeNN().init_server(task)
