"""Networks with a readout that was solved for, as plain modules: what they predict with once they are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_fcl.errors import at_least, one_of
from lightning_fcl.models.described import Described
from lightning_fcl.models.esn import EchoStateNetwork

Features = Literal["steps", "last", "mean"]


@runtime_checkable
class EmbedsSamples(Protocol):
    """A network that tells features."""

    @property
    def features(self) -> int:
        """How many."""

    def embed(self, x: Tensor) -> Tensor:
        """Features of samples, shape (batch, features)."""


class _Readout(Described):
    """A linear map of what `embed` gives, in double precision."""

    weight: Tensor

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        at_least(1, outputs=outputs)
        self.register_buffer("weight", torch.zeros(outputs, features, dtype=torch.float64))

    @property
    def features(self) -> int:
        return int(self.weight.shape[1])

    def embed(self, x: Tensor) -> Tensor:
        """What is read, shape (batch, ..., features)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (batch, ..., outputs)."""
        return self.embed(x).double() @ self.weight.double().t()


class ReservoirReadout(_Readout):
    """A linear readout of a reservoir's states.

    Args:
        reservoir: The reservoir.
        outputs: Size of the output.
        readout: What it reads: each time step's state (``"steps"``), each sequence's ``"last"`` one, or their
            ``"mean"``.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> network = ReservoirReadout(EchoStateNetwork(3, units=20, seed=0), outputs=2, readout="last")
        >>> network(torch.zeros(5, 10, 3)).shape, network.embed(torch.zeros(5, 10, 3)).shape
        (torch.Size([5, 2]), torch.Size([5, 20]))
    """

    def __init__(self, reservoir: EchoStateNetwork, outputs: int, readout: Features = "steps") -> None:
        super().__init__(reservoir.features, outputs)
        one_of(("steps", "last", "mean"), readout=readout)
        self.reservoir = reservoir
        self.readout = readout

    def embed(self, x: Tensor) -> Tensor:
        """What is read, in double precision: (batch, steps, N_R), or (batch, N_R)."""
        states = torch.cat(list(pooled(self.reservoir, x, self.readout))).double().transpose(0, 1)
        return states if self.readout == "steps" else states[:, 0]


class FeatureReadout(_Readout):
    """A linear readout of a network's features.

    Args:
        network: A network with ``embed(x)`` and ``features``, their number; its own head is not asked.
        outputs: Size of the output.

    Raises:
        ValueError: If the number of outputs is below 1.

    Example:
        >>> from lightning_fcl.models import MLP
        >>> FeatureReadout(MLP([6, 5, 4]), outputs=2)(torch.zeros(3, 6)).shape
        torch.Size([3, 2])
    """

    def __init__(self, network: EmbedsSamples, outputs: int) -> None:
        super().__init__(network.features, outputs)
        self.network = network

    def embed(self, x: Tensor) -> Tensor:
        """The network's features, shape (batch, features)."""
        return self.network.embed(x)


def pooled(reservoir: EchoStateNetwork, x: Tensor, readout: Features) -> Iterator[Tensor]:
    """What a readout sees of sequences: blocks of states (steps, batch, N_R), or one of a single step."""
    blocks = reservoir.blocks(x)
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
