"""Small networks for devices: perceptrons, HAR-CNN for sensor data (Usmanova et al., 2021), and DSICNet for faces."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models._layers import check_images
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least, one_of

_TOKEN = re.compile(r"(?P<filters>[1-9]\d*)-(?P<width>[1-9]\d*)C|(?P<pool>[1-9]\d*)M|(?P<units>[1-9]\d*)D", re.ASCII)
# Depthwise-separable blocks of the backbone of `DSICNet`: output channels and stride.
_BLOCKS = ((32, 1), (64, 2), (64, 1), (64, 2), (64, 1), (64, 2))


class MLP(Serializable, nn.Sequential):
    """Linear layers with ReLU between them. Inputs are flattened first.

    Args:
        sizes: Number of features of the input, of each hidden layer and of the output. At least two numbers.
        batch_norm: Whether a batch normalization precedes each linear layer. The first one normalizes the inputs.

    Raises:
        ValueError: If there are fewer than two sizes.

    Example:
        >>> import torch
        >>> MLP([64, 32, 10])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, sizes: Sequence[int], batch_norm: bool = False) -> None:
        if len(sizes) < 2:
            raise InvalidValueError(
                f"Expected `sizes` to contain at least an input and an output size, but got {list(sizes)}.",
                argument="sizes",
            )
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            normalization = [nn.BatchNorm1d(inputs)] if batch_norm else []
            layers += [*normalization, nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])
        self.features = sizes[-2]

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the last layer, shape (batch, features)."""
        for layer in list(self)[:-1]:
            x = layer(x)
        return x


class HARCNN(Serializable):
    """A network of convolutions, pooling and dense layers with a linear classifier (Usmanova et al., 2021).

    The paper is "A distillation-based approach integrating continual learning and federated learning for pervasive
    services", section 3.5 and Table 1. The notation is a list of layers, joined by ``_``:

    - ``196-16C`` is a convolution with 196 filters of width 16 without padding, followed by ReLU.
    - ``4M`` is max pooling over 4 time steps.
    - ``1024D`` is a dense layer with 1024 units, followed by ReLU and dropout.

    The notation does not contain the classifier. The paper states a dropout rate, but not where dropout is applied.
    This model has dropout after every dense layer except the classifier.

    For windows of 6 x 128 and at 12 bytes per parameter, two models have about the sizes of Table 1:
    ``196-16C_4M_1024D`` (5,645,898 parameters, 67.8 MB) and ``196-16C_4M_1024D_512D`` (6,167,626 parameters, 74.0 MB).
    Two models have different sizes: ``32-10C_256D_128D`` (1,010,726 parameters) has 12.1 MB instead of 3.3 MB in Table
    1, and ``64-9C_4M_32-9C_2M_16-9C_128D`` (33,654 parameters) has 404 KB instead of 45 KB.

    The hidden layers are `body`, and the classifier is `head`.

    Args:
        notation: The layers. Convolutions and pooling come before dense layers.
        in_channels: Number of channels of the signal.
        length: Number of time steps of the signal.
        num_classes: Number of outputs of the classifier.
        dropout: Probability of dropping a unit after a dense layer, at least 0 and below 1.
        init: ``"torch"`` keeps PyTorch's initialization. ``"keras"`` uses the defaults of Keras, which the paper used:
            Glorot uniform weights and zero biases.

    Raises:
        ValueError: If an argument is out of range, if the notation is invalid, or if the signal is too short. For an
            invalid notation, the message names the token and its position.

    Example:
        >>> import torch
        >>> model = HARCNN()
        >>> sum(p.numel() for p in model.parameters())
        5645898
        >>> model(torch.zeros(2, 6, 128)).shape
        torch.Size([2, 6])
    """

    citations: ClassVar[tuple[str, ...]] = ("usmanova2021flwf",)

    def __init__(
        self,
        notation: str = "196-16C_4M_1024D",
        in_channels: int = 6,
        length: int = 128,
        num_classes: int = 6,
        dropout: float = 0.5,
        init: Literal["torch", "keras"] = "torch",
    ) -> None:
        super().__init__()
        at_least(1, in_channels=in_channels, length=length, num_classes=num_classes)
        if not 0 <= dropout < 1:
            raise InvalidValueError(
                f"Expected `dropout` to be at least 0 and below 1, but got {dropout}. Use 0 for no dropout.",
                argument="dropout",
                value=dropout,
            )
        one_of(("torch", "keras"), init=init)
        self.notation = notation
        self.in_channels = in_channels
        self.length = length
        self.body, self.features = _hidden(notation, in_channels, length, dropout)
        self.head = nn.Linear(self.features, num_classes)
        if init == "keras":
            for layer in self.modules():
                if isinstance(layer, nn.Conv1d | nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, num_classes) of windows (batch, in_channels, length), or of a single window."""
        logits: Tensor = self.head(self.embed(x))
        return logits

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, shape (batch, features)."""
        if x.ndim not in (2, 3) or tuple(x.shape[-2:]) != (self.in_channels, self.length):
            raise InvalidValueError(
                f"Expected `x` to have shape (batch, {self.in_channels}, {self.length}), but got {tuple(x.shape)}.",
                hint="Transpose the windows, or build the model with their `in_channels` and `length`.",
                argument="x",
            )
        features: Tensor = self.body(x)
        return features


def _hidden(notation: str, in_channels: int, length: int, dropout: float) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    channels, steps = in_channels, length
    # Number of outputs of the last dense layer, or 0 before the first dense layer.
    features = 0
    for position, token in enumerate(notation.split("_"), start=1):
        location = f"{token!r} at position {position}"
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise InvalidValueError(
                f"Expected `notation` to contain tokens such as 196-16C, 4M or 1024D, but got {location} of "
                f"{notation!r}.",
                hint="Separate the tokens with a single `_`, and use capitals and sizes of at least 1.",
                argument="notation",
                value=location,
            )
        if match["units"]:
            if not features:
                layers.append(nn.Flatten(start_dim=-2))
            inputs, features = features or channels * steps, int(match["units"])
            layers += [nn.Linear(inputs, features), nn.ReLU(), nn.Dropout(dropout)]
            continue
        if features:
            raise InvalidValueError(
                f"Expected `notation` to have no convolution or pooling after a dense layer, but got {location} of "
                f"{notation!r}.",
                hint="Move the dense layers to the end.",
                argument="notation",
                value=location,
            )
        width = int(match["pool"] or match["width"])
        if width > steps:
            raise InvalidValueError(
                f"Expected the number of time steps before {location} of {notation!r} to be at least {width}, but "
                f"`length`={length} results in {steps}.",
                hint="Use longer windows, or narrower filters and pools.",
                argument="length",
                value=steps,
            )
        if match["pool"]:
            layers.append(nn.MaxPool1d(width))
            steps //= width
        else:
            filters = int(match["filters"])
            layers += [nn.Conv1d(channels, filters, width), nn.ReLU()]
            channels, steps = filters, steps - width + 1
    if not features:
        layers.append(nn.Flatten(start_dim=-2))
    return nn.Sequential(*layers), features or channels * steps


class DSICNet(Serializable):
    """A depthwise-separable CNN. On devices, its `backbone` is frozen, and its `head` is trained.

    Kröger et al. describe a DSICNet of 30,000 parameters. Its last convolution and its classifier (M_T, 24 kB in fp32)
    are trained. All other layers (M_F) are frozen in int8. The layers are not published, as far as we know. Therefore,
    this network is a reconstruction from these numbers.

    The backbone has a 3x3 stem with 16 channels and six pairs of a depthwise and a pointwise convolution. The first
    pair has 32 output channels, and the other five pairs have 64. A depthwise convolution with 64 channels follows. The
    head consists of the last pointwise convolution with 80 channels, and a classifier. With ten classes, the network
    has 29,962 parameters, including batch normalization. After folding the batch normalization, M_T has 6,010
    parameters (24,040 bytes).

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images in pixels.
        channels: Number of channels of the images.

    Raises:
        ValueError: If the height or width is below 16 pixels, if ``num_classes`` is below 1, or if the images of a
            batch have a different size.

    Example:
        >>> import torch
        >>> net = DSICNet(num_classes=10)
        >>> net(torch.zeros(2, 1, 64, 48)).shape, net.backbone(torch.zeros(2, 1, 64, 48)).shape
        (torch.Size([2, 10]), torch.Size([2, 64, 4, 3]))
    """

    citations: ClassVar[tuple[str, ...]] = ("kroeger2025odfcl",)

    def __init__(self, num_classes: int = 10, image_size: tuple[int, int] = (64, 48), channels: int = 1) -> None:
        super().__init__()
        at_least(1, num_classes=num_classes)
        if min(image_size) < 16:
            raise InvalidValueError(
                f"Expected `image_size` of at least 16 x 16 pixels, but got {image_size}.",
                argument="image_size",
                value=image_size,
            )
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
        """Return logits (batch, num_classes) of images (batch, channels, height, width) or of maps from `latent`."""
        logits: Tensor = self.head(self.latent(x))
        return logits

    def latent(self, x: Tensor) -> Tensor:
        """Return the backbone's maps, shape (batch, 64, h, w). An input with 64 channels is returned unchanged."""
        if x.dim() == 4 and x.shape[1] == self.latent_channels:
            return x
        check_images(x, self.input_shape)
        maps: Tensor = self.backbone(x)
        return maps

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, shape (batch, features)."""
        features: Tensor = self.head[:-1](self.latent(x))
        return features


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(convolution=convolution, norm=nn.BatchNorm2d(outputs), relu=nn.ReLU()))
