"""Random numbers keyed by what they are for: no generator state to carry, save or agree on.

Philox is counter-based (Salmon et al., SC'11): the key names the stream's owner, the counter the place in it,
so any rank can produce the numbers of any client in any round without having produced those before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


def keyed(seed: int, purpose: str, round: int = 0, client: int = 0, step: int = 0) -> np.random.Generator:
    """Return the generator that belongs to these numbers, each below 2^64, and to this purpose, such as ``"batch"``."""
    key = np.array([seed, zlib.crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([0, step, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def keyed_in_turn(
    seed: int, purpose: str, round: int, clients: Iterable[int], step: int = 0
) -> Iterator[np.random.Generator]:
    """Yield the `keyed` generator of each client; it is the next one's from then on.

    To put one generator into another place takes a seventh of the time of making one.
    """
    rng = keyed(seed, purpose, round, 0, step)
    state = rng.bit_generator.state
    for client in clients:
        state["state"]["counter"][2] = client
        rng.bit_generator.state = state
        yield rng


def key_as_seed(seed: int, purpose: str, round: int = 0, client: int = 0, step: int = 0) -> int:
    """A 63-bit seed for libraries that take only a number (torch's initialisers)."""
    return int(keyed(seed, purpose, round, client, step).integers(2**63))


class StepKey(NamedTuple):
    """What keys the randomness of one training step (dropout, augmentation, draws) of a chunk of clients."""

    seed: int
    round: int
    clients: Sequence[int]
    step: int

    def generators(self, purpose: str) -> list[np.random.Generator]:
        """A generator for each client; it does not depend on who else is in the chunk."""
        return [keyed(self.seed, purpose, self.round, client, self.step) for client in self.clients]

    def as_seed(self, purpose: str, row: int) -> int:
        """`key_as_seed` of the client in a row."""
        return key_as_seed(self.seed, purpose, self.round, self.clients[row], self.step)
