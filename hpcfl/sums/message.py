"""Messages: masked weighted sums of named blocks, formed so that the order of summation cannot matter.

A visit's message is ``{block: (value, weight)}``; a missing block has weight zero. The server gets, per block,
``Σ weight·value`` and ``Σ weight``. A visit may hold a part of a block only: where that is one of the block's `parts`
its value has that shape, and where it may be any part the block is sent as `masked` returns it; the server then gets
``Σ weight`` of each coordinate. Every partial sum (float64, formed within one chunk, always the same chunk) is
added exactly (`hpcfl.sums.exact`): of float64 blocks in three bins, of float32 blocks in two, large ones in one whole
number and, where its range does not suffice, a bin beside it. Beyond the bins' range (a run that diverges) sums are
still sums, but no longer the same to the bit on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from hpcfl.base.device_copy import on_device, on_host
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.sums.exact import PIECE, RANGE, ROOM, BinnedSum, ExactSum, FixedSum, each_piece
from hpcfl.sums.on_device import DeviceSums
from hpcfl.sums.packing import POOL, SPARE, Packing

Message = Mapping[str, tuple[Tensor, Tensor]]
"""What a client generator yields: ``{block: (value [k, …], weight [k])}`` for the first k rows of its chunk."""

NOTHING: Mapping[str, Floats] = MappingProxyType({})
HELD = "held "  # before a block's name: the block of its mask
Fill = Callable[[slice, Floats], None]
"""Writes a piece of a block's total to float64 [n ≤ PIECE]."""

FIXED_FROM = 1024  # numbers: smaller blocks carry two bins, and nobody asks who needs them


class Code(Protocol):
    """How a visit writes its numbers; `drawn`: its round, client and number tell something of it, see `Visits`."""

    @property
    def drawn(self) -> bool: ...

    def bytes(self, numbers: int, each: int) -> int:
        """Return how many bytes so many numbers take, of `each` so many bytes as they are."""

    def encode(self, value: Tensor, visit: Sequence[int]) -> Tensor:
        """Return the bytes, uint8, of numbers [n]; of what is not finite any that are as many."""

    def decode(self, data: Tensor, numbers: int, dtype: torch.dtype, visit: Sequence[int]) -> Tensor:
        """Return the same numbers, to the bit; of bytes that are 0 zeros."""


@dataclass(frozen=True)
class Block:
    """Shape and type of one block, known to every rank before anything is sent.

    A visit may fill one of several `places` of equal size, each client its own: the sum then holds all values.

    Attributes
    ----------
    parts : tuple of shapes
        Shapes that a value may have, the first coordinates of each axis: `Algorithm.holds` says by number
        which of them a client's visits hold. Empty: all hold all.
    mask : bool
        Whether this is the mask of another block, see `masked`.
    kept : bool
        Whether what each visit has sent of it is looked at once more, see `IteratedReduction.kept`.
    code : Code, optional
        How a visit writes it; None: each number as it is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    places: int = 1
    parts: tuple[tuple[int, ...], ...] = ()
    mask: bool = False
    kept: bool = False
    code: Code | None = None

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that a value may have, as the sums' weights count them."""
        return tuple(dict.fromkeys((self.shape, *self.parts)))

    def part(self, value: Tensor) -> int:
        """Return which of the shapes in `held` the rows ``[k, …]`` have."""
        return self.held.index(tuple(value.shape[1:])) if self.parts else 0

    def sent(self, part: int) -> int:
        """Return how many numbers a visit sends that holds the part of this number in `parts`."""
        return prod(self.parts[part]) if self.parts else self.size

    def written(self, part: int) -> int:
        """Return how many bytes a visit sends that holds the part of this number in `parts`."""
        numbers, each = self.sent(part), self.dtype.itemsize
        return numbers * each if self.code is None else self.code.bytes(numbers, each)

    def whole(self, value: Tensor) -> Tensor:
        """Return the rows ``[k, …]`` with 0 where they hold nothing, ``[k, n]``."""
        if not self.part(value):
            return value.reshape(len(value), self.size)
        room = value.new_zeros(len(value), *self.shape)
        room[(slice(None), *map(slice, value.shape[1:]))] = value
        return room.view(len(value), self.size)

    @property
    def bins(self) -> int:
        """How many grids a sum of this block needs."""
        return 2 if self.dtype == torch.float32 else 3

    @property
    def fixed(self) -> bool:
        """Whether its sums are whole numbers, in `FixedSum`."""
        return self.dtype == torch.float32 and self.size >= FIXED_FROM

    @property
    def sum_bytes(self) -> int:
        """Size of its sum on the wire, in bytes, where no second bin is needed beside whole numbers."""
        return 8 * self.size * (1 if self.fixed else self.bins)

    def sums(self, size: int) -> ExactSum:
        """Return sums on one rank of so many ≤ PIECE of its numbers, the thread's only ones where they are `fixed`.

        What they begin with is to be said.
        """
        return FixedSum(ROOM.whole[:size]) if self.fixed else BinnedSum(np.empty((self.bins, size)))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def numbers(self) -> int:
        """How many numbers one visit tells."""
        return self.size // self.places

    @property
    def bytes(self) -> int:
        """Size of one visit's whole value, in bytes."""
        return self.size * self.dtype.itemsize


Layout = tuple[dict[str, Block], ...]
"""The groups of blocks that leave together, in the order in which they leave."""


class Layers:
    """Layers 1 … L, first layer first, and the groups of blocks in which a visit sends them, last layer first.

    Parameters
    ----------
    tensors : sequence of sequence of str
        The names of each layer's tensors.

    Attributes
    ----------
    of : dict of str to int
        The layer (1 … L) of each tensor that is in one.
    of_groups : int64 [G]
        The lowest layer (1 … L) in each group of the layout; L for what is no layer's.
    reached : list of int [G + 1]
        The first layer (1 … L; L + 1: none) from which on all is there when so many groups have arrived.
    """

    def __init__(self, tensors: Sequence[Sequence[str]], layout: Layout) -> None:
        self.tensors, count = tensors, len(tensors)
        self.of = {name: number for number, names in enumerate(tensors, start=1) for name in names}
        self.of_groups = np.array([min((self.of.get(name, count) for name in g), default=count) for g in layout])
        self._blocks = {name: block for group in layout for name, block in group.items()}
        self.reached, lacking = list[int](), set(self._blocks)
        for group in ({}, *layout):
            lacking -= group.keys()
            late = [number for number, names in enumerate(tensors, start=1) if not lacking.isdisjoint(names)]
            self.reached.append(max(late, default=0) + 1)

    def of_state(self, name: str) -> int:
        """Return the layer with which a personal tensor advances: that of the block that it is named after.

        That is the block of its name, or of what follows a colon in it. Others advance with layer 1, when all is there.
        """
        return self.of.get(name, self.of.get(name.rpartition(":")[2], 1))

    @cached_property
    def numbers(self) -> Ints:
        """Numbers in one visit's layers as the method sends them, where it holds all of them, int64 [L]."""
        return np.array([sum(self._blocks[name].size for name in names) for names in self.tensors])

    def sent(self, part: int, bytes: bool = False, withheld: Collection[str] = ()) -> Ints:
        """Return numbers, or bytes, in the layers of a visit that holds this one of `Block.parts`, int64 [L].

        What is `withheld` is not among them.
        """
        layers = [[self._blocks[name] for name in names if name not in withheld] for names in self.tensors]
        return np.array([sum(each.written(part) if bytes else each.sent(part) for each in layer) for layer in layers])

    def name(self, number: int) -> str:
        """Return the name of layer `number` (1 … L)."""
        tensors = self.tensors[number - 1]
        owner = tensors[0].rpartition(".")[0] if len(tensors) > 1 else ""
        return owner or tensors[0]

    @property
    def names(self) -> list[str]:
        return [self.name(number) for number in range(1, len(self.tensors) + 1)]


@dataclass(frozen=True)
class Arrived:
    """What the visits of a round that arrivals end began with.

    Attributes
    ----------
    versions, clients : int64 [n]
        Whose visits they are, and the rounds whose states they began with.
    factors : float64 [n]
        What each change counts, see `[staleness]` and `participation.every_client`; values are multiplied by it
        already.
    states : dict of int to State
        The shared states of those rounds.
    """

    clients: Ints
    versions: Ints
    factors: Floats
    states: Mapping[int, State]


class Sums(ABC):
    """Weighted sums of blocks over the visits that counted: what the server's step is given.

    Attributes
    ----------
    cohort : int64 [n]
        Who was invited, whether they counted or not; where only their number is given, the first so many clients.
    miss_probability : float64 [L]
        Chance that nobody's layer l counts, as the speed model has it.
    iterated : State
        What the iterated reduction over the messages that counted has found (`hpcfl.engine.iterated`).
    arrived : Arrived, optional
        Where arrivals end rounds: what the visits began with.
    round : int
        The round that ends.
    """

    def __init__(self, layout: Layout, invited: int | Ints = 0, miss_probability: Floats | None = None) -> None:
        self.layout = layout
        self._blocks = {name: block for group in layout for name, block in group.items()}
        self.cohort = np.arange(invited) if isinstance(invited, int) else invited
        self.miss_probability = np.zeros(0) if miss_probability is None else miss_probability
        self.iterated: State = {}
        self.arrived: Arrived | None = None
        self.round = 0

    @property
    def invited(self) -> int:
        """How many were invited."""
        return len(self.cohort)

    @abstractmethod
    def total(self, name: str) -> Tensor:
        """Return ``Σ weight·value``, float64, of the block's shape."""

    @abstractmethod
    def weights(self, name: str) -> Floats:
        """Return ``Σ weight`` of the values that had each of the shapes in `Block.held`."""

    def weight(self, name: str) -> float:
        """Return ``Σ weight``, whatever part of the block each visit held."""
        return float(self.weights(name).sum())

    def holders(self, name: str) -> Tensor | None:
        """Return ``Σ weight`` of each coordinate, float64; None where all have the block's."""
        if HELD + name in self:
            return self.total(HELD + name)
        shapes, weights = self._blocks[name].held, self.weights(name).tolist()
        if not any(weights[1:]):
            return None
        counts = torch.zeros(shapes[0], dtype=torch.float64)
        for shape, weight in zip(shapes, weights):
            counts[tuple(map(slice, shape))] += weight
        return counts

    def mean(self, name: str) -> Tensor:
        """Return the weighted mean, float64; zero at each coordinate of which nothing was sent."""
        holders = self.holders(name)
        return self.over(name, self.weight(name)) if holders is None else self._over_holders(name, holders)

    def _over_holders(self, name: str, holders: Tensor) -> Tensor:
        total = self.total(name)
        return total.div_(on_device(holders.where(holders > 0, 1.0), total.device))

    def over(self, name: str, denominator: float) -> Tensor:
        """Return ``Σ weight·value / denominator``, float64; zero where nothing was sent."""
        total = self.total(name)
        return total.div_(denominator) if self.weight(name) else total.zero_()

    def moved(self, name: str, value: Tensor, denominator: float | None = None) -> Tensor:
        """Return a value after its mean update, or after `over` some other denominator: see `moved`."""
        if denominator is None and (holders := self.holders(name)) is not None:
            return moved(value, self._over_holders(name, holders))
        denominator = self.weight(name) if denominator is None else denominator
        fill = self.fill(name) if value.device.type == "cpu" and value.numel() > PIECE else None
        if fill is None or not self.weight(name):
            return moved(value, self.over(name, denominator))
        after = POOL.empty(value.shape, value.dtype)
        new, old = after.view(-1), value.reshape(-1)
        over = torch.tensor(denominator, dtype=torch.float64)

        def move(piece: slice) -> None:  # whole sums in float64 would cost more than the arithmetic
            size = piece.stop - piece.start
            fill(piece, ROOM.result[:size].numpy())
            new[piece].copy_(ROOM.total[:size].copy_(old[piece]).addcdiv_(ROOM.result[:size], over))

        each_piece(value.numel(), move)
        return after

    def fill(self, name: str) -> Fill | None:
        """Return what knows a block's total piece by piece; None: only `total` knows it."""
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __contains__(self, name: str) -> bool:
        return name in self._blocks


class ExactSums(Sums):
    """Sums that grow message by message, exactly, on the device that computes; its totals are there too.

    Where that is not the CPU, they are in the buffers once they are `settled`.

    Parameters
    ----------
    ranks : int
        How many ranks' sums are added up.
    sent : collection of str, optional
        The blocks that anybody sends; of the others there is nothing, and nothing travels.

    Attributes
    ----------
    buffers : list of float64 or int64 arrays
        What ranks add up: all blocks' weights and bins, then the whole numbers of each group of blocks.
    wide : float64 [blocks of whole numbers]
        A part of the first buffer: how many ranks need a bin beside them, known once sums are `settled`.
    """

    def __init__(
        self,
        layout: Layout,
        invited: int | Ints = 0,
        miss_probability: Floats | None = None,
        device: torch.device | None = None,
        ranks: int = 1,
        sent: Collection[str] | None = None,
    ) -> None:
        super().__init__(layout, invited, miss_probability)
        self.device = device or torch.device("cpu")
        self._ranks = ranks
        self._far = self._far_from_nothing()  # what is on the device
        groups = [{name: each for name, each in group.items() if sent is None or name in sent} for group in layout]
        some = {name: block for group in groups for name, block in group.items()}
        binned = {name: block.bins * block.size for name, block in some.items() if not block.fixed}
        kinds = [len(block.held) for block in some.values()]
        heads = sum(kinds), len(some) - len(binned)
        buffer, (weights, self.wide, *bins) = _zeros([*heads, *binned.values()], torch.float64)
        self._weights = dict(zip(some, np.split(weights, np.cumsum(kinds)[:-1])))
        self.buffers: list[Floats | Ints] = [buffer] if some else []
        self._sums: dict[str, ExactSum] = {
            name: BinnedSum(room.reshape(some[name].bins, -1)) for name, room in zip(binned, bins)
        }
        self._fixed: dict[str, FixedSum] = {}
        for group in groups:
            if sizes := {name: block.size for name, block in group.items() if block.fixed}:
                buffer, wholes = _zeros(list(sizes.values()), torch.int64)
                self.buffers.append(buffer)
                self._fixed |= {name: FixedSum(whole, ranks) for name, whole in zip(sizes, wholes)}
        self._sums |= self._fixed

    def _far_from_nothing(self) -> DeviceSums:
        return DeviceSums({name: block.bins for name, block in self._blocks.items()}, RANGE / self._ranks)

    def add(
        self, message: Message, factors: Mapping[str, Floats] = NOTHING, norms: Mapping[str, Floats] = NOTHING
    ) -> None:
        """Add the rows of one chunk; those of some blocks are multiplied by `factors` [k], which are no weights.

        `norms` [k] are the rows' Euclidean norms, of blocks of which they are known: on a device that is not the CPU
        they are asked for otherwise, and waited for.
        """
        for name, (value, weight) in message.items():
            if not len(weight):
                continue
            block, value = self._blocks[name], on_device(value.detach(), self.device)
            self._weights[name][block.part(value)] += float(weight.sum())
            if name in factors:
                weight = weight * torch.from_numpy(factors[name][: len(weight)]).to(weight.device)
            if self.device.type == "cpu":
                self._sums[name].add_rows(block.whole(value), weight.tolist())
            else:
                rows = block.whole(value)
                known = norms[name] if name in norms else on_host([torch.linalg.vector_norm(rows, dim=1)])[0].numpy()
                self._far.add(name, rows, weight.tolist(), known[: len(weight)])

    def add_rows(self, name: str, rows: Tensor, factors: list[float], weights: Floats) -> None:
        """Add ``Σ factor·row`` of rows [k, n] on the CPU, which count with so much weight of each part."""
        self._weights[name] += weights
        self._sums[name].add_rows(rows, factors)

    def settled(self) -> ExactSums:
        """Bring what was summed on the device to the buffers, with one wait for it; note who needs which bins."""
        self._far.hand_over(self._sums)
        self._far = self._far_from_nothing()
        self.wide[:] = [fixed.upper is not None for fixed in self._fixed.values()]
        return self

    def uppers(self) -> list[Floats]:
        """Return the bins beside whole numbers that any rank needs, as `wide` says, for ranks to add them up too."""
        return [fixed.wide() for fixed, ranks in zip(self._fixed.values(), self.wide) if ranks]

    def add_sums(self, name: str, other: ExactSum, weights: Floats) -> None:
        """Add other sums of a block, with their weights."""
        self._weights[name] += weights
        self._sums[name].add_all(other, self._blocks[name].size)

    def of(self, name: str) -> ExactSum:
        """Return the sums of one block."""
        return self._sums[name]

    def total(self, name: str) -> Tensor:
        shape = self._blocks[name].shape
        if name in self._far:
            if (there := self._far.total(name)) is not None:
                return there.reshape(shape)
            self.settled()
        if name not in self._sums:
            return torch.zeros(shape, dtype=torch.float64, device=self.device)
        total = SPARE.empty(shape, torch.float64)
        self._sums[name].total(total.view(-1).numpy())
        return on_device(total, self.device)

    def fill(self, name: str) -> Fill | None:
        return self._sums[name].part if name in self._sums and name not in self._far else None

    def weights(self, name: str) -> Floats:
        return self._weights[name] if name in self._weights else np.zeros(1)


class CorrectedSums(Sums):
    """The sums of a round with other weights of some blocks to divide by, and something `added` to their means.

    They stand for the means over some `clients`, whether these have arrived or not; `held` has their weights at each
    coordinate, of blocks that not all of them hold whole.
    """

    def __init__(
        self,
        sums: Sums,
        clients: Ints,
        weights: Mapping[str, float],
        added: Mapping[str, Tensor] | None = None,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(sums.layout, sums.cohort, sums.miss_probability)
        self.sums, self.clients, self.others, self.added, self.held = sums, clients, weights, added or {}, held or {}
        self.iterated, self.arrived, self.round = sums.iterated, sums.arrived, sums.round

    def total(self, name: str) -> Tensor:
        return self.sums.total(name)

    def weights(self, name: str) -> Floats:
        return self.sums.weights(name)

    def weight(self, name: str) -> float:
        weight = self.sums.weight(name)
        return self.others.get(name, weight) if weight else 0.0

    def holders(self, name: str) -> Tensor | None:
        return self.held[name] if name in self.held else super().holders(name)

    def mean(self, name: str) -> Tensor:
        if (holders := self.holders(name)) is None:
            return super().mean(name)
        mean = self._over_holders(name, holders) if self.sums.weight(name) else self.total(name).zero_()
        return mean.add_(on_device(self.added[name], mean.device)) if name in self.added else mean

    def moved(self, name: str, value: Tensor, denominator: float | None = None) -> Tensor:
        if denominator is None and self.holders(name) is not None:
            return moved(value, self.mean(name))
        if name in self.added:
            return super().moved(name, value, denominator)
        return self.sums.moved(name, value, self.weight(name) if denominator is None else denominator)

    def over(self, name: str, denominator: float) -> Tensor:
        mean = self.sums.over(name, denominator)
        return mean.add_(on_device(self.added[name], mean.device)) if name in self.added else mean


def _zeros(sizes: list[int], dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """Return a buffer full of zeros, and the arrays of so many numbers that lie in it."""
    like = {str(place): torch.empty(size, dtype=dtype, device="meta") for place, size in enumerate(sizes)}
    packing = Packing(like)
    buffer = POOL.zeros(packing.nbytes)
    return buffer.view(dtype).numpy(), [view.numpy() for view in packing.views(buffer).values()]


def masked(name: str, value: Tensor, mask: Tensor, weight: Tensor) -> Message:
    """Return the message of a block of which visits hold some coordinates: where `mask`, like the value, is 1, not 0.

    The mask travels as a block of its own, `HELD` before the name, which needs its place in the layout beside the other
    one; both count by the weight ``[k]``.
    """
    return {name: (value * mask, weight), HELD + name: (mask.expand_as(value).to(value.dtype), weight)}


def moved(value: Tensor, update: Tensor) -> Tensor:
    """Return ``value + update``, added in float64 and rounded once to value's type.

    On a CPU piece by piece: whole copies in float64 would cost more than the arithmetic.
    """
    update = on_device(update, value.device).expand_as(value)
    if value.device.type != "cpu" or value.numel() <= PIECE:
        return (value.double() + update).to(value.dtype)
    after = POOL.empty(value.shape, value.dtype)
    new, old, change = after.view(-1), value.reshape(-1), update.reshape(-1)

    def move(piece: slice) -> None:
        new[piece].copy_(ROOM.total[: piece.stop - piece.start].copy_(old[piece]).add_(change[piece]))

    each_piece(len(new), move)
    return after
