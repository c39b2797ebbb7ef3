"""PyTorch datasets as users bring them, and some that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

COUNT = 40


class Image:
    """What of Pillow's images is looked at."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def getbands(self) -> tuple[str, ...]:
        return ("L",)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.pixels


def pixels(train: bool) -> np.ndarray:
    return np.random.default_rng(int(train)).integers(256, size=(COUNT if train else COUNT // 2, 6, 5)).astype(np.uint8)


class Images(Dataset[tuple[Image, int]]):
    """Made as torchvision's are: a root, a training and a test part, images and classes."""

    def __init__(self, root: str, train: bool = True, classes: int = 4) -> None:
        self.root, self.images, self.classes = root, pixels(train), classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Image, int]:
        return Image(self.images[i]), i % self.classes


class Pairs(Dataset[tuple[tuple[Tensor, Tensor, float], float]]):
    """Words, a picture and a number; a target."""

    def __init__(self, words: int = 5) -> None:
        self.words = words

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, Tensor, float], float]:
        generator = torch.Generator().manual_seed(i)
        words = torch.randint(self.words, (3,), generator=generator)
        picture = torch.randn(2, 2, generator=generator)
        return (words, picture, i / COUNT), float(words.sum() + picture.sum())


class Stream(IterableDataset[tuple[Tensor, int]]):
    """No indices, and random features."""

    def __iter__(self) -> Any:
        for i in range(12):
            yield torch.randn(3), i % 2


def ragged() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(2), 0), (torch.zeros(3), 1)]


def unlabelled() -> list[Tensor]:
    return [torch.zeros(2)]


def empty() -> list[tuple[Tensor, int]]:
    return []


class Both(nn.Module):
    """A module of three tensors."""

    def __init__(self, shape: tuple[tuple[int, ...], ...], classes: int) -> None:
        super().__init__()
        (length,), (height, width), number = shape
        assert number == ()
        self.words, self.picture = nn.Embedding(5, 2), nn.Linear(height * width, 3)
        self.head = nn.Linear(2 * length + 3 + 1, classes)

    def forward(self, words: Tensor, picture: Tensor, number: Tensor) -> Tensor:
        assert words.dtype == torch.int64
        parts = self.words(words).flatten(1), self.picture(picture.flatten(1)), number[:, None]
        outputs: Tensor = self.head(torch.cat(parts, 1))
        return outputs
