"""Vision transformers in two parts: a body that clients share, and a head that can be client-local."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_fcl.models._backbones import make_backbone, vit_backbone
from lightning_fcl.models._layers import check_images, fast_attention
from lightning_fcl.models.serialization import Serializable, serializable
from lightning_fcl.validation import at_least

__all__ = ["SplitViT", "ViT", "create_vit"]


class SplitViT(Serializable):
    """A body that computes features of images, and a linear head: ``forward(x) = head(body(x))``.

    With ``reductions={"model.head.*": "local"}``, the server averages the bodies, and each client keeps its own head,
    as in FedRep and FedViT.

    Args:
        body: Module that maps images (batch, channels, height, width) to features (batch, features).
        features: Number of features of the body.
        num_classes: Number of classes.
        image_size: Height and width of the images in pixels.
        channels: Number of channels of the images.

    Raises:
        ValueError: If ``num_classes`` is below 1, or if the images of a batch have a different size.

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
        """Return logits (batch, num_classes) of images (batch, channels, height, width)."""
        logits: Tensor = self.head(self.embed(x))
        return logits

    def embed(self, x: Tensor) -> Tensor:
        """Return the body's features, which are the input of the head, shape (batch, features)."""
        check_images(x, self.input_shape)
        with fast_attention(x):
            features: Tensor = self.body(x)
        return features


class ViT(SplitViT):
    """The vision transformer of FedViT (Zuo et al., 2024, section 5.1): six layers, for images of 32 x 32 pixels.

    The architecture is the architecture of Dosovitskiy et al. (2021): patches, a class token, learned positions, and
    pre-norm blocks with biases in all layers. The body is timm's ``VisionTransformer``, and has the same parameters as
    the authors' code. The paper specifies only the number of layers. The width of 192 and the 12 heads come from the
    code. The number of heads does not change the number of parameters.

    The body has 2,691,648 parameters. An upload or a download of the body has 10.77 MB, at 4 bytes per parameter. Each
    block has 444,864 parameters.

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images in pixels, a multiple of ``patch_size``.
        patch_size: Height and width of a patch in pixels.
        width: Number of channels of the tokens.
        depth: Number of blocks.
        num_heads: Number of attention heads, a divisor of ``width``.
        mlp_ratio: Hidden width of the perceptrons divided by the width of the tokens.
        channels: Number of channels of the images.

    Raises:
        ValueError: If the patch size does not divide the image size, ``num_heads`` does not divide ``width``, or
            `SplitViT` raises an error.

    Example:
        >>> import torch
        >>> model = ViT(num_classes=10)
        >>> sum(p.numel() for p in model.body.parameters()), model.head
        (2691648, Linear(in_features=192, out_features=10, bias=True))
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    citations: ClassVar[tuple[str, ...]] = ("zuo2024fedvit",)

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
    """Return an untrained vision transformer of one of the eight families of FedViT (Zuo et al., 2024, section 5.5).

    The name of a family selects the family's smallest variant. In the first column of the table, the variants of a
    family follow the family's name after a colon. The other two columns list the patches or convolutions, and the
    number of positions per side in each stage. For example, ``4 every 2: 15, 8, 4`` means patches of 4 pixels with
    stride 2, and 15, 8 and 4 positions per side in three stages. For ``swin``, ``2, windows of 4`` means patches of 2
    pixels, and attention in windows of 4 x 4 positions.

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

    From 112 pixels on, the configurations are those of the papers, except for the differences below, and except that
    ``vit`` has six layers. At 32 pixels, the attention in each stage has more than one position. With a single
    position, queries and keys cannot be trained.

    - ``vit`` is `ViT`. ``deit`` is a `ViT` with 12 layers, without distillation.
    - ``cvt`` is `CvTBody`, and ``t2t`` is `T2TBody`. The other bodies come from timm.
    - PVT is version 2, because timm does not contain version 1. Below 112 pixels, PVT reduces keys by (4, 2, 1, 1)
      instead of the paper's (8, 4, 2, 1).
    - LeViT has one head instead of two. The batch normalization before the head belongs to the body. This normalization
      comes before the pooling, so that the model can be trained on a batch of one image.
    - Dropout and stochastic depth are off, unless an option sets them.

    Each upload or download contains the parameters of the body, at 4 bytes each. For LeViT and CvT, it also contains
    the statistics of batch normalization. The bodies have these numbers of parameters:

    =====  ==========  ==========    =====  ==========  ==========    =====  ==========  ==========
    body        at 32      at 224    body        at 32      at 224    body        at 32      at 224
    =====  ==========  ==========    =====  ==========  ==========    =====  ==========  ==========
    vit     2,691,648   2,855,232    pit     4,511,936   4,590,272    swin   27,497,418  27,519,354
    deit    5,360,832   5,524,416    pvt     3,007,392   3,409,760    cvt    19,600,576  19,608,256
    cait   11,599,680  11,763,264    levit   6,980,832   7,006,290    t2t     3,975,030   3,998,310
    =====  ==========  ==========    =====  ==========  ==========    =====  ==========  ==========

    Args:
        name: Name of a family or a variant, from the first table.
        image_size: Height and width of the images in pixels.
        num_classes: Number of classes.
        channels: Number of channels of the images.
        options: Arguments of the body's class that override those of the variant, such as ``depth``, or timm's
            ``drop_path_rate``.

    Returns:
        The model, with the attributes `body`, `head` and `features`. The model's weights are drawn from torch's global
        random generator.

    Raises:
        ValueError: If the name or an option is unknown, or if the image size does not match the architecture.

    Example:
        >>> import torch
        >>> model = create_vit("t2t", num_classes=10, depth=2)
        >>> model.features, model(torch.zeros(1, 3, 32, 32)).shape
        (256, torch.Size([1, 10]))
    """
    body, features = make_backbone(name, image_size, channels, options)
    return SplitViT(body, features, num_classes, image_size, channels)
