from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.toys import federation, full_batch, load, mlp_task, plain, plain_gradients, visits_of
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import StepKey
from hpcfl.data.bundled import Digits
from hpcfl.learning.batches import crop_and_flip
from hpcfl.learning.derivatives import hessian_vector_product
from hpcfl.learning.task import Task
from hpcfl.models.bilstm import BiLstm
from hpcfl.models.cnn import Cnn
from hpcfl.models.latent import Latent
from hpcfl.models.mlp import Mlp

SIZES = [3, 7, 5]
LENGTH, DIM = 6, 4
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def lstm_task(**keys):
    model = BiLstm(**{"hidden": 5, "dropout": 0.0, "bottleneck": 3, **keys})
    return Task(model, federation(SIZES, shape=(LENGTH, DIM)), 0)


def own_params(task, clients):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.stack([value + 0.1 * torch.randn(value.shape, generator=generator) for _ in range(clients)])
        for name, value in task.initial().items()
    }


def row(params, client):
    return {name: value[client] for name, value in params.items()}


def one_batch(task, clients, round_=0, size=0, step=0):
    return list(task.batches(visits_of(task, clients, round_=round_), size, steps=step + 1))[step]


# --- BiLSTM -------------------------------------------------------------------------------------------------


def torchs_lstm(params):
    """``torch.nn.LSTM`` with the weights of both layers."""
    net = nn.LSTM(DIM, 5, num_layers=2, bidirectional=True, batch_first=True)
    with torch.no_grad():
        for layer in (1, 2):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                for direction, suffix in enumerate(("", "_reverse")):
                    getattr(net, f"{name}_l{layer - 1}{suffix}").copy_(params[f"lstm{layer}.{name}"][direction])
    return net


@pytest.mark.parametrize("count", [1, 3])
def test_two_layers_are_torchs_lstm(count):
    task = lstm_task()
    params = own_params(task, count)
    x = one_batch(task, range(count)).x
    inner = task.layers[1](params, task.layers[0](params, x, None), None)
    logits = task.forward(params, x)
    for client in range(count):
        net = torchs_lstm(row(params, client))
        states, (last, _) = net(x[client])
        torch.testing.assert_close(task.layers[0](params, x, None)[client].shape, states.shape)
        wanted = torch.cat((last[-2], last[-1]), dim=1)
        torch.testing.assert_close(inner[client], wanted, **CLOSE)
        own = row(params, client)
        hidden = torch.relu(nn.functional.linear(wanted, own["fc1.weight"], own["fc1.bias"]))
        torch.testing.assert_close(
            logits[client], nn.functional.linear(hidden, own["fc2.weight"], own["fc2.bias"]), **CLOSE
        )


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_and_curvature_of_an_lstm_are_the_plain_models(count):
    task = lstm_task()
    params, batch = own_params(task, count), one_batch(task, range(count))
    along = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) for name, value in params.items()
    }
    gradients, _ = task.gradients(params, batch)
    curvature = hessian_vector_product(task, params, batch, along)
    parts = {}
    for _, found, _ in task.backprop(params, batch, [count] * len(task.layers)):
        parts |= found
    for client in range(count):
        x, y = full_batch(task, client)
        wanted = plain_gradients(task, row(params, client), x, y)
        net = plain(task, row(params, client))
        own = list(net.parameters())
        first = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), own, create_graph=True)
        slope = sum((g * along[name][client]).sum() for name, g in zip(params, first))
        second = torch.autograd.grad(slope, own)
        for name, bent in zip(params, second):
            assert wanted[name].abs().max() > 0
            torch.testing.assert_close(gradients[name][client], wanted[name], **CLOSE)
            torch.testing.assert_close(parts[name][client], wanted[name], **CLOSE)
            torch.testing.assert_close(curvature[name][client], bent, **CLOSE)


def test_gradients_are_those_of_torchs_lstm():
    task = lstm_task(bottleneck=0)
    params, batch = own_params(task, 1), one_batch(task, [1])
    gradients, _ = task.gradients(params, batch)
    net = torchs_lstm(row(params, 0))
    head = nn.Linear(10, 3)
    load(head, {name: value for name, value in row(params, 0).items() if name.startswith("fc1")})
    _, (last, _) = net(batch.x[0])
    nn.functional.cross_entropy(head(torch.cat((last[-2], last[-1]), dim=1)), batch.y[0]).backward()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        for layer in (1, 2):
            found = gradients[f"lstm{layer}.{name}"][0]
            wanted = [getattr(net, f"{name}_l{layer - 1}{suffix}").grad for suffix in ("", "_reverse")]
            torch.testing.assert_close(found, torch.stack(wanted), **CLOSE)


def test_dropout_is_between_the_layers_and_keyed_by_the_client():
    task = lstm_task(dropout=0.5)
    assert [[type(m).__name__ for m in layer.modules] for layer in task.layers] == [
        ["BiLstm", "Dropout"],
        ["BiLstm", "Ends"],
        ["Flatten", "Linear", "ReLU"],
        ["Linear"],
    ]
    params, batch = own_params(task, 3), one_batch(task, range(3), size=3)
    together, _ = task.gradients(params, batch)
    for client in range(3):
        mine = {name: value[client : client + 1] for name, value in params.items()}
        alone, _ = task.gradients(mine, one_batch(task, [client], size=3))
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client], value[0], **CLOSE)
    still = lstm_task().gradients(params, batch)[0]
    assert (still["fc2.weight"] - together["fc2.weight"]).abs().max() > 1e-3


def test_the_default_is_the_papers_network():
    stages = BiLstm().build((25, 100), 2)
    shapes = {f"{name}.{key}": tuple(value.shape) for name, own in stages for key, value in own.named_parameters()}
    assert [name for name, _ in stages] == ["lstm1", "lstm2", "fc1", "fc2"]
    assert shapes["lstm1.0.weight_ih"] == (2, 1024, 100)
    assert shapes["lstm2.0.weight_ih"] == (2, 1024, 512)
    assert shapes["lstm2.0.weight_hh"] == (2, 1024, 256)
    assert (shapes["fc1.1.weight"], shapes["fc2.0.weight"]) == ((5, 512), (2, 5))
    torchs = nn.LSTM(100, 256, num_layers=2, bidirectional=True)
    count = sum(p.numel() for p in torchs.parameters())
    assert sum(np.prod(shape) for key, shape in shapes.items() if key.startswith("lstm")) == count
    weights = stages[0][1][0].weight_hh
    assert weights.abs().max() <= 1 / 16
    assert weights.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    assert stages[0][1][1].p == 0.5


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layers", 0, "greater than or equal to 1, got 0"),
        ("hidden", 0, "greater than or equal to 1, got 0"),
        ("bottleneck", -1, "greater than or equal to 0, got -1"),
        ("dropout", 1.0, "less than 1, got 1.0"),
    ],
)
def test_what_cannot_be_an_lstm_is_refused(key, value, said):
    with pytest.raises(UsageError, match=rf"model\.{key}: expected {said}"):
        BiLstm.from_table({key: value}, "model")


def test_an_lstm_takes_sequences_of_vectors():
    with pytest.raises(UsageError, match=r"needs features of shape \(length, dimension\), got \(3, 32, 32\)"):
        BiLstm().check((3, 32, 32), 2)


# --- LeNet-5 and MLP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "classes", "shapes"),
    [
        (
            {"channels": (64, 64), "hidden": (120, 64)},
            10,
            [(64, 3, 5, 5), (64, 64, 5, 5), (120, 1600), (64, 120), (10, 64)],
        ),
        (
            {"channels": (64, 128), "hidden": (256, 128), "dropout": 0.6},
            100,
            [(64, 3, 5, 5), (128, 64, 5, 5), (256, 3200), (128, 256), (100, 128)],
        ),
    ],
)
def test_lenet_5_is_a_cnn(keys, classes, shapes):
    model = Cnn(**keys)
    model.check((3, 32, 32), classes)
    stages = model.build((3, 32, 32), classes)
    weights = [value for _, own in stages for key, value in own.named_parameters() if key.endswith("weight")]
    assert [tuple(weight.shape) for weight in weights] == shapes
    dropped = [[module.p for module in own if isinstance(module, nn.Dropout)] for _, own in stages]
    assert dropped == ([[], [], [0.6], [0.6], []] if "dropout" in keys else [[]] * 5)
    assert nn.Sequential(*[own for _, own in stages])(torch.zeros(2, 3, 32, 32)).shape == (2, classes)


def test_an_mlp_may_end_in_a_softmax():
    bare = mlp_task(SIZES)
    soft = Task(Mlp(hidden=(4, 3), softmax=True), bare.federation, 0)
    params, batch = own_params(bare, 3), one_batch(bare, range(3))
    assert params.keys() == own_params(soft, 3).keys()
    outputs = soft.forward(params, batch.x)
    torch.testing.assert_close(outputs, bare.forward(params, batch.x).softmax(-1))
    x, y = full_batch(soft, 1)
    assert isinstance(plain(soft)[-1], nn.Softmax)
    torch.testing.assert_close(
        soft.gradients(params, batch)[0]["fc1.weight"][1],
        plain_gradients(soft, row(params, 1), x, y)["fc1.weight"],
        **CLOSE,
    )


# --- random crops and flips ---------------------------------------------------------------------------------


def key_of(clients, round_=3, step=2, seed=5):
    return StepKey(seed, round_, list(clients), step)


def images(clients, batch, height=9, width=7):
    return torch.rand((clients, batch, 2, height, width), generator=torch.Generator().manual_seed(0)) + 0.1


def crops(image, black):
    """Every image that padding by 4, cropping and mirroring can make, by (down, across, mirrored)."""
    channels, height, width = image.shape
    padded = torch.full((channels, height + 8, width + 8), black)
    padded[:, 4:-4, 4:-4] = image
    for down in range(9):
        for across in range(9):
            cut = padded[:, down : down + height, across : across + width]
            yield (down, across, False), cut
            yield (down, across, True), cut.flip(2)


@pytest.mark.parametrize("black", [0.0, -1.0])
def test_images_are_cropped_from_a_padded_copy_and_mirrored(black):
    x = images(3, 40)
    made = crop_and_flip(x, key_of([4, 0, 9]), black)
    assert made.shape == x.shape
    assert made.dtype == torch.float32
    ways = []
    for image, result in zip(x.flatten(0, 1), made.flatten(0, 1)):
        (way,) = [how for how, wanted in crops(image, black) if torch.equal(result, wanted)]
        ways.append(way)
    down, across, mirrored = map(list, zip(*ways))
    assert set(down) == set(across) == set(range(9))
    assert 40 < sum(mirrored) < 80
    assert len(set(ways)) > 60


def test_crops_are_keyed_by_client_round_step_and_seed():
    x = images(3, 6)
    x[1:] = x[0]
    together = crop_and_flip(x, key_of([4, 0, 9]), 0.0)
    for number, client in enumerate([4, 0, 9]):
        assert torch.equal(together[number], crop_and_flip(x[:1], key_of([client]), 0.0)[0])
        assert torch.equal(together[number, :2], crop_and_flip(x[:1, :2], key_of([client]), 0.0)[0])
    assert not torch.equal(together[0], together[1])
    others = [key_of([4], round_=4), key_of([4], step=3), key_of([4], seed=6)]
    assert not any(torch.equal(together[0], crop_and_flip(x[:1], other, 0.0)[0]) for other in others)


def test_batches_are_augmented_where_the_data_section_says_so():
    section = Digits(augment=True, scale="centred")
    federated = section.federate(20, 0, None)
    assert federated.augment == -1.0
    assert Digits(augment=True).federate(20, 0, None).augment == 0.0
    assert Digits().federate(20, 0, None).augment is None
    task = Task(Mlp(), federated, 0)
    still = Task(Mlp(), replace(federated, augment=None), 0)
    together, bare = (one_batch(own, [3, 8, 1], round_=2, size=10, step=4) for own in (task, still))
    assert torch.equal(together.x, crop_and_flip(bare.x, together.key, -1.0))
    assert not torch.equal(together.x, bare.x)
    assert torch.equal(together.y, bare.y)
    assert torch.equal(together.x[1], one_batch(task, [8], round_=2, size=10, step=4).x[0])


# ---- latent: what depends on the shape, and what does not


@pytest.mark.parametrize("embedding", ["dense", "convolutions"])
def test_only_the_embedding_depends_on_the_shape(embedding: str) -> None:
    clients = federation([4, 4], shape=(1, 12, 12)), federation([4, 4], shape=(1, 8, 8))
    held = [clients[0].held[0], clients[1].held[1]]
    both = replace(clients[0], shapes=[(1, 12, 12), (1, 8, 8)], held=held)
    task = Task(Latent(embedding=embedding, widths=(5,), dimension=6, hidden=(7,)), both, 3)
    one, other = task.initial(0), task.initial(1)
    assert one.keys() == other.keys()
    differing = {name.partition(".")[0] for name in one if one[name].shape != other[name].shape}
    assert differing == ({"embed1"} if embedding == "dense" else {"embed3"})
    for name in one:
        if name.startswith(("hidden", "head")):
            assert torch.equal(one[name], other[name])
    for client, params in enumerate((one, other)):
        visits = visits_of(task, [client])
        x, _ = full_batch(task, client)
        assert task.forward(task.replicate(params, visits), x[None]).shape == (1, 4, 3)
    assert task.nbytes == sum(value.nbytes for value in one.values())


def test_an_identity_needs_features_of_the_latent_dimension() -> None:
    Latent(embedding="identity", dimension=5).check((5,), 3)
    with pytest.raises(UsageError, match=r"model\.dimension.*did you mean 5"):
        Latent(embedding="identity").check((5,), 3)
    with pytest.raises(UsageError, match=r"model\.embedding.*did you mean 'dense'"):
        Latent(embedding="convolutions").check((5,), 3)


@pytest.mark.parametrize("hidden", [(), (7,)])
def test_an_identity_takes_images_as_they_are(hidden: tuple[int, ...]) -> None:
    task = Task(Latent(embedding="identity", dimension=4, hidden=hidden), federation([5], shape=(1, 2, 2)), 3)
    visits = visits_of(task, [0])
    params, (x, _) = task.replicate(task.initial(), visits), full_batch(task, 0)
    assert torch.equal(task.forward(params, x[None]), task.forward(params, x.flatten(1)[None]))
