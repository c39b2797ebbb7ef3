"""How well models do: losses and correct answers on test samples, objectives on training samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hpcfl.base.types import Floats, Ints, State
from hpcfl.learning.batches import sample_losses
from hpcfl.learning.task import TEST_BATCH, Task


@torch.no_grad()
def client_scores(task: Task, params: State, clients: Ints) -> tuple[Floats, Floats]:
    """Loss sums and numbers of correct answers (NaN for targets) on the clients' own test samples, ``[c]`` each."""
    data = [task.samples(client) for client in clients]
    sizes = torch.tensor([len(samples.test_y) for samples in data])
    if not sizes.max():
        return np.zeros(len(data)), np.zeros(len(data))
    x = pad_sequence([samples.test_x for samples in data], batch_first=True)
    y = pad_sequence([samples.test_y for samples in data], batch_first=True)
    valid = (torch.arange(x.shape[1]) < sizes[:, None]).to(task.device)
    return _scores(task.forward(params, x, sizes=sizes.tolist()), y, valid)


@torch.no_grad()
def server_scores(task: Task, shared: State) -> tuple[float, float, int] | None:
    """Loss sum, correct answers and size of the global test set; None without samples or without a whole model."""
    if not _whole(task, shared) or task.server_test is None:
        return None
    params = {name: value.unsqueeze(0) for name, value in shared.items()}
    loss, correct = 0.0, 0.0
    for parts in zip(*(torch.split(part, TEST_BATCH) for part in task.server_test)):
        x, y = (part.unsqueeze(0).to(task.device) for part in parts)
        losses, right = _scores(task.forward(params, x), y, torch.ones_like(y, dtype=torch.bool))
        loss, correct = loss + float(losses[0]), correct + float(right[0])
    return loss, correct, len(task.server_test[1])


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
        total += float(sample_losses(task.forward(params, rows), labels).double().sum())
    if task.penalty:
        total += len(y) * float(task.penalties({name: value.double() for name, value in params.items()}))
    return total


def _whole(task: Task, shared: State) -> bool:
    return {name for names in task.layer_names() for name in names} <= shared.keys()


def _scores(outputs: Tensor, y: Tensor, valid: Tensor) -> tuple[Floats, Floats]:
    each, known = sample_losses(outputs, y), not y.is_floating_point()
    right = (outputs.argmax(-1) == y) & valid
    correct = right.sum(1).double() if known else torch.full((len(y),), torch.nan, dtype=torch.float64)
    return (each.double() * valid).sum(1).cpu().numpy(), correct.cpu().numpy()
