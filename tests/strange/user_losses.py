"""Losses as users get them wrong, or odd and right; the tests copy this file into a user's folder."""

import random
import sys

import torch
import torch.nn.functional as F

CALLS = []


def fair(outputs, labels):
    """A loss that is right."""
    return F.cross_entropy(outputs, labels, reduction="none")


def without_reduction(outputs, labels):
    return F.cross_entropy(outputs, labels)


def summed(outputs, labels):
    return fair(outputs, labels).sum()


def of_classes(outputs, labels):
    return outputs


def column(outputs, labels):
    return fair(outputs, labels)[:, None]


def number(outputs, labels):
    return float(fair(outputs, labels).mean())


def array(outputs, labels):
    return fair(outputs, labels).detach().numpy()


def nothing(outputs, labels):
    fair(outputs, labels)


def pair(outputs, labels):
    return fair(outputs, labels), 0


def detached(outputs, labels):
    return fair(outputs, labels).detach()


def without_graph(outputs, labels):
    with torch.no_grad():
        return fair(outputs, labels)


def constant(outputs, labels):
    return torch.ones(len(labels))


def of_labels(outputs, labels):
    return labels.float() + 0 * outputs.sum(1)


def accuracy(outputs, labels):
    return (outputs.argmax(1) != labels).float()


def negative(outputs, labels):
    """Right: minimised as any other."""
    return fair(outputs, labels) - 10


def rising(outputs, labels):
    """Odd: it is minimised, whatever that means."""
    return -0.01 * fair(outputs, labels)


def integers(outputs, labels):
    return labels


def doubles(outputs, labels):
    return fair(outputs.double(), labels)


def complex_numbers(outputs, labels):
    return fair(outputs, labels).to(torch.complex64)


def not_numbers(outputs, labels):
    return fair(outputs, labels) * float("nan")


def infinite(outputs, labels):
    return fair(outputs, labels) / 0


def nan_gradient(outputs, labels):
    return fair(outputs, labels) + (outputs.sum(1) * 0).sqrt()


def nan_later(outputs, labels):
    return fair(outputs, labels) * (float("nan") if len(labels) > 3 else 1)


def alters_labels(outputs, labels):
    each = fair(outputs, labels)
    labels.copy_(outputs.argmax(1))
    return each


def alters_labels_later(outputs, labels):
    each = fair(outputs, labels)
    if len(labels) > 3:
        labels.copy_(outputs.argmax(1))
    return each


def alters_labels_behind(outputs, labels):
    each = fair(outputs, labels)
    labels.numpy()[...] = outputs.detach().argmax(1).numpy()
    return each


def alters_outputs(outputs, labels):
    with torch.no_grad():
        outputs.zero_()
    return fair(outputs, labels)


def wide_later(outputs, labels):
    return fair(outputs, labels) if len(labels) < 5 else fair(outputs, labels).mean()


def short_later(outputs, labels):
    return fair(outputs, labels) if len(labels) < 5 else fair(outputs, labels)[:-1]


def raises(outputs, labels):
    raise ValueError("no luck")


def raises_later(outputs, labels):
    if len(labels) > 5:
        raise ValueError("no luck")
    return fair(outputs, labels)


def exits(outputs, labels):
    sys.exit(0)


def exits_later(outputs, labels):
    if len(labels) > 5:
        sys.exit(0)
    return fair(outputs, labels)


def recurses(outputs, labels):
    return recurses(outputs, labels)


def one_parameter(outputs):
    return outputs


def counts(outputs, labels):
    CALLS.append(0)
    return fair(outputs, labels) * len(CALLS)


def draws(outputs, labels):
    """Right: what it draws in a step is keyed."""
    return fair(outputs + 0.1 * torch.randn_like(outputs), labels)


def draws_python(outputs, labels):
    """Right: what it draws in a step is keyed."""
    return fair(outputs, labels) * random.random()


def among_others(outputs, labels):
    """Right: of a single sample it is 0, as Cox's partial likelihood is."""
    return outputs[:, 0].logsumexp(0) - outputs[:, 0]


class Loss(torch.nn.Module):
    def forward(self, outputs, labels):
        return fair(outputs, labels)


module = Loss()
