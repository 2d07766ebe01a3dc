"""Parts of the vision transformers that are written here: CvT, T2T-ViT, LVT and DyTox."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.errors import above


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
        >>> attend(torch.zeros(1, 3, 4), torch.zeros(1, 2, 4), torch.ones(1, 2, 4), heads=2).shape
        torch.Size([1, 3, 4])
    """
    query, key, value = (tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2) for tokens in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def with_class_token(token: Tensor, tokens: Tensor) -> Tensor:
    """Tokens (batch, 1 + tokens, width): a class token (1, 1, width) before those of each image.

    Example:
        >>> with_class_token(torch.ones(1, 1, 2), torch.zeros(3, 4, 2))[:, 0].tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    return torch.cat([token.expand(len(tokens), -1, -1), tokens], dim=1)


class Block(nn.Module):
    """A pre-norm transformer block: ``t + attention(norm1(t))``, then ``t + mlp(norm2(t))``.

    Args:
        width: Channels of the tokens.
        attention: Maps tokens to tokens of the same shape.
        mlp_ratio: Hidden width of the perceptron over that of the tokens.

    Example:
        >>> Block(8, attention=nn.Identity())(torch.zeros(1, 4, 8)).shape
        torch.Size([1, 4, 8])
    """

    def __init__(self, width: int, attention: nn.Module, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = perceptron(width, mlp_ratio)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens from tokens, shape (batch, tokens, width)."""
        tokens = tokens + self.attention(self.norm1(tokens))
        transformed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return transformed


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
    above(0, width=width, heads=heads, depth=depth, mlp_ratio=mlp_ratio)
    if width % heads:
        raise ValueError(f"Expected `width` to be a multiple of `heads`={heads} but got {width}.")


def as_map(tokens: Tensor, side: int) -> Tensor:
    """A map (batch, width, side, side) of its tokens (batch, side * side, width), which lie row by row.

    Example:
        >>> as_map(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]), side=2).tolist()
        [[[[1.0, 2.0], [3.0, 4.0]]]]
    """
    return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)


def check_images(x: Tensor, takes: tuple[int, ...]) -> None:
    """Refuse images of another size than a network takes.

    Args:
        x: Images, shape (batch, channels, height, width).
        takes: Channels, height and width.

    Raises:
        ValueError: If they are of another size.

    Example:
        >>> check_images(torch.zeros(2, 3, 32, 32), takes=(3, 32, 32))
    """
    if tuple(x.shape[1:]) != takes:
        raise ValueError(
            f"Expected images of shape {takes} (channels, height, width) but got {tuple(x.shape[1:])}. Resize them, or "
            "build the model with their `image_size` and `channels`."
        )
