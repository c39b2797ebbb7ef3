"""Whether data are those of a run: what its checkpoint holds must have the shapes that the data give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.base.types import Shape

Shapes = Mapping[str, tuple[int, ...]]


def check_shared(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise UsageError where shared tensors of a checkpoint are not of the shapes of `wanted`."""
    _compare(_shapes(saved), _shapes(wanted), "data")


def check_personal(
    path: Path, clients: Iterable[int], like: Callable[[int], Mapping[str, Any]], shapes: Sequence[Shape]
) -> None:
    """Raise UsageError where clients' personal state in a checkpoint is not of the shapes that their data give.

    Parameters
    ----------
    like : callable
        Gives a client's personal state; those of clients whose features have equal shapes are alike.
    shapes : sequence of tuple of int
        Shape of one sample's features, per client.
    """
    wanted: dict[Shape, Shapes] = {}
    for client, found in store.personal_shapes(path, clients).items():
        shape = shapes[client]
        if shape not in wanted:
            wanted[shape] = _shapes(like(client))
        _compare(found, wanted[shape], f"data: client {client} has features of shape {shape}")


def _compare(saved: Shapes, wanted: Shapes, whose: str) -> None:
    for name, shape in wanted.items():
        found = saved.get(name)
        if found != shape:
            there = "none" if found is None else list(found)
            raise UsageError(
                f"{whose}: '{name}' has shape {list(shape)} on these data, in the checkpoint {there}: "
                "expected the data of the run"
            )


def _shapes(tensors: Mapping[str, Any]) -> Shapes:
    return {name: tuple(value.shape) for name, value in tensors.items()}
