"""What a model is made of: the layers of a chain, or a whole module that was tried on samples."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import key_as_seed
from hpcfl.base.types import Shape
from hpcfl.data import Federation
from hpcfl.learning.config import Buffers
from hpcfl.models import Model
from hpcfl.models.foreign import Foreign
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.tracing import Computing, examined
from hpcfl.models.modules.whole import Whole

MOST = 2**20  # numbers of an integer buffer that all clients tell together
TRIAL = 3  # samples on which a module is tried


def units(
    model: Model,
    federation: Federation,
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    buffers: Buffers = "mean",
    computing: Computing | None = None,
) -> list[Layer] | list[Whole]:
    """Return the units that compute one after the other, their values drawn by `seed`.

    UsageError where a module from outside cannot be made, or does not suit the features or the handling of `buffers`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_as_seed(seed, "initial values"))
        if isinstance(model, Foreign):
            module = model.module(shape, federation.classes).to(dtype)
            x, where = _trial(federation, shape, dtype), f"model.name = '{model.name}'"
            found = examined(module, x, federation.classes, where, computing)
            whole = Whole(model.name, module.to(device), found, buffers == "keep")
            return [_gathered(whole, federation.clients, where) if buffers == "mean" else whole]
        named = model.build(shape, federation.classes)
    return [Layer(name, modules.to(dtype), number) for number, (name, modules) in enumerate(named)]


def _trial(federation: Federation, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a few samples of a client whose features have this shape."""
    held = torch.from_numpy(federation.client(federation.shapes.index(shape)).train_features[:TRIAL])
    x = held[torch.arange(TRIAL) % len(held)]
    return x.to(dtype) if x.is_floating_point() else x


def _gathered(whole: Whole, clients: int, where: str) -> Whole:
    """Return a module of whose integer buffers the server can take the largest; UsageError where they are too large."""
    for name, value in whole.buffers.items():
        if whole.integer(name) and clients * value.numel() > MOST:
            raise UsageError(
                f"{where}: steps change the integer buffer {name} of {value.numel()} numbers, of which {clients} "
                f"clients tell all theirs: expected at most {MOST} in all; did you mean task.buffers = 'local'?"
            )
    return whole
