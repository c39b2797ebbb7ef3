"""Dropout whose masks belong to client, step and place: alike on every device, whomever a client is computed with.

What torch drops is drawn by the generator of a device, one number after the other. Here number i of a stream is a mix
of ``seed + i·γ`` (SplitMix64; Steele, Lea and Flood, OOPSLA 2014), in whole numbers, which all devices compute alike
and `torch.func.vmap` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfl.base.device_copy import on_device
from hpcfl.base.rng import StepKey

ALPHA = 1.7580993408473766  # what a unit of SELU tends to: alpha · scale (Klambauer et al. 2017)
MOST = 2**63 - 1


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


GAMMA, PLACE = _signed(0x9E3779B97F4A7C15), 0xD1342543DE82EF95
MIXES = (30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))
"""Shifts and factors; what SplitMix64 does after them leaves the upper bits as they are."""


def seeds_of(key: StepKey, device: torch.device) -> Tensor:
    """Return the seeds of a step's clients, int64 ``[c]`` on a device."""
    if key.fed is not None:
        seeds: Tensor = key.fed("dropout", key.clients)
        return seeds
    return on_device(torch.from_numpy(key.seeds("dropout")), device)


def kept(seeds: Tensor, place: int, shape: Sequence[int], chance: float) -> Tensor:
    """Return which numbers of one place in a model are not dropped, bool ``[c, …]`` for seeds int64 ``[c]``.

    A client's do not depend on those after them: a larger batch begins with the same ones.
    """
    numbers = torch.arange(1, prod(shape) + 1, device=seeds.device).mul_(GAMMA)
    mixed = (seeds + _signed(place * PLACE)).unsqueeze(-1) + numbers
    for shift, factor in MIXES:
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))).mul_(factor)
    return (mixed >= min(MOST, round(chance * 2**64) - 2**63)).view(*seeds.shape, *shape)


@contextmanager
def keyed(seeds: Tensor | None, first: int = 0) -> Iterator[None]:
    """Let torch's functions drop within the block what `kept` says, at places from number `first` on.

    With seeds int64 ``[c]`` tensors have a leading client axis; with a single one they are one client's. None: torch's
    functions stay as they are.
    """
    if seeds is None:
        yield
        return
    places, axes, plain = count(first), seeds.dim(), F.scaled_dot_product_attention

    def dropping(whole: bool, alpha: bool) -> Callable[..., Tensor]:
        """Return a function that drops numbers, or `whole` channels; with `alpha` it keeps mean and variance."""

        def drop(input: Tensor, p: float = 0.5, training: bool = not alpha, inplace: bool = False) -> Tensor:
            if not training or not p:
                return input
            shape = input.shape[axes:]
            keep = kept(seeds, next(places), (*shape[:2], *(1 for _ in shape[2:])) if whole else shape, p)
            if alpha:
                factor = 1 / sqrt((1 - p) * (1 + p * ALPHA**2)) if p < 1 else 0.0
                result = torch.where(keep, input, -ALPHA) * factor + factor * p * ALPHA
            else:
                result = input * keep * (1 / (1 - p) if p < 1 else 0.0)
            return input.copy_(result) if inplace else result

        return drop

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not dropout_p:
            more = {"enable_gqa": True} if enable_gqa else {}  # torch 2.4 does not know it
            return plain(query, key, value, attn_mask, 0.0, is_causal, scale=scale, **more)
        if enable_gqa:
            key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            seen = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if seen else scores + attn_mask
        weights: Tensor = own["dropout"](scores.softmax(-1), dropout_p)
        return weights @ value

    own: dict[str, Any] = {
        **{"dropout": dropping(False, False), "alpha_dropout": dropping(False, True)},
        **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), dropping(True, False)),
        **{"feature_alpha_dropout": dropping(True, True), "scaled_dot_product_attention": attention},
    }
    before = {name: getattr(F, name) for name in own}
    vars(F).update(own)
    try:
        yield
    finally:
        vars(F).update(before)
