"""Networks whose backbone has learnt all that it will: its normalisation folded, its weights fixed, perhaps in int8."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lightning_fcl.models.described import Described
from lightning_fcl.models.quantization import fold_batchnorm, quantize_backbone

Precision = Literal["int8", "float"]


def frozen(network: Described, backbone: Precision = "int8") -> Described:
    """A network with a frozen backbone, for a state that is loaded afterwards.

    Args:
        network: A network with a ``backbone`` and a ``head``; it is changed.
        backbone: ``"int8"`` or ``"float"``.

    Returns:
        The network.

    Example:
        >>> from lightning_fcl.models import DSICNet
        >>> network = frozen(DSICNet())
        >>> type(network.backbone).__name__, network.described["init_args"]["backbone"]
        ('Int8Backbone', 'int8')
    """
    freeze(network, backbone)
    return network


def freeze(network: nn.Module, backbone: Precision, images: Tensor | None = None) -> None:
    """Fold a network's normalisation and freeze its backbone, in place; int8 is calibrated on images, if given."""
    network.eval()
    fold_batchnorm(network)
    if backbone == "int8":
        quantize_backbone(network, images)
    network.get_submodule("backbone").requires_grad_(False)
    network.frozen = True  # type: ignore[assignment]
    if isinstance(network, Described):
        arguments = {"network": network.described, "backbone": backbone}
        network.described = {"class_path": f"{__package__}.{frozen.__name__}", "init_args": arguments}
    network.train()
