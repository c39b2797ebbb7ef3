"""What has been received of visits, and the sums over it: the same as over the visits themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats, Ints
from hpcfl.engine.iterated import blank, keep
from hpcfl.engine.profile import Phases
from hpcfl.sums.exact import FixedSum, each_piece, sum_small
from hpcfl.sums.frames import REJECTED, Frame
from hpcfl.sums.guard import NO_GROUP, Rejection
from hpcfl.sums.message import Block, ExactSums, Fill, Layout, Message, Sums
from hpcfl.sums.packing import SPARE


class Received:
    """Visits of several ranks, each of so many places, as far as they have come, in `frames` of these `formats`.

    Attributes
    ----------
    clients : list of list of int
        Whose visits they are, ``[local rank][place]``.
    times : list of float
        When each group was there, in seconds of the monotonic clock: what is behind them has not come.
    """

    def __init__(self, clients: list[list[int]], formats: Sequence[Any], frames: list[Frame]) -> None:
        self.clients, self.visits = clients, sum(map(len, clients))
        self.formats, self.frames = formats, frames
        self.signs = [group.signs(frame) for group, frame in zip(formats, frames)]
        self.times: list[float] = []

    @property
    def complete(self) -> bool:
        return len(self.times) == len(self.formats)

    def sent(self, groups: int) -> Ints:
        """Return how many of the first `groups` groups were really sent of each visit, int64 [ranks, places]."""
        flags = np.array([*(signs[0] for signs in self.signs[:groups]), np.zeros_like(self.signs[0][0])])
        count: Ints = np.argmin(flags > 0, axis=0)
        return count

    def rejected(self, groups: int) -> Ints:
        """Return by which of the first `groups` groups each visit was rejected, int64 [ranks, places].

        `NO_GROUP`: by none.
        """
        flags = np.array([*(signs[0] for signs in self.signs[:groups]), np.full_like(self.signs[0][0], REJECTED)])
        first: Ints = np.argmax(flags == REJECTED, axis=0)
        return np.where(first < groups, first, NO_GROUP)

    def seconds(self, local_rank: int) -> float:
        """Return the seconds that a rank's visits had taken when it sent the last group that arrived."""
        return max((float(signs[1, local_rank].max()) for signs in self.signs[: len(self.times)]), default=0.0)

    def count(self, local_rank: int) -> int:
        """Return how many visits of a rank these are."""
        return len(self.clients[local_rank])

    def came(self, local_rank: int, place: int) -> float:
        """Return when the last group of a visit was there, in seconds of the monotonic clock."""
        return self.times[-1]

    def steps(self, local_rank: int, place: int) -> int:
        """Return the local steps that a visit has taken, where they may differ; 0 where it was not sent."""
        return int(self.signs[-1][4, local_rank, place])

    def gradients(self, local_rank: int, place: int, groups: int) -> int:
        """Return how many gradients a visit had computed for the first `groups` groups."""
        frames = list(zip(self.formats, self.frames))[:groups]
        return max((group.gradients(frame, local_rank, place) for group, frame in frames), default=0)


class ReceivedSums(Sums):
    """Sums over the groups that counted, formed when they are asked for: one visit per lane is all that is kept.

    Messages of single visits are summed on fixed grids, as in simulated time, so a replay gives the same bits; sums
    over chunks are on these grids already. Visits of several ranks were summed on their way, at the blocks' precision
    and in an order of MPI's choosing.

    Parameters
    ----------
    received : list of (Received, int)
        Visits, and how many of their groups count.
    early : ExactSums, optional
        Sums over visits that are not held any more.
    kept : sequence of Message
        What of those visits is kept for iterated reductions.
    """

    def __init__(
        self,
        layout: Layout,
        invited: int | Ints,
        miss_probability: Floats,
        received: list[tuple[Received, int]],
        early: ExactSums | None = None,
        kept: Sequence[Message] = (),
    ) -> None:
        super().__init__(layout, invited, miss_probability)
        self.received, self.early, self.kept = received, early, kept
        self.gradients = 0  # the most that a visit that counted has computed
        self.rejected: dict[int, Rejection] = {}  # as `RoundOutcome` has them, and the norms
        self.norms: Floats = np.zeros((0, 0))
        self.phases = Phases()
        self._group = {name: number for number, blocks in enumerate(layout) for name in blocks}

    def weights(self, name: str) -> Floats:
        number = self._group[name]
        weights = [one.formats[number].part_weights(one.frames[number], name) for one in self._with(number)]
        begun = self.early.weights(name) if self.early else np.zeros(len(self._blocks[name].held))
        return sum(weights, start=begun)

    def total(self, name: str) -> Tensor:
        with self.phases.phase("reduction"):
            block, fill = self._blocks[name], self.fill(name)
            total = SPARE.empty(block.shape, torch.float64)
            out = total.view(-1).numpy()
            each_piece(block.size, lambda piece: fill(piece, out[piece]))
            return total

    def moved(self, name: str, value: Tensor, denominator: float | None = None) -> Tensor:
        with self.phases.phase("reduction"):
            return super().moved(name, value, denominator)

    def fill(self, name: str) -> Fill:
        number, block = self._group[name], self._blocks[name]
        counted = self._with(number)
        parts = [contribution(one, number, name) for one in counted if not one.formats[number].sums]
        sums_of = [one.formats[number].sum(one.frames[number], name) for one in counted if one.formats[number].sums]
        summed = [other for other in sums_of if other is not None]
        early = self.early.of(name) if self.early else None
        alone = len(parts) == 1 and parts[0][1] is None and not summed and early is None
        weighed = [(value.numpy(), 1.0 if weight is None else weight) for value, weight in parts]

        def fill(piece: slice, out: Floats) -> None:
            some = [(value[piece], weight) for value, weight in weighed]
            if alone:
                np.copyto(out, some[0][0])
                return
            small = sum_small(some, out) if block.fixed else 0
            if 0 < small == len(some) and early is None and not summed:
                return
            sums = block.sums(len(out))
            sums.start(early, piece)
            if isinstance(sums, FixedSum):
                sums.add_values(some[small:], out if small else None)
            else:
                for value, weight in some:
                    sums.add_rows(torch.from_numpy(value)[None], [weight])
            for other in summed:
                sums.add_sums(other, piece, slice(0, len(out)))
            sums.total(out)

        return fill

    def messages(self, blocks: Mapping[str, Block]) -> list[Message]:
        """Return what each visit that counted has sent of `blocks`, one by one."""
        return [*self.kept, *chain(*(messages(one, groups, blocks) for one, groups in self.received))]

    def _with(self, number: int) -> list[Received]:
        """Return the visits whose group of this number counts."""
        return [one for one, groups in self.received if number < groups]


def contribution(one: Received, number: int, name: str) -> tuple[Tensor, float | None]:
    """Return a block as it arrived, and what it is still to be multiplied by (None: nothing)."""
    group, frame = one.formats[number], one.frames[number]
    return group.whole(frame, name), (float(group.weights(frame, name)[0]) if group.ranks == 1 else None)


def messages(one: Received, groups: int, blocks: Mapping[str, Block]) -> Iterator[Message]:
    """Yield what each single visit has sent of `blocks` within its first groups, in memory of its own."""
    for local_rank, clients in enumerate(one.clients):
        for place in range(len(clients)):
            kept = blank(blocks, 1)
            for group, frame in zip(one.formats[:groups], one.frames):
                for name in group.blocks.keys() & blocks.keys():
                    keep({name: group.single(frame, name, local_rank, place)}, kept)
            yield kept


def add_all(
    one: Received, sums: ExactSums, groups: int | None = None, factors: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Add the first groups of a visit (None: all) to exact sums; `factors` of blocks are those of `ExactSums.add`."""
    for number in range(len(one.formats[:groups])):
        add_group(one, number, sums, factors)


def add_group(one: Received, number: int, sums: ExactSums, factors: Mapping[str, float] = MappingProxyType({})) -> None:
    """Add the group of this number alone."""
    group, frame = one.formats[number], one.frames[number]
    for name in group.blocks:
        weighed = group.part_weights(frame, name)
        if group.sums:
            if (other := group.sum(frame, name)) is not None:
                sums.add_sums(name, other, weighed)
            continue
        value, weight = contribution(one, number, name)
        weight = 1.0 if weight is None else weight
        sums.add_rows(name, value[None], [weight * factors.get(name, 1.0)], weighed)
