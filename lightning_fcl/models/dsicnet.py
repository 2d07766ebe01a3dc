"""DSICNet: a depthwise-separable network for faces, small enough to learn on a microcontroller."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lightning_fcl.errors import at_least
from lightning_fcl.models._parts import check_images
from lightning_fcl.models.described import Described

# Depthwise-separable blocks of the backbone: output channels and stride.
_BLOCKS = ((32, 1), (64, 2), (64, 1), (64, 2), (64, 1), (64, 2))


class DSICNet(Described):
    """Depthwise-separable CNN in two parts: a `backbone` that is frozen on devices, and a `head` that learns there.

    Kröger et al. name a DSICNet of 30,000 parameters whose last convolution and classifier (M_T, 24 kB in fp32) are
    trained and whose rest (M_F) is frozen int8. Its table of layers is published nowhere that we know: this is a
    reconstruction from these numbers. Stem 3x3 of 16; pairs of a depthwise and a pointwise convolution to 32 and to
    64, four of 64; a depthwise of 64; the head is the last pointwise convolution, to 80, and a classifier. With ten
    classes and batch normalisation there are 29,962 parameters; once the latter is folded, M_T has 6,010 (24,040
    bytes).

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images, in pixels.
        channels: Channels of the images.

    Raises:
        ValueError: If the images are smaller than 16 x 16, or a batch is of another size.

    Example:
        >>> import torch
        >>> net = DSICNet(num_classes=10)
        >>> net(torch.zeros(2, 1, 64, 48)).shape, net.backbone(torch.zeros(2, 1, 64, 48)).shape
        (torch.Size([2, 10]), torch.Size([2, 64, 4, 3]))
    """

    def __init__(self, num_classes: int = 10, image_size: tuple[int, int] = (64, 48), channels: int = 1) -> None:
        super().__init__()
        at_least(1, num_classes=num_classes)
        if min(image_size) < 16:
            raise ValueError(f"Expected `image_size` of at least 16 x 16 pixels but got {image_size}.")
        self.input_shape = (channels, *image_size)
        layers: list[tuple[str, nn.Module]] = [("stem", _convolution(channels, 16, 3, 2))]
        width = 16
        for number, (wider, stride) in enumerate(_BLOCKS, start=1):
            layers.append((f"depthwise{number}", _convolution(width, width, 3, stride, groups=width)))
            layers.append((f"pointwise{number}", _convolution(width, wider, 1)))
            width = wider
        layers.append((f"depthwise{len(_BLOCKS) + 1}", _convolution(width, width, 3, groups=width)))
        self.latent_channels = width
        self.features = 80
        self.backbone: nn.Module = nn.Sequential(OrderedDict(layers))
        self.head = nn.Sequential(
            OrderedDict(
                pointwise=_convolution(width, self.features, 1),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                classifier=nn.Linear(self.features, num_classes),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, num_classes), of images (batch, channels, height, width), or of the backbone's maps."""
        logits: Tensor = self.head(self.latent(x))
        return logits

    def latent(self, x: Tensor) -> Tensor:
        """The backbone's maps, shape (batch, 64, h, w); maps that were computed before are returned as they are."""
        if x.dim() == 4 and x.shape[1] == self.latent_channels:
            return x
        check_images(x, self.input_shape)
        maps: Tensor = self.backbone(x)
        return maps

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.head[:-1](self.latent(x))
        return features


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(convolution=convolution, norm=nn.BatchNorm2d(outputs), relu=nn.ReLU()))
