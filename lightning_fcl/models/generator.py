"""A generator of images, and a distance between batch statistics and a network's running statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least


class Generator(Serializable):
    """A network that generates images from noise (Fang et al., 2019, "Data-free adversarial distillation").

    A linear layer creates maps whose sides are a quarter of the image's sides, rounded up. Two upsampling layers and
    three convolutions follow. The generators of MFCL and TARGET also have these layers. They differ in the last layer.
    TARGET ends with a sigmoid, and MFCL with a tanh and a batch normalization. Here the last layer is a batch
    normalization, so the training images need not be scaled to a fixed range.

    Args:
        size: Channels, height and width of an image, each at least 1.
        noise_dim: Size of the noise vector of an image, at least 1.
        width: Number of channels of the last hidden layer, at least 1. The earlier layers have ``2 * width`` channels.

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
        """Return images (batch, channels, height, width) generated from noise (batch, noise_dim)."""
        images: Tensor = self.net(z)
        return images


def batchnorm_layers(network: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalization layers of a network that track running statistics.

    Raises:
        ValueError: If there are no such layers.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if not layers:
        raise InvalidValueError(
            "Expected a network with batch normalization layers that track running statistics, but "
            f"`{type(network).__name__}` has none.",
            hint="Add a layer such as `nn.BatchNorm2d`, or use another method.",
            argument="network",
            value=type(network).__name__,
        )
    return layers


def with_statistics_distance(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a network's output, and the scalar distance between the batch statistics and the running statistics.

    The distance is the sum of ``||mean - running mean|| + ||variance - running variance||`` over all
    `batchnorm_layers`. Mean and variance are those of the layer's input. This is equation 4 of Yin et al. (2020,
    "Dreaming to distill"), but not squared. The network must be in evaluation mode.

    Raises:
        ValueError: If the network has no `batchnorm_layers`.

    Example:
        >>> norm = nn.BatchNorm1d(1).eval()
        >>> with_statistics_distance(norm, torch.tensor([[3.0], [3.0]]))[1]  # mean 3, not 0; variance 0, not 1
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
