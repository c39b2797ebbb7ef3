"""Between the host and the device that computes, without waiting for what the device still does where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcfl.base.lazy import Tensor, torch


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, behind what that still computes; what is there already as it is.

    From memory that is not pinned the copy would wait.
    """
    if value.device.type != "cpu" or device.type == "cpu":
        return value.to(device)
    pinned = device.type != "cuda" or value.is_pinned()
    return (value if pinned else value.pin_memory()).to(device, non_blocking=True)


def refill(room: Tensor, value: Tensor) -> None:
    """Give a tensor of a device the numbers of one of the host, behind what the device still does."""
    room.view(value.shape).copy_(value.pin_memory() if room.device.type == "cuda" else value, non_blocking=True)


def on_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the host's memory, with one wait for the device that has any of them."""
    device = next((value.device for value in values if value.device.type != "cpu"), None)
    if device is None:
        return [value.detach() for value in values]
    rooms = [behind(value.detach()) for value in values]
    backend(device).current_stream(device).synchronize()
    return rooms


def behind(value: Tensor) -> Tensor:
    """Return room in the host's memory that a tensor is copied to behind what its device still does."""
    room = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
    return room.copy_(value, non_blocking=True)


def backend(device: torch.device) -> Any:
    """Return torch's module of a kind of device, such as ``torch.cuda``: there are its streams."""
    return torch.get_device_module(device)


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory that a device other than the CPU has, free or not."""
    return int(backend(device).get_device_properties(device).total_memory)
