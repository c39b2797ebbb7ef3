"""Room in large pages: what is in use is left alone, what is not is used again."""

from __future__ import annotations

import gc

import pytest
import torch

from hpcfl.sums.packing import ALIGNED, CHUNK_BYTES, LARGE_BYTES, BufferPool, Spare


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_in_use_is_left_alone(dtype: torch.dtype) -> None:
    pool, like = BufferPool(), (200, 1000)
    before = [pool.empty(like, dtype).fill_(-1)]
    for number in range(40):
        now = [pool.empty(like, dtype).fill_(number) for _ in range(9)]
        assert all(bool((each == number).all()) and each.shape == like and each.dtype == dtype for each in now)
        assert all(bool((each == number - 1).all()) for each in before)
        before = now


def test_chunks_come_back_when_all_in_them_are_gone() -> None:
    pool, like = BufferPool(), (CHUNK_BYTES // 64,)  # sixteen to a chunk
    kept = [pool.empty(like, torch.float32) for _ in range(33)]
    places = {part.data_ptr() for part in kept[:16]}
    del kept[:16]
    gc.collect()
    again = [pool.empty(like, torch.float32) for _ in range(31)]
    assert {part.data_ptr() for part in again[-16:]} == places
    assert len({part.data_ptr() for part in [*kept, *again]}) == 48


def test_odd_sizes_stay_aligned() -> None:
    pool = BufferPool()
    sizes = (1, 7, 100, 33, CHUNK_BYTES // 4, LARGE_BYTES // 4, LARGE_BYTES + 1)
    tensors = [pool.empty((size,), torch.float32).fill_(number) for number, size in enumerate(sizes)]
    assert all(part.data_ptr() % ALIGNED == 0 for part in tensors)
    assert [tuple(part.shape) for part in tensors] == [(size,) for size in sizes]
    assert all(bool((part == number).all()) for number, part in enumerate(tensors))
    assert pool.empty((), torch.float64).shape == ()
    assert pool.empty((3, 0), torch.float64).shape == (3, 0)


def test_large_ones_have_pages_of_their_own_which_come_back() -> None:
    pool, size = BufferPool(), (LARGE_BYTES // 4 + 5,)
    one, other = (pool.empty(size, torch.float32) for _ in range(2))
    place = one.data_ptr()
    assert place % LARGE_BYTES == other.data_ptr() % LARGE_BYTES == 0
    view = one[5:]
    del one
    gc.collect()
    assert pool.empty(size, torch.float32).data_ptr() not in (place, other.data_ptr())
    del view
    gc.collect()
    assert pool.empty(size, torch.float32).data_ptr() == place


def test_a_spare_is_one_tensor_at_a_time() -> None:
    spare, size = Spare(), LARGE_BYTES // 8
    one = spare.empty((size + 4,), torch.float64).fill_(1)
    place, view = one.data_ptr(), one[3:]
    other = spare.empty((size,), torch.float64).fill_(2)
    del one
    gc.collect()
    assert spare.empty((size,), torch.float64).data_ptr() != place
    assert bool((view == 1).all())
    assert other.shape == (size,)
    del view
    gc.collect()
    again = spare.empty((2, size // 2), torch.float64)
    assert (again.data_ptr(), again.shape) == (place, (2, size // 2))
    assert spare.empty((), torch.float64).shape == ()


@pytest.mark.parametrize("nbytes", [10, LARGE_BYTES + 3])
def test_zeros_are_zeros_in_memory_that_is_used_again_too(nbytes: int) -> None:
    pool = BufferPool()
    one = pool.zeros(nbytes).fill_(7)
    place = one.data_ptr()
    del one
    gc.collect()
    again = pool.zeros(nbytes)
    assert again.shape == (nbytes,)
    assert not again.any()
    assert again.data_ptr() == place or nbytes < LARGE_BYTES
