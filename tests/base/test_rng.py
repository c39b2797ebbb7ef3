"""Keyed generators: the one that is put from client to client gives what each client's own would."""

from __future__ import annotations

import numpy as np

from hpcfl.base.rng import IDLE, keyed, keyed_in_turn


def test_in_turn_each_client_has_its_own_numbers() -> None:
    clients = [7, 0, 7, 2**40]
    seen = []
    for client, rng in zip(clients, keyed_in_turn(3, "some purpose", 5, clients, 2)):
        own = keyed(3, "some purpose", 5, client, 2)
        for each in range(3):  # 32 bits at a time: one draw leaves the other half of a word for the next
            assert rng.integers(9, dtype=np.uint32) == own.integers(9, dtype=np.uint32), each
        np.testing.assert_array_equal(rng.standard_normal(5), own.standard_normal(5))
        seen.append(own.random())
        assert rng.random() == seen[-1]
    assert seen[0] == seen[2]
    assert len(set(seen)) == 3


def test_iterators_in_use_do_not_share_a_generator() -> None:
    """One that is done with serves another purpose, whose numbers are its own, wherever it was left."""
    for _ in zip([0], keyed_in_turn(3, "some purpose", 5, [1, 2])):
        pass
    assert IDLE
    one, other = keyed_in_turn(4, "mine", 1, [1, 2]), keyed_in_turn(4, "yours", 2, [1, 2], 3)
    for client in (1, 2):
        mine, yours = next(one), next(other)
        assert mine is not yours
        for rng, own in ((mine, keyed(4, "mine", 1, client)), (yours, keyed(4, "yours", 2, client, 3))):
            rng.integers(9, dtype=np.uint32), own.integers(9, dtype=np.uint32)
            assert rng.random() == own.random()
