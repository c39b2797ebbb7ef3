"""How the blocks of a visit, or of a chunk of visits, travel: one frame per group, its head and then its large blocks.

The head is ``[sent, seconds, gradients, weights, values of the small blocks]``. Each client rank of the lane writes the
flags, seconds and gradients of its visits, and its weights, at places of its own: after a sum over ranks they can still
be told apart. Large blocks are sent from where they are. A rank alone on its lane sends a visit's values as they are,
or in the bytes of a `Code`, and the server multiplies them by their weights in float64, as in simulated time. Ranks
that share a lane send ``weight·value``, since MPI adds them up on the way; there the sum is rounded at the blocks'
precision. Of chunks of visits the exact sums travel that are formed in simulated time (`hpcfl.sums.message`): the bins
of ``Σ weight·value``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.device_copy import backend, behind
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats
from hpcfl.sums.exact import BinnedSum, ExactSum, FixedSum
from hpcfl.sums.message import Block, ExactSums, Layout
from hpcfl.sums.packing import APART_BYTES, POOL, Packing

Frame = list[Tensor]
"""One group of blocks as it travels: its head, then its large blocks, all of them flat."""
SENT, REJECTED = 1.0, -1.0
SIGNS = 5  # what a rank signs with: its flag, its seconds, its gradients in two parts, and its steps


Place = tuple[slice, tuple[int, ...]]
"""Where in a head some of its numbers stand, and the shape that they have."""


class HeadFormat:
    """The format of one group's frames, of which all have a head that says first who has sent what follows.

    So many client `ranks` sign, each for so many `visits` at a time, with so many numbers for each.
    """

    dtype: torch.dtype

    def __init__(self, blocks: dict[str, Block], ranks: int, visits: int, signs: int) -> None:
        self.blocks, self.ranks, self.visits, self.size = blocks, ranks, visits, 0
        self._signs = self._place(signs, ranks, visits)

    def _place(self, *shape: int) -> Place:
        """Return the place of this shape that comes next in the head."""
        start, self.size = self.size, self.size + prod(shape)
        return slice(start, self.size), shape

    def head(self, pinned: bool = False) -> Tensor:
        """Return a head that says that nothing was sent."""
        return torch.zeros(self.size, dtype=self.dtype, pin_memory=pinned)

    def signs(self, frame: Frame) -> NDArray[np.floating]:
        """Return where visits sign, [5, ranks, visits]; of a leader's sums [6, …], the last row being its own.

        `SENT` who has sent this frame, `REJECTED` whose visit was rejected by it, 0 else; then the visit's seconds and
        gradients by then, the latter in two parts, and its local steps where they may differ.
        """
        return _numbers(frame, self._signs)

    def came(self, frame: Frame) -> Frame:
        """Return what of a frame has come from a rank alone on its lane."""
        return frame

    def gradients(self, frame: Frame, local_rank: int, place: int = 0) -> int:
        """Return how many gradients a rank's visit has signed with."""
        return sum(int(part) for part in self.signs(frame)[2:4, local_rank, place])


class FrameFormat(HeadFormat):
    """The format of one group's frames on a lane of so many client `ranks`, each with so many `visits` at a time.

    Attributes
    ----------
    sums : bool
        Whether values are the bins of sums over a rank's visits, ``[bins, n]``.
    sent : dict of str to shape
        What travels of each block: all of it, or the `part` that the single visit of a rank alone on its lane holds.
    codes : dict of str to Code
        By which the single visit of such a rank writes blocks, as bytes.
    """

    def __init__(self, blocks: dict[str, Block], ranks: int, visits: int = 1, part: int | None = None) -> None:
        super().__init__(blocks, ranks, visits, SIGNS)
        self.sums = visits > 1
        held = {} if part is None else {name: block.parts[part] for name, block in blocks.items() if block.parts}
        self.sent = {name: held.get(name, block.shape) for name, block in blocks.items()}
        large = [name for name, block in blocks.items() if block.bytes >= APART_BYTES]
        self.large = {name: place for place, name in enumerate(large, start=1)}  # where in a frame they are
        small = [name for name in blocks if name not in self.large]
        alone = ranks == visits == 1
        self.codes = {name: block.code for name, block in blocks.items() if alone and block.code is not None}
        double = self.sums or any(blocks[name].dtype == torch.float64 for name in small if name not in self.codes)
        self.dtype = torch.float64 if double else torch.float32
        self._weights = {name: self._place(2, len(block.held), ranks) for name, block in blocks.items()}
        drawn = any(code.drawn for code in self.codes.values())
        self._visit = self._place(2 * drawn, 3)  # of which round, client and number it is
        self.small = {name: self._place(self.numbers(name))[0] for name in small}  # where in the head they are

    def zeros(self) -> Frame:
        return [torch.zeros(size, dtype=dtype) for size, dtype in self.sizes()]

    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """Return entries and type of each part of a frame."""
        return [(self.size, self.dtype), *((self.numbers(name), self.kind(name)) for name in self.large)]

    def numbers(self, name: str) -> int:
        """Return how many numbers of a block travel: what has a code as bytes, in a head as so many of its numbers."""
        if name in self.codes:
            return -(-self._coded_bytes(name) // (1 if name in self.large else self.dtype.itemsize))
        return prod(self.sent[name]) * (self.blocks[name].bins if self.sums else 1)

    def kind(self, name: str) -> torch.dtype:
        """Return the type in which a large block travels."""
        return torch.uint8 if name in self.codes else torch.float64 if self.sums else self.blocks[name].dtype

    def _coded_bytes(self, name: str) -> int:
        return self.codes[name].bytes(prod(self.sent[name]), self.blocks[name].dtype.itemsize)

    def sign(
        self,
        frame: Frame,
        local_rank: int,
        seconds: float,
        gradients: int = 0,
        flag: float = SENT,
        place: int = 0,
        steps: int = 0,
    ) -> None:
        """Mark the frame as sent by a rank's visit, `seconds` after it began, with so many gradients and steps."""
        self.signs(frame)[:, local_rank, place] = flag, seconds, *_parts(gradients), steps

    def weigh(self, frame: Frame, local_rank: int, name: str, weight: float, part: int = 0) -> None:
        """Note a rank's weight of a block, of which it has sent a part: its number in `Block.held`."""
        _numbers(frame, self._weights[name])[:, part, local_rank] = _parts(weight)

    def weights(self, frame: Frame, name: str) -> Floats:
        """Return each rank's weight of a block, float64 [ranks]."""
        return self._weighed(frame, name, 0)

    def part_weights(self, frame: Frame, name: str) -> Floats:
        """Return the weight of each of a block's parts over all ranks, float64 [parts]."""
        return self._weighed(frame, name, 1)

    def _weighed(self, frame: Frame, name: str, axis: int) -> Floats:
        high, low = _numbers(frame, self._weights[name]).astype(np.float64)
        weights: Floats = (high + low).sum(axis)
        return weights

    def lacks(self, frame: Frame, name: str) -> bool:
        """Return whether nobody has sent a block: then only zeros stand for it, or what was there before."""
        return not self.part_weights(frame, name).any()

    def came(self, frame: Frame) -> Frame:
        return [frame[0], *(frame[place] for name, place in self.large.items() if not self.lacks(frame, name))]

    def single(self, frame: Frame, name: str, local_rank: int, place: int) -> tuple[Tensor, Tensor]:
        """Return what the visit of a rank alone on its lane has sent of a block, flat, and its weight [1]."""
        return self.whole(frame, name), torch.from_numpy(self.weights(frame, name))

    def value(self, frame: Frame, name: str) -> Tensor:
        """Return a block as it was sent, flat; of several ranks the weighted sum."""
        room = self.room(frame, name)
        if name not in self.codes:
            return room
        if self.lacks(frame, name):  # its room may have what was there before
            return torch.zeros(prod(self.sent[name]), dtype=self.blocks[name].dtype)
        visit = _numbers(frame, self._visit).astype(np.float64).sum(0).astype(np.int64).tolist()
        return self.codes[name].decode(room, prod(self.sent[name]), self.blocks[name].dtype, visit)

    def room(self, frame: Frame, name: str) -> Tensor:
        """Return where a block is in a frame, as it travels."""
        room = frame[self.large[name]] if name in self.large else frame[0][self.small[name]]
        return room.view(torch.uint8)[: self._coded_bytes(name)] if name in self.codes else room

    def encoded(self, frame: Frame, name: str, value: Tensor, visit: Sequence[int]) -> Tensor:
        """Return a block as it travels from this visit, of which the head tells as much as its reader needs."""
        if name not in self.codes:
            return value
        if self.codes[name].drawn:
            _numbers(frame, self._visit)[:] = np.transpose([_parts(each) for each in visit])
        return self.codes[name].encode(value, visit)

    def whole(self, frame: Frame, name: str) -> Tensor:
        """Return the same with 0 where the visit holds nothing of the block."""
        value, shape = self.value(frame, name), self.sent[name]
        return value if shape == self.blocks[name].shape else self.blocks[name].whole(value.view(1, *shape))[0]

    def bins(self, frame: Frame, name: str) -> Floats:
        """Return the bins of a block's sum, float64 [bins, n]."""
        return self.value(frame, name).numpy().reshape(self.blocks[name].bins, self.blocks[name].size)

    def sum(self, frame: Frame, name: str) -> ExactSum | None:
        """Return a block's sum, where values are such; None where there is nothing."""
        return None if self.lacks(frame, name) else BinnedSum(self.bins(frame, name))


class SumFormat(HeadFormat):
    """The format of one group's sums as a leader sends them on: over so many `visits` of each of so many `ranks`.

    A head comes first, ``[signs, what single visits have sent of blocks that are kept, each block's weights, how their
    sums come, the sums that are small]``; then what the head says of each large block: nothing where nobody
    has sent any, its whole numbers, and what is beside them only where that is needed (`hpcfl.sums.exact`). Visits sign
    as in a `FrameFormat`, and with the seconds from the round's start until the leader had the group.

    Attributes
    ----------
    kept : list of str
        The blocks of which each visit's own values travel too.
    large : list of str
        Those whose sums come by themselves.
    """

    sums = True

    def __init__(self, blocks: dict[str, Block], ranks: int, visits: int) -> None:
        super().__init__(blocks, ranks, visits, SIGNS + 1)
        self.dtype = torch.float64
        self.kept = [name for name, block in blocks.items() if block.kept]
        self.large = [name for name, block in blocks.items() if block.fixed or block.bytes >= APART_BYTES]
        self._singles = {name: self._place(ranks, visits, 1 + blocks[name].size) for name in self.kept}
        self._weights = {name: self._place(len(block.held)) for name, block in blocks.items()}
        self._kinds = {name: self._place(2) for name in blocks}  # in how many parts a large sum comes, and its `bound`
        small = {name: block for name, block in blocks.items() if name not in self.large}
        self._bins = {name: self._place(block.bins, block.size) for name, block in small.items()}

    @property
    def most_bytes(self) -> int:
        """Size of a frame in bytes, as a rule at most."""
        return 8 * self.size + sum(self.blocks[name].sum_bytes for name in self.large)

    def singles(self, frame: Frame, name: str) -> Floats:
        """Return what each visit has sent of a block that is kept, weight first, float64 [ranks, visits, 1 + n]."""
        return _numbers(frame, self._singles[name])

    def single(self, frame: Frame, name: str, local_rank: int, place: int) -> tuple[Tensor, Tensor]:
        """Return what one visit has sent of a block that is kept, flat, and its weight [1]."""
        own = torch.from_numpy(self.singles(frame, name)[local_rank, place])
        return own[1:], own[:1]

    def part_weights(self, frame: Frame, name: str) -> Floats:
        """Return the weight of each of a block's parts over all ranks, float64 [parts]."""
        return _numbers(frame, self._weights[name])

    def fill(self, frame: Frame, sums: ExactSums) -> None:
        """Put sums into a frame whose head has what is said of single visits already.

        It shares their memory: they must not change until it has left.
        """
        for name in self.blocks:
            own, weights = sums.of(name), sums.weights(name)
            self.part_weights(frame, name)[:] = weights
            if name not in self.large:
                assert isinstance(own, BinnedSum)
                _numbers(frame, self._bins[name])[:] = own.bins
            elif weights.any():
                parts: list[Any] = [own.bins] if isinstance(own, BinnedSum) else []
                if isinstance(own, FixedSum):
                    parts = [own.whole] if own.upper is None else [own.whole, own.upper]
                    _numbers(frame, self._kinds[name])[1] = own.bound
                _numbers(frame, self._kinds[name])[0] = len(parts)
                frame += [torch.from_numpy(part).flatten() for part in parts]

    def parts(self, frame: Frame) -> list[int]:
        """Return in how many parts each large block comes, as a head that is there says."""
        return [int(_numbers(frame, self._kinds[name])[0]) for name in self.large]

    def room(self, parts: Sequence[int]) -> Frame:
        """Return room for what comes after a head, for each large block in so many parts."""
        room = []
        for name, count in zip(self.large, parts):
            block = self.blocks[name]
            size, kind = (block.size, torch.int64) if block.fixed else (block.size * block.bins, torch.float64)
            room += [POOL.empty((size,), each) for each in (kind, torch.float64)[:count]]
        return room

    def sum(self, frame: Frame, name: str) -> ExactSum | None:
        """Return a block's sum; None where there is nothing."""
        if name not in self.large:
            return BinnedSum(_numbers(frame, self._bins[name]))
        number, parts, block = self.large.index(name), self.parts(frame), self.blocks[name]
        start = 1 + sum(parts[:number])
        there = [part.numpy() for part in frame[start : start + parts[number]]]
        if not there:
            return None
        if not block.fixed:
            return BinnedSum(there[0].reshape(block.bins, block.size))
        return FixedSum.received(there[0], there[1] if len(there) > 1 else None, _numbers(frame, self._kinds[name])[1])


def _numbers(frame: Frame, place: Place) -> NDArray[Any]:
    """Return those numbers of a frame's head that stand there: a part of it, not a copy."""
    where, shape = place
    return frame[0].numpy()[where].reshape(shape)


def _parts(number: float) -> tuple[float, float]:
    """Return a number in two parts: as float32 they have 48 bits, enough for numbers of samples."""
    high = float(np.float32(number))
    return high, number - high


def frame_formats(layout: Layout, ranks: int, visits: int = 1, part: int | None = None) -> list[FrameFormat]:
    """Return the formats of a layout's groups, in the order in which they leave."""
    return [FrameFormat(blocks, ranks, visits, part) for blocks in layout]


class VisitFormats:
    """The formats of a layout's groups on one lane, in the order in which they leave: `all`, as a rule.

    Where a rank alone on its lane sends one visit at a time, some travel as the part of the blocks that their client
    holds: `parts` says which, by client.
    """

    def __init__(
        self, layout: Layout, ranks: int, visits: int = 1, parts: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self.all, self._parts = frame_formats(layout, ranks, visits), parts
        single = ranks == visits == 1 and any(block.parts for blocks in layout for block in blocks.values())
        self._narrow = {part: frame_formats(layout, 1, 1, part) for part in {*parts.values()}} if single else {}

    def of(self, turn: Iterable[Iterable[int]]) -> Sequence[FrameFormat]:
        """Return those in which the visits of these clients travel together."""
        client = next(chain(*turn), -1)
        return self._narrow.get(self._parts.get(client, -1), self.all)


def zero_frames(formats: Sequence[FrameFormat]) -> list[Frame]:
    """Return a frame of each format, full of zeros, all in one buffer: large pieces lie in large pages."""
    sizes = [size for each in formats for size in each.sizes()]
    like = {str(place): torch.empty(size, dtype=dtype, device="meta") for place, (size, dtype) in enumerate(sizes)}
    packing = Packing(like)
    parts = iter(packing.views(packing.zeros()).values())
    return [[next(parts) for _ in each.sizes()] for each in formats]


@dataclass
class StagedFrame:
    """A frame on its way from the computing thread to the wire; from a GPU the copy may still be under way.

    Large blocks may lie in memory that is not the frame's own: nobody may write into them. Where MPI reads a GPU's
    memory they may lie there.
    """

    format: FrameFormat
    parts: Frame
    event: Any = None
    norms: dict[str, Tensor] = field(default_factory=dict)
    """Of blocks from a device, which are not looked at before they are there."""
    judge: Callable[[StagedFrame], None] | None = None
    """What looks at them then, once."""

    def buffers(self) -> list[Any]:
        """Return the frame as MPI takes it."""
        return [data if data.is_cuda else data.numpy() for data in self.parts]

    def Test(self) -> bool:  # noqa: N802
        """True once the data are there; named as MPI's requests have it, so that both can be waited for."""
        if self.event is not None and not self.event.query():
            return False
        if self.judge is not None:
            judge, self.judge = self.judge, None
            judge(self)
        return True


class Staging:
    """Fills frames. A large block that lies in host memory as it is to be sent is not copied.

    From a GPU, values go into pinned memory on a stream of their own, behind what has computed them and beside what is
    computed next; an event per frame says when they are there. So do their norms: nobody waits to look at them. Where
    MPI reads the device's memory (`direct`), large blocks of a rank alone on its lane are sent from there.

    Attributes
    ----------
    visit : sequence of int
        Round, client and number of the single visit that is sent, see `Visits`.
    """

    visit: Sequence[int] = (0, 0, 0)

    def __init__(self, device: torch.device, direct: bool = False) -> None:
        self.device, self.far, self.direct = device, device.type != "cpu", direct
        self.pinned = device.type == "cuda"
        self.stream: Any = backend(device).Stream(device) if self.far else None
        # for large blocks that are not there: all frames share them
        self._zeros: dict[tuple[int, torch.dtype], Tensor] = {}

    def open(self, group: FrameFormat) -> StagedFrame:
        """Return a frame in which nothing is yet."""
        return StagedFrame(group, [group.head(self.pinned), *(torch.empty(0) for _ in group.large)])

    def nothing(self, group: FrameFormat) -> StagedFrame:
        """Return a frame that says that nothing was sent."""
        return self.close(self.open(group))

    def write(self, staged: StagedFrame, local_rank: int, name: str, value: Tensor, weight: float) -> None:
        """Put a block ``[…]``, or a part of it, into a frame, sent by the rank at this place of the lane."""
        block, value = staged.format.blocks[name], value.detach()[None]
        staged.format.weigh(staged.parts, local_rank, name, weight, block.part(value))
        value = value.flatten() if staged.format.sent[name] != block.shape else block.whole(value)[0]
        factor = 1.0 if staged.format.ranks == 1 else weight
        if self.stream is None:
            self._put(staged, name, value, factor)
            return
        streams = backend(self.device)
        self.stream.wait_stream(streams.current_stream(self.device))
        with streams.stream(self.stream):
            self._put(staged, name, value, factor)
        if value.device.type != "cpu":
            value.record_stream(self.stream)

    def measure(self, staged: StagedFrame, name: str, value: Tensor) -> None:
        """Leave word in a frame of how large a block is that was written to it, once it has come from the device."""
        with backend(self.device).stream(self.stream):
            staged.norms[name] = behind(torch.linalg.vector_norm(value.detach()))

    def close(self, staged: StagedFrame) -> StagedFrame:
        """Return the frame as it can be sent."""
        for name, place in staged.format.large.items():
            size, kind = staged.format.numbers(name), staged.format.kind(name)
            if not len(staged.parts[place]):
                zeros = np.zeros(size * kind.itemsize, dtype=np.uint8)  # no memory as long as nobody reads them
                staged.parts[place] = self._zeros.setdefault((size, kind), torch.from_numpy(zeros).view(kind))
        if self.stream is not None:
            staged.event = self.stream.record_event()
        return staged

    def _put(self, staged: StagedFrame, name: str, value: Tensor, factor: float) -> None:
        group = staged.format
        value = group.encoded(staged.parts, name, value, self.visit)
        if name not in group.large:
            group.room(staged.parts, name).copy_(value if factor == 1.0 else value * factor, non_blocking=True)
            return
        there = value.device.type != "cpu"
        copied = there and not (self.direct and group.ranks == 1)
        if factor != 1.0 or copied or value.dtype != group.kind(name):
            room = torch.empty(len(value), dtype=group.kind(name), pin_memory=self.pinned)
            if factor == 1.0 or there:
                value = room.copy_(value if factor == 1.0 else value * factor, non_blocking=True)
            else:
                value = torch.mul(value, factor, out=room)  # in one pass
        staged.parts[group.large[name]] = value
