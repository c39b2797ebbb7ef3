"""What one process has read and others map: the same to the bit, each for itself, and gone with the last of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcfl.base.errors import RunError
from hpcfl.data.base import ClientData, Federation, InMemory
from hpcfl.data.shared import attach, shared
from hpcfl.data.unit_cube import UnitCube

SOURCE = UnitCube()  # any
OTHER = "import sys; from hpcfl.data.shared import attach; from hpcfl.data.unit_cube import UnitCube\n" + (
    "print(attach(sys.argv[1], UnitCube()).client(1).train_features.tolist())"
)


def federation() -> Federation:
    """Two clients, of a tuple of tensors each; the second one's features are columns of a larger array."""
    wide, labels = np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(4)
    clients = [ClientData((wide[:, :2], labels), labels, (wide[:1, :2], labels[:1]), labels[:1])]  # type: ignore[arg-type]
    return InMemory.of([*clients, *clients], classes=4)


def test_arrays_keep_their_order_in_memory() -> None:
    """Transposed, in Fortran's order, of an axis of no meaning, of several types, empty, and a single number."""
    cube = np.arange(24.0).reshape(2, 3, 4)
    arrays = [cube, cube.transpose(2, 0, 1), np.asfortranarray(cube), np.arange(3, dtype=np.uint8)[:, None]]
    arrays += [np.zeros((0, 5), dtype=np.float32), np.array(7), np.array([True, False]), np.arange(2, dtype=">f4")]
    given = replace(federation(), parts=arrays)
    with shared(given, SOURCE) as text:
        found = attach(text, SOURCE).parts
    for one, other in zip(arrays, found, strict=True):
        assert (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
        assert one.tobytes() == other.tobytes()


def test_gaps_are_closed() -> None:
    cube = np.arange(24.0).reshape(2, 3, 4)
    with shared(replace(federation(), parts=[cube[:, :2, :3].transpose(1, 0, 2)]), SOURCE) as text:
        (found,) = attach(text, SOURCE).parts
    assert np.array_equal(found, cube[:, :2, :3].transpose(1, 0, 2))
    assert found.strides == (24, 48, 8)


def test_everything_else_is_as_it_was() -> None:
    given = federation()
    with shared(given, SOURCE) as text:
        found = attach(text, SOURCE)
    assert (found.classes, found.pieces, [*found.shapes]) == (4, given.pieces, [*given.shapes])
    assert isinstance(found.pieces, tuple)
    assert found.client(0).train_labels is found.client(0).train_labels


def test_what_one_writes_no_other_sees() -> None:
    with shared(federation(), SOURCE) as text:
        one, other = attach(text, SOURCE), attach(text, SOURCE)
    one.client(0).train_labels[:] = -1
    assert other.client(0).train_labels.tolist() == [0, 1, 2, 3]


def test_another_process_finds_it_and_nothing_is_left() -> None:
    given = federation()
    before = len([*Path("/proc/self/fd").iterdir()])
    with shared(given, SOURCE) as text:
        command = [sys.executable, "-c", OTHER, text]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert found.stdout == f"{given.client(1).train_features.tolist()}\n"
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    with pytest.raises(RunError, match=f"^memory of process {os.getpid()} cannot be opened: "):
        attach(text, SOURCE)


def test_other_memory_is_not_taken_for_it() -> None:
    with shared(federation(), SOURCE) as text, shared(federation(), SOURCE) as other:
        wrong = " ".join([*text.split()[:2], other.split()[2]])
        with pytest.raises(RunError, match=f"^memory of process {os.getpid()} is not what it was said to be$"):
            attach(wrong, SOURCE)


class Foreign:
    """Nothing that this package knows."""


@pytest.mark.parametrize(
    "part", [Foreign(), np.array([Foreign()]), np.broadcast_to(1.0, (3,)), np.float32(1), UnitCube(dimension=3)]
)
def test_what_is_not_known_is_not_shared(part: object) -> None:
    with shared(replace(federation(), parts=[part]), SOURCE) as text:  # type: ignore[arg-type]
        assert text == ""


def test_without_such_memory_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with shared(federation(), SOURCE) as text:
        assert text == ""


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with shared(federation(), SOURCE) as text:
        assert text == ""
