"""LVT: a vision transformer whose attention compares tokens with keys that it has learnt (Wang et al., CVPR 2022)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.models._parts import Block, check_blocks, check_image_size, heads_of, initialise, with_class_token
from lightning_fcl.models.described import Described
from lightning_fcl.models.vit import SplitViT


class LVT(SplitViT):
    """The lifelong vision transformer (Wang et al. 2022, "LVT"), of the sizes and with the arguments of `ViT`.

    It is that transformer with `InterTaskAttention` in each block. As in Zuo et al. 2024, who compare it with FedViT
    at the same size: the paper's own has convolutions before it and between its three stages. And it has one
    classifier, `head`, where the paper has two: one that is trained on new tasks alone, and one that predicts and is
    trained on both, which remains. The loss is `lightning_fcl.callbacks.LVTMethod`'s.

    The body has 2,549,016 parameters by default, 10.20 MB in one direction at 4 bytes each: those of `ViT`, but for
    its six blocks of 421,092 (2,526,552), which have 111,168 of the attention (3 * (192 * 192 + 192)) and 13,284 keys
    and biases ((8 * 8 + 1) * 192 + 12 * (8 * 8 + 3)) each.

    Raises:
        ValueError: If patches do not divide the image, or heads the width; and as `SplitViT` does.

    Example:
        >>> model = LVT(num_classes=10)
        >>> sum(p.numel() for p in model.body.parameters())
        2549016
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
        heads: int = 12,
        mlp_ratio: float = 4.0,
        channels: int = 3,
    ) -> None:
        body = LVTBody(image_size, channels, patch_size, width, depth, heads, mlp_ratio)
        super().__init__(body, width, num_classes, image_size, channels)


class LVTBody(Described):
    """The body of `LVT`, whose arguments it has: patches, a class token, learnt positions, pre-norm blocks.

    The output is the class token.

    Raises:
        ValueError: If patches do not divide the image, or heads the width.

    Example:
        >>> LVTBody(32, 3, patch_size=16, width=8, depth=1, heads=2)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        patch_size: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 12,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        check_blocks(width, heads, depth, mlp_ratio)
        check_image_size("LVT", image_size, multiple=patch_size, least=2 * patch_size)
        side = image_size // patch_size
        self.patches = nn.Conv2d(channels, width, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + side * side, width))
        self.blocks = nn.Sequential(
            *(Block(width, InterTaskAttention(width, heads, side), mlp_ratio) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images (batch, channels, height, width), shape (batch, width)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = with_class_token(self.class_token, tokens) + self.positions
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features


class InterTaskAttention(nn.Module):
    """Attention whose keys are learnt, not computed from the input (Wang et al. 2022, section 3, inter-task attention).

    ``softmax(q K^T / sqrt(d) + B) v`` in each head: queries q and values v come from the tokens, the key K of each
    token and the biases B are parameters, `external_key` and `external_bias`. B has a number for each distance of two
    patches, as in LeViT, and three more: for the class token's attention to patches, theirs to it, and its own to
    itself; it begins at 0, K with the variance of keys that a layer of 0.02 computes from normalised tokens.
    """

    offsets: Tensor

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        check_blocks(width, heads)
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.external_key = nn.Parameter(torch.empty(heads, 1 + side * side, width // heads))
        self.external_bias = nn.Parameter(torch.zeros(heads, side * side + 3))
        self.register_buffer("offsets", _offsets(side), persistent=False)
        nn.init.trunc_normal_(self.external_key, std=0.02 * width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) from tokens of the same shape."""
        query, value = (heads_of(layer(tokens), self.heads) for layer in (self.query, self.value))
        key = self.external_key.expand(len(tokens), -1, -1, -1)
        bias = self.external_bias[:, self.offsets][None].to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key.to(query.dtype), value, attn_mask=bias)
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


def _offsets(side: int) -> Tensor:
    """Which bias belongs to a query (row) and a key (column): of two patches ``rows * side + columns`` apart."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    apart = (places[:, None] - places).abs()
    table = torch.full((1 + side * side, 1 + side * side), side * side)
    table[1:, 0] = side * side + 1
    table[0, 0] = side * side + 2
    table[1:, 1:] = apart[..., 0] * side + apart[..., 1]
    return table
