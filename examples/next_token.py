"""The next character of Python's own manual: clients hold its topics in turn, cut into pieces of text."""

from math import log
from pydoc_data.topics import topics

import numpy as np
import torch.nn.functional as F

from hpcfl import ClientData, InMemory, Source

CHARACTERS = 128


class Manual(Source):
    """Pieces of the manual as numbers of characters; the label of a place is the next character."""

    length: int = 32
    """Characters of a piece."""

    def check(self, clients, data_dir):
        return self.federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        return InMemory.of([self.client(sorted(topics)[i::clients]) for i in range(clients)], CHARACTERS)

    def client(self, names):
        text = "".join(topics[name] for name in names).encode("ascii", "replace")
        count = len(text) // (self.length + 1)
        pieces = np.frombuffer(text, np.uint8, count * (self.length + 1)).astype(np.int64).reshape(count, -1)
        x, y, n = pieces[:, :-1], pieces[:, 1:], count * 4 // 5  # [count, length] each
        return ClientData(x[:n], y[:n], x[n:], y[n:])


def bits(outputs, labels):
    """Bits that a character costs: ``[B]``, from ``[B, length, CHARACTERS]`` and ``[B, length]``."""
    return F.cross_entropy(outputs.mT, labels, reduction="none").mean(1) / log(2)
