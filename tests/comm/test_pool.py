"""Room in large pages: what is in use is left alone, what is not is used again."""

from __future__ import annotations

import gc

import pytest
import torch

from hpcfl.comm.pool import CHUNK_BYTES, BufferPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_in_use_is_left_alone(dtype: torch.dtype) -> None:
    pool, like = BufferPool(), torch.zeros(200, 1000, dtype=dtype)
    before = [pool.empty_like(like).fill_(-1)]
    for number in range(40):
        now = [pool.empty_like(like).fill_(number) for _ in range(9)]
        assert all(bool((each == number).all()) and each.shape == like.shape and each.dtype == dtype for each in now)
        assert all(bool((each == number - 1).all()) for each in before)
        before = now


def test_chunks_come_back_when_all_in_them_are_gone() -> None:
    pool, like = BufferPool(), torch.zeros(CHUNK_BYTES // 64)  # sixteen to a chunk
    kept = [pool.empty_like(like) for _ in range(33)]
    places = {part.data_ptr() for part in kept[:16]}
    del kept[:16]
    gc.collect()
    again = [pool.empty_like(like) for _ in range(31)]
    assert {part.data_ptr() for part in again[-16:]} == places
    assert len({part.data_ptr() for part in [*kept, *again]}) == 48


def test_odd_sizes_stay_aligned_and_large_ones_are_torchs() -> None:
    pool = BufferPool()
    assert all(pool.empty_like(torch.zeros(size)).data_ptr() % 64 == 0 for size in (1, 7, 100, 33))
    assert pool.empty_like(torch.zeros(CHUNK_BYTES // 4)).shape == (CHUNK_BYTES // 4,)
    assert pool.empty_like(torch.zeros(5, 4).t()).is_contiguous()
