"""Multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from lightning_fcl.models.described import Described


class MLP(Described, nn.Sequential):
    """Linear layers with ReLU between them, on flattened inputs.

    Args:
        sizes: Features of the input, of each hidden layer and of the output, at least two numbers.

    Raises:
        ValueError: If there are fewer than two sizes.

    Example:
        >>> import torch
        >>> MLP([64, 32, 10])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if len(sizes) < 2:
            raise ValueError(f"Expected `sizes` to hold at least an input and an output size but got {list(sizes)}.")
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])
        self.features = sizes[-2]

    def embed(self, x: Tensor) -> Tensor:
        """What the last layer sees: shape (batch, features)."""
        for layer in list(self)[:-1]:
            x = layer(x)
        return x
