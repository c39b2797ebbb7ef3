"""Finished groups on their way from the computing thread to the wire, from a CPU or from a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpcfl.comm.message import Block
from hpcfl.engine.wall.framing import Group, Parcel

Kind = tuple[int, torch.dtype]
"""Entries and type of a large block."""


@dataclass(frozen=True)
class Shipment:
    """One group in host memory; on a GPU the copy may still be under way.

    Attributes
    ----------
    parcel : list of Tensor
        Large blocks may lie in memory that is not the group's own: nobody may write into them. Where MPI reads a
        GPU's memory they may lie there.
    lent : list of Tensor
        Those that go back to the dock.
    """

    parcel: Parcel
    lent: list[Tensor] = field(default_factory=list)
    event: torch.cuda.Event | None = None

    def buffers(self) -> list[Any]:
        """Return the parcel as MPI takes it."""
        return [data if data.is_cuda else data.numpy() for data in self.parcel]

    def Test(self) -> bool:  # noqa: N802
        """Return whether the data are there; named as MPI's requests have it, so that both can be waited for."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Dock:
    """Puts groups together.

    A large block that lies in host memory as it is to be sent is not copied. Room for others is lent and taken back:
    fresh memory costs page faults. From a GPU, values go into pinned memory on a stream of their own, behind what has
    computed them and beside what is computed next; an event per group says when they are there.

    Parameters
    ----------
    device : torch.device
        Where values are computed.
    lean : bool
        Let go of room at once when it is back.
    direct : bool
        MPI reads the device's memory: large blocks of a rank alone on its lane are sent from there.
    """

    def __init__(self, device: torch.device, lean: bool = False, direct: bool = False) -> None:
        self.cuda = device.type == "cuda"
        self.lean, self.direct = lean, direct
        self.stream: torch.cuda.Stream | None = (
            torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        )
        self._free: dict[Kind, list[Tensor]] = {}
        self._zeros: dict[Kind, Tensor] = {}

    def open(self, group: Group) -> Shipment:
        """Return a group in which nothing is yet."""
        return Shipment([group.head(self.cuda), *(torch.empty(0) for _ in group.large)])

    def nothing(self, group: Group) -> Shipment:
        """Return a group that says that nothing was sent."""
        return self.close(group, self.open(group))

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

    def close(self, group: Group, shipment: Shipment) -> Shipment:
        """Return the group as it can be sent: large blocks that are not there are zeros that all groups share."""
        for name, place in group.large.items():
            if not len(shipment.parcel[place]):
                shipment.parcel[place] = self._zeros_of(_kind(group.blocks[name]))
        if self.stream is None:
            return shipment
        return Shipment(shipment.parcel, shipment.lent, self.stream.record_event())

    def give_back(self, shipment: Shipment) -> None:
        """Take back what was lent: the group has been sent."""
        for room in () if self.lean else shipment.lent:
            self._free[len(room), room.dtype].append(room)

    def _put(self, group: Group, shipment: Shipment, name: str, value: Tensor, factor: float) -> None:
        if name not in group.large:
            group.value(shipment.parcel, name).copy_(value if factor == 1.0 else value * factor, non_blocking=True)
            return
        kind = _kind(group.blocks[name])
        copied = value.is_cuda and not (self.direct and group.width == 1)
        if factor != 1.0 or copied or value.dtype != kind[1]:
            value = _copied(value, factor, self._room(kind))
            shipment.lent.append(value)
        shipment.parcel[group.large[name]] = value

    def _room(self, kind: Kind) -> Tensor:
        free = self._free.setdefault(kind, [])
        return free.pop() if free else torch.empty(kind[0], dtype=kind[1], pin_memory=self.cuda)

    def _zeros_of(self, kind: Kind) -> Tensor:
        if kind not in self._zeros:
            self._zeros[kind] = torch.zeros(kind[0], dtype=kind[1])
        return self._zeros[kind]


def _kind(block: Block) -> Kind:
    return prod(block.shape), block.dtype


def _copied(value: Tensor, factor: float, room: Tensor) -> Tensor:
    if factor == 1.0 or value.is_cuda:
        return room.copy_(value if factor == 1.0 else value * factor, non_blocking=True)
    return torch.mul(value, factor, out=room)  # in one pass
