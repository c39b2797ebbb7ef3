"""Survival: Cox's partial likelihood of who fails when, each batch being its own risk set (D. R. Cox, 1972)."""

import numpy as np
from torch import logsumexp, nn

from hpcfl import ClientData, InMemory, Source, keyed

HAZARD = np.array([1.0, -0.5, 0.5, 0.0], np.float32)


class Patients(Source):
    """Hospitals, each with a base rate of its own; a label is the time and whether it is that of an event."""

    patients: int = 100
    """Patients of each hospital; as many again are its test part."""

    def check(self, clients, data_dir):
        return self.federate(clients, 0, data_dir).header

    def federate(self, clients, seed, data_dir):
        return InMemory.of([self.hospital(keyed(seed, "patients", client=i)) for i in range(clients)], 2)

    def hospital(self, rng):
        x = rng.standard_normal((2 * self.patients, len(HAZARD))).astype(np.float32)
        fails = rng.exponential(1 / np.exp(x @ HAZARD + rng.standard_normal()))
        leaves = rng.exponential(np.median(fails), len(x))
        y = np.stack([np.minimum(fails, leaves), fails <= leaves], 1).astype(np.float32)
        return ClientData(
            *(part for rows in (slice(self.patients), slice(self.patients, None)) for part in (x[rows], y[rows]))
        )


def risk(shape, classes):
    """The logarithm of the relative hazard, linear in the features: ``[B, 1]``."""
    return nn.Linear(shape[0], 1, bias=False)


def cox(outputs, labels):
    """``−event · (risk − log Σ exp(risk of all who are still there))``, ``[B]``."""
    time, event = labels.unbind(1)
    there = time[None, :] >= time[:, None]  # [patient, others]
    everyone = outputs.T.expand(len(time), -1).masked_fill(~there, -float("inf"))
    return -event * (outputs[:, 0] - logsumexp(everyone, 1))


def concordance(outputs, labels):
    """Share of those who outlived a patient and were given a lower risk, 0.5 where nobody can be compared, ``[B]``."""
    time, event = labels.unbind(1)
    later = (time[None, :] > time[:, None]) & (event[:, None] > 0)
    right = ((outputs > outputs.T) & later).sum(1).double()
    return (right / later.sum(1)).nan_to_num(0.5)
