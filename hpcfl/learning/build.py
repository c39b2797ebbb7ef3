"""What a model is made of: the layers of a chain, or a whole module that was tried on samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import key_as_seed
from hpcfl.base.types import Shape
from hpcfl.data import Federation
from hpcfl.learning.config import Buffers
from hpcfl.learning.loss import class_axis
from hpcfl.models import Model
from hpcfl.models.foreign import Foreign
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.tracing import Computing, examined
from hpcfl.models.modules.whole import Whole

if TYPE_CHECKING:
    from hpcfl.learning.task import Task

STEPS = "num_batches_tracked"
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
            where = f"model.name = '{model.name}'"
            x, _ = _trial(federation, shape, dtype)
            found = examined(module, x, where, computing)
            whole = Whole(model.name, module.to(device), found, buffers == "keep")
            return [_averaged(whole, where) if buffers == "mean" else whole]
        named = model.build(shape, federation.classes)
    return [Layer(name, modules.to(dtype), number) for number, (name, modules) in enumerate(named)]


def _trial(federation: Federation, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a few samples of a client whose features have this shape, and their labels."""
    data = federation.client(federation.shapes.index(shape))
    rows = np.arange(TRIAL) % len(data.train_labels)
    x, y = torch.from_numpy(data.train_features[rows]), torch.from_numpy(data.train_labels[rows])
    return (each.to(dtype) if each.is_floating_point() else each for each in (x, y))  # type: ignore[return-value]


def tried(task: Task, model: str) -> None:
    """Try the loss and the metrics on a few samples.

    UsageError where one of them gives no value per sample, or what the model puts out does not suit a loss of ours.
    """
    x, y = _trial(task.federation, task.federation.shapes[0], task.dtype)
    params = {name: value.unsqueeze(0) for name, value in task.initial().items()}
    with torch.no_grad():
        outputs = task.forward(params, x.unsqueeze(0).to(task.device))[0]
    labels = y.to(task.device)
    for each in (task.loss, *task.metrics.values()):
        each.tried(outputs, labels)
    if task.loss.ours and not labels.is_floating_point():
        axis, classes = class_axis(outputs[None], labels[None]), task.federation.classes
        if axis is None or outputs[None].shape[axis] != classes:
            wanted, got = [*labels.shape, classes], list(outputs.shape)
            raise UsageError(
                f"model.name = '{model}': expected outputs of shape {wanted} for {TRIAL} samples, got {got}"
            )
    task.loss.each(outputs[None], labels[None])


def _averaged(whole: Whole, where: str) -> Whole:
    """Return a module of whose buffers the server can take means; UsageError where one counts what it does not know."""
    for name in whole.buffers:
        if whole.integer(name) and not name.endswith(STEPS):
            raise UsageError(
                f"{where}: steps change the integer buffer {name}, of which there is no mean: expected no other than "
                f"{STEPS}; did you mean task.buffers = 'local'?"
            )
    return whole
