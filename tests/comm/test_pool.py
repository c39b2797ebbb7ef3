"""Memory that is used again: whose it is, and what it holds at first."""

from __future__ import annotations

import pytest

from hpcfl.comm.pool import ALIGNED, LARGE_BYTES, BufferPool


@pytest.mark.parametrize("nbytes", [LARGE_BYTES + 3, 3 * LARGE_BYTES])
def test_large_memory_is_used_again_once_nothing_keeps_it(nbytes: int) -> None:
    pool = BufferPool()
    first = pool.zeros(nbytes)
    place, part = first.data_ptr(), first.fill_(7)[5:9]
    del first
    other = pool.zeros(nbytes)
    assert part.tolist() == [7] * 4  # a view keeps all of it
    assert other.data_ptr() != place
    del part
    again = pool.zeros(nbytes)
    assert again.data_ptr() == place
    assert again.shape == (nbytes,)
    assert not again.any()
    assert place % ALIGNED == 0


def test_little_memory_is_torchs_own() -> None:
    assert BufferPool().zeros(10).tolist() == [0] * 10
