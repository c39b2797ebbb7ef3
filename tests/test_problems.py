"""The problems on which methods are compared that use the smoothness of the loss in the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcfl.data.base import Federation
from hpcfl.data.digits import Digits
from hpcfl.data.server import turns
from hpcfl.errors import UsageError


def refused(call: Callable[..., Any], *args: Any) -> str:
    """The one-line message of the UsageError that the call raises."""
    with pytest.raises(UsageError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def samples(federation: Federation) -> np.ndarray:
    """All training samples with their labels as rows, the clients' and the server's, sorted."""
    held = [federation.client(i) for i in range(federation.clients)]
    parts = [(own.train_features, own.train_labels) for own in held]
    parts += [found] if (found := federation.server_train()) else []
    rows = np.concatenate([np.column_stack([x.reshape(len(x), -1), y]) for x, y in parts])
    return rows[np.lexsort(rows.T)]


# --- the server's samples -----------------------------------------------------------------------------------


def test_classes_take_turns():
    labels = np.array([2, 0, 0, 0, 2, 1])
    order = turns(labels, 6, np.random.default_rng(0))
    assert labels[order].tolist() == [0, 1, 2, 0, 2, 0]
    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    assert turns(labels, 2, np.random.default_rng(0)).tolist() == order[:2].tolist()


KEYS = [{}, {"partition": "shards", "classes": 3}, {"partition": "dirichlet", "train_samples": 500}]


@pytest.mark.parametrize("keys", KEYS)
def test_the_servers_samples_and_the_clients_are_the_pool(keys):
    section = Digits(server=24, **keys)
    federation, header = section.federate(7, 3, None), section.check(7, None)
    used = keys.get("train_samples", 1437)
    assert (header.train, header.server) == (used - 24, 24)
    parts = np.concatenate([*federation.train_parts, federation.server_part])
    assert len(np.unique(parts)) == len(parts)
    remainder = 0 if "classes" in keys else (used - 24) % 7
    assert len(parts) == used - remainder
    x, y = federation.server_train()
    assert y.tolist() == [*range(10), *range(10), 0, 1, 2, 3]
    assert x.shape == (24, 1, 8, 8)
    assert federation.train_sizes.tolist() == [len(part) for part in federation.train_parts]


@pytest.mark.parametrize("keys", KEYS)
def test_dealt_out_they_are_the_same_samples_in_all(keys):
    held, dealt = (Digits(server=24, deal=deal, **keys).federate(7, 3, None) for deal in (False, True))
    assert np.array_equal(samples(held), samples(dealt))
    assert dealt.server_train() is None
    assert (dealt.train_sizes - held.train_sizes).tolist() == [4, 4, 4, 3, 3, 3, 3]
    assert dealt.test_sizes.tolist() == held.test_sizes.tolist()
    header = Digits(server=24, deal=True, **keys).check(7, None)
    assert (header.train, header.server) == (keys.get("train_samples", 1437), 0)


def test_a_server_without_samples_says_so():
    federation = Digits().federate(7, 3, None)
    assert federation.server_train() is None
    assert sum(len(part) for part in federation.train_parts) == 1437 - 1437 % 7


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"server": 1437},
            "data.server = 1437, but there are 1437 training samples for clients and server; nearest: 1436",
        ),
        ({"deal": True}, "data.deal = true, but data.server = 0: expected samples to deal out; nearest: 1"),
        ({"server": 1432, "deal": True}, "clients = 7, but there are 5 training samples; nearest: 5"),
    ],
)
def test_impossible_shares_of_the_server_are_refused(keys, message):
    assert refused(Digits(**keys).check, 7, None) == message
    assert refused(Digits(**keys).federate, 7, 3, None) == message
