"""Finished groups on their way from the computing thread to the wire, from a CPU or from a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.wall.group import Group


@dataclass(frozen=True)
class Shipment:
    """One group in host memory; on a GPU the copy may still be under way."""

    data: Tensor
    event: torch.cuda.Event | None = None

    def Test(self) -> bool:  # noqa: N802
        """Return whether the data are there; named as MPI's requests have it, so that both can be waited for."""
        return self.event is None or self.event.query()


class Dock:
    """Fills the buffers in which groups leave.

    From a GPU, values go into pinned memory on a stream of their own, behind what has computed them and beside what
    is computed next; an event per group says when they are there.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None

    def empty(self, group: Group) -> Tensor:
        """Return an empty buffer."""
        return group.empty(pinned=self.cuda)

    def write(self, group: Group, data: Tensor, seat: int, name: str, value: Tensor, weight: float) -> None:
        """Put a block into a buffer."""
        if self.stream is None:
            group.write(data, seat, name, value, weight)
            return
        self.stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self.stream):
            group.write(data, seat, name, value, weight)
        value.record_stream(self.stream)

    def shipped(self, data: Tensor) -> Shipment:
        """Return the buffer as it can be sent."""
        return Shipment(data, None if self.stream is None else self.stream.record_event())
