"""A generator of samples, and distances between batch statistics and a network's running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least

LayerDistance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``distance(mean, variance, running_mean, running_variance)``: a scalar for one batch normalization layer.

Each argument has shape (channels,).
"""


class Generator(Serializable):
    """A network that generates images or feature vectors from noise.

    For images, the layers are those of Fang et al. (2019, "Data-free adversarial distillation"). A linear layer creates
    maps whose sides are a quarter of the image's sides, rounded up. Two upsampling layers and three convolutions
    follow. The generators of MFCL and TARGET also have these layers. They differ in the last layer. TARGET ends with a
    sigmoid, and MFCL with a tanh and a batch normalization. Here the last layer is a batch normalization, so the
    training images need not be scaled to a fixed range.

    For feature vectors, the network has one hidden layer, and a batch normalization after each of its two linear
    layers.

    Args:
        size: Shape of one sample: channels, height and width of an image, or the number of features of a vector. Each
            number is at least 1.
        noise_dim: Size of the noise vector of a sample, at least 1.
        width: Number of channels of the last hidden layer, at least 1. The earlier layers have ``2 * width`` channels.
            For vectors, the hidden layer has ``16 * width`` units.

    Raises:
        ValueError: If a number is out of range, or ``size`` has neither one nor three numbers.

    Example:
        >>> Generator((3, 32, 32))(torch.randn(2, 256)).shape
        torch.Size([2, 3, 32, 32])
        >>> Generator((1280,))(torch.randn(2, 256)).shape
        torch.Size([2, 1280])
    """

    def __init__(self, size: Sequence[int], noise_dim: int = 256, width: int = 64) -> None:
        super().__init__()
        if len(size) not in (1, 3):
            raise InvalidValueError(
                "Expected `size` to be the shape of an image, (channels, height, width), or of a vector, (features,), "
                f"but got {tuple(size)}.",
                hint="Use a size of three numbers or of one number.",
                argument="size",
                value=tuple(size),
            )
        at_least(1, noise_dim=noise_dim, width=width, size=min(size))
        self.noise_dim = noise_dim
        make_layers = _image_layers if len(size) == 3 else _vector_layers
        self.net = make_layers(size, noise_dim, width)

    def forward(self, z: Tensor) -> Tensor:
        """Return samples of the shape ``size``, generated from noise, shape (batch, noise_dim)."""
        samples: Tensor = self.net(z)
        return samples


def _image_layers(size: Sequence[int], noise_dim: int, width: int) -> nn.Sequential:
    channels, height, breadth = size
    small, half = (-(-height // 4), -(-breadth // 4)), (-(-height // 2), -(-breadth // 2))
    return nn.Sequential(
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


def _vector_layers(size: Sequence[int], noise_dim: int, width: int) -> nn.Sequential:
    (features,), units = size, 16 * width
    return nn.Sequential(
        nn.Linear(noise_dim, units),
        nn.BatchNorm1d(units),
        nn.LeakyReLU(0.2),
        nn.Linear(units, features),
        nn.BatchNorm1d(features),
    )


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


def norm_distance(mean: Tensor, variance: Tensor, running_mean: Tensor, running_variance: Tensor) -> Tensor:
    """Return ``||mean - running_mean|| + ||variance - running_variance||``.

    This is a term of equation 4 of Yin et al. (2020, "Dreaming to distill"), but not squared.
    """
    distance: Tensor = (mean - running_mean).norm() + (variance - running_variance).norm()
    return distance


def gaussian_divergence(mean: Tensor, variance: Tensor, running_mean: Tensor, running_variance: Tensor) -> Tensor:
    """Return the divergence KL(running || batch) of two normal distributions, averaged over the channels.

    Example:
        >>> gaussian_divergence(*torch.tensor([[3.0], [1.0], [1.0], [1.0]]))  # (3 - 1)^2 / 2
        tensor(2.)
    """
    # The authors of MFCL also add this number, so that a channel without variance has a finite divergence.
    variance, running_variance = variance + 1e-8, running_variance + 1e-8
    ratio = (running_variance + (running_mean - mean).square()) / variance
    return (variance.log() - running_variance.log() + ratio - 1).mean() / 2


def with_statistics_distance(
    network: nn.Module, x: Tensor, layer_distance: LayerDistance = norm_distance
) -> tuple[Tensor, Tensor]:
    """Return a network's output, and the scalar distance between the batch statistics and the running statistics.

    The distance is the sum of ``layer_distance`` over all `batchnorm_layers`. Mean and variance are those of the
    layer's input. The network must be in evaluation mode.

    Args:
        network: The network.
        x: Inputs of the network.
        layer_distance: The distance for one layer: `norm_distance` or `gaussian_divergence`.

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
        batch_statistics = rows.mean(1), rows.var(1, correction=0)
        running_statistics = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        distances.append(layer_distance(*batch_statistics, *running_statistics))

    handles = [layer.register_forward_pre_hook(look) for layer in batchnorm_layers(network)]
    try:
        output: Tensor = network(x)
    finally:
        for handle in handles:
            handle.remove()
    return output, torch.stack(distances).sum()
