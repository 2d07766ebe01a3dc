"""Parts of the vision transformers that are written here, CvT, T2T-ViT, LVT and DyTox, and what images they take."""

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
    """Tokens (batch, tokens, width) cut into heads that lie side by side: (batch, heads, tokens, width of a head)."""
    return tokens.reshape(*tokens.shape[:2], num_heads, -1).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, num_heads: int = 1) -> Tensor:
    """Attention, ``softmax(q k^T / sqrt(d)) v`` in each head of width d; all have the shape (batch, n, width)."""
    query, key, value = (split_heads(tokens, num_heads) for tokens in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class _WideAttention(TorchFunctionMode):
    """Fused attention in single precision, in our networks and timm's; what comes out is as wide as what goes in."""

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
    """Within it attention has the precision in which it is fast: on a CPU, single precision also under autocast.

    The backward of fused attention in bf16 takes 1.3 to 15 times as long there, whatever the width of the heads and the
    number of tokens, the forward no less: `benchmarks/attention_step.py`.
    """
    return _WideAttention() if x.device.type == "cpu" and torch.is_autocast_enabled("cpu") else nullcontext()


def with_class_token(token: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (batch, 1 + tokens, width): a class token (1, 1, width) before those of each image."""
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
        """Tokens from tokens, shape (batch, tokens, width)."""
        tokens = tokens + self.attention(self.norm1(tokens))
        transformed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return transformed


def make_mlp(width: int, ratio: float) -> nn.Sequential:
    """A block's two linear layers with GELU between them; the hidden one is ``ratio`` times as wide."""
    hidden_width = int(width * ratio)
    return nn.Sequential(nn.Linear(width, hidden_width), nn.GELU(), nn.Linear(hidden_width, width))


def init_weights(module: nn.Module) -> None:
    """Truncated normal weights of 0.02 and no bias, if the module is a linear layer; for `nn.Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def compute_padding(kernel: int, stride: int) -> int:
    """Zeros around a map so that there is a patch of ``kernel`` positions for each ``stride`` of them."""
    return (kernel - stride + 1) // 2


def count_patches(side: int, kernel: int, stride: int, image_size: int) -> int:
    """Patches along one side of a map of an image; a stride that does not suit them is refused."""
    count = side // stride
    fits = stride <= kernel <= side and (side + 2 * compute_padding(kernel, stride) - kernel) // stride + 1 == count
    if side % stride or not fits:
        raise InvalidValueError(
            f"Expected `image_size` to suit patches of {kernel} x {kernel} every {stride} but got {image_size}, which "
            f"leaves {side} x {side} positions for them.",
            hint="Resize the images to a multiple of all strides together, or choose other patches, no smaller than "
            "their stride.",
            argument="image_size",
            value=image_size,
        )
    return count


def check_blocks(width: int, num_heads: int, depth: int = 1, mlp_ratio: float = 1.0) -> None:
    """Refuse sizes of which no transformer block can be made: not positive, or heads that do not divide the width."""
    above(0, width=width, num_heads=num_heads, depth=depth, mlp_ratio=mlp_ratio)
    if width % num_heads:
        raise InvalidValueError(
            f"Expected `width` to be a multiple of `num_heads`={num_heads} but got {width}.",
            argument="width",
            value=width,
        )


def check_image_size(name: str, image_size: int, multiple: int, min_size: int) -> None:
    """Refuse images that a network cannot cut into patches, once or several times."""
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
    """A map (batch, width, side, side) of its tokens (batch, side * side, width), which lie row by row."""
    return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)


def check_images(x: Tensor, takes: tuple[int, ...]) -> None:
    """Refuse images (batch, channels, height, width) of another size than a network takes."""
    if tuple(x.shape[1:]) != takes:
        raise InvalidValueError(
            f"Expected images of shape {takes} (channels, height, width) but got {tuple(x.shape[1:])}.",
            hint="Resize them, or build the model with their `image_size` and `channels`.",
            argument="image_size",
            value=tuple(x.shape[1:]),
        )
