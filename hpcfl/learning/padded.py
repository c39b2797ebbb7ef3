"""Samples of several clients in one tensor, for tests and objectives, and what of them is kept for the next time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hpcfl.base.types import Shape

KEPT_BYTES = 2**26  # of samples that a rank keeps beside its clients' own


class Padded(NamedTuple):
    """Samples of c clients, of each at most B."""

    x: Tensor
    """Features, ``[c, B, …]``."""
    y: Tensor
    """Labels, ``[c, B, …]``."""
    valid: Tensor
    """Which samples are real, bool ``[c, B]``."""
    sizes: list[int]
    """How many of each client's are real, the first ones."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Padded:
        """Pad each client's features and labels."""
        x, y = (pad_sequence(list(each), batch_first=True) for each in zip(*parts))
        sizes = torch.tensor([len(part) for _, part in parts])
        return cls(x, y, (torch.arange(x.shape[1]) < sizes[:, None]).to(x.device), sizes.tolist())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self[:3])


@dataclass
class Kept:
    """What an evaluation finds out and the next one needs again.

    Attributes
    ----------
    batches : dict
        Of chunks of clients (their ids as bytes), test samples (True) or training samples.
    sample_bytes : dict
        What a sample costs in a forward pass, by the shape of its features.
    """

    batches: dict[tuple[bool, bytes], list[Padded]] = field(default_factory=dict)
    sample_bytes: dict[Shape, int] = field(default_factory=dict)

    def keep(self, key: tuple[bool, bytes], batches: Iterable[Padded], nbytes: int) -> Iterable[Padded]:
        """Keep so many bytes of batches if there is room, and return them."""
        if nbytes + sum(each.nbytes for held in self.batches.values() for each in held) > KEPT_BYTES:
            return batches
        self.batches[key] = list(batches)
        return self.batches[key]
