from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hpcfl.base.types import Floats
from hpcfl.sums import exact
from hpcfl.sums.exact import PIECE, BinnedSum, ExactSum, FixedSum, pieces, sum_small
from hpcfl.sums.message import FIXED_FROM, Block, ExactSums

TINY = 2.0**-46  # one step
HALF = TINY / 2


def fixed(*chunks: list[float], ranks: int = 1) -> FixedSum:
    """The sums of chunks that one rank of so many holds, each chunk a list of n numbers."""
    sums = FixedSum(np.zeros(len(chunks[0]), dtype=np.int64), ranks)
    return added(sums, *chunks)


def added(sums: Any, *chunks: list[float] | Floats) -> Any:
    for chunk in chunks:
        sums.add_rows(torch.as_tensor(chunk, dtype=torch.float64)[None], [1.0])
    return sums


def total(sums: ExactSum, size: int) -> list[float]:
    out = np.empty(size)
    sums.total(out)
    return out.tolist()


def together(ranks: list[FixedSum]) -> FixedSum:
    """What a reduction makes of several ranks' sums."""
    sums = FixedSum(sum((each.whole for each in ranks[1:]), start=ranks[0].whole.copy()))
    if any(each.upper is not None for each in ranks):
        sums.upper = sum((each.wide() for each in ranks), start=np.zeros(len(sums.whole)))
    return sums


@pytest.mark.parametrize("large", [0.0, 32.0, 1024.0])
def test_numbers_are_rounded_to_steps_ties_to_even(large: float) -> None:
    """From 32 on by another way, and from 64 on float64 numbers are multiples of the step by themselves."""
    sums = fixed([0.5, -3.25, HALF, 3 * HALF, -HALF, -3 * HALF, TINY, large])
    expected = [2**45, -13 * 2**44, 0, 2, 0, -2, 1, int(large) << 46]
    assert sums.whole.tolist() == expected
    assert sums.upper is None
    assert total(sums, 8) == [each * TINY for each in expected]


def test_ties_are_rounded_one_by_one_before_they_are_added() -> None:
    assert total(fixed([HALF], [HALF], [32 + HALF], [32 + 3 * HALF]), 1) == [64 + 2 * TINY]


def test_one_number_holds_what_is_in_range_and_a_bin_takes_what_is_beyond() -> None:
    assert fixed([2.0**16 - 1, 0.0]).upper is None
    assert fixed([2.0**15], [-(2.0**15) + 1]).upper is None  # the bound is 2^16 - 1
    for chunks in ([[2.0**16]], [[-(2.0**16)]], [[2.0**15], [2.0**15]], [[2.0**15], [-(2.0**15)]]):
        sums = fixed(*chunks)
        assert sums.upper is not None
        assert total(sums, 1) == [sum(chunk[0] for chunk in chunks)]
    assert fixed([2.0**14 - 1], ranks=4).upper is None
    assert fixed([2.0**14], ranks=4).upper is not None  # four such sums are 2^16


def test_what_is_large_does_not_swallow_what_is_small() -> None:
    chunks = [[2.0**40 + 0.25], [2.0**-40], [-(2.0**40)], [-0.25], [5.0]]
    assert sum(chunk[0] for chunk in chunks) == 5.0
    assert total(fixed(*chunks), 1) == [5 + 2.0**-40]
    assert total(fixed(*chunks[::-1]), 1) == [5 + 2.0**-40]


def test_each_piece_of_a_block_has_a_range_of_its_own() -> None:
    size = PIECE + 3
    chunk = np.full(size, 0.5)
    chunk[1] = 2.0**17
    sums = added(FixedSum(np.zeros(size, dtype=np.int64)), chunk)
    assert sums.upper is not None
    assert np.flatnonzero(sums.upper).tolist() == [*range(PIECE)]
    assert sums.whole[PIECE:].tolist() == [2**45] * 3
    assert total(sums, size) == chunk.tolist()


def drawn(most: int, size: int = 64, count: int = 12) -> list[Floats]:
    """Chunks of numbers of many sizes, up to 10^most."""
    rng = np.random.default_rng(most + 20)
    return [rng.normal(size=size) * 10.0 ** rng.integers(-16, most + 1, size) for _ in range(count)]


@pytest.mark.parametrize("most", [-3, 1, 3, 5, 10])
def test_bins_order_and_ranks_change_nothing(most: int) -> None:
    chunks = drawn(most)
    expected = total(added(BinnedSum(np.zeros((2, 64))), *chunks), 64)
    steps = [[round(float(value) / TINY) for value in chunk] for chunk in chunks]  # Python's whole numbers
    assert expected == [math.ldexp(sum(column), -46) for column in zip(*steps)]
    rng = np.random.default_rng(1)
    for ranks in (1, 2, 3, 4):
        order = rng.permutation(len(chunks))
        parts = [
            added(FixedSum(np.zeros(64, dtype=np.int64), ranks), *(chunks[place] for place in places))
            for places in np.array_split(order, ranks)
        ]
        assert total(together(parts), 64) == expected


def test_sums_of_whole_steps_are_what_fsum_finds() -> None:
    rng = np.random.default_rng(5)
    chunks = [np.ldexp(rng.integers(-(2**52), 2**52, 50).astype(float), -46 + 8 * (k % 3)) for k in range(9)]
    sums = added(FixedSum(np.zeros(50, dtype=np.int64)), *chunks)
    assert sums.upper is not None
    assert total(sums, 50) == [math.fsum(column) for column in np.transpose(chunks).tolist()]


@pytest.mark.parametrize("value", [2.0**41, 1e15, 1e30, -1e200, math.inf, -math.inf, math.nan])
def test_sums_beyond_all_ranges_are_still_sums(value: float) -> None:
    chunks = [[value, 1.0], [value, 2.0], [1.5, 4.0]]
    with np.errstate(invalid="ignore"):
        found = total(fixed(*chunks), 2)
    assert found[0] == pytest.approx(2 * value + 1.5, rel=1e-12, nan_ok=True)
    assert found[1] == 7.0


def test_factors_are_exact() -> None:
    rows = torch.tensor([[1.5, 3.0], [0.25, 1.0], [2.0, -1.0]])
    for sums in (FixedSum(np.zeros(2, dtype=np.int64)), BinnedSum(np.zeros((2, 2)))):
        sums.add_rows(rows, [3.0, 1000.0, 0.5])
        assert total(sums, 2) == [255.5, 1008.5]
        sums.add_rows(rows[:0], [])
        assert total(sums, 2) == [255.5, 1008.5]


def test_small_sums_are_formed_in_one_grid_to_the_same_bits() -> None:
    values = [(torch.as_tensor(chunk).float(), factor) for chunk, factor in zip(drawn(-1), (3.0, 1.0, -5.0, 0.125))]
    out, sums = np.full(64, np.nan), FixedSum(np.zeros(64, dtype=np.int64))
    for value, factor in values:
        sums.add_rows(value[None], [factor])
    assert sum_small([(value.numpy(), factor) for value, factor in values], out) == 4
    assert out.tolist() == total(sums, 64)
    half = np.array([HALF, 3 * HALF], np.float32)
    assert sum_small([(half, 1.0), (half, 1.0)], out[:2]) == 2
    assert out[:2].tolist() == [0, 4 * TINY]


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([], 0),
        ([32.0], 0),
        ([-32.0], 0),
        ([31.0, 1.0], 1),
        ([8.0, -24.0], 1),
        ([8.0, -4.0, 0.5, 64.0, 1.0], 3),
        ([math.nan], 0),
        ([3.0, math.inf], 1),
    ],
)
def test_one_grid_takes_the_first_that_are_small_together(values: list[float], count: int) -> None:
    out = np.zeros(2)
    assert sum_small([(np.array([value / 2, 0.0], np.float32), 2.0) for value in values], out) == count
    if count:
        assert out.tolist() == [sum(values[:count]), 0.0]


@pytest.mark.parametrize("factors", [[1.0, 3.0, 700.0, 0.1], [2.0**17, -5.0, 2.0**30 + 1.0, 1e-3]])
def test_values_of_any_size_are_added_in_any_order_as_one_by_one(factors: list[float]) -> None:
    """Among them a factor by which products are not exact, and sums that need a bin beside whole numbers."""
    values = [(chunk.astype(np.float32), factors[number % 4]) for number, chunk in enumerate(drawn(1, 5000))]
    apart = FixedSum(np.zeros(5000, dtype=np.int64))
    for value, factor in values:
        apart.add_rows(torch.from_numpy(value)[None], [factor])
    assert (apart.upper is not None) == (factors[0] > 1)
    for order in (slice(None), slice(None, None, -1)):
        out, ordered = np.empty(5000), values[order]
        for small in {0, sum_small(ordered, out)}:
            together = FixedSum(np.zeros(5000, dtype=np.int64))
            together.add_values(ordered[small:], out if small else None)
            assert total(together, 5000) == total(apart, 5000)


@pytest.mark.parametrize("most", [1, 6])
def test_sums_begin_where_others_are(most: int) -> None:
    chunks = drawn(most, PIECE + 7, 2)
    for whole, part in (
        (FixedSum(np.zeros(PIECE + 7, dtype=np.int64)), FixedSum(np.ones(7, dtype=np.int64))),
        (BinnedSum(np.zeros((3, PIECE + 7))), BinnedSum(np.ones((3, 7)))),
    ):
        tail = pieces(PIECE + 7)[1]
        added(whole, chunks[0])
        part.start(whole, tail)
        added(part, chunks[1][tail])
        added(whole, chunks[1])
        assert total(part, 7) == total(whole, PIECE + 7)[tail]
        part.start(None, tail)
        assert total(part, 7) == [0.0] * 7


LAYOUT = ({"small": Block((3,)), "large": Block((FIXED_FROM,))}, {"other": Block((2, FIXED_FROM))})


def test_large_float32_blocks_are_one_number_for_each() -> None:
    assert [block.sum_bytes for group in LAYOUT for block in group.values()] == [48, 8 * FIXED_FROM, 16 * FIXED_FROM]
    assert not Block((FIXED_FROM,), torch.float64).fixed
    buffers = ExactSums(LAYOUT).buffers
    assert [buffer.dtype for buffer in buffers] == [np.float64, np.int64, np.int64]
    assert [buffer.size for buffer in buffers[1:]] == [FIXED_FROM, 2 * FIXED_FROM]


def visits(factor: float) -> list[dict[str, Any]]:
    """Messages of seven chunks; the last one's are so many times as large."""
    rng = np.random.default_rng(8)
    weights = torch.tensor([3.0, 5.0], dtype=torch.float64)
    blocks = {name: block for group in LAYOUT for name, block in group.items()}
    return [
        {
            name: (torch.as_tensor(rng.normal(size=(2, *block.shape)) * (factor if n == 6 else 1)).float(), weights)
            for name, block in blocks.items()
        }
        for n in range(7)
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("factor", [1.0, 1e6])
@pytest.mark.parametrize(("way", "copies"), [("close", 1), ("share", 2)])
@pytest.mark.parametrize("together", [1, 2])
def test_ranks_with_and_without_a_second_bin_find_the_same(
    world: Any, together: int, way: str, copies: int, factor: float
) -> None:
    """However many ranks a host has: a copy of the sums for each rank but one goes up, and as many come down."""
    if world.comm is None:
        pytest.skip("needs MPI")
    from hpcfl.mpi.collective import Collective

    alone, mine = ExactSums(LAYOUT), ExactSums(LAYOUT, ranks=world.size)
    for number, message in enumerate(visits(factor)):
        alone.add(message)
        if number % world.size == world.rank:
            mine.add(message)
    transport = Collective(world.comm, hosts=[f"host {rank // together}" for rank in range(world.size)])
    sums = getattr(transport, way)(mine)
    sent, received = (world.comm.allreduce(each) for each in transport.count())
    transport.leave()
    model = 4 * (3 + 3 * FIXED_FROM)
    assert sent == received
    if world.size > 1:
        assert (sent < 2.1 * model * copies * (world.size - 1)) == (factor == 1.0)
        assert sent < 4.2 * model * copies * (world.size - 1)
    if world.rank == 0 or way == "share":
        for name in alone:
            assert torch.equal(sums.total(name), alone.total(name))
            assert sums.weight(name) == alone.weight(name) == 56


@pytest.mark.parametrize("make", [lambda n: BinnedSum(np.zeros((2, n))), lambda n: FixedSum(np.zeros(n, np.int64))])
def test_many_rows_of_few_numbers_are_what_they_are_one_by_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(70, 33, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-20.0, 13)
    factors = [float(number % 900) for number in range(70)]
    found, wanted = np.empty(33), np.empty(33)
    together, apart = make(33), make(33)
    together.add_rows(rows, factors)
    together.total(found)
    monkeypatch.setattr(exact, "FEW", 0)
    apart.add_rows(rows, factors)
    apart.total(wanted)
    assert found.tolist() == wanted.tolist()
    assert len(set(found.tolist())) > 20


@pytest.mark.parametrize("make", [lambda n: BinnedSum(np.zeros((2, n))), lambda n: FixedSum(np.zeros(n, np.int64))])
@pytest.mark.parametrize("factor", [700.0, 0.1])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_added_one_after_the_other(
    make: Any, factor: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products by counts of samples are exact, by other factors they are rounded with the sum."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = PIECE + 5000
    rows = torch.randn(13, size, generator=torch.Generator().manual_seed(0))
    rows *= 10.0 ** torch.linspace(-20.0, 3, size)
    found, wanted, one_by_one = make(size), make(size), torch.zeros(size, dtype=torch.float64)
    found.add_rows(rows, [factor] * 13)
    for row in rows:
        one_by_one.add_(row, alpha=factor * wanted.scale)
    for piece in pieces(size):
        wanted.add(one_by_one[piece].numpy(), piece)
    assert total(found, size) == total(wanted, size)
