"""What the server makes of messages in real time: the sums of simulated time; and the shared state on its way."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpcfl.engine.pace import SumSender
from hpcfl.engine.received import ReceivedSums, add_all
from hpcfl.sums.exact import PIECE
from hpcfl.sums.frames import FrameFormat, Staging, frame_formats
from hpcfl.sums.guard import NO_GROUP
from hpcfl.sums.message import Block, ExactSums
from hpcfl.sums.packing import ALIGNED, APART_BYTES, Packing

LARGE = max(PIECE, APART_BYTES // 4) + 7
LAYOUT = (
    {"loss": Block(())},
    {"weight": Block((LARGE,)), "bias": Block((5,))},
    {"mean": Block((3, 2), torch.float64), "wide": Block((APART_BYTES // 8 + 1,), torch.float64)},
)


@dataclass
class Messages:
    """What a pending holds: the formats, one frame per group, and of whose visit they are."""

    formats: list[FrameFormat]
    frames: list[Any]
    clients: tuple[tuple[int, ...], ...] = ((0,),)


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """One visit's values, of very different sizes."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.as_tensor(rng.normal(size=block.shape) * 10.0 ** rng.integers(-9, 4, block.shape)).to(block.dtype)
        for blocks in LAYOUT
        for name, block in blocks.items()
    }


def received(visits: list[tuple[dict[str, torch.Tensor], float]]) -> Any:
    """A pending of one lane into which each rank has sent its visit, with the same weight for all blocks."""
    groups = frame_formats(LAYOUT, len(visits))
    data = [group.zeros() for group in groups]
    for local_rank, (values, weight) in enumerate(visits):
        factor = weight if len(visits) > 1 else 1.0
        for group, frame in zip(groups, data):
            group.sign(frame, local_rank, 0.5)
            for name in group.blocks:
                group.weigh(frame, local_rank, name, weight)
                group.value(frame, name).add_(values[name].flatten() * factor)
    return Messages(groups, data)


def deposited(visits: list[tuple[dict[str, torch.Tensor], float, int]]) -> ExactSums:
    """The same in simulated time; of each visit the first groups count."""
    sums = ExactSums(LAYOUT)
    for values, weight, count in visits:
        for blocks in LAYOUT[:count]:
            sums.add({name: (values[name][None], torch.tensor([weight], dtype=torch.float64)) for name in blocks})
    return sums


def assert_same(held: ReceivedSums, sums: ExactSums) -> None:
    for name in sums:
        assert held.weight(name) == sums.weight(name), name
        assert torch.equal(held.total(name), sums.total(name)), name
        assert torch.equal(held.mean(name), sums.mean(name)), name


VISITS = [(drawn(0), 3.0, 3), (drawn(1), 1.0, 2), (drawn(2), 123_457.0, 3), (drawn(3), 0.5, 1)]


def test_messages_of_single_ranks_are_summed_to_the_bit_as_in_simulated_time() -> None:
    kept: list[Any] = [(received([(values, weight)]), count) for values, weight, count in VISITS]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        assert_same(ReceivedSums(LAYOUT, 4, np.zeros(2), [kept[index] for index in order]), deposited(VISITS))


def test_what_was_summed_up_early_counts_too() -> None:
    early = ExactSums(LAYOUT)
    for values, weight, _ in (VISITS[0], VISITS[2]):
        add_all(received([(values, weight)]), early)
    kept: Any = [(received([VISITS[1][:2]]), 2)]
    assert_same(ReceivedSums(LAYOUT, 3, np.zeros(2), kept, early), deposited([*VISITS[:3]]))
    assert_same(ReceivedSums(LAYOUT, 3, np.zeros(2), [], early), deposited([VISITS[0], VISITS[2]]))


@pytest.mark.parametrize("largest", [0.01, 1e4])
def test_several_threads_find_the_bits_of_one(largest: float) -> None:
    """Of sums that are held, of sums formed early, and of the new state; also of what whole numbers cannot hold."""
    size = 5 * PIECE + 7
    layout, rng = ({"weight": Block((size,))},), np.random.default_rng(3)
    (group,), visits = frame_formats(layout, 1), []  # type: ignore[var-annotated]
    for number in range(5):
        frame = group.zeros()
        group.weigh(frame, 0, "weight", 7.0 * number + 1)
        group.value(frame, "weight").copy_(torch.from_numpy(rng.normal(0, largest, size)))
        visits.append(Messages([group], [frame]))
    found = []
    try:
        before = torch.get_num_threads()
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            early = ExactSums(layout)
            add_all(visits[0], early)  # type: ignore[arg-type]
            for sums in (early, ReceivedSums(layout, 5, np.zeros(1), [(one, 1) for one in visits[1:]], early)):  # type: ignore[misc]
                found += [sums.total("weight").clone(), sums.moved("weight", torch.ones(size))]
    finally:
        torch.set_num_threads(before)
    values = [group.value(one.frames[0], "weight").double() * (7.0 * n + 1) for n, one in enumerate(visits)]
    for each, expected in zip(found, 3 * [values[0], values[0] + 1, sum(values), 1 + sum(values) / 75]):
        assert torch.allclose(each.double(), expected, rtol=1e-6, atol=1e-6 * largest)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(found[:4] + found[:4], found[4:]))


def chunked(visits: list[tuple[dict[str, torch.Tensor], float]]) -> tuple[Any, list[Any]]:
    """What one lane receives of two chunks of visits, and the messages that the chunks have sent."""
    groups, put = frame_formats(LAYOUT, 1, len(visits)), []  # type: ignore[var-annotated]
    pace: Any = SimpleNamespace(over=Event(), wait=lambda number: None, seconds=lambda: 0.25)
    sender, messages = SumSender(groups, 0, Staging(torch.device("cpu")), pace, put.append), []
    for part in (visits[:1], visits[1:]):
        weight = torch.tensor([each for _, each in part], dtype=torch.float64)
        messages.append({name: (torch.stack([values[name] for values, _ in part]), weight) for name in drawn(0)})
        sender.take(messages[-1])
        sender.end(np.full(len(part), NO_GROUP), [0] * len(part))
    sender.finish()
    return Messages(groups, [staged.parts for staged in put]), messages


@pytest.mark.parametrize("summed_up", [False, True])
def test_sums_of_chunks_are_those_of_simulated_time(summed_up: bool) -> None:
    """Of one rank alone too: what is beyond the grids is dropped there as well."""
    chunks = [chunked([(drawn(number), 2.0 * number + 1) for number in range(5)])]
    chunks.append(chunked([(drawn(9), 3.0), (drawn(8), 1.0)]))
    for count in (1, 2):
        sums = ExactSums(LAYOUT)
        for _, messages in chunks[:count]:
            for message in messages:
                sums.add(message)
        early = ExactSums(LAYOUT) if summed_up and count == 2 else None
        if early is not None:
            add_all(chunks[0][0], early)
        kept: Any = [(pending, 3) for pending, _ in chunks[early is not None : count]]
        assert_same(ReceivedSums(LAYOUT, 7, np.zeros(2), kept, early), sums)


def test_nothing_received_is_nothing() -> None:
    held = ReceivedSums(LAYOUT, 2, np.zeros(2), [])
    assert held.weight("bias") == 0
    assert held.mean("bias").tolist() == [0] * 5
    assert held.total("loss").shape == ()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_lane_are_summed_on_the_way(ranks: int) -> None:
    """Weight 0 and no flag for the last one, whose visit did not come."""
    visits = [(drawn(local_rank), 2.0**local_rank) for local_rank in range(ranks - 1)]
    pending = received([*visits, ({name: torch.zeros_like(value) for name, value in drawn(9).items()}, 0.0)])
    held = ReceivedSums(LAYOUT, ranks, np.zeros(2), [(pending, 3)])
    for name in held:
        block = next(blocks[name] for blocks in LAYOUT if name in blocks)
        expected = sum(values[name].double() * weight for values, weight in visits)
        assert held.weight(name) == 2.0 ** (ranks - 1) - 1
        assert held.total(name).dtype == torch.float64
        accuracy = 1e-6 if block.dtype == torch.float32 else 1e-14
        size = sum(values[name].double().abs() * weight for values, weight in visits)
        assert (held.total(name) - expected).abs().max() <= accuracy * size.max()
        mean = held.mean(name).clone()
        assert torch.equal(held.mean(name), mean)  # what was formed before lies in memory of its own
    assert (pending.formats[0].signs(pending.frames[0])[0, :, 0] > 0).tolist() == [True] * ranks


STATE = {
    "first": torch.arange(3.0),
    "flag": torch.tensor([True, False, True]),
    "large": torch.arange(APART_BYTES // 4, dtype=torch.float32).reshape(2, -1),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.zeros(0),
    "turned": torch.arange(APART_BYTES // 4, dtype=torch.float32).reshape(-1, 4).t(),
}


def test_a_state_arrives_as_it_was_sent() -> None:
    packing = Packing(STATE)
    assert packing.parts == [["first", "flag"], ["large"], ["scale", "nothing"], ["turned"]]
    sent, buffer = packing.sent(STATE), packing.zeros()
    for place, part in zip(packing.received(buffer), sent, strict=True):
        place[:] = part
    arrived = packing.views(buffer)
    assert arrived.keys() == STATE.keys()
    for name, value in arrived.items():
        assert value.dtype == STATE[name].dtype
        assert torch.equal(value, STATE[name])
        assert value.numel() == 0 or value.data_ptr() % ALIGNED == buffer.data_ptr() % ALIGNED


def test_large_tensors_are_sent_from_where_they_are() -> None:
    packing = Packing(STATE)
    addresses = [part.ctypes.data for part in packing.sent(STATE)]
    assert addresses[1] == STATE["large"].data_ptr()
    assert addresses[3] != STATE["turned"].data_ptr()  # it does not lie in one piece


def test_packing_is_the_same_as_sending_and_receiving() -> None:
    packing = Packing(STATE)
    one, other = packing.packed(STATE), packing.zeros()
    for place, part in zip(packing.received(other), packing.sent(STATE), strict=True):
        place[:] = part
    assert all(torch.equal(a, b) for a, b in zip(packing.views(one).values(), packing.views(other).values()))


def test_an_empty_state_has_no_parts() -> None:
    packing = Packing({})
    assert (packing.nbytes, packing.parts, packing.sent({}), packing.received(packing.zeros())) == (0, [], [], [])
