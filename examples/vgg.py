"""VGG 11, 13, 16 and 19 with batch normalisation.

K. Simonyan and A. Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015 (Table 1,
columns A, B, D and E). S. Ioffe and C. Szegedy: Batch Normalization, ICML 2015.
"""

from itertools import pairwise

from torch import nn

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (1, 2, 4, 8, 8)


class VGG(nn.Module):
    """Of images ``[channels, height, width]`` of at least 32 x 32 pixels.

    Parameters
    ----------
    depth : int
        11, 13, 16 or 19 layers where two are `hidden`.
    width : int
        Channels of the first convolutions.
    hidden : sequence of int
        Widths of linear layers before the last. None, as is common for CIFAR; the paper's are 4096 and 4096.
    dropout : float
        Chance that an output of a hidden layer is dropped.
    """

    def __init__(self, shape, classes, depth: int = 16, width: int = 64, hidden=(), dropout: float = 0.5):
        super().__init__()
        if depth not in CONVOLUTIONS:
            raise ValueError(f"depth: expected one of {', '.join(map(str, CONVOLUTIONS))}, got {depth}")
        channels, height, columns = shape
        layers = []
        for count, factor in zip(CONVOLUTIONS[depth], WIDTHS):
            for _ in range(count):
                made = factor * width
                layers += [nn.Conv2d(channels, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
                channels = made
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        sizes = [channels * (height // 32) * (columns // 32), *hidden]
        head = []
        for inputs, outputs in pairwise(sizes):
            head += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
        self.classifier = nn.Sequential(*head, nn.Linear(sizes[-1], classes))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))
