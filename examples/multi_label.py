"""Several labels per sample: which digits are on a picture of two digits, one above the other."""

import numpy as np
import torch.nn.functional as F
from sklearn.datasets import load_digits

from hpcfl import ClientData, InMemory, Source, keyed


class Pairs(Source):
    """The bundled digits in pairs; a label is ten flags. A client has digits of its own: it never saw others'."""

    pairs: int = 200
    """Pairs of each client; the last fifth are its test part."""

    def check(self, clients, data_dir):
        return self.federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        images, digits = load_digits(return_X_y=True)
        own = np.array_split(keyed(seed, "pairs").permutation(len(digits)), clients)
        return InMemory.of(
            [self.client(images[i] / 16, digits[i], keyed(seed, "pairs", client=n)) for n, i in enumerate(own)], 10
        )

    def client(self, images, digits, rng):
        first, second = rng.integers(len(digits), size=(2, self.pairs))
        x = np.stack([images[first], images[second]], 1).reshape(-1, 1, 16, 8).astype(np.float32)
        y = np.zeros((self.pairs, 10), np.float32)
        for place in (first, second):
            y[np.arange(self.pairs), digits[place]] = 1
        n = self.pairs * 4 // 5
        return ClientData(x[:n], y[:n], x[n:], y[n:])


def loss(outputs, labels):
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(1)  # [B]


def exact(outputs, labels):
    """Whether all ten flags are right, ``[B]``."""
    return ((outputs > 0) == (labels > 0)).all(1).double()
