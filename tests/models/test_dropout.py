"""Dropout by seed and place, against masks that NumPy draws, and in all functions of torch's that drop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from hpcfl.models.modules.dropout import kept, keyed
from hpcfl.testing import fake_device
from models.test_any_module import full_batch, own_params, task_of, visits_of

SEEDS = torch.tensor([3, -(2**63), 2**63 - 1])
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def drawn(seed: int, place: int, count: int) -> np.ndarray[Any, Any]:
    """The first numbers of SplitMix64 that begins with a seed, as its authors have it, uint64 [count]."""
    state, wrap, found = (seed + place * 0xD1342543DE82EF95) % 2**64, 2**64, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % wrap
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % wrap
        found.append(z ^ (z >> 31))
    return np.array(found, dtype=np.uint64)


def mask(seed: int, place: int, shape: tuple[int, ...], chance: float) -> Tensor:
    """What is kept: SplitMix64's numbers, as signed ones, from a limit on."""
    numbers = drawn(seed, place, int(np.prod(shape))).view(np.int64)
    return torch.from_numpy(numbers >= round(chance * 2**64) - 2**63).view(shape)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_masks_are_those_of_splitmix64(chance: float) -> None:
    together = kept(SEEDS, 7, (5, 40), chance)
    for seed, found in zip(SEEDS, together):
        assert torch.equal(found, mask(int(seed), 7, (5, 40), chance))
        assert torch.equal(found, kept(seed, 7, (5, 40), chance))
        assert torch.equal(found[:2], kept(seed, 7, (2, 40), chance))
    fake = kept(SEEDS.to(fake_device.registered()), 7, (5, 40), chance)
    assert torch.equal(fake.cpu(), together)
    assert torch.equal(together, vmap(lambda seed: kept(seed, 7, (5, 40), chance))(SEEDS))


def test_nothing_and_everything() -> None:
    assert kept(SEEDS, 0, (1000,), 0.0).all()
    assert not kept(SEEDS, 0, (1000,), 1.0).any()
    with keyed(SEEDS):
        assert torch.equal(F.dropout(torch.ones(3, 9), 1.0), torch.zeros(3, 9))


def test_masks_of_seeds_places_and_neighbours_have_nothing_in_common() -> None:
    count, seeds = 40_000, torch.arange(4)
    each = torch.cat([kept(seeds, place, (count,), 0.5) for place in range(4)]).double() - 0.5
    shifted = [(each[0] * each[0].roll(lag)).mean() for lag in (1, 2, 3, 64, 257)]
    pairs = [(one * other).mean() for n, one in enumerate(each) for other in each[:n]]
    bound = 5 * 0.25 / np.sqrt(count)  # standard deviations of the mean of products of two coins
    assert max(abs(float(value)) for value in (*shifted, *pairs)) < bound
    assert abs(float(each.mean())) < 5 * 0.5 / np.sqrt(16 * count)


FUNCTIONS = {
    "Dropout": (nn.Dropout(0.3), (6, 4, 5)),
    "Dropout, in place": (nn.Dropout(0.3, inplace=True), (6, 4, 5)),
    "Dropout1d": (nn.Dropout1d(0.3), (6, 4, 5)),
    "Dropout2d": (nn.Dropout2d(0.3), (6, 4, 5, 5)),
    "Dropout3d": (nn.Dropout3d(0.3), (6, 4, 5, 5, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_module_of_torchs_multiplies_by_its_mask(name: str) -> None:
    module, shape = FUNCTIONS[name]
    whole = name[-2:] in ("1d", "2d", "3d")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    keep = mask(3, 0, (*shape[:2], *(1 for _ in shape[2:])) if whole else shape, 0.3)
    with keyed(torch.tensor(3)):
        found = module.train()(x.clone())
        assert torch.equal(module.eval()(x.clone()), x)
    torch.testing.assert_close(found, x * keep / 0.7, **CLOSE)


@pytest.mark.parametrize(("module", "whole"), [(nn.AlphaDropout(0.3), False), (nn.FeatureAlphaDropout(0.3), True)])
def test_alpha_dropout_keeps_mean_and_variance(module: nn.Module, whole: bool) -> None:
    x = torch.randn(400, 50, 4, generator=torch.Generator().manual_seed(0))
    with keyed(torch.tensor(3)):
        found = module.train()(x)
    assert abs(float(found.mean())) < 0.05
    assert abs(float(found.var()) - 1) < 0.05
    keep = mask(3, 0, (400, 50, 1) if whole else x.shape, 0.3).expand_as(x)
    assert len(found[~keep].unique()) == 1
    assert float(torch.corrcoef(torch.stack([found[keep], x[keep]]))[0, 1]) > 0.9999


@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"scale": 0.2}, {"mask": "bool"}, {"mask": "added"}])
def test_attention_drops_its_weights(more: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, rows, 4, generator=generator) for rows in (5, 5, 5))
    seen, given = torch.ones(5, 5).tril().bool(), dict(more)
    if "mask" in given:
        given["attn_mask"] = seen if given.pop("mask") == "bool" else torch.zeros(5, 5).masked_fill(~seen, -torch.inf)
    with keyed(torch.tensor(3)):
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, **given)
        plain = F.scaled_dot_product_attention(query, key, value, **given)
    torch.testing.assert_close(plain, F.scaled_dot_product_attention(query, key, value, **given), **CLOSE)
    # of a value that is 1 in one place alone attention gives the weights
    weights = F.scaled_dot_product_attention(query, key, torch.eye(5).expand(2, 3, 5, 5), **given)
    keep = mask(3, 0, (2, 3, 5, 5), 0.4)
    torch.testing.assert_close(found, (weights * keep / 0.6) @ value, **CLOSE)


def test_torchs_functions_are_as_they_were_after_an_error() -> None:
    before = F.dropout, F.scaled_dot_product_attention
    with pytest.raises(ValueError, match="within"), keyed(torch.tensor(0)):
        raise ValueError("within")
    assert (F.dropout, F.scaled_dot_product_attention) == before


def test_places_follow_one_another() -> None:
    ones = torch.ones(30)
    with keyed(torch.tensor(5), first=2):
        found = [F.dropout(ones) for _ in range(3)]
    for place, each in enumerate(found, start=2):
        assert torch.equal(each > 0, mask(5, place, (30,), 0.5))


def test_a_transformer_that_drops_is_vmapped_and_a_part_run_again_is_not() -> None:
    attention, again = task_of("Attention", dropout=0.5).whole.found, task_of("Again").whole.found
    assert (attention.computing, attention.drops, attention.draws) == ("vmapped", True, False)
    assert (again.computing, again.drops, again.draws) == ("looped", False, True)


def test_vmapped_drops_what_the_loop_does() -> None:
    found = []
    for computing in ("vmapped", "looped"):
        task = task_of("Attention", computing, "double", dropout=0.5)
        batch = next(task.batches(visits_of(task, range(3)), 4, steps=1))
        gradients, losses = task.gradients(own_params(task, 3), batch)
        found.append({**gradients, "loss": losses})
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], atol=1e-12, rtol=1e-10)
    still = task_of("Attention", precision="double", dropout=0.0)
    x = full_batch(still, 0)[0].double()[None]
    params = {name: value[:1] for name, value in own_params(still, 3).items()}
    assert not torch.allclose(task.forward(params, x, batch.key._replace(clients=[0])), still.forward(params, x))
