"""Between the host and the device that computes, without waiting for what the device still does where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, behind what that still computes; what is there already as it is.

    From memory that is not pinned the copy would wait.
    """
    if value.device.type != "cpu" or device.type == "cpu":
        return value.to(device)
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


def on_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the host's memory, with one wait for the device that has any of them."""
    device = next((value.device for value in values if value.device.type != "cpu"), None)
    if device is None:
        return [value.detach() for value in values]
    import torch

    rooms = []
    for value in values:
        rooms.append(torch.empty(value.shape, dtype=value.dtype, pin_memory=device.type == "cuda"))
        rooms[-1].copy_(value.detach(), non_blocking=True)
    backend: Any = torch.get_device_module(device)
    backend.current_stream(device).synchronize()
    return rooms
