"""CIFAR-100: 50000 training and 10000 test images of 100 classes (the fine labels)."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpcfl.data.cifar import Cifar, Layout


class Cifar100(Cifar):
    """The folder ``cifar-100-binary/`` or ``cifar-100-python/`` of the data folder, as distributed."""

    name: Literal["cifar100"] = "cifar100"
    layout: ClassVar[Layout] = Layout(
        binary="cifar-100-binary",
        python="cifar-100-python",
        train=("train",),
        test=("test",),
        label_bytes=2,  # coarse, fine
        key=b"fine_labels",
        classes=100,
    )
