"""Parts of the vision transformers that are written here: CvT and T2T-ViT."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int = 1) -> Tensor:
    """Multi-head attention, ``softmax(q k^T / sqrt(d)) v`` in each head, where d is the width of a head.

    Args:
        query: Shape (batch, queries, width).
        key: Shape (batch, keys, width).
        value: Shape (batch, keys, width).
        heads: Heads, side by side in the width.

    Returns:
        Shape (batch, queries, width).

    Example:
        >>> import torch
        >>> attend(torch.zeros(1, 3, 4), torch.zeros(1, 2, 4), torch.ones(1, 2, 4), heads=2).shape
        torch.Size([1, 3, 4])
    """
    query, key, value = (tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2) for tokens in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def perceptron(width: int, ratio: float) -> nn.Sequential:
    """A block's two linear layers with GELU between them; the hidden one is ``ratio`` times as wide.

    Example:
        >>> [tuple(p.shape) for p in perceptron(4, 2.0).parameters()]
        [(8, 4), (8,), (4, 8), (4,)]
    """
    hidden = int(width * ratio)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def initialise(module: nn.Module) -> None:
    """Truncated normal weights of 0.02 and no bias, if the module is a linear layer; for `nn.Module.apply`.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> initialise(layer)
        >>> layer.bias.tolist()
        [0.0, 0.0]
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def margin(kernel: int, stride: int) -> int:
    """Zeros around a map so that there is a patch of ``kernel`` positions for each ``stride`` of them.

    Example:
        >>> margin(7, 4), margin(3, 2), margin(3, 1)
        (2, 1, 1)
    """
    return (kernel - stride + 1) // 2


def patches(side: int, kernel: int, stride: int, image_size: int) -> int:
    """Patches along one side of a map.

    Args:
        side: Positions along one side of the map.
        kernel: Height and width of a patch.
        stride: Positions from one patch to the next.
        image_size: Height and width of the images, for the message.

    Raises:
        ValueError: If the stride does not divide the side, or a patch is larger than the map or leaves gaps.

    Example:
        >>> patches(32, kernel=7, stride=4, image_size=32)
        8
    """
    count = side // stride
    fits = stride <= kernel <= side and (side + 2 * margin(kernel, stride) - kernel) // stride + 1 == count
    if side % stride or not fits:
        raise ValueError(
            f"Expected `image_size` to suit patches of {kernel} x {kernel} every {stride} but got {image_size}, which "
            f"leaves {side} x {side} positions for them. Resize the images to a multiple of all strides together, or "
            "choose other patches, no smaller than their stride."
        )
    return count


def check_blocks(width: int, heads: int, depth: int = 1, mlp_ratio: float = 1.0) -> None:
    """Refuse sizes of which no transformer block can be made.

    Raises:
        ValueError: If one is not positive, or heads do not divide the width.

    Example:
        >>> check_blocks(width=192, heads=5)
        Traceback (most recent call last):
        ValueError: Expected `width` to be a multiple of `heads`=5 but got 192.
    """
    for name, value in (("width", width), ("heads", heads), ("depth", depth), ("mlp_ratio", mlp_ratio)):
        if not value > 0:
            raise ValueError(f"Expected `{name}` to be above 0 but got {value}.")
    if width % heads:
        raise ValueError(f"Expected `width` to be a multiple of `heads`={heads} but got {width}.")


def as_map(tokens: Tensor, side: int) -> Tensor:
    """A map (batch, width, side, side) of its tokens (batch, side * side, width), which lie row by row.

    Example:
        >>> import torch
        >>> as_map(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]), side=2).tolist()
        [[[[1.0, 2.0], [3.0, 4.0]]]]
    """
    return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)
