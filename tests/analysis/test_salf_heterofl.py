"""The loop that looks for what makes HeteroFL fall: its means, what stragglers hold, and the step of many users."""

from __future__ import annotations

import pytest
import salf_heterofl
import torch

from hpcfl.models.cnn import Cnn


def cnn() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer for _, layer in Cnn().build((1, 28, 28), 10)))


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("mean", "expected"),
    [("holders", [2.0, 3.0, 3.0, 4.0]), ("kept", [2.0, 3.0, 5.5, 6.0]), ("zero", [2.0, 3.0, 1.5, 2.0])],
)
def test_means_of_a_whole_model_and_half_of_one(mean: str, expected: list[float]) -> None:
    old, whole = {"w": torch.full((4,), 8.0)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    half, places = {"w": torch.tensor([3.0, 4.0])}, {"w": (slice(2),)}
    assert salf_heterofl.averaged(old, whole, 1, half, 1, mean, places)["w"].tolist() == expected


def test_a_tensor_that_stragglers_do_not_send_counts_as_it_was() -> None:
    old, whole = {"w": torch.tensor([8.0])}, {"w": torch.tensor([2.0])}
    assert salf_heterofl.averaged(old, whole, 1, {}, 2, "kept", {})["w"].tolist() == [6.0]
    assert salf_heterofl.averaged(old, whole, 1, {}, 2, "holders", {})["w"].tolist() == [2.0]


def test_halves_of_the_paper_s_network() -> None:
    model = state(cnn())
    shapes = [(3, 1, 5, 5), (3,), (3, 3, 5, 5), (3,), (25, 48), (25,), (10, 25), (10,)]
    for cut, last in (("hidden", shapes), ("classes", [*shapes[:-2], (5, 25), (5,)])):
        places = salf_heterofl.held(model, cut, 0.5)
        assert [tuple(model[name][places[name]].shape) for name in model] == last
        part = {name: model[name][places[name]] for name in model}
        assert salf_heterofl.outputs(part, torch.ones(2, 1, 28, 28)).shape == (2, 10)
    assert [*salf_heterofl.held(model, "first", 0.5)] == [*model][:4]
    assert [*salf_heterofl.held(model, "last", 0.5)] == [*model][4:]


def test_one_step_on_the_samples_of_all_is_the_mean_of_their_steps() -> None:
    x, y = torch.randn(2, 2, 8, 1, 28, 28), torch.randint(10, (2, 2, 8))  # [round, user, sample]
    server, models = cnn(), [cnn(), cnn()]
    users = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
    found, velocity = state(server), {}
    for round_ in range(2):
        for user, optimizer in enumerate(users):
            models[user].load_state_dict(server.state_dict())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(models[user](x[round_, user]), y[round_, user]).backward()
            optimizer.step()
        sent = [model.state_dict() for model in models]
        server.load_state_dict({name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]})
        found = salf_heterofl.step(found, x[round_].flatten(0, 1), y[round_].flatten(), 0.1, 1.0, 0.5, velocity)
    for name, value in state(server).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
