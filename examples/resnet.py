"""ResNet-18, by K. He, X. Zhang, S. Ren and J. Sun: Deep Residual Learning for Image Recognition, CVPR 2016.

Tensors have the names that PyTorch users know from elsewhere (layer1.0.conv1.weight, ..., fc.bias).
"""

from torch import nn


def conv(inputs, outputs, stride=1, size=3):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Block(nn.Module):
    """Two convolutions, around which the input goes too: as it is, or through one of size 1 where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, stride, 1), nn.BatchNorm2d(outputs))

    def forward(self, x):
        inner = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(inner)) + self.downsample(x)).relu()


class ResNet(nn.Module):
    """Of images ``[channels, height, width]``; as it is, ResNet-18.

    Parameters
    ----------
    width : int
        Channels of the first stage; each further stage doubles them.
    blocks : sequence of int
        How many blocks each stage has; (3, 4, 6, 3) is ResNet-34.
    stem : "cifar" or "imagenet"
        For images of 32 x 32 pixels or less, a convolution of 3 x 3; for large ones the paper's, of 7 x 7 with stride
        2, and a pooling of stride 2.
    """

    def __init__(self, shape, classes, width: int = 64, blocks=(2, 2, 2, 2), stem: str = "cifar"):
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ValueError(f"stem: expected cifar or imagenet, got {stem}")
        large = stem == "imagenet"
        self.conv1 = conv(shape[0], width, 2, 7) if large else conv(shape[0], width)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        channels = [width * 2**stage for stage in range(len(blocks))]
        before = [width, *channels]
        for stage, count in enumerate(blocks):
            first = Block(before[stage], channels[stage], stride=1 if stage == 0 else 2)
            others = [Block(channels[stage], channels[stage], stride=1) for _ in range(count - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, *others))
        self.stages = len(blocks)
        self.fc = nn.Linear(channels[-1], classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))
