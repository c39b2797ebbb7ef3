"""Data as users get them wrong, or odd and right; the tests copy this file into a user's folder."""

import random
import sys

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from hpcfl import ClientData, Header, InMemory, Source, keyed


class _Legacy:
    """NumPy's global generator."""

    integers = staticmethod(np.random.randint)
    normal = staticmethod(np.random.normal)


class Fair(Source):
    """A source that is right."""

    classes: int = 3

    def check(self, clients, data_dir):
        return self.federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        return InMemory.of([self.client(keyed(seed, "fair", client=i)) for i in range(clients)], self.classes)

    def client(self, rng):
        y = rng.integers(3, size=30)
        x = rng.normal(size=(30, 4)).astype(np.float32) + np.eye(3, 4, dtype=np.float32)[y]
        return self.parts(x, y)

    def parts(self, x, y):
        return ClientData(x[:20], y[:20], x[20:], y[20:])


class NegativeLabels(Fair):
    def parts(self, x, y):
        return super().parts(x, y - 1)


class LargeLabels(Fair):
    def parts(self, x, y):
        return super().parts(x, y + 5)


class LargeTestLabels(Fair):
    def parts(self, x, y):
        return ClientData(x[:20], y[:20], x[20:], y[20:] + 5)


class UnknownTestLabels(Fair):
    """Odd, and right: a class that nobody learns."""

    def parts(self, x, y):
        return ClientData(x[:20], y[:20] % 2, x[20:], y[20:] * 0 + 2)


class RealLabels(Fair):
    """Odd: classes as real numbers are targets."""

    def parts(self, x, y):
        return super().parts(x, y.astype(np.float32))


class NanLabels(Fair):
    def parts(self, x, y):
        return super().parts(x, np.full(len(y), np.nan, np.float32))


class WordLabels(Fair):
    def parts(self, x, y):
        return super().parts(x, np.array(["a", "b", "c"])[y])


class ListLabels(Fair):
    def parts(self, x, y):
        return super().parts(x, y).__class__(x[:20], y[:20].tolist(), x[20:], y[20:].tolist())


class TensorParts(Fair):
    def parts(self, x, y):
        return super().parts(torch.tensor(x), torch.tensor(y))


class NanFeatures(Fair):
    def parts(self, x, y):
        return super().parts(x * np.float32("nan"), y)


class NanOfOne(Fair):
    def client(self, rng):
        found = super().client(rng)
        found.train_features[3, 1] = np.nan
        return found


class InfiniteFeatures(Fair):
    def parts(self, x, y):
        return super().parts(x / np.float32(0), y)


class WordFeatures(Fair):
    def parts(self, x, y):
        return super().parts(x.astype(str), y)


class ComplexFeatures(Fair):
    def parts(self, x, y):
        return super().parts(x.astype(np.complex64), y)


class FewerLabels(Fair):
    def parts(self, x, y):
        return ClientData(x[:20], y[:19], x[20:], y[20:])


class OtherTestShape(Fair):
    def parts(self, x, y):
        return ClientData(x[:20], y[:20], x[20:, :3], y[20:])


class NoSamples(Fair):
    def parts(self, x, y):
        return ClientData(x[:0], y[:0], x, y)


class NoTests(Fair):
    """Right: clients without test samples."""

    def parts(self, x, y):
        return ClientData(x, y, x[:0], y[:0])


class NoClients(Fair):
    def federate(self, clients, seed, data_dir):
        return InMemory.of([], 3)


class FewerClients(Fair):
    def federate(self, clients, seed, data_dir):
        return super().federate(clients - 1, seed, data_dir)


class CheckLies(Fair):
    def check(self, clients, data_dir):
        return Header(clients, 7, 7, ((9,),), 3)


class CheckNone(Fair):
    def check(self, clients, data_dir):
        return None


class FederateNone(Fair):
    def federate(self, clients, seed, data_dir):
        return None


class FederateList(Fair):
    def check(self, clients, data_dir):
        return super().federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        return [*super().federate(clients, seed, data_dir).parts]


class NoFederate(Source):
    def check(self, clients, data_dir):
        return Header(clients, 7, 7, ((9,),), 3)


class OtherSignature(Fair):
    def federate(self, clients):
        return super().federate(clients, 0, None)


class RaisesInCheck(Fair):
    def check(self, clients, data_dir):
        raise ValueError("no luck")


class RaisesInFederate(Fair):
    def check(self, clients, data_dir):
        return super().federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        raise ValueError("no luck")


class ExitsInFederate(Fair):
    def check(self, clients, data_dir):
        return super().federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        sys.exit(0)


class RecursesInFederate(Fair):
    def federate(self, clients, seed, data_dir):
        return self.federate(clients, seed, data_dir)


class TooLarge(Fair):
    def federate(self, clients, seed, data_dir):
        return np.empty(2**55)


class ReadsWhatIsNotThere(Fair):
    def federate(self, clients, seed, data_dir):
        return np.load("/nowhere/file.npy")


class DrawsNumpy(Fair):
    """Right: what is drawn while data are made is keyed."""

    def client(self, rng):
        return super().client(_Legacy)


class DrawsTorch(Fair):
    """Right: what is drawn while data are made is keyed."""

    def parts(self, x, y):
        return super().parts(torch.rand(30, 4).numpy(), y)


class DrawsGenerator(Fair):
    def client(self, rng):
        return super().client(np.random.default_rng())


class TooFewClasses(Fair):
    classes: int = 2


class NoClasses(Fair):
    classes: int = 0


class MoreClasses(Fair):
    """Right: more classes than anybody holds."""

    classes: int = 5


class Alike(Fair):
    """Right: features as a tuple that is one."""

    def parts(self, x, y):
        return super().parts(x, y.astype(np.uint8))


class Points(Dataset):
    """A dataset that is right."""

    count = 60

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        y = int(rng.integers(3))
        return (rng.normal(size=4) + np.eye(3, 4)[y]).astype(np.float32), y


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield np.zeros(4, np.float32), 0


class EndlessItems(Dataset):
    def __getitem__(self, i):
        return np.zeros(4, np.float32), 0


class LongLength(Points):
    def __len__(self):
        return 10 * self.count

    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError(i)
        return super().__getitem__(i)


class ShortLength(Points):
    """Right: as long as it says."""

    def __len__(self):
        return self.count // 2


class HugeLength(Points):
    def __len__(self):
        return 10**15


class NegativeLength(Points):
    def __len__(self):
        return -1


class TextLength(Points):
    def __len__(self):
        return "many"


class Empty(Points):
    count = 0


class Bare(Points):
    def __getitem__(self, i):
        return super().__getitem__(i)[0]


class Three(Points):
    def __getitem__(self, i):
        return *super().__getitem__(i), 0


class Nothing(Points):
    def __getitem__(self, i):
        return None


class OtherShapes(Points):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x[: 1 + i % 3], y


class NegativeClasses(Points):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, y - 1


class RealClasses(Points):
    """Odd: classes as real numbers are targets."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, float(y)


class WordClasses(Points):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, "abc"[y]


class NanItems(Points):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * np.float32("nan"), y


class RaisesItems(Points):
    def __getitem__(self, i):
        raise ValueError("no luck")


class RaisesInInit(Points):
    def __init__(self):
        raise ValueError("no luck")


class ExitsItems(Points):
    def __getitem__(self, i):
        sys.exit(0)


class RandomItems(Points):
    """Right: what is drawn while samples are read is keyed."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + np.float32(random.random() + np.random.rand() + float(torch.rand(()))), y


def dataset():
    """Right: a function that makes one."""
    return Points()


def nothing():
    return None


def number():
    return 3
