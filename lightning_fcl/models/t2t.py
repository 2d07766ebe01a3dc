"""T2T-ViT: tokens that gather their neighbours, step by step, before a transformer (Yuan et al., ICCV 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.models._parts import (
    Block,
    as_map,
    attend,
    check_blocks,
    initialise,
    margin,
    patches,
    perceptron,
    with_class_token,
)
from lightning_fcl.models.described import Described


class T2TBody(Described):
    """The tokens-to-token vision transformer without its classifier (Yuan et al. 2021, "T2T-ViT", section 3).

    The T2T module (section 3.1, eq. 1 to 4) splits the image softly, that is into patches that overlap, transforms
    these, lays them out as a map again, and splits that; a linear layer follows the last split. Then a deep and
    narrow backbone (section 3.2, eq. 5): a class token, fixed sinusoidal positions, and blocks of pre-norm attention
    without biases of queries, keys and values. The output is the class token.

    The defaults are T2T-ViT-7 (Table 1). With a classifier of 1000 classes there are 4,255,310 parameters, and
    50,432 fixed numbers in the positions; the paper has 4.3 M. Left out: the Performer of the T2T module, for which
    full attention stands as in the paper's T2T-ViT_t; dropout and stochastic depth.

    Args:
        image_size: Height and width of the images, in pixels.
        channels: Channels of the images.
        width: Channels of the backbone's tokens, an even number.
        depth: Blocks of the backbone.
        heads: Heads of the backbone.
        mlp_ratio: Hidden width of the backbone's perceptrons over that of the tokens.
        splits: Size and stride of the patches in each soft split.
        token_width: Channels of the tokens in the T2T module.

    Raises:
        ValueError: If heads do not divide the width, the width is odd, there is no split, or the image does not fit.

    Example:
        >>> body = T2TBody(32, width=16, depth=1, heads=2, splits=((3, 2), (3, 2)), token_width=8)
        >>> body(torch.zeros(2, 3, 32, 32)).shape, body.features
        (torch.Size([2, 16]), 16)
    """

    positions: Tensor

    def __init__(
        self,
        image_size: int = 224,
        channels: int = 3,
        width: int = 256,
        depth: int = 7,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        splits: Sequence[tuple[int, int]] = ((7, 4), (3, 2), (3, 2)),
        token_width: int = 64,
    ) -> None:
        super().__init__()
        check_blocks(width, heads, depth, mlp_ratio)
        if width % 2:
            raise ValueError(f"Expected `width` to be even but got {width}.")
        side, wide = image_size, channels
        transformers = []
        for number, (kernel, stride) in enumerate(splits, start=1):
            side, wide = patches(side, kernel, stride, image_size), wide * kernel * kernel
            if number < len(splits):
                transformers.append(TokenTransformer(wide, token_width))
                wide = token_width
        self.splits = tuple(splits)
        self.features = width
        self.transformers = nn.ModuleList(transformers)
        self.project = nn.Linear(wide, width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("positions", _sinusoids(1 + side * side, width), persistent=False)
        self.blocks = nn.Sequential(*(Block(width, _Attention(width, heads), mlp_ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images (batch, channels, height, width), shape (batch, features)."""
        tokens = self.project(self.tokens(x))
        tokens = with_class_token(self.class_token, tokens) + self.positions
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features

    def tokens(self, x: Tensor) -> Tensor:
        """What the T2T module makes of images: the last split's patches, shape (batch, tokens, patch)."""
        tokens = _soft_split(x, *self.splits[0])
        for transformer, split in zip(self.transformers, self.splits[1:], strict=True):
            side = round(tokens.shape[1] ** 0.5)
            tokens = _soft_split(as_map(transformer(tokens), side), *split)
        return tokens


class TokenTransformer(nn.Module):
    """Attention and a perceptron that make narrow tokens of wide ones (Yuan et al. 2021, eq. 1).

    One head. As the widths differ, the values stand in the residual connection, as in the authors' code.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs)
        self.qkv = nn.Linear(inputs, 3 * width, bias=False)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = perceptron(width, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) from tokens (batch, tokens, inputs)."""
        query, key, value = self.qkv(self.norm1(tokens)).chunk(3, dim=2)
        tokens = value + self.output(attend(query, key, value))
        transformed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return transformed


class _Attention(nn.Module):
    """Self-attention without biases of queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).chunk(3, dim=2)
        mixed: Tensor = self.output(attend(query, key, value, self.heads))
        return mixed


def _soft_split(maps: Tensor, kernel: int, stride: int) -> Tensor:
    """Patches (batch, patches, channels * kernel * kernel) that overlap, one for each ``stride`` pixels (eq. 3)."""
    return F.unfold(maps, kernel, padding=margin(kernel, stride), stride=stride).transpose(1, 2)


def _sinusoids(tokens: int, width: int) -> Tensor:
    """Fixed positions (1, tokens, width): sines and cosines of wavelengths 2 pi to 20000 pi (Vaswani et al. 2017)."""
    rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[None].float()
