"""Random crops and flips of training images, keyed by (seed, round, client, step): the same on any rank."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfl.base.rng import StepKey

PADDING = 4


def augmented(x: Tensor, key: StepKey, black: float) -> Tensor:
    """Return images of the same size, cropped at random from a padded copy, mirrored with chance 1/2.

    Parameters
    ----------
    x : Tensor
        Images, float32 ``[c, B, C, H, W]``.
    black : float
        What the padding of 4 pixels on each side holds.
    """
    clients, batch, channels, height, width = x.shape
    # one row of draws per sample, so that a sample's do not depend on how many come after it
    drawn = np.stack([rng.random((batch, 3)) for rng in key.generators("augment")])
    drawn = drawn.reshape(clients * batch, 3)
    corners = (drawn[:, :2] * (2 * PADDING + 1)).astype(np.int64)
    rows = corners[:, :1] + np.arange(height)
    columns = corners[:, 1:] + np.arange(width)
    columns = np.where(drawn[:, 2:] < 0.5, columns[:, ::-1], columns)
    down, across = (torch.from_numpy(places).to(x.device) for places in (rows, columns))
    padded = F.pad(x.flatten(0, 1), (PADDING,) * 4, value=black)
    sample = torch.arange(len(padded), device=x.device)[:, None, None, None]
    colour = torch.arange(channels, device=x.device)[:, None, None]
    return padded[sample, colour, down[:, None, :, None], across[:, None, None, :]].view(x.shape)
