"""A value per sample from outputs and labels: losses and metrics, built in or from outside the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from hpcfl.base.errors import RunError, UsageError, in_place
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.plugins import outside, reason
from hpcfl.base.rng import StepKey
from hpcfl.learning.batches import Batch
from hpcfl.learning.config import FORM
from hpcfl.models.modules import tracing


class PerSample:
    """A loss or a metric: one of ours, or ``function(outputs, labels) -> [B]`` of the user's.

    The user's sees one client's real samples at a time, ``[B, …]`` each: it may compare them with one another. What it
    draws at random in a step is keyed by round, client and step.
    """

    def __init__(self, key: str, name: str) -> None:
        self.name, self.where, self.ours = name, f"{key} = '{name}'", name in OURS
        self._function: Callable[[Tensor, Tensor], Tensor] = OURS[name] if self.ours else outside(name, key, FORM)
        self._draws = False

    def each(
        self, outputs: Tensor, y: Tensor, sizes: Sequence[int] | None = None, key: StepKey | None = None
    ) -> Tensor:
        """Return a value for each sample, ``[c, B]``, from outputs and labels ``[c, B, …]``.

        Of each client's samples the first so many of `sizes` are real; None: all. `key` is that of a training step.
        """
        if self.ours:
            return self._function(outputs, y)
        width, rows = y.shape[1], []
        for row, size in zip(range(len(y)), [width] * len(y) if sizes is None else sizes):
            seed = key.as_seed("loss", row) if key is not None and self._draws else 0
            with tracing.seeded(seed, y.device) if self._draws else nullcontext():
                # contiguous: what randn_like fills first follows from the layout, and that from how clients are batched
                real = self._of_one(outputs[row, :size].contiguous(), y[row, :size])
            rows.append(torch.nn.functional.pad(real, (0, width - size)))
        return torch.stack(rows)

    def _of_one(self, outputs: Tensor, y: Tensor) -> Tensor:
        if not len(y):
            return outputs.new_zeros(0)
        versions, shapes = (outputs._version, y._version), f"outputs {list(outputs.shape)} and labels {list(y.shape)}"
        try:
            found = self._function(outputs, y)
        except Exception as error:
            raise RunError(f"{self.where}: {shapes}: {reason(error)}") from error
        if wrong := _wrong(found, outputs, y, versions):
            raise RunError(f"{self.where}: {shapes}: {wrong}")
        return found

    def mean(self, outputs: Tensor, batch: Batch, rows: int | None = None) -> Tensor:
        """Return the mean over each client's real samples, ``[c]`` (or of the first `rows` clients)."""
        sizes = None if batch.valid is None else batch.sample_counts()
        each = self.each(outputs, batch.y[:rows], sizes, batch.key)
        if batch.valid is None:
            return each.mean(1)
        valid = batch.valid[:rows]
        return (each * valid).sum(1) / valid.sum(1).clamp(min=1)

    def tried(self, outputs: Tensor, y: Tensor) -> None:
        """Find out by one client's samples ``[B, …]`` whether random numbers are drawn.

        UsageError where the function raises, or returns anything but numbers ``[B]``.
        """
        if self.ours:
            return
        try:
            self._draws = tracing.draws(lambda: self._of_one(outputs, y))
        except RunError as error:
            raise UsageError(str(error)) from error.__cause__


def _wrong(found: object, outputs: Tensor, y: Tensor, versions: tuple[int, int]) -> str:
    """Return what is wrong with what a function has made of one client's samples, "" if nothing is."""
    got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if not isinstance(found, torch.Tensor) or got != [len(y)]:
        return f"expected a value per sample, a tensor [{len(y)}], got {got}; did you mean reduction = 'none'?"
    if found.is_complex() or (outputs.requires_grad and not found.requires_grad):
        what = str(found.dtype) if found.is_complex() else "some without a gradient"
        return f"expected real values that depend on the outputs, got {what}"
    for name, tensor, version in zip(("outputs", "labels"), (outputs, y), versions):
        if tensor._version != version:
            return f"it {in_place(f'the {name}')}"
    return ""


def class_axis(outputs: Tensor, y: Tensor) -> int | None:
    """Return the axis of ``[c, B, …]`` that counts classes: the last one, or the third as PyTorch has it; None: none.

    UsageError where it may be either: labels of as many positions as there are classes.
    """
    shape, labels = tuple(outputs.shape), tuple(y.shape)
    last, third = shape[:-1] == labels, outputs.dim() > 3 and shape[:2] + shape[3:] == labels
    if last and third:
        axes = f"have their classes in axis 1 or {len(shape) - 2}, labels being {list(labels[1:])}"
        where = f"task.loss = 'cross-entropy': outputs {list(shape[1:])} {axes}"
        raise UsageError(f"{where}: expected lengths that tell; did you mean a function of your own?")
    return -1 if last else 2 if third else None


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    axis = class_axis(outputs, y)
    if axis is None:
        raise _misfit("cross-entropy", outputs, y, "the labels' shape and an axis of classes")
    outputs = outputs if axis == -1 else outputs.movedim(axis, -1)
    each = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    return each.flatten(2).mean(2) if y.dim() > 2 else each


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    outputs = outputs.squeeze(-1) if outputs.dim() == y.dim() + 1 else outputs
    if outputs.shape != y.shape:
        raise _misfit("squared-error", outputs, y, "the labels' shape")
    each = (outputs - y).square()
    return each.flatten(2).mean(2) if y.dim() > 2 else each


def by_labels(outputs: Tensor, y: Tensor) -> Tensor:
    return squared_error(outputs, y) if y.is_floating_point() else cross_entropy(outputs, y)


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    axis = None if y.is_floating_point() else class_axis(outputs, y)
    if axis is None or outputs.shape[axis] == 1:  # a number, that integers are compared with
        return outputs.new_full(y.shape[:2], torch.nan)
    right = (outputs.argmax(axis) == y).double()
    return right.flatten(2).mean(2) if y.dim() > 2 else right


def _misfit(loss: str, outputs: Tensor, y: Tensor, wanted: str) -> UsageError:
    got = f"outputs {list(outputs.shape[1:])} for labels {list(y.shape[1:])}"
    return UsageError(f"task.loss = '{loss}': expected outputs of {wanted}, got {got}")


OURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auto": by_labels,
    "cross-entropy": cross_entropy,
    "squared-error": squared_error,
    "accuracy": accuracy,
}
