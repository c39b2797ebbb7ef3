"""The samples of the clients that a rank computes, on the device that computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hpcfl.base.device_copy import memory_of, on_device
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.memory import let_go
from hpcfl.base.types import Ints, Shape
from hpcfl.data import Federation
from hpcfl.data.base import Inputs, Labels

TEST_SHARE = 16  # the global test set takes at most this part of the memory of a device that is not the CPU


class Samples(NamedTuple):
    """One client's training and test samples, on the device that computes."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    pool: tuple[Tensor, Tensor]
    """Features and labels of all clients whose training samples lie in one array."""
    start: int
    """Where this client's begin in it."""


class Held:
    """A federation's samples as tensors, each client's read when it is first asked for.

    Those of clients that are read together lie in one array.
    """

    def __init__(self, federation: Federation, dtype: torch.dtype, device: torch.device) -> None:
        self.federation, self.dtype, self.device = federation, dtype, device
        self._samples: dict[int, Samples] = {}
        self.kept = Kept()

    @property
    def held_now(self) -> Mapping[int, Samples]:
        """The clients' samples that are there."""
        return self._samples

    def release_held(self) -> None:
        """Hold no client's samples any more, until they are asked for."""
        self._samples, self.kept = {}, Kept()

    def hold(self, clients: Ints) -> None:
        """Read the samples of some clients that are not there yet; those of one shape lie in one array."""
        missing = [client for client in clients.tolist() if client not in self._samples]
        sizes = self.federation.train_sizes
        for shape in dict.fromkeys(self.federation.shapes[client] for client in missing):
            alike = [client for client in missing if self.federation.shapes[client] == shape]
            pool, start = None, 0
            for client in alike:
                data = self.federation.client(client)
                parts = data.train_features, data.train_labels, data.test_features, data.test_labels
                x, y, test_x, test_y = (on_device(self._tensor(part), self.device) for part in parts)
                if pool is None:
                    total = int(sizes[alike].sum())
                    pool = x.new_empty(total, *x.shape[1:]), y.new_empty(total, *y.shape[1:])
                own = slice(start, start + len(y))
                pool[0][own], pool[1][own] = x, y
                self._samples[client] = Samples(pool[0][own], pool[1][own], test_x, test_y, pool, start)
                start = own.stop

    def samples(self, client: int) -> Samples:
        """A client's samples, read once."""
        self.hold(np.array([client]))
        return self._samples[int(client)]

    @cached_property
    def server_test(self) -> tuple[Tensor, Tensor] | None:
        """Features and labels of the global test set, on the device where they fit well; None without samples."""
        held = self.federation.server_test()
        if held is None or not len(held[1]):
            return None
        x, y = self._tensor(held[0]), self._tensor(held[1])
        if self.device.type != "cpu" and x.nbytes + y.nbytes <= memory_of(self.device) // TEST_SHARE:
            x, y = on_device(x, self.device), on_device(y, self.device)
        return x, y

    def _tensor(self, part: Inputs | Labels) -> Tensor:
        tensor = torch.from_numpy(part)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def release_data(self) -> None:
        """Free the memory of all samples: nothing is asked of this task any more."""
        self.release_held()
        del self.federation
        let_go()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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
        x, y = (torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in zip(*parts))
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
