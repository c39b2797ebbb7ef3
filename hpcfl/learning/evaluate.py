"""How well models do: losses and metrics on test samples, objectives on training samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hpcfl.base.types import Floats, Ints, State
from hpcfl.learning.task import TEST_BATCH, Task


@torch.no_grad()
def client_scores(task: Task, params: State, clients: Ints) -> Floats:
    """Sums of the loss and of each metric over the clients' own test samples, ``[1 + metrics, c]``."""
    data = [task.samples(client) for client in clients]
    sizes = torch.tensor([len(samples.test_y) for samples in data])
    if not sizes.max():
        return np.zeros((1 + len(task.metrics), len(data)))
    x = pad_sequence([samples.test_x for samples in data], batch_first=True)
    y = pad_sequence([samples.test_y for samples in data], batch_first=True)
    valid = (torch.arange(x.shape[1]) < sizes[:, None]).to(task.device)
    return _scores(task, task.forward(params, x, sizes=sizes.tolist()), y, valid, sizes.tolist())


@torch.no_grad()
def server_scores(task: Task, shared: State) -> tuple[Floats, int] | None:
    """The same of the global test set, ``[1 + metrics]``, and its size; None without samples or a whole model."""
    if not _whole(task, shared) or task.server_test is None:
        return None
    params = {name: value.unsqueeze(0) for name, value in shared.items()}
    sums = np.zeros(1 + len(task.metrics))
    for parts in zip(*(torch.split(part, TEST_BATCH) for part in task.server_test)):
        x, y = (part.unsqueeze(0).to(task.device) for part in parts)
        sums += _scores(task, task.forward(params, x), y, torch.ones(y.shape[:2], dtype=torch.bool, device=y.device))[
            :, 0
        ]
    return sums, len(task.server_test[1])


@torch.no_grad()
def client_objectives(task: Task, params: State, clients: Ints) -> Floats:
    """Each client's sum of losses over its training samples, each with the penalty, float64 ``[c]``."""
    models = ({name: value[row : row + 1] for name, value in params.items()} for row in range(len(clients)))
    return np.array([_objective(task, one, *task.samples(client)[:2]) for one, client in zip(models, clients)])


@torch.no_grad()
def server_objective(task: Task, shared: State) -> tuple[float, int]:
    """The same of the server's own samples, and how many they are; both 0 without samples or without a whole model."""
    held = task.server_batch() if _whole(task, shared) else None
    if held is None:
        return 0.0, 0
    params = {name: value.unsqueeze(0) for name, value in shared.items()}
    return _objective(task, params, held.x.squeeze(0), held.y.squeeze(0)), held.y.shape[1]


def _objective(task: Task, params: State, x: Tensor, y: Tensor) -> float:
    """The sum over one client's samples of loss and penalty; `params` are ``{name: [1, …]}``."""
    total = 0.0
    for start in range(0, len(y), TEST_BATCH):
        # cloned: how memory is aligned, and with it the last bits, is then the same whoever read the samples
        rows, labels = (part[start : start + TEST_BATCH].unsqueeze(0).clone() for part in (x, y))
        total += float(task.loss.each(task.forward(params, rows), labels).double().sum())
    if task.penalty:
        total += len(y) * float(task.penalties({name: value.double() for name, value in params.items()}))
    return total


def _whole(task: Task, shared: State) -> bool:
    return {name for names in task.layer_names() for name in names} <= shared.keys()


def _scores(task: Task, outputs: Tensor, y: Tensor, valid: Tensor, sizes: Sequence[int] | None = None) -> Floats:
    found = [each.each(outputs, y, sizes).double() for each in (task.loss, *task.metrics.values())]
    sums: Floats = torch.stack([(each * valid).sum(1) for each in found]).cpu().numpy()
    return sums
