"""Networks with a linear readout that is computed in closed form. These modules only predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.ridge import DoublePrecision
from lightning_fcl.models.serialization import Serializable
from lightning_fcl.validation import at_least, one_of

Features = Literal["steps", "last", "mean"]


@runtime_checkable
class EmbedsSamples(Protocol):
    """A network that computes features of samples."""

    @property
    def features(self) -> int:
        """Number of features."""

    def embed(self, x: Tensor) -> Tensor:
        """Return features of samples, shape (batch, features)."""


class RandomFeatures(DoublePrecision):
    """Random features ``ReLU(f W)`` of features f. The entries of W are from N(0, 1) (RanPAC, McDonnell et al., 2023).

    Args:
        in_features: Size of f.
        out_features: Number of random features, M.
        seed: Seed of W. Use the same seed for all clients.

    Raises:
        ValueError: If a number of features is below 1.

    Example:
        >>> RandomFeatures(64, 1000)(torch.zeros(2, 64)).shape
        torch.Size([2, 1000])
    """

    citations: ClassVar[tuple[str, ...]] = ("mcdonnell2023ranpac",)

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, seed: int = 0) -> None:
        super().__init__()
        at_least(1, in_features=in_features, out_features=out_features)
        weight = torch.randn(in_features, out_features, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("weight", weight.double())

    def forward(self, features: Tensor) -> Tensor:
        """Return random features of shape (..., out_features) in float64."""
        return (features.double() @ self.weight).relu()


class _Readout(Serializable):
    """A linear map of the features that `embed` returns. The output has double precision."""

    weight: Tensor

    def __init__(self, features: int, num_outputs: int) -> None:
        super().__init__()
        at_least(1, num_outputs=num_outputs)
        self.register_buffer("weight", torch.zeros(num_outputs, features, dtype=torch.float64))

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.weight.shape[1])

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the linear map, shape (batch, ..., features)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of shape (batch, ..., num_outputs)."""
        return self.embed(x).double() @ self.weight.double().t()


class ReservoirReadout(_Readout):
    """A linear readout of a reservoir's states.

    Args:
        reservoir: The reservoir.
        num_outputs: Size of the output.
        readout: States that the readout uses: ``"steps"`` for the state of each time step, ``"last"`` for the last
            state of each sequence, or ``"mean"`` for the mean state of each sequence.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> network = ReservoirReadout(EchoStateNetwork(3, units=20, seed=0), num_outputs=2, readout="last")
        >>> network(torch.zeros(5, 10, 3)).shape, network.embed(torch.zeros(5, 10, 3)).shape
        (torch.Size([5, 2]), torch.Size([5, 20]))
    """

    def __init__(self, reservoir: EchoStateNetwork, num_outputs: int, readout: Features = "steps") -> None:
        super().__init__(reservoir.features, num_outputs)
        one_of(("steps", "last", "mean"), readout=readout)
        self.reservoir = reservoir
        self.readout = readout

    def embed(self, x: Tensor) -> Tensor:
        """Return the states that the readout uses, in double precision.

        The shape is (batch, steps, features) for ``readout="steps"``, and (batch, features) otherwise.
        """
        states = torch.cat(list(pool_states(self.reservoir, x, self.readout))).double().transpose(0, 1)
        return states if self.readout == "steps" else states[:, 0]


class FeatureReadout(_Readout):
    """A linear readout of a network's features.

    Args:
        network: A network with a method ``embed(x)`` and an attribute ``features``, the number of features. The
            network's own head is not used.
        num_outputs: Size of the output.
        random_features: Module that maps the network's features to random features. None to use them directly.
        bias: Whether to append a constant feature 1.
        unit_norm: Whether to divide the features of each sample, with the constant feature, by their norm.

    Raises:
        ValueError: If the number of outputs is below 1.

    Example:
        >>> from lightning_fcl.models import MLP
        >>> FeatureReadout(MLP([6, 5, 4]), num_outputs=2)(torch.zeros(3, 6)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        network: EmbedsSamples,
        num_outputs: int,
        random_features: RandomFeatures | None = None,
        bias: bool = False,
        unit_norm: bool = False,
    ) -> None:
        features = network.features if random_features is None else random_features.weight.shape[1]
        super().__init__(features + bias, num_outputs)
        self.network = network
        self.random_features = random_features
        self.bias = bias
        self.unit_norm = unit_norm

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the linear map, shape (batch, features)."""
        return readout_features(self.network.embed(x), self.random_features, self.bias, self.unit_norm)


def readout_features(
    features: Tensor, random_features: RandomFeatures | None, bias: bool, unit_norm: bool = False
) -> Tensor:
    """Return the features, or their random features.

    With ``bias``, append a column of ones. With ``unit_norm``, divide each row by its norm. The norm of the result is
    never above 1.
    """
    features = features if random_features is None else random_features(features)
    features = F.pad(features, (0, 1), value=1.0) if bias else features
    if not unit_norm:
        return features
    wide = features.double()
    # The margin is larger than the rounding errors.
    unit: Tensor = wide * ((1 - 1e-12) / wide.norm(dim=-1, keepdim=True).clamp(min=1e-300))
    return unit


def pool_states(reservoir: EchoStateNetwork, x: Tensor, readout: Features) -> Iterator[Tensor]:
    """Yield the states that a readout uses, in blocks of shape (steps, batch, features).

    For ``"last"`` and ``"mean"``, yield a single block with one step.
    """
    blocks = reservoir.iter_states(x)
    if readout == "steps":
        yield from blocks
    elif readout == "last":
        for block in blocks:
            last = block[-1:]
        yield last
    else:
        sums, steps = [], 0
        for block in blocks:
            sums.append(block.sum(dim=0, dtype=torch.float64))
            steps += len(block)
        yield torch.stack(sums).sum(dim=0, keepdim=True) / steps
