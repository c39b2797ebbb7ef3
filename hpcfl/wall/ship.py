"""Finished groups on their way from the computing thread to the wire, from a CPU or from a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from hpcfl.message import Block
from hpcfl.wall.group import Group, Parcel

Kind = tuple[int, torch.dtype]
"""Entries and type of a large block."""


@dataclass(frozen=True)
class Shipment:
    """One group in host memory; on a GPU the copy may still be under way.

    Attributes
    ----------
    parcel : list of Tensor
        Large blocks may lie in memory that is not the group's own: nobody may write into them.
    lent : list of Tensor
        Those that go back to the dock.
    """

    parcel: Parcel
    lent: list[Tensor] = field(default_factory=list)
    event: torch.cuda.Event | None = None

    def Test(self) -> bool:  # noqa: N802
        """Return whether the data are there; named as MPI's requests have it, so that both can be waited for."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Dock:
    """Puts groups together.

    A large block that lies in host memory as it is to be sent is not copied. Room for others is lent and taken back:
    fresh memory costs page faults. From a GPU, values go into pinned memory on a stream of their own, behind what has
    computed them and beside what is computed next; an event per group says when they are there.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = (
            torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        )
        self._free: dict[Kind, list[Tensor]] = {}
        self._zeros: dict[Kind, Tensor] = {}

    def open(self, group: Group) -> Shipment:
        """Return a group in which nothing is yet: large blocks are zeros that all groups share."""
        return Shipment([group.head(self.cuda), *(self._nothing(_kind(group.blocks[name])) for name in group.large)])

    def write(self, group: Group, shipment: Shipment, seat: int, name: str, value: Tensor, weight: float) -> None:
        """Put a block into a group."""
        group.weigh(shipment.parcel, seat, name, weight)
        factor = 1.0 if group.width == 1 else weight
        if self.stream is None:
            self._put(group, shipment, name, value.detach().flatten(), factor)
            return
        self.stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self.stream):
            self._put(group, shipment, name, value.detach().flatten(), factor)
        value.record_stream(self.stream)

    def close(self, shipment: Shipment) -> Shipment:
        """Return the group as it can be sent."""
        if self.stream is None:
            return shipment
        return Shipment(shipment.parcel, shipment.lent, self.stream.record_event())

    def give_back(self, shipment: Shipment) -> None:
        """Take back what was lent: the group has been sent."""
        for room in shipment.lent:
            self._free[len(room), room.dtype].append(room)

    def _put(self, group: Group, shipment: Shipment, name: str, value: Tensor, factor: float) -> None:
        if name not in group.large:
            group.value(shipment.parcel, name).copy_(value if factor == 1.0 else value * factor, non_blocking=True)
            return
        kind = _kind(group.blocks[name])
        if factor != 1.0 or value.is_cuda or value.dtype != kind[1]:
            value = _copied(value, factor, self._room(kind))
            shipment.lent.append(value)
        shipment.parcel[group.large[name]] = value

    def _room(self, kind: Kind) -> Tensor:
        free = self._free.setdefault(kind, [])
        return free.pop() if free else torch.empty(kind[0], dtype=kind[1], pin_memory=self.cuda)

    def _nothing(self, kind: Kind) -> Tensor:
        if kind not in self._zeros:
            self._zeros[kind] = torch.zeros(kind[0], dtype=kind[1])
        return self._zeros[kind]


def _kind(block: Block) -> Kind:
    return prod(block.shape), block.dtype


def _copied(value: Tensor, factor: float, room: Tensor) -> Tensor:
    if factor == 1.0 or value.is_cuda:
        return room.copy_(value if factor == 1.0 else value * factor, non_blocking=True)
    return torch.mul(value, factor, out=room)  # in one pass
