"""Keys of what a model computes in a step and in a test. torch is not loaded."""

from __future__ import annotations

from typing import Literal

from hpcfl.base.config import ConfigBase

Buffers = Literal["mean", "keep", "local"]


class TaskConfig(ConfigBase):
    """What a model from outside (``model.name = "package.module:factory"``) does beside its gradients."""

    buffers: Buffers = "mean"
    """Buffers that training steps change, such as the running statistics of a batch normalisation, which tests use.
    ``mean``: averaged by the server by the weights of the visits' losses, but for those of personal layers, which are
    personal. Integers, such as a batch normalisation's number of batches, rise to the largest.
    ``keep``: they stay as they are made, and tests use these. ``local``: each client's own; the server cannot test."""
