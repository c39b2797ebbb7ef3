"""CIFAR-10: 50000 training and 10000 test images of 10 classes."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpcfl.data.cifar import Cifar, Layout


class Cifar10(Cifar):
    """The folder ``cifar-10-batches-bin/`` or ``cifar-10-batches-py/`` of the data folder, as distributed."""

    name: Literal["cifar10"] = "cifar10"
    layout: ClassVar[Layout] = Layout(
        binary="cifar-10-batches-bin",
        python="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        label_bytes=1,
        key=b"labels",
        classes=10,
    )
