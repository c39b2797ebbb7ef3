"""Keys of what is learned: loss, metrics, what becomes of buffers. torch is not loaded."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Literal

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.plugins import callable_of, outside
from hpcfl.data import Header

Buffers = Literal["mean", "keep", "local", "static"]
LOSSES = ("auto", "cross-entropy", "squared-error")
METRICS = ("accuracy",)
FORM = "package.module:function"


class TaskConfig(ConfigBase):
    """What is minimised, what tests measure, and what a model from outside does beside its gradients."""

    loss: str = "auto"
    """What a step minimises, a value per sample. ``cross-entropy``: of classes, the mean over a sample's labels.
    ``squared-error``: the mean over its numbers. ``auto``: by the labels. ``package.module:function``:
    ``function(outputs, labels)`` of one client's batch, which returns a tensor ``[B]``."""
    metrics: tuple[str, ...] = METRICS
    """What tests measure beside the loss, each a column of its name and one of ``client_`` and its name. ``accuracy``:
    the share of classes that are predicted. ``package.module:function``: as for `loss`, the mean over test samples."""
    buffers: Buffers = "mean"
    """Buffers that training steps change, as of a batch normalisation. ``mean``: averaged by the server by the weights
    of the visits' losses, but for personal layers; integers rise to the largest. ``keep``: they stay as they are made.
    ``local``: each client's own; the server cannot test. ``static``: of batch normalisations only; training keeps none,
    and each test gathers them in a pass over all training data (HeteroFL), in real time at the server alone."""

    embedding: str | None = None
    """The submodule of a model from outside whose outputs are the latent space, for ``flic`` and ``fedhenn``. What the
    model puts out must depend on the features through it alone."""

    @property
    def own(self) -> list[tuple[str, str]]:
        """Keys and names of the functions from outside the package."""
        named = [("task.loss", self.loss), *(("task.metrics", name) for name in self.metrics)]
        return [(key, name) for key, name in named if ":" in name]

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics' names in what is recorded."""
        return tuple(name.rpartition(":")[2] for name in self.metrics)

    def check(self) -> None:
        """Raise UsageError where a function cannot be had, or two metrics have one name."""
        _check_name("task.loss", self.loss, LOSSES)
        for name in self.metrics:
            _check_name("task.metrics", name, METRICS)
        for key, name in self.own:
            callable_of(name, key, outside(name, key, FORM), "a function of outputs and labels")
        if twice := sorted(name for name in self.columns if self.columns.count(name) > 1):
            raise UsageError(f"task.metrics: expected a name of its own for each, got '{twice[0]}' again")

    def check_labels(self, header: Header) -> None:
        """Raise UsageError where labels are not those that a loss of ours is made for."""
        if self.loss == "cross-entropy" and header.targets:
            raise refusal("task.loss", "'squared-error' or a function, since labels are real numbers", self.loss)


def _check_name(key: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known and ":" not in name:
        near = get_close_matches(name, known, 1)
        words = ", ".join(f"'{word}'" for word in known)
        raise refusal(key, f"{words} or {FORM}", name, f"{key} = '{near[0]}'" if near else None)
