"""What a model is made of: the layers of a chain, or a whole module that was tried on samples."""

from __future__ import annotations

import torch
from torch import nn

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import key_as_seed
from hpcfl.base.types import Shape
from hpcfl.data import Federation
from hpcfl.models import Model
from hpcfl.models.foreign import Foreign
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.tracing import examined
from hpcfl.models.modules.whole import Whole

TRIAL = 3  # samples on which a module is tried


def units(
    model: Model, federation: Federation, shape: Shape, seed: int, dtype: torch.dtype, device: torch.device
) -> list[Layer] | list[Whole]:
    """Return the units that compute one after the other, their values drawn by `seed`.

    UsageError where a module from outside cannot be made, or does not suit the features.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_as_seed(seed, "initial values"))
        if isinstance(model, Foreign):
            module = model.module(shape, federation.classes).to(dtype)
            return [_tried(model.name, module, federation, shape, dtype, device)]
        named = model.build(shape, federation.classes)
    return [Layer(name, modules.to(dtype), number) for number, (name, modules) in enumerate(named)]


def _tried(
    name: str, module: nn.Module, federation: Federation, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Whole:
    """Return a module as one unit, tried on samples of a client whose features have this shape."""
    held = torch.from_numpy(federation.client(federation.shapes.index(shape)).train_features[:TRIAL])
    x, where = held[torch.arange(TRIAL) % len(held)], f"model.name = '{name}'"
    if x.is_floating_point():
        x = x.to(dtype)
    found = examined(module, x, federation.classes, where)
    if found.state:
        raise UsageError(f"{where}: steps change the buffer {found.state[0]}; expected a module whose buffers stay")
    return Whole(name, module.to(device), found)
