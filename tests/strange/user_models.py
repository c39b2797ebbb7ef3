"""Models as users get them wrong, or odd and right; the tests copy this file into a user's folder."""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

CALLS = []


class Fair(nn.Module):
    """A model that is right."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(shape[-1], 8)
        self.last = nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.first(x).relu())


class NoParameters(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.classes = classes

    def forward(self, x):
        return x[:, : self.classes]


class Frozen(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.requires_grad_(False)


class HalfFrozen(Fair):
    """Right: the first layer stays as it was made."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.first.requires_grad_(False)


class Idle(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.idle = nn.Linear(2, 2)


class TooWide(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, classes + 3)


class TooNarrow(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, 1)


class OneNumber(Fair):
    def forward(self, x):
        return super().forward(x).sum()


class OneRow(Fair):
    def forward(self, x):
        return super().forward(x)[:1]


class Pair(Fair):
    def forward(self, x):
        return super().forward(x), x


class Named(Fair):
    def forward(self, x):
        return {"logits": super().forward(x)}


class Nothing(Fair):
    def forward(self, x):
        super().forward(x)


class Array(Fair):
    def forward(self, x):
        return super().forward(x).detach().numpy()


class Detached(Fair):
    def forward(self, x):
        return super().forward(x).detach()


class WithoutGraph(Fair):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Nan(Fair):
    def forward(self, x):
        return super().forward(x) * float("nan")


class Infinite(Fair):
    def forward(self, x):
        return super().forward(x) / 0


class NanInTraining(Fair):
    def forward(self, x):
        return super().forward(x) * (float("nan") if self.training else 1.0)


class NanFromTheStart(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        nn.init.constant_(self.first.weight, float("nan"))


class Zeros(Fair):
    def forward(self, x):
        return super().forward(x) * 0


class Doubles(Fair):
    """Right: the precision is that of the run."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.double()


class CastsToDouble(Fair):
    def forward(self, x):
        return super().forward(x.double())


class OutputsDouble(Fair):
    def forward(self, x):
        return super().forward(x).double()


class Complex(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape[-1], classes, dtype=torch.complex64) * 0.1)

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


class SparseWeight(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.weight = nn.Parameter((torch.eye(classes, shape[-1]) * 0.1).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.weight, x.t()).t()


class InPlace(Fair):
    def forward(self, x):
        return super().forward(x.mul_(0.9))


class InPlaceAfterwards(Fair):
    def forward(self, x):
        outputs = super().forward(x)
        x.data.zero_()
        return outputs


class ChangesWeights(Fair):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.mul_(0.5)
        return super().forward(x)


class BatchNorm(Fair):
    """Right: normalises over a batch of several."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class Buffered(Fair):
    """Right: a buffer counts the steps."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        return super().forward(x)


class BufferInTests(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale.mul_(1.5)
        return super().forward(x) * self.scale


class Tied(Fair):
    """Right: one tensor in two places."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.middle, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.middle.weight

    def forward(self, x):
        return self.last(self.again(self.middle(self.first(x)).relu()).relu())


class Drops(Fair):
    """Right: dropout is keyed."""

    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(x).relu(), 0.2, self.training))


class Draws(Fair):
    """Right: what it draws in a step is keyed."""

    def forward(self, x):
        noise = 0.1 * torch.randn(len(x), 8) if self.training else 0.0
        return self.last((self.first(x) + noise).relu())


class DrawsNumpy(Fair):
    """Right: what it draws in a step is keyed."""

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * float(np.random.rand()) * self.training)


class DrawsInTests(Fair):
    """Right: what it draws in a test is keyed."""

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * random.random())


class DrawsOwn(Fair):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.rng = np.random.default_rng(1)

    def forward(self, x):
        return super().forward(x) * (1 + self.rng.random())


class Counts(Fair):
    def forward(self, x):
        CALLS.append(len(x))
        return super().forward(x) / len(CALLS)


class OfBatch(Fair):
    """Right: what it gives depends on the others in the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class OfBatchSize(Fair):
    """Right."""

    def forward(self, x):
        return super().forward(x) / len(x)


class FixedBatch(Fair):
    def forward(self, x):
        return super().forward(x.view(3, -1))


class FailsLater(Fair):
    def forward(self, x):
        if len(x) > 5:
            raise ValueError("too many samples")
        return super().forward(x)


class WideLater(Fair):
    def forward(self, x):
        outputs = super().forward(x)
        return outputs if len(x) < 5 else torch.cat([outputs, outputs], 1)


class Held(Fair):
    """Right: a function among its attributes."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.function = lambda x: x.tanh()

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Lazy(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.LazyLinear(classes)

    def forward(self, x):
        return self.layer(x)


class WeightNorm(Fair):
    """Right, or refused: a parametrisation."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.first = weight_norm(self.first)


class HeldInList(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = [nn.Linear(shape[-1], classes)]

    def forward(self, x):
        return self.layers[0](x)


class WithoutInit(nn.Module):
    def __init__(self, shape, classes):
        self.layer = nn.Linear(shape[-1], classes)


class WithoutForward(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(shape[-1], classes)


class OtherParameters(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()


class RaisesInInit(nn.Module):
    def __init__(self, shape, classes):
        raise ValueError("no luck")


class Raises(Fair):
    def forward(self, x):
        raise ValueError("no luck")


class RaisesInTests(Fair):
    def forward(self, x):
        if not self.training:
            raise ValueError("no luck")
        return super().forward(x)


class RaisesBackward(Fair):
    def forward(self, x):
        outputs = super().forward(x)
        if len(x) > 3 and outputs.requires_grad:
            outputs.register_hook(lambda gradient: 1 / 0)
        return outputs


class Exits(nn.Module):
    def __init__(self, shape, classes):
        sys.exit(0)


class ExitsForward(Fair):
    def forward(self, x):
        sys.exit(0)


class ExitsLater(Fair):
    def forward(self, x):
        if len(x) > 5:
            sys.exit(0)
        return super().forward(x)


class Recurses(Fair):
    def forward(self, x):
        return self.forward(x)


class TooLarge(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2**50))


class TooLargeForward(Fair):
    def forward(self, x):
        if len(x) > 5:
            torch.empty(2**50)
        return super().forward(x)


def made(shape, classes):
    """Right: a function that makes a model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[-1], classes))


def nothing(shape, classes):
    return None


def aclass(shape, classes):
    return Fair


def function(shape, classes):
    return lambda x: x
