from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfl.sums.exact import BinnedSum
from hpcfl.sums.message import FIXED_FROM, Block, ExactSums, moved

WIDTH = 3
GRIDS = (2.0**12, 2.0**46, 2.0**80)  # as documented
TYPES = {torch.float32: np.float32, torch.float64: np.float64}

sizes = st.floats(1e-12, 1e6, allow_nan=False)
values = st.builds(lambda size, sign: sign * size, sizes, st.sampled_from([-1.0, 1.0])) | st.just(0.0)
visit = st.tuples(st.lists(values, min_size=WIDTH, max_size=WIDTH), st.integers(0, 10**5))
# 16 visits of at most 1e5 · 1e6 stay below 2^41, the range that the module promises
visits = st.lists(visit, min_size=1, max_size=16)
dtypes = st.sampled_from(list(TYPES))


def layout(dtype):
    return ({"loss": Block((), dtype)}, {"a": Block((WIDTH,), dtype), "b": Block((2, 2), dtype)})


def message(visits, dtype):
    """One chunk's message: block a has the values, the loss is the first of them; b is never sent."""
    rows = torch.tensor([row for row, _ in visits], dtype=dtype)
    weight = torch.tensor([float(weight) for _, weight in visits], dtype=torch.float64)
    return {"loss": (rows[:, 0], weight), "a": (rows, weight)}


def summed(chunks, dtype):
    sums = ExactSums(layout(dtype))
    for chunk in chunks:
        sums.add(message(chunk, dtype))
    return sums


def bits(sums):
    return [buffer.tobytes() for buffer in sums.buffers]


def reduced(ranks, data):
    """The buffers' sums over ranks along a random tree, as an MPI library is free to form them."""
    buffers = [list(sums.buffers) for sums in ranks]
    while len(buffers) > 1:
        one = buffers.pop(data.draw(st.integers(0, len(buffers) - 1)))
        other = buffers.pop(data.draw(st.integers(0, len(buffers) - 1)))
        buffers.append([a + b for a, b in zip(one, other)])
    return [array.tobytes() for array in buffers[0]]


@settings(max_examples=150, deadline=None)
@given(visits, dtypes, st.data())
def test_any_order_any_grouping_and_any_tree_give_the_same_bits(visits, dtype, data):
    alone = bits(summed([[visit] for visit in visits], dtype))
    ranks = data.draw(st.integers(1, 5))
    hosts = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(visits), max_size=len(visits)))
    order = data.draw(st.permutations(range(len(visits))))
    shares = [[[visits[i]] for i in order if hosts[i] == rank] for rank in range(ranks)]
    assert reduced([summed(share, dtype) for share in shares], data) == alone


@settings(max_examples=60, deadline=None)
@given(st.lists(visits, min_size=1, max_size=4), dtypes, st.data())
def test_chunks_of_several_visits_may_come_in_any_order(chunks, dtype, data):
    chunks = [chunk[:4] for chunk in chunks]
    order = data.draw(st.permutations(chunks))
    assert bits(summed(order, dtype)) == bits(summed(chunks, dtype))


@settings(max_examples=150, deadline=None)
@given(visits, dtypes)
def test_totals_are_the_exact_sums(visits, dtype):
    sums = summed([[visit] for visit in visits], dtype)
    number = TYPES[dtype]
    # each add drops less than half of the last grid; adding up the grids' sums rounds once per grid
    dropped = len(visits) * 0.5 / GRIDS[sums.layout[1]["a"].bins - 1]
    between = 0.0 if dtype == torch.float32 else len(visits) / GRIDS[0] * 2.0**-53
    for column in range(WIDTH):
        products = [float(number(row[column])) * weight for row, weight in visits]
        exact = math.fsum(products)
        assert abs(float(sums.total("a")[column]) - exact) <= math.ulp(exact) + dropped + between
    assert sums.weight("a") == sum(weight for _, weight in visits)
    assert torch.equal(sums.total("loss"), sums.total("a")[0])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(1e-3, 1e6), min_size=WIDTH, max_size=WIDTH), st.integers(1, 10**5)),
        min_size=1,
        max_size=16,
    )
)
def test_float64_totals_of_one_sign_are_right_to_one_ulp(visits):
    sums = summed([[visit] for visit in visits], torch.float64)
    for column in range(WIDTH):
        exact = math.fsum(row[column] * weight for row, weight in visits)
        assert abs(float(sums.total("a")[column]) - exact) <= math.ulp(exact)
        mean = float(sums.mean("a")[column])
        assert mean == pytest.approx(exact / sum(weight for _, weight in visits), rel=4e-16)


def test_plain_sums_would_depend_on_the_order():
    visits = [([value] * WIDTH, weight) for value, weight in ((0.1, 1), (0.2, 1), (0.3, 1), (1e4 / 3, 7))]
    plain = {sum(row[0] * weight for row, weight in order) for order in permutations(visits)}
    exact = {tuple(bits(summed([[visit] for visit in order], torch.float64))) for order in permutations(visits)}
    assert len(plain) > 1
    assert len(exact) == 1


@given(st.floats(-1e9, 1e9), st.sampled_from([2, 3]))
def test_a_split_adds_up_and_lies_on_the_grids(value, bins):
    parts = np.zeros((bins, 1))
    BinnedSum(parts).add(np.array([value]), slice(0, 1))
    for part, grid in zip(parts, GRIDS):
        assert part[0] * grid == round(part[0] * grid)
    assert abs(math.fsum([*parts.flatten().tolist(), -value])) <= 0.5 / GRIDS[bins - 1]


def test_a_missing_block_is_weight_zero_and_mean_zero():
    sums = ExactSums(layout(torch.float32), invited=5)
    sums.add({"a": (torch.full((2, WIDTH), 7.0), torch.tensor([1.0, 3.0]))})
    assert [sums.weight(name) for name in sums] == [0, 4, 0]
    assert sums.mean("a").tolist() == [7, 7, 7]
    for mean in (sums.mean("b"), sums.over("b", 0.0), sums.over("b", 5.0)):
        assert mean.tolist() == [[0, 0], [0, 0]]
    assert sums.mean("loss").item() == 0
    assert "b" in sums
    assert "c" not in sums


def test_blocks_that_nobody_sends_do_not_travel():
    blocks = ({"x": Block((2,)), "y": Block((FIXED_FROM,))}, {"z": Block((3, FIXED_FROM))})
    sums = ExactSums(blocks, sent={"x", "z"})
    assert [buffer.nbytes for buffer in sums.buffers] == [3 * 64, 3 * 8 * FIXED_FROM]
    sums.add({"x": (torch.tensor([[1.0, 2.0]]), torch.tensor([2.0])), "y": (torch.ones(0, FIXED_FROM), torch.ones(0))})
    assert list(sums) == ["x", "y", "z"]
    assert [sums.weight(name) for name in sums] == [2, 0, 0]
    assert sums.mean("x").tolist() == [1, 2]
    assert sums.mean("y").tolist() == sums.total("y").tolist() == [0] * FIXED_FROM
    with pytest.raises(KeyError):
        sums.add({"y": (torch.ones(1, FIXED_FROM), torch.ones(1))})
    assert ExactSums(blocks, sent=()).buffers == []


@pytest.mark.parametrize("dtype", TYPES)
def test_a_chunk_of_no_rows_adds_nothing(dtype):
    sums = summed([[([1.0, 2.0, 3.0], 2)]], dtype)
    before = bits(sums)
    sums.add({"a": (torch.zeros(0, WIDTH), torch.zeros(0))})
    assert bits(sums) == before


def test_blocks_of_one_group_do_not_touch_each_other():
    blocks = {"x": Block((2,)), "y": Block((), torch.float64), "z": Block((1, 3))}
    sums = ExactSums((blocks,))
    for name, value in (("z", [[[1.0, 2.0, 3.0]]]), ("x", [[4.0, 5.0]]), ("y", [6.0])):
        sums.add({name: (torch.tensor(value), torch.tensor([2.0]))})
    assert sums.total("x").tolist() == [8, 10]
    assert sums.total("y").tolist() == 12
    assert sums.total("z").tolist() == [[2, 4, 6]]
    assert [block.bytes for block in blocks.values()] == [8, 8, 12]


def test_over_divides_by_what_it_is_told():
    sums = summed([[([1.0, 2.0, 4.0], 3)]], torch.float32)
    assert sums.over("a", 12).tolist() == [0.25, 0.5, 1]


def test_an_update_is_added_in_float64_and_rounded_once():
    value, update = torch.tensor([1.0]), torch.tensor([2.0**-24 + 2.0**-50], dtype=torch.float64)
    assert float(moved(value, update)) == 1 + 2.0**-23  # update first rounded to float32 would tie back to 1
    assert float(value + update.float()) == 1
    assert moved(value, update).dtype == torch.float32


def test_large_tensors_move_by_the_same_bits_in_pieces() -> None:
    rng = np.random.default_rng(3)
    value = torch.from_numpy(rng.normal(size=(700, 300)).astype(np.float32)).t()
    update = torch.from_numpy(rng.normal(size=(300, 700)) * 1e-7)
    after = moved(value, update)
    assert torch.equal(after, (value.double() + update).float())
    assert (after.shape, after.dtype) == (value.shape, torch.float32)
    assert not torch.equal(after, value)
