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
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Dock:
    """Fills the buffers in which groups leave, and takes them back when they are sent: fresh memory costs page faults.

    From a GPU, values go into pinned memory on a stream of their own, behind what has computed them and beside what
    is computed next; an event per group says when they are there.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, group: Group) -> Tensor:
        """Return a buffer for a group; what it holds does not matter."""
        free = self._free.get((group.size, group.dtype))
        return free.pop() if free else group.empty(pinned=self.cuda)

    def nothing(self, group: Group) -> Tensor:
        """Return a buffer that says that nothing was sent."""
        data = self.take(group)
        group.clear(data)
        group.clear_values(data, group.blocks)
        return data

    def give(self, data: Tensor) -> None:
        """Take back a buffer that is not in use any more."""
        self._free.setdefault((len(data), data.dtype), []).append(data)

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
