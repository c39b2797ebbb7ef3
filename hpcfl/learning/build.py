"""What a model is made of: the layers of a chain, or a whole module that was tried on samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from hpcfl.base.errors import UsageError, did_you_mean, listed
from hpcfl.base.rng import key_as_seed
from hpcfl.base.types import Computing, Shape
from hpcfl.data import Federation
from hpcfl.data.absent import Absent
from hpcfl.data.base import Piece
from hpcfl.learning.config import Buffers, TaskConfig
from hpcfl.learning.loss import PerSample, class_axis
from hpcfl.models import Model, ModuleModel
from hpcfl.models.base import EVERYTHING
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.module import Whole
from hpcfl.models.modules.narrow import NORMS
from hpcfl.models.modules.tracing import examined

MOST = 2**20  # numbers of an integer buffer that all clients tell together

TRIAL = 3  # samples on which a module is tried


def units(
    model: Model,
    federation: Federation,
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: TaskConfig,
    computing: Computing | None = None,
) -> list[Layer] | list[Whole]:
    """Return the units that compute one after the other, their values drawn by `seed`.

    UsageError where a module from outside cannot be made, or does not suit the features or what `kind` says.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key_as_seed(seed, "initial values"))  # not those of GPUs too
        if isinstance(model, ModuleModel):
            shapes = tuple(piece.shape for piece in federation.pieces)
            module = model.module(shapes or shape, federation.classes).to(dtype)
            parameters = dict(module.named_parameters())
            learning = [name for name, value in parameters.items() if value.requires_grad]
            frozen = parameters.keys() - trained(model.train, learning) if model.train != EVERYTHING else set[str]()
            for name in frozen:
                parameters[name].requires_grad_(False)
            where = f"model.name = '{model.name}'"
            x, _ = trial(federation, dtype, shape)
            hook = module.register_forward_pre_hook(partial(unpacked, federation.pieces)) if shapes else None
            found = examined(module, x, where, computing, device)
            whole = Whole(
                model.name, module.to(device), found, kind.buffers in ("keep", "static"), hook, sorted(frozen)
            )
            if kind.embedding is not None:
                whole.cut(kind.embedding, x.to(device))
            _check_buffers(whole, module, kind.buffers, federation.clients)
            return [whole]
        named = model.build(shape, federation.classes)
    layers = [Layer(name, modules.to(device, dtype), number) for number, (name, modules) in enumerate(named)]
    if model.train != EVERYTHING:
        names = [name for layer in layers for name in layer.tensors]
        for layer in layers:
            layer.freeze({*names} - trained(model.train, names))
    return layers


def trained(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return which of a model's parameters `model.train` matches; UsageError for a pattern that matches none."""
    there = f"parameters: {listed(names)}"
    if not patterns:
        raise UsageError(f"model.train = []: it leaves nothing to train: expected at least one pattern; {there}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = (f"{name[: dot.start()]}.*" for name in names for dot in re.finditer(r"\.", name))
            hint = did_you_mean(pattern, {*names, *parts})
            near = hint if "did you mean" in hint else ""
            raise UsageError(f"model.train: '{pattern}' matches no parameter{near}; {there}")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def trial(federation: Federation, dtype: torch.dtype, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
    """Return a few samples of a client that has any, of features of this `shape` if one is given, and their labels.

    Where no data are here they are made up.
    """
    if isinstance(federation, Absent):
        data = federation.made_up(shape or federation.shapes[0])
    else:
        having = np.flatnonzero(federation.train_sizes).tolist()
        data = federation.client(next(each for each in having if shape in (None, federation.shapes[each])))
    rows = np.arange(TRIAL) % len(data.train_labels)
    x, y = torch.from_numpy(data.train_features[rows]), torch.from_numpy(data.train_labels[rows])
    return (each.to(dtype) if each.is_floating_point() else each for each in (x, y))  # type: ignore[return-value]


def made_up(shape: Shape, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a few samples of this shape that nobody holds, and labels for them."""
    x = torch.linspace(-1, 1, TRIAL * prod(shape), dtype=dtype).view(TRIAL, *shape)
    return x, torch.arange(TRIAL) % classes if classes > 1 else torch.linspace(-1, 1, TRIAL, dtype=dtype)


def unpacked(pieces: Sequence[Piece], _: object, inputs: tuple[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of which samples ``[B, numbers]`` are made up, ``[B, …]`` each."""
    (x,) = inputs
    parts = zip(pieces, torch.split(x, [prod(piece.shape) for piece in pieces], -1))
    shaped = [(piece, part.reshape(*part.shape[:-1], *piece.shape)) for piece, part in parts]
    return tuple(part.to(torch.int64) if piece.tokens else part for piece, part in shaped)


def check_outputs(loss: PerSample, outputs: Tensor, y: Tensor, classes: int, where: str) -> None:
    """Raise UsageError where outputs ``[B, …]`` do not suit labels ``[B, …]`` and a loss of ours."""
    if loss.ours and loss.name != "squared-error" and not y.is_floating_point():
        axis = class_axis(outputs[None], y[None])
        if axis is None or outputs[None].shape[axis] != classes:
            wanted, got = [*y.shape, classes], list(outputs.shape)
            raise UsageError(f"{where}: expected outputs of shape {wanted} for {len(y)} samples, got {got}")
    loss.each(outputs[None], y[None])


def _check_buffers(whole: Whole, module: nn.Module, kind: Buffers, clients: int) -> None:
    """Raise UsageError where a buffer that steps change is too large to be gathered, or of another kind of module."""
    where = f"model.name = '{whole.name}'"
    for name, value in whole.buffers.items():
        if kind == "mean" and whole.integer(name) and clients * value.numel() > MOST:
            told = f"{name} of {value.numel()} numbers, of which {clients} clients tell all theirs"
            hint = "did you mean task.buffers = 'local'?"
            raise UsageError(f"{where}: steps change the integer buffer {told}: expected at most {MOST} in all; {hint}")
        if kind == "static" and not isinstance(module.get_submodule(name.rpartition(".")[0]), NORMS):
            changed = f"steps change the buffer {name}, which is no batch normalisation's"
            raise UsageError(f"{where}: {changed}: expected task.buffers = 'mean', 'keep' or 'local'")
