"""How well models do: losses and metrics on test samples, objectives on training samples, in batches that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcfl.base.device_copy import on_host
from hpcfl.base.lazy import Tensor, no_grad, torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.learning.samples import Padded
from hpcfl.learning.task import TEST_BATCH, Task

BATCH_BYTES = 2**26  # of samples and of the largest tensor made of them, in one forward pass
FEW = 2  # samples on which it is found out what one costs


def client_scores(task: Task, params: State, clients: Ints) -> Floats:
    """Sums of the loss and of each metric over the clients' own test samples, ``[1 + metrics, c]``."""
    return on_host([client_sums(task, params, clients)])[0].numpy()


@no_grad
def client_sums(task: Task, params: State, clients: Ints) -> Tensor:
    """The same, float64, on the device that computes, which is not waited for."""
    sums = torch.zeros(1 + len(task.metrics), len(clients), dtype=torch.float64, device=task.device)
    batches = _batches(task, params, clients, test=True)
    found: Iterable[Any] = ((task.forward(params, batch.x, sizes=batch.sizes), batch) for batch in batches)
    if not all(each.ours for each in (task.loss, *task.metrics.values())):  # they may compare samples with one another
        found = list(found)
        if len(found) > 1:
            parts = zip(*((out, each.y, each.valid) for out, each in found))
            outputs, y, valid = (torch.cat(part, 1) for part in parts)
            found = [(outputs, Padded(y[:, :0], y, valid, valid.sum(1).tolist()))]
    for outputs, batch in found:
        sums += _scores(task, outputs, *batch[1:])
    return sums


@no_grad
def client_finite(task: Task, params: State, clients: Ints) -> Floats:
    """How many of the clients' own test samples have an output that is finite, ``[c]``."""
    sums = np.zeros(len(clients))
    for batch in _batches(task, params, clients, test=True):
        sums += _finite(task.forward(params, batch.x, sizes=batch.sizes), batch.valid)
    return sums


@no_grad
def server_scores(task: Task, shared: State) -> tuple[Floats, int] | None:
    """The same of the global test set, ``[1 + metrics]``, and its size; None without samples or a whole model."""
    if not _whole(task, shared) or task.server_test is None:
        return None
    sums = torch.zeros(1 + len(task.metrics), dtype=torch.float64, device=task.device)
    for outputs, y, valid in _server_outputs(task, shared):
        sums += _scores(task, outputs, y, valid)[:, 0]
    return on_host([sums])[0].numpy(), len(task.server_test[1])


@no_grad
def server_finite(task: Task, shared: State) -> float:
    """How many samples of the global test set have an output that is finite."""
    return float(sum(_finite(outputs, valid)[0] for outputs, _, valid in _server_outputs(task, shared)))


def _server_outputs(task: Task, shared: State) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield outputs and labels of the global test set, ``[1, B, …]``, and that all of them are real."""
    assert task.server_test is not None
    params = {name: value.unsqueeze(0) for name, value in shared.items()}
    rows = min(TEST_BATCH, _fitting(task, params, task.server_test[0]))
    for parts in zip(*(torch.split(part, rows) for part in task.server_test)):
        x, y = (part.unsqueeze(0).to(task.device) for part in parts)
        yield task.forward(params, x), y, torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)


@no_grad
def client_objectives(task: Task, params: State, clients: Ints) -> Floats:
    """Each client's sum of losses over its training samples, each with the penalty, float64 ``[c]``."""
    there = torch.zeros(len(clients), dtype=torch.float64, device=task.device)
    for batch in _batches(task, params, clients, test=False):
        each = task.loss.each(task.forward(params, batch.x, sizes=batch.sizes), batch.y, batch.sizes).double()
        there += torch.where(batch.valid, each, 0.0).sum(1)
    sums: Floats = on_host([there])[0].numpy()
    if task.penalty:
        sums += task.federation.train_sizes[clients] * _penalties(task, params)
    return sums


@no_grad
def server_objective(task: Task, shared: State) -> tuple[float, int]:
    """The same of the server's own samples, and how many they are; both 0 without samples or without a whole model."""
    held = task.server_batch() if _whole(task, shared) else None
    if held is None:
        return 0.0, 0
    params, total = {name: value.unsqueeze(0) for name, value in shared.items()}, 0.0
    rows = min(TEST_BATCH, _fitting(task, params, held.x[0]))
    for x, y in zip(torch.split(held.x, rows, 1), torch.split(held.y, rows, 1)):
        # cloned: how memory is aligned, and with it the last bits, is then the same whoever read the samples
        total += float(task.loss.each(task.forward(params, x.clone()), y.clone()).double().sum())
    if task.penalty:
        total += held.y.shape[1] * float(_penalties(task, params)[0])
    return total, held.y.shape[1]


def _batches(task: Task, params: State, clients: Ints, test: bool) -> Iterable[Padded]:
    """Return the clients' test samples, or training samples, so many at a time as fit with what is made of them."""
    key = test, clients.tobytes()
    if key in task.kept.batches:
        return task.kept.batches[key]
    parts = [held[2:4] if test else held[:2] for held in map(task.samples, clients.tolist())]
    x, y = max(parts, key=lambda part: len(part[1]))
    if not len(y):
        return []
    rows = max(1, _fitting(task, params, x) // len(parts))
    rows = rows if test else min(rows, TEST_BATCH)
    starts = range(0, len(y), rows)
    made = (Padded.of([(x[start : start + rows], y[start : start + rows]) for x, y in parts]) for start in starts)
    nbytes = len(parts) * (x.nbytes + y.nbytes + len(y))
    return task.kept.keep(key, made, nbytes) if len(parts) > 1 else made


def _fitting(task: Task, params: State, x: Tensor) -> int:
    """How many samples like those of `x` fit into one forward pass by one client's parameters, at least 1.

    A sample costs its own bytes and those of its part of the largest tensor that a module takes or gives in a test.
    """
    shape = tuple(x.shape[1:])
    if shape not in task.kept.sample_bytes:
        few, sizes = torch.cat([x[:1]] * FEW).unsqueeze(0).to(task.device), [0]

        def note(_module: Any, inputs: Any, output: Any) -> None:  # some modules are computed without being called
            parts = [*inputs, *(output if isinstance(output, tuple) else [output])]
            sizes.extend(part.nbytes for part in parts if isinstance(part, torch.Tensor))

        with torch.nn.modules.module.register_module_forward_hook(note):
            note(None, (), task.forward({name: value[:1] for name, value in params.items()}, few))
        task.kept.sample_bytes[shape] = (few.nbytes + max(sizes)) // FEW
    return max(1, BATCH_BYTES // max(1, task.kept.sample_bytes[shape]))


def _penalties(task: Task, params: State) -> Floats:
    """Each client's penalty, float64 ``[c]``; of so many at once as fit."""
    count = max(1, BATCH_BYTES // (8 * task.parameter_count))
    split = {name: torch.split(value, count) for name, value in params.items()}
    parts = ({name: value.double() for name, value in zip(split, values)} for values in zip(*split.values()))
    return torch.cat([task.penalties(part) for part in parts]).cpu().numpy()


def _whole(task: Task, shared: State) -> bool:
    return {name for names in task.layer_names() for name in names} <= shared.keys()


def _finite(outputs: Tensor, valid: Tensor) -> Floats:
    return (outputs.isfinite().flatten(2).any(2) & valid).sum(1).double().cpu().numpy()


def _scores(task: Task, outputs: Tensor, y: Tensor, valid: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    found = [each.each(outputs, y, sizes).double() for each in (task.loss, *task.metrics.values())]
    return torch.stack([torch.where(valid, each, 0.0).sum(1) for each in found])
