"""What tests on ranks share: the world of ranks, and a folder that all of them see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcfl.testing import fake_device
from hpcfl.testing.world import World

if fake_device.available():
    fake_device.registered()  # torch counts the devices when it first goes backward


@pytest.fixture(scope="session")
def world() -> World:
    """The ranks that run the tests."""
    return World()


@pytest.fixture(scope="session")
def solo() -> World:
    """One rank, whoever else runs the tests."""
    return World(alone=True)


@pytest.fixture
def shared_dir(world: World, tmp_path: Path) -> Iterator[Path]:
    """A fresh folder that all ranks see; rank 0's."""
    world.meet()
    yield Path(world.told(str(tmp_path)))
    world.meet()
