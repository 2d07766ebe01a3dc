"""Vision transformers in two parts, a body that is shared and a head that stays with its client."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_fcl.models._backbones import make_backbone, vit_backbone
from lightning_fcl.models._layers import check_images, fast_attention
from lightning_fcl.models.serialization import Serializable, serializable
from lightning_fcl.validation import at_least

__all__ = ["SplitViT", "ViT", "create_vit"]


class SplitViT(Serializable):
    """A body that makes features of images, and a linear head: ``forward(x) = head(body(x))``.

    With ``reductions={"model.head.*": "local"}`` the bodies are averaged and each client keeps its head, as in FedRep
    and FedViT.

    Args:
        body: Maps images (batch, channels, height, width) to features (batch, features).
        features: Features of the body.
        num_classes: Number of classes.
        image_size: Height and width of the images, in pixels.
        channels: Channels of the images.

    Raises:
        ValueError: If there is no class, or a batch's images are of another size.

    Example:
        >>> import torch
        >>> model = SplitViT(nn.Flatten(), features=3 * 8 * 8, num_classes=10, image_size=8)
        >>> model(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, body: nn.Module, features: int, num_classes: int = 100, image_size: int = 32, channels: int = 3
    ) -> None:
        super().__init__()
        at_least(1, num_classes=num_classes)
        self.input_shape = (channels, image_size, image_size)
        self.features = features
        self.body = body
        self.head = nn.Linear(features, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (batch, channels, height, width), shape (batch, num_classes)."""
        logits: Tensor = self.head(self.embed(x))
        return logits

    def embed(self, x: Tensor) -> Tensor:
        """What the head sees: the body's features, shape (batch, features)."""
        check_images(x, self.input_shape)
        with fast_attention(x):
            features: Tensor = self.body(x)
        return features


class ViT(SplitViT):
    """The vision transformer of Zuo et al. 2024, "FedViT", section 5.1: six layers, at 32 x 32 pixels.

    The architecture is that of Dosovitskiy et al. 2021: patches, a class token, learnt positions, pre-norm blocks with
    biases everywhere. It is timm's ``VisionTransformer``, whose parameters are exactly those of the authors' code. The
    paper tells the layers only, the code the rest: width 192, 12 heads (3 heads have as many parameters).

    The body has 2,691,648 parameters, which are 10.77 MB one way: 444,864 in each block.

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images, in pixels, a multiple of the patches'.
        patch_size: Height and width of a patch, in pixels.
        width: Channels of the tokens.
        depth: Blocks.
        num_heads: Heads of the attention; they divide the width.
        mlp_ratio: Hidden width of the perceptrons over that of the tokens.
        channels: Channels of the images.

    Raises:
        ValueError: If patches do not divide the image, or heads the width; and as `SplitViT` does.

    Example:
        >>> import torch
        >>> model = ViT(num_classes=10)
        >>> sum(p.numel() for p in model.body.parameters()), model.head
        (2691648, Linear(in_features=192, out_features=10, bias=True))
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 100,
        image_size: int = 32,
        patch_size: int = 4,
        width: int = 192,
        depth: int = 6,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        channels: int = 3,
    ) -> None:
        body, features = vit_backbone(image_size, channels, patch_size, width, depth, num_heads, mlp_ratio)
        super().__init__(body, features, num_classes, image_size, channels)


@serializable
def create_vit(
    name: str = "vit", image_size: int = 32, num_classes: int = 100, channels: int = 3, **options: Any
) -> SplitViT:
    """A vision transformer by name, untrained: the eight families of Zuo et al. 2024, "FedViT", section 5.5.

    A family's name stands for its smallest variant. Names and what a transformer sees, position by position:

    ======================================================  =============================  ============================
    name                                                    below 112 pixels: at 32        from 112 pixels: at 224
    ======================================================  =============================  ============================
    ``vit``; ``deit``: ``deit_tiny``, ``deit_small``        patches of 4: 8 x 8            of 16: 14 x 14
    ``cait``: ``cait_xxs24``, ``cait_xxs36``                patches of 4: 8 x 8            of 16: 14 x 14
    ``pit``: ``pit_ti``, ``pit_xs``, ``pit_s``              4 every 2: 15, 8, 4            16 every 8: 27, 14, 7
    ``pvt``: ``pvt_v2_b0``, ``pvt_v2_b1``                   7 every 2: 16, 8, 4, 2         7 every 4: 56, 28, 14, 7
    ``levit``: ``levit_128s``, ``levit_128``,               2 convolutions: 8, 4, 2        4 convolutions: 14, 7, 4
    ``levit_192``
    ``swin``: ``swin_tiny``, ``swin_small``                 2, windows of 4: 16, 8, 4, 2   4, of 7: 56, 28, 14, 7
    ``cvt``: ``cvt_13``, ``cvt_21``                         3 every 2: 16, 8, 4            7 every 4: 56, 28, 14
    ``t2t``: ``t2t_7``, ``t2t_10``, ``t2t_12``, ``t2t_14``  strides 2, 2, 1: 16, 8, 8      4, 2, 2: 56, 28, 14
    ======================================================  =============================  ============================

    From 112 pixels on these are their papers' configurations, but for the six layers of ``vit``; at 32 there is more
    than one position left in every attention, else its queries and keys would learn nothing. ``vit`` is `ViT`,
    ``deit`` the same with 12 layers and without distillation, ``cvt`` and ``t2t`` are `CvTBody` and `T2TBody`, the
    others timm's. PVT is its second version (timm has no other); at 32 it reduces keys by (4, 2, 1, 1) where the paper
    has (8, 4, 2, 1). LeViT has one head in place of two; the batch normalisation before it belongs to the body and
    stands before the pooling, where a batch of one image can be trained, too. Nothing is dropped while training,
    unless an option says so.

    What travels are the bodies' parameters, 4 bytes each, and LeViT's and CvT's statistics of batch normalisation:

    =====  ==========  ==========    =====  ==========  ==========    =====  ==========  ==========
    body        at 32      at 224    body        at 32      at 224    body        at 32      at 224
    =====  ==========  ==========    =====  ==========  ==========    =====  ==========  ==========
    vit     2,691,648   2,855,232    pit     4,511,936   4,590,272    swin   27,497,418  27,519,354
    deit    5,360,832   5,524,416    pvt     3,007,392   3,409,760    cvt    19,600,576  19,608,256
    cait   11,599,680  11,763,264    levit   6,980,832   7,006,290    t2t     3,975,030   3,998,310
    =====  ==========  ==========    =====  ==========  ==========    =====  ==========  ==========

    Args:
        name: A family or a variant, see above.
        image_size: Height and width of the images, in pixels.
        num_classes: Number of classes.
        channels: Channels of the images.
        options: Arguments of the class that is built in place of the variant's, such as ``depth``, or timm's
            ``drop_path_rate``.

    Returns:
        The model, with `body`, `head` and `features`. Its weights come from torch's global generator.

    Raises:
        ValueError: If the name or an option is not known, or the image size does not suit the architecture.

    Example:
        >>> import torch
        >>> model = create_vit("t2t", num_classes=10, depth=2)
        >>> model.features, model(torch.zeros(1, 3, 32, 32)).shape
        (256, torch.Size([1, 10]))
    """
    body, features = make_backbone(name, image_size, channels, options)
    return SplitViT(body, features, num_classes, image_size, channels)
