"""Residual networks for small images (He et al., 2016)."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.models._layers import check_images
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least


class CifarResNet(Serializable):
    """A residual network of three stages for images of 32 x 32 pixels, such as ResNet-8 (He et al., 2016).

    The paper is "Deep residual learning for image recognition", section 4.2. A convolution is followed by three stages
    of basic blocks with 16, 32 and 64 channels, global average pooling, and the linear classifier `head`. A block has
    two 3x3 convolutions with batch normalization. The first block of stages 2 and 3 halves height and width. Shortcuts
    have no parameters: they skip every second pixel, and new channels are 0. The network has ``6 * blocks + 2`` layers:
    1 block per stage is ResNet-8, and 3 blocks are ResNet-20. With ten classes, these networks have 75,290 and 269,722
    parameters, including batch normalization. Convolutions are initialized from a normal distribution with variance
    ``2 / fan_in`` (He et al., 2015).

    The network computes with the channels of a pixel next to each other in memory (PyTorch's ``channels_last``). On a
    CPU, training steps then take 0.75 to 0.95 times as long. The memory layout of parameters does not change.

    Args:
        num_classes: Number of classes.
        blocks: Number of blocks per stage.
        width: Number of channels of the first stage. Stage 2 has twice, and stage 3 has four times as many channels.
        channels: Number of channels of the images.
        image_size: Height and width of the images in pixels.

    Raises:
        ValueError: If an argument is below 1, or if the images of a batch have a different size.

    Example:
        >>> import torch
        >>> net = CifarResNet(num_classes=10)
        >>> sum(p.numel() for p in net.parameters())
        75290
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    citations: ClassVar[tuple[str, ...]] = ("he2016resnet",)

    def __init__(
        self, num_classes: int = 10, blocks: int = 1, width: int = 16, channels: int = 3, image_size: int = 32
    ) -> None:
        super().__init__()
        at_least(1, num_classes=num_classes, blocks=blocks, width=width, channels=channels, image_size=image_size)
        self.input_shape = (channels, image_size, image_size)
        self.features = 4 * width
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        inputs, layers = width, []
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(blocks):
                layers.append(_Block(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(self.features, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, num_classes) of images (batch, channels, image_size, image_size)."""
        logits: Tensor = self.head(self.embed(x))
        return logits

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, shape (batch, features)."""
        check_images(x, self.input_shape)
        # This is `channels_last`. `Tensor.contiguous(memory_format=...)` does not work under vmap.
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        maps: Tensor = self.blocks(F.relu(self.norm(self.stem(x))))
        return maps.mean((2, 3))


class _Block(nn.Module):
    """A basic block: two convolutions with batch normalization, and a shortcut without parameters (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (batch, outputs, height / stride, width / stride) of maps (batch, inputs, height, width)."""
        maps = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1 or self.new_channels:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(maps + x)
