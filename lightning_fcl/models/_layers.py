"""Layers of the vision transformers CvT, T2T-ViT, LVT and DyTox, and checks of layer sizes and image sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import above, at_least


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """Return tokens (batch, tokens, width) split into heads, shape (batch, heads, tokens, width / heads)."""
    return tokens.reshape(*tokens.shape[:2], num_heads, -1).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, num_heads: int = 1) -> Tensor:
    """Return ``softmax(q k^T / sqrt(d)) v`` in each head of width d. All tensors have shape (batch, tokens, width)."""
    query, key, value = (split_heads(tokens, num_heads) for tokens in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class _WideAttention(TorchFunctionMode):
    """A context that runs fused attention in single precision, also inside timm. Outputs have the query's dtype."""

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not isinstance(query := args[0], Tensor):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            wide = {name: _wide(value) for name, value in kwargs.items()}
            return func(*map(_wide, args), **wide).to(query.dtype)


def _wide(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def fast_attention(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that runs attention in the fastest precision: on a CPU, single precision even under autocast.

    On a CPU, the backward pass of fused attention takes 1.3 to 15 times as long in bf16 as in single precision. This
    was measured for several widths of the heads and numbers of tokens. The forward pass in bf16 is not faster either.
    See `benchmarks/attention_step.py`.
    """
    return _WideAttention() if x.device.type == "cpu" and torch.is_autocast_enabled("cpu") else nullcontext()


def with_class_token(token: Tensor, tokens: Tensor) -> Tensor:
    """Return tokens (batch, 1 + tokens, width): a class token (1, 1, width), followed by the tokens of each image."""
    return torch.cat([token.expand(len(tokens), -1, -1), tokens], dim=1)


class Block(nn.Module):
    """A pre-norm transformer block: ``t + attention(norm1(t))``, then ``t + mlp(norm2(t))``."""

    def __init__(self, width: int, attention: nn.Module, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = make_mlp(width, mlp_ratio)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the transformed tokens. Input and output have shape (batch, tokens, width)."""
        tokens = tokens + self.attention(self.norm1(tokens))
        transformed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return transformed


def make_mlp(width: int, ratio: float) -> nn.Sequential:
    """Return two linear layers with GELU between them. The hidden layer has ``ratio`` times the width."""
    hidden_width = int(width * ratio)
    return nn.Sequential(nn.Linear(width, hidden_width), nn.GELU(), nn.Linear(hidden_width, width))


def init_weights(module: nn.Module) -> None:
    """Initialize a linear layer with truncated normal weights (standard deviation 0.02) and zero bias.

    Other modules are not changed. Pass this function to `nn.Module.apply`.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def compute_padding(kernel: int, stride: int) -> int:
    """Return the zero padding with which n positions per side give n / stride patches per side, if this is possible."""
    return (kernel - stride + 1) // 2


def count_patches(side: int, kernel: int, stride: int, image_size: int) -> int:
    """Return the number of patches along one side of a map. Raise ValueError if they do not match the map's size."""
    count = side // stride
    fits = stride <= kernel <= side and (side + 2 * compute_padding(kernel, stride) - kernel) // stride + 1 == count
    if side % stride or not fits:
        raise InvalidValueError(
            f"Expected `image_size` to match patches of {kernel} x {kernel} with stride {stride}, but got "
            f"{image_size}, which results in a map of {side} x {side} positions before these patches.",
            hint="Resize the images to a larger multiple of the product of all strides, or choose patches at least as "
            "large as their stride. Patches with stride 1 need an odd size.",
            argument="image_size",
            value=image_size,
        )
    return count


def check_blocks(width: int, num_heads: int, depth: int = 1, mlp_ratio: float = 1.0) -> None:
    """Raise ValueError if a transformer block cannot have these sizes.

    All sizes must be positive, and the width must be a multiple of the number of heads.
    """
    above(0, width=width, num_heads=num_heads, depth=depth, mlp_ratio=mlp_ratio)
    if width % num_heads:
        raise InvalidValueError(
            f"Expected `width` to be a multiple of `num_heads`={num_heads} but got {width}.",
            argument="width",
            value=width,
        )


def check_image_size(name: str, image_size: int, multiple: int, min_size: int) -> None:
    """Raise ValueError if an image size is too small for a network or is not a multiple of a given number of pixels."""
    at_least(1, patch_size=multiple)
    if image_size < min_size or image_size % multiple:
        suggested_size = max(min_size, -(-image_size // multiple) * multiple)
        raise InvalidValueError(
            f"Expected `image_size` to be a multiple of {multiple} and at least {min_size} for {name} but got "
            f"{image_size}.",
            hint=f"Resize the images, to {suggested_size} for example.",
            argument="image_size",
            value=image_size,
        )


def to_map(tokens: Tensor, side: int) -> Tensor:
    """Return tokens (batch, side * side, width) arranged row by row in a map (batch, width, side, side)."""
    return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)


def check_images(x: Tensor, takes: tuple[int, ...]) -> None:
    """Raise ValueError if images (batch, channels, height, width) do not have the shape that a network expects."""
    if tuple(x.shape[1:]) != takes:
        raise InvalidValueError(
            f"Expected images of shape {takes} (channels, height, width) but got {tuple(x.shape[1:])}.",
            hint="Resize the images, or build the model with the `image_size` and `channels` of the images.",
            argument="image_size",
            value=tuple(x.shape[1:]),
        )
