"""Transformer bodies whose tokens combine neighboring patches: T2T-ViT (Yuan et al., 2021), CvT (Wu et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models._layers import (
    Block,
    attend,
    check_blocks,
    compute_padding,
    count_patches,
    init_weights,
    make_mlp,
    to_map,
    with_class_token,
)
from lightning_fcl.models.serialization import Serializable


class T2TBody(Serializable):
    """The tokens-to-token vision transformer without its classifier (Yuan et al., ICCV 2021, "T2T-ViT", section 3).

    The T2T module (section 3.1, eq. 1 to 4) splits the image into overlapping patches ("soft split"). It transforms the
    patches, arranges them in a map, and splits the map again. A linear layer follows the last split.

    The backbone (section 3.2, eq. 5) is deep and narrow. It has a class token, fixed sinusoidal positions, and blocks
    of pre-norm attention without biases of queries, keys and values. The output is the class token.

    The defaults are those of T2T-ViT-7 (Table 1). With a classifier of 1000 classes, the model has 4,255,310 parameters
    and 50,432 fixed numbers in the positions. The paper reports 4.3 M parameters. This model differs from the paper in
    two ways. The T2T module uses full attention instead of the Performer, as in the paper's T2T-ViT_t. There is no
    dropout or stochastic depth.

    Args:
        image_size: Height and width of the images in pixels.
        channels: Number of channels of the images.
        width: Number of channels of the backbone's tokens, an even number.
        depth: Number of blocks of the backbone.
        num_heads: Number of attention heads of the backbone.
        mlp_ratio: Hidden width of the backbone's perceptrons divided by the width of the tokens.
        splits: Size and stride of the patches in each soft split.
        token_width: Number of channels of the tokens in the T2T module.

    Raises:
        ValueError: If ``num_heads`` does not divide ``width``, ``width`` is odd, or the image size does not match the
            strides.

    Example:
        >>> body = T2TBody(32, width=16, depth=1, num_heads=2, splits=((3, 2), (3, 2)), token_width=8)
        >>> body(torch.zeros(2, 3, 32, 32)).shape, body.features
        (torch.Size([2, 16]), 16)
    """

    citations = ("yuan2021t2t",)

    positions: Tensor

    def __init__(
        self,
        image_size: int = 224,
        channels: int = 3,
        width: int = 256,
        depth: int = 7,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        splits: Sequence[tuple[int, int]] = ((7, 4), (3, 2), (3, 2)),
        token_width: int = 64,
    ) -> None:
        super().__init__()
        check_blocks(width, num_heads, depth, mlp_ratio)
        if width % 2:
            raise InvalidValueError(f"Expected `width` to be even but got {width}.", argument="width", value=width)
        side, wide = image_size, channels
        transformers = []
        for number, (kernel, stride) in enumerate(splits, start=1):
            side, wide = count_patches(side, kernel, stride, image_size), wide * kernel * kernel
            if number < len(splits):
                transformers.append(TokenTransformer(wide, token_width))
                wide = token_width
        self.splits = tuple(splits)
        self.features = width
        self.transformers = nn.ModuleList(transformers)
        self.project = nn.Linear(wide, width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.register_buffer("positions", _sinusoids(1 + side * side, width), persistent=False)
        self.blocks = nn.Sequential(*(Block(width, _Attention(width, num_heads), mlp_ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        self.apply(init_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, features) of images (batch, channels, height, width)."""
        tokens = self.project(self.tokens(x))
        tokens = with_class_token(self.class_token, tokens) + self.positions
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features

    def tokens(self, x: Tensor) -> Tensor:
        """Return the patches of the last split, shape (batch, patches, channels * kernel * kernel)."""
        tokens = _soft_split(x, *self.splits[0])
        for transformer, split in zip(self.transformers, self.splits[1:], strict=True):
            side = round(tokens.shape[1] ** 0.5)
            tokens = _soft_split(to_map(transformer(tokens), side), *split)
        return tokens


class TokenTransformer(nn.Module):
    """Attention and a perceptron that map wide tokens to narrow tokens (Yuan et al., 2021, eq. 1).

    The attention has one head. Input and output have different widths, so the residual connection adds the values
    instead of the input, as in the authors' code.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(inputs)
        self.qkv = nn.Linear(inputs, 3 * width, bias=False)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = make_mlp(width, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens (batch, tokens, width) from tokens (batch, tokens, inputs)."""
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
    """Return overlapping patches (batch, patches, channels * kernel * kernel), ``stride`` pixels apart (eq. 3)."""
    return F.unfold(maps, kernel, padding=compute_padding(kernel, stride), stride=stride).transpose(1, 2)


def _sinusoids(tokens: int, width: int) -> Tensor:
    """Return sinusoidal positions (1, tokens, width). Wavelengths are 2 pi to 20000 pi (Vaswani et al., 2017)."""
    rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[None].float()


class CvTBody(Serializable):
    """The convolutional vision transformer without its classifier (Wu et al., ICCV 2021, "CvT", sections 3.1 to 3.3).

    Each stage starts with a convolution that converts a map to tokens, followed by layer normalization (section 3.1,
    "convolutional token embedding"). `ConvolutionalBlock` modules transform the tokens. The last stage adds a class
    token, which is the output. There are no position embeddings, because the convolutions encode the positions.

    The defaults are those of CvT-13 (Table 2). With a classifier of 1000 classes, the model has 19,993,256 parameters.
    The paper reports 20.0 M parameters. This model differs from the paper in two ways. The last block has no
    convolution of queries, because its only query is the class token, and the convolution does not change the class
    token. There is no stochastic depth.

    Args:
        image_size: Height and width of the images in pixels.
        channels: Number of channels of the images.
        widths: Number of channels of the tokens in each stage.
        depths: Number of blocks of each stage.
        num_heads: Number of attention heads of each stage.
        kernels: Size of each stage's embedding convolution.
        strides: Stride of each stage's embedding convolution. The last map must have at least 3 x 3 positions.
        mlp_ratio: Hidden width of the perceptrons divided by the width of the tokens.

    Raises:
        ValueError: If the arguments of the stages have different lengths, or the number of heads of a stage does not
            divide its width. Also if the image size does not match the strides.

    Example:
        >>> body = CvTBody(32, widths=(8, 16), depths=(1, 1), num_heads=(1, 2), kernels=(3, 3), strides=(2, 2))
        >>> body(torch.zeros(2, 3, 32, 32)).shape, body.features
        (torch.Size([2, 16]), 16)
    """

    citations = ("wu2021cvt",)

    def __init__(
        self,
        image_size: int = 224,
        channels: int = 3,
        widths: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        kernels: Sequence[int] = (7, 3, 3),
        strides: Sequence[int] = (4, 2, 2),
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        side, stages = image_size, []
        for number, (width, depth, of_heads, kernel, stride) in enumerate(
            zip(widths, depths, num_heads, kernels, strides, strict=True), start=1
        ):
            check_blocks(width, of_heads, depth or 1, mlp_ratio)
            side = count_patches(side, kernel, stride, image_size)
            last = number == len(widths)
            stages.append(_Stage(channels, width, depth, of_heads, kernel, stride, mlp_ratio, last))
            channels = width
        if side < 3:
            raise InvalidValueError(
                f"Expected `image_size` to leave at least 3 x 3 positions in the last stage, but `image_size`="
                f"{image_size} leaves {side} x {side}.",
                hint="Use larger images, or smaller `strides`.",
                argument="image_size",
                value=side,
            )
        self.features = channels
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(channels)
        self.apply(init_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, features) of images (batch, channels, height, width)."""
        features: Tensor = self.norm(self.stages(x))
        return features


class _Stage(nn.Module):
    """A stage of CvT that converts a feature map to a new map. The last stage returns the class token instead."""

    def __init__(
        self,
        channels: int,
        width: int,
        depth: int,
        heads: int,
        kernel: int,
        stride: int,
        mlp_ratio: float,
        last: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(channels, width, kernel, stride, compute_padding(kernel, stride))
        self.norm = nn.LayerNorm(width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if last else None
        if self.class_token is not None:
            nn.init.trunc_normal_(self.class_token, std=0.02)
        self.blocks = nn.ModuleList(
            ConvolutionalBlock(width, heads, mlp_ratio, class_only=last and number == depth - 1)
            for number in range(depth)
        )

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.embedding(maps)
        side = maps.shape[-1]
        tokens = self.norm(maps.flatten(2).transpose(1, 2))
        if self.class_token is not None:
            tokens = with_class_token(self.class_token, tokens)
        for block in self.blocks:
            tokens = block(tokens, side)
        return tokens[:, 0] if self.class_token is not None else to_map(tokens, side)


class ConvolutionalBlock(nn.Module):
    """A transformer block with convolutional projections (Wu et al., 2021, section 3.2).

    Args:
        width: Number of channels of the tokens.
        num_heads: Number of attention heads.
        mlp_ratio: Hidden width of the perceptron divided by the width of the tokens.
        class_only: Whether to transform and return only the class token.
    """

    def __init__(self, width: int, num_heads: int, mlp_ratio: float = 4.0, class_only: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.class_only = class_only
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width) if class_only else ConvolutionalProjection(width)
        self.key = ConvolutionalProjection(width, stride=2)
        self.value = ConvolutionalProjection(width, stride=2)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = make_mlp(width, mlp_ratio)

    def forward(self, tokens: Tensor, side: int) -> Tensor:
        """Return the transformed tokens, or only the transformed class token with ``class_only``.

        Args:
            tokens: Tokens of shape (batch, tokens, width). The tokens of a ``side`` x ``side`` map come last.
            side: Height and width of the map.
        """
        normed = self.norm1(tokens)
        query = self.query(normed[:, :1]) if self.class_only else self.query(normed, side)
        mixed = attend(query, self.key(normed, side), self.value(normed, side), self.num_heads)
        tokens = tokens[:, : query.shape[1]] + self.output(mixed)
        transformed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return transformed


class ConvolutionalProjection(nn.Module):
    """A depthwise 3 x 3 convolution of the map, batch normalization, and a linear layer (Wu et al., 2021, eq. 2)."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, tokens: Tensor, side: int) -> Tensor:
        """Return projected tokens. The convolution and the normalization apply only to the tokens of the map.

        Args:
            tokens: Tokens of shape (batch, tokens, width). The tokens of a ``side`` x ``side`` map come last.
            side: Height and width of the map.
        """
        num_other_tokens = tokens.shape[1] - side * side
        maps = self.norm(self.convolution(to_map(tokens[:, num_other_tokens:], side)))
        projected: Tensor = self.linear(
            torch.cat([tokens[:, :num_other_tokens], maps.flatten(2).transpose(1, 2)], dim=1)
        )
        return projected
