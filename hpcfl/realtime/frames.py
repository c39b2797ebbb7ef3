"""How the blocks of a visit, or of a chunk of visits, travel: one frame per group, its head and then its large blocks.

The head is ``[sent, seconds, gradients, weights, values of the small blocks]``. Each client rank of the lane writes the
flags, seconds and gradients of its visits, and its weights, at places of its own: after a sum over ranks they can still
be told apart. Large blocks are sent from where they are. A rank alone on its lane sends a visit's values as they are,
and the server multiplies them by their weights in float64, as in simulated time. Ranks that share a lane send
``weight·value``, since MPI adds them up on the way; there the sum is rounded at the blocks' precision. Of chunks of
visits the exact sums travel that are formed in simulated time (`hpcfl.sums.message`): the bins of ``Σ weight·value``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.device_copy import backend, behind
from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, Ints
from hpcfl.mpi.placement import Topology
from hpcfl.sums.exact import BinnedSum, ExactSum, FixedSum
from hpcfl.sums.message import Block, ExactSums, Layout
from hpcfl.sums.packing import APART_BYTES, POOL, Packing

if TYPE_CHECKING:
    from torch import Tensor


Frame = list["Tensor"]
"""One group of blocks as it travels: its head, then its large blocks, all of them flat."""
SENT, REJECTED = 1.0, -1.0
SIGNS = 5  # what a rank signs with: its flag, its seconds, its gradients in two parts, and its steps


class FrameFormat:
    """The format of one group's frames on a lane of so many client `ranks`, each with so many `visits` at a time.

    Attributes
    ----------
    sums : bool
        Whether values are the bins of sums over a rank's visits, ``[bins, n]``.
    sent : dict of str to shape
        What travels of each block: all of it, or the `part` that the single visit of a rank alone on its lane holds.
    """

    def __init__(self, blocks: dict[str, Block], ranks: int, visits: int = 1, part: int | None = None) -> None:
        self.blocks, self.ranks, self.visits, self.sums = blocks, ranks, visits, visits > 1
        held = {} if part is None else {name: block.parts[part] for name, block in blocks.items() if block.parts}
        self.sent = {name: held.get(name, block.shape) for name, block in blocks.items()}
        large = [name for name, block in blocks.items() if block.bytes >= APART_BYTES]
        self.large = {name: place for place, name in enumerate(large, start=1)}  # where in a frame they are
        small = {name: block for name, block in blocks.items() if name not in self.large}
        double = self.sums or any(block.dtype == torch.float64 for block in small.values())
        self.dtype = torch.float64 if double else torch.float32
        self.starts: dict[str, int] = {}
        self._weights: dict[str, tuple[int, int]] = {}  # where a block's begin, and of how many parts
        self.size = self._signed = SIGNS * ranks * visits
        for name, block in blocks.items():
            self._weights[name] = self.size, len(block.held)
            self.size += 2 * ranks * len(block.held)
        for name in small:
            self.starts[name] = self.size
            self.size += self.numbers(name)

    def head(self, pinned: bool = False) -> Tensor:
        """Return a head that says that nothing was sent."""
        return torch.zeros(self.size, dtype=self.dtype, pin_memory=pinned)

    def zeros(self) -> Frame:
        return [torch.zeros(size, dtype=dtype) for size, dtype in self.sizes()]

    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """Return entries and type of each part of a frame."""
        return [(self.size, self.dtype), *((self.numbers(name), self.kind(name)) for name in self.large)]

    def numbers(self, name: str) -> int:
        """Return how many numbers of a block travel."""
        return prod(self.sent[name]) * (self.blocks[name].bins if self.sums else 1)

    def kind(self, name: str) -> torch.dtype:
        """Return the type in which a large block travels."""
        return torch.float64 if self.sums else self.blocks[name].dtype

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

    def signs(self, frame: Frame) -> NDArray[np.floating]:
        """Return where visits sign, [5, ranks, visits].

        `SENT` who has sent this frame, `REJECTED` whose visit was rejected by it, 0 else; then the visit's seconds and
        gradients by then, the latter in two parts, and its local steps where they may differ.
        """
        signs: NDArray[np.floating] = frame[0].numpy()[: self._signed].reshape(SIGNS, self.ranks, self.visits)
        return signs

    def gradients(self, frame: Frame, local_rank: int, place: int = 0) -> int:
        """Return how many gradients a rank's visit has signed with."""
        return sum(int(part) for part in self.signs(frame)[2:4, local_rank, place])

    def weigh(self, frame: Frame, local_rank: int, name: str, weight: float, part: int = 0) -> None:
        """Note a rank's weight of a block, of which it has sent a part: its number in `Block.held`."""
        self._places(frame, name)[:, part, local_rank] = _parts(weight)

    def weights(self, frame: Frame, name: str) -> Floats:
        """Return each rank's weight of a block, float64 [ranks]."""
        high, low = self._places(frame, name).astype(np.float64)
        weights: Floats = (high + low).sum(0)
        return weights

    def single(self, frame: Frame, name: str, local_rank: int, place: int) -> tuple[Tensor, Tensor]:
        """Return what the visit of a rank alone on its lane has sent of a block, flat, and its weight [1]."""
        return self.whole(frame, name), torch.from_numpy(self.weights(frame, name))

    def part_weights(self, frame: Frame, name: str) -> Floats:
        """Return the weight of each of a block's parts over all ranks, float64 [parts]."""
        high, low = self._places(frame, name).astype(np.float64)
        weights: Floats = (high + low).sum(1)
        return weights

    def value(self, frame: Frame, name: str) -> Tensor:
        """Return a block as it was sent, flat; of several ranks the weighted sum."""
        if name in self.large:
            return frame[self.large[name]]
        return frame[0][self.starts[name] : self.starts[name] + self.numbers(name)]

    def whole(self, frame: Frame, name: str) -> Tensor:
        """Return the same with 0 where the visit holds nothing of the block."""
        value, shape = self.value(frame, name), self.sent[name]
        return value if shape == self.blocks[name].shape else self.blocks[name].whole(value.view(1, *shape))[0]

    def bins(self, frame: Frame, name: str) -> Floats:
        """Return the bins of a block's sum, float64 [bins, n]."""
        bins: Floats = self.value(frame, name).numpy().reshape(self.blocks[name].bins, self.blocks[name].size)
        return bins

    def sum(self, frame: Frame, name: str) -> ExactSum | None:
        """Return a block's sum, where values are such; None where there is nothing."""
        return BinnedSum(self.bins(frame, name))

    def _places(self, frame: Frame, name: str) -> NDArray[np.floating]:
        start, parts = self._weights[name]
        end = start + 2 * parts * self.ranks
        weights: NDArray[np.floating] = frame[0].numpy()[start:end].reshape(2, parts, self.ranks)
        return weights


class SumFormat:
    """The format of one group's sums as a leader sends them on: over the visits of so many `ranks`, `most` of each.

    A head comes first, ``[signs, what single visits have sent of blocks that are kept, then for each block its weights,
    how its sum comes, and the sum if it is small]``; then what the head says of each large block: nothing where nobody
    has sent any, its whole numbers, and what is beside them only where that is needed (`hpcfl.sums.exact`). Visits sign
    as in a `FrameFormat`, and with the seconds from the round's start until the leader had the group.
    """

    sums = True

    def __init__(self, blocks: dict[str, Block], ranks: int, most: int) -> None:
        self.blocks, self.ranks, self.most = blocks, ranks, most
        self._signed = (SIGNS + 1) * ranks * most
        self._starts: dict[str, int] = {}
        self.size = self._signed
        self._singles: dict[str, int] = {}
        for name in self.kept:
            self._singles[name] = self.size
            self.size += ranks * most * (1 + blocks[name].size)
        for name, block in blocks.items():
            self._starts[name] = self.size
            self.size += len(block.held) + 2 + (0 if self.is_large(name) else block.bins * block.size)

    def is_large(self, name: str) -> bool:
        """Whether a block's sum comes by itself."""
        return self.blocks[name].fixed or self.blocks[name].bytes >= APART_BYTES

    @property
    def most_bytes(self) -> int:
        """Size of a frame in bytes, as a rule at most."""
        return 8 * self.size + sum(block.sum_bytes for name, block in self.blocks.items() if self.is_large(name))

    def head(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    def signs(self, frame: Frame) -> NDArray[np.floating]:
        """Return where visits sign, [6, ranks, most], see `FrameFormat.signs`; the last row is the leader's."""
        signs: NDArray[np.floating] = frame[0].numpy()[: self._signed].reshape(SIGNS + 1, self.ranks, self.most)
        return signs

    def gradients(self, frame: Frame, local_rank: int, place: int = 0) -> int:
        return sum(int(part) for part in self.signs(frame)[2:4, local_rank, place])

    @property
    def kept(self) -> list[str]:
        """The blocks of which each visit's own values travel too."""
        return [name for name, block in self.blocks.items() if block.kept]

    def singles(self, frame: Frame, name: str) -> Floats:
        """Return what each visit has sent of a block that is kept, weight first, float64 [ranks, most, 1 + n]."""
        start, size = self._singles[name], 1 + self.blocks[name].size
        end = start + self.ranks * self.most * size
        return frame[0].numpy()[start:end].reshape(self.ranks, self.most, size)

    def single(self, frame: Frame, name: str, local_rank: int, place: int) -> tuple[Tensor, Tensor]:
        """Return what one visit has sent of a block that is kept, flat, and its weight [1]."""
        own = torch.from_numpy(self.singles(frame, name)[local_rank, place])
        return own[1:], own[:1]

    def part_weights(self, frame: Frame, name: str) -> Floats:
        """Return the weight of each of a block's parts over all ranks, float64 [parts]."""
        start = self._starts[name]
        return frame[0].numpy()[start : start + len(self.blocks[name].held)]

    def filled(self, head: Tensor, sums: ExactSums) -> Frame:
        """Return the frame of these sums, whose memory it shares: they must not change until it has left.

        The `head` has what is said of single visits already.
        """
        frame = [head]
        for name in self.blocks:
            own = sums.of(name)
            self.part_weights(frame, name)[:] = sums.weights(name)
            if not self.is_large(name):
                assert isinstance(own, BinnedSum)
                self._bins(frame, name)[:] = own.bins
            elif sums.weights(name).any():
                parts: list[Floats | Ints] = [own.bins] if isinstance(own, BinnedSum) else []
                if isinstance(own, FixedSum):
                    parts = [own.whole] if own.upper is None else [own.whole, own.upper]
                    self._kind(frame, name)[1] = own.bound
                self._kind(frame, name)[0] = len(parts)
                frame += [torch.from_numpy(part).flatten() for part in parts]
        return frame

    @property
    def large(self) -> list[str]:
        """The blocks whose sums come by themselves."""
        return [name for name in self.blocks if self.is_large(name)]

    def parts(self, frame: Frame) -> list[int]:
        """Return in how many parts each large block comes, as a head that is there says."""
        return [int(self._kind(frame, name)[0]) for name in self.large]

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
        block, place = self.blocks[name], 1
        if not self.is_large(name):
            return BinnedSum(self._bins(frame, name))
        for each in self.blocks:
            if each == name:
                break
            place += int(self._kind(frame, each)[0]) if self.is_large(each) else 0
        parts, bound = self._kind(frame, name).tolist()
        if not parts:
            return None
        if not block.fixed:
            return BinnedSum(frame[place].numpy().reshape(block.bins, block.size))
        return FixedSum.received(frame[place].numpy(), frame[place + 1].numpy() if parts > 1 else None, bound)

    def _kind(self, frame: Frame, name: str) -> Floats:
        """Return where it stands in how many parts a large block's sum comes, and its `bound`."""
        start = self._starts[name] + len(self.blocks[name].held)
        return frame[0].numpy()[start : start + 2]

    def _bins(self, frame: Frame, name: str) -> Floats:
        block, start = self.blocks[name], self._starts[name] + len(self.blocks[name].held) + 2
        bins: Floats = frame[0].numpy()[start : start + block.bins * block.size].reshape(block.bins, block.size)
        return bins


def _parts(number: float) -> tuple[float, float]:
    """Return a number in two parts: as float32 they have 48 bits, enough for numbers of samples."""
    high = float(np.float32(number))
    return high, number - high


def frame_formats(layout: Layout, ranks: int, visits: int = 1, part: int | None = None) -> list[FrameFormat]:
    """Return the formats of a layout's groups, in the order in which they leave."""
    return [FrameFormat(blocks, ranks, visits, part) for blocks in layout]


def narrow_formats(layout: Layout, topology: Topology, together: bool, parts: Ints) -> dict[int, list[FrameFormat]]:
    """Return the same by the part that the visit of a turn holds; none where several visits are summed on their way.

    `parts` says which part each client holds, int64 [clients].
    """
    single = len(topology.ranks) == 1 and topology.most(together) == 1
    if not single or not any(block.parts for blocks in layout for block in blocks.values()):
        return {}
    return {part: frame_formats(layout, 1, 1, part) for part in np.unique(parts[topology.clients]).tolist()}


def zero_frames(formats: list[FrameFormat]) -> list[Frame]:
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

    Attributes
    ----------
    empty : bool
        Whether it says that nothing was sent: then nobody takes note of its large blocks, which are zeros.
    """

    format: FrameFormat
    parts: Frame
    empty: bool = False
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

    def wait(self) -> None:
        """Wait until the data are there."""
        if self.event is not None:
            self.event.synchronize()
        self.Test()


class Staging:
    """Fills frames. A large block that lies in host memory as it is to be sent is not copied.

    From a GPU, values go into pinned memory on a stream of their own, behind what has computed them and beside what is
    computed next; an event per frame says when they are there. So do their norms: nobody waits to look at them. Where
    MPI reads the device's memory (`direct`), large blocks of a rank alone on its lane are sent from there.
    """

    def __init__(self, device: torch.device, direct: bool = False) -> None:
        self.device, self.far, self.direct = device, device.type != "cpu", direct
        self.pinned = device.type == "cuda"
        self.stream: Any = backend(device).Stream(device) if self.far else None
        self._zeros: dict[
            tuple[int, torch.dtype], Tensor
        ] = {}  # for large blocks that are not there: all frames share them

    def open(self, group: FrameFormat) -> StagedFrame:
        """Return a frame in which nothing is yet."""
        return StagedFrame(group, [group.head(self.pinned), *(torch.empty(0) for _ in group.large)])

    def nothing(self, group: FrameFormat) -> StagedFrame:
        """Return a frame that says that nothing was sent."""
        return replace(self.close(self.open(group)), empty=True)

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
            if not len(staged.parts[place]) and (size, kind) not in self._zeros:
                zeros = np.zeros(size * kind.itemsize, dtype=np.uint8)  # no memory as long as nobody reads them
                self._zeros[size, kind] = torch.from_numpy(zeros).view(kind)
            if not len(staged.parts[place]):
                staged.parts[place] = self._zeros[size, kind]
        if self.stream is not None:
            staged.event = self.stream.record_event()
        return staged

    def _put(self, staged: StagedFrame, name: str, value: Tensor, factor: float) -> None:
        group = staged.format
        if name not in group.large:
            group.value(staged.parts, name).copy_(value if factor == 1.0 else value * factor, non_blocking=True)
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
