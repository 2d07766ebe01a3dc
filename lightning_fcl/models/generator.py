"""A generator of images, and how far what a network sees of them is from what it saw in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least


class Generator(Serializable):
    """Images from noise: a linear layer to a quarter of their size, two doublings, and three convolutions.

    The network of Fang et al. 2019, "Data-free adversarial distillation", which MFCL and TARGET take, too. Its last
    layer is a batch normalisation, so that images need not be scaled to a range.

    Args:
        size: Of an image: channels, height and width, each at least 1.
        noise_dim: Numbers that an image is made of, at least 1.
        width: Channels of the last hidden layer, half of those before, at least 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> Generator((3, 32, 32))(torch.randn(2, 256)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, size: Sequence[int], noise_dim: int = 256, width: int = 64) -> None:
        super().__init__()
        channels, height, breadth = size
        at_least(1, channels=channels, height=height, breadth=breadth, noise_dim=noise_dim, width=width)
        small, half = (-(-height // 4), -(-breadth // 4)), (-(-height // 2), -(-breadth // 2))
        self.noise_dim = noise_dim
        self.net = nn.Sequential(
            nn.Linear(noise_dim, 2 * width * small[0] * small[1]),
            nn.Unflatten(1, (2 * width, *small)),
            nn.BatchNorm2d(2 * width),
            nn.Upsample(half),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample((height, breadth)),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images, shape (batch, channels, height, width), of noise, shape (batch, noise)."""
        images: Tensor = self.net(z)
        return images


def batchnorm_layers(network: nn.Module) -> list[_BatchNorm]:
    """The layers of batch normalisation that keep statistics.

    Raises:
        ValueError: If there are none.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if not layers:
        raise InvalidValueError(
            "Expected a network with layers of batch normalisation that keep statistics but "
            f"`{type(network).__name__}` has none.",
            hint="Add a layer such as `nn.BatchNorm2d`, or use another method.",
            argument="network",
            value=type(network).__name__,
        )
    return layers


def with_statistics_distance(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a network makes of samples, and how far their statistics are from those that it keeps, a scalar.

    Over its `batchnorm_layers`, the sum of ``||mean - running mean|| + ||variance - running variance||`` of what comes
    into them (Yin et al. 2020, "Dreaming to distill", equation 4, not squared), in evaluation mode.

    Example:
        >>> norm = nn.BatchNorm1d(1).eval()
        >>> with_statistics_distance(norm, torch.tensor([[3.0], [3.0]]))[1]  # a mean of 3 for 0, a variance of 0 for 1
        tensor(4.)
    """
    distances: list[Tensor] = []

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].transpose(0, 1).flatten(1)
        for statistic, buffer_name in ((rows.mean(1), "running_mean"), (rows.var(1, correction=0), "running_var")):
            distances.append((statistic - layer.get_buffer(buffer_name)).norm())

    handles = [layer.register_forward_pre_hook(look) for layer in batchnorm_layers(network)]
    try:
        output: Tensor = network(x)
    finally:
        for handle in handles:
            handle.remove()
    return output, torch.stack(distances).sum()
