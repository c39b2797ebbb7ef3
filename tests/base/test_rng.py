"""Keyed generators: the one that is put from client to client gives what each client's own would."""

from __future__ import annotations

import numpy as np

from hpcfl.base.rng import keyed, keyed_in_turn


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
