"""What goes over the wire: the record of a round, and compression of uploads with error feedback.

What is not sent now is sent later. A client's *update* of an entry is its state minus the server state of the round,
plus what earlier rounds have left over. The client sends a code of it, the server adds what it decodes to its own
state, and the client keeps the *residual*, the update minus what was decoded (Seide et al. 2014; Stich et al. 2018,
"Sparsified SGD with memory", Algorithm 1). So nothing is lost, and the sum of what the server has decoded stays within
one residual of the sum of all updates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError, check_arguments
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.ranks import Ranks

DIVERGED = "Lower the learning rate, or a method's strength, or clip gradients (`gradient_clip_val` of the Trainer)."
"""What to do about numbers that are not finite."""


class Compression(ABC):
    """A code for updates, entry by entry: a subclass says what is decoded, and how many bytes the code has."""

    @abstractmethod
    def decoded(self, update: Tensor) -> Tensor:
        """What the server decodes of the updates of several clients, shape (clients, n), each by itself."""

    @abstractmethod
    def nbytes(self, n: int, itemsize: int) -> int:
        """Bytes of the code of one client's ``n`` numbers, of ``itemsize`` bytes each as they are."""

    def saves(self, value: Tensor) -> bool:
        """Whether the code of a tensor is shorter than the tensor; others travel as they are."""
        return self.nbytes(value.numel(), value.element_size()) < value.nbytes

    def hparams(self) -> dict[str, Any]:
        """What makes this compression the one that it is, for checkpoints."""
        return {"class": type(self).__name__, **vars(self)}


class TopK(Compression):
    """The numbers of an update that are largest in size, of each entry on its own.

    Of n numbers ``fraction * n`` travel, rounded up, with their places: 4 bytes each, or one bit for each of the n,
    whichever is shorter. With ``bits`` they are also coded as by `Quantize`.

    Args:
        fraction: Share of an entry's numbers that travel, above 0 and up to 1. 1 is no compression, to the bit.
        bits: Bits of each number; None: as it is.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> TopK(fraction=0.5).decoded(torch.tensor([[3.0, -1.0, 0.5, -4.0]]))
        tensor([[ 3.,  0.,  0., -4.]])
        >>> TopK(fraction=0.01).nbytes(1000, itemsize=4), TopK(fraction=0.5).nbytes(1000, itemsize=4)
        (80, 2125)
    """

    @check_arguments
    def __init__(self, fraction: float = 0.1, bits: int | None = None) -> None:
        if not 0 < fraction <= 1:
            raise InvalidValueError(
                f"Expected `fraction` to be above 0 and up to 1 but got {fraction}.",
                argument="fraction",
                value=fraction,
            )
        self.fraction = float(fraction)
        self.bits = None if bits is None else _checked(bits)

    def decoded(self, update: Tensor) -> Tensor:
        k = self._sent(update.shape[1])
        places = update.abs().topk(k, dim=1, sorted=False).indices
        values = update.gather(1, places)
        return torch.zeros_like(update).scatter_(
            1, places, values if self.bits is None else _rounded(values, self.bits)
        )

    def nbytes(self, n: int, itemsize: int) -> int:
        k = self._sent(n)
        places = min(4 * k, -(-n // 8)) if k < n else 0
        return places + (k * itemsize if self.bits is None else _rounded_nbytes(k, self.bits))

    def _sent(self, n: int) -> int:
        return math.ceil(round(self.fraction * n, 6))  # 0.07 * 100 is a bit above 7


class Quantize(Compression):
    """Every number of an update as a whole multiple of its entry's scale, the nearest one.

    The largest size in an entry is ``2^(bits - 1) - 1`` times the scale, which travels, too, in 4 bytes. Numbers are
    not rounded at random as in Alistarh et al. 2017 (QSGD): error feedback makes up for the bias.

    Args:
        bits: Bits of each number, from 2 to 16.

    Raises:
        ValueError: If ``bits`` is out of range.

    Example:
        >>> Quantize(bits=3).decoded(torch.tensor([[3.0, -1.2, 0.4, -1.6]]))
        tensor([[ 3., -1.,  0., -2.]])
        >>> Quantize(bits=8).nbytes(1000, itemsize=4)
        1004
    """

    @check_arguments
    def __init__(self, bits: int = 8) -> None:
        self.bits = _checked(bits)

    def decoded(self, update: Tensor) -> Tensor:
        return _rounded(update, self.bits)

    def nbytes(self, n: int, itemsize: int) -> int:
        return _rounded_nbytes(n, self.bits)


def transmit(
    compression: Compression,
    server: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    residuals: Sequence[Mapping[str, Tensor]],
) -> tuple[State, list[State], int]:
    """What the server makes of clients' compressed uploads, what each client has left over, and the bytes of each code.

    Args:
        residuals: What each client has left over; an entry that is not there, or has another shape, counts as 0.
    """
    received: State = {}
    left: list[State] = [dict(residual) for residual in residuals]
    nbytes = 0
    for name, value in states.items():
        update = value - server[name]
        for row, residual in zip(update, residuals, strict=True):
            if name in residual and residual[name].shape == row.shape:
                row += residual[name].to(row.device)
        sent = compression.decoded(update.reshape(len(update), -1)).view_as(update)
        received[name] = server[name] + sent
        for mine, row in zip(left, update - sent, strict=True):
            mine[name] = row.clone()  # a row alone would keep those of all clients in memory
        nbytes += compression.nbytes(server[name].numel(), value.element_size())
    return received, left, nbytes


def _checked(bits: int) -> int:
    if type(bits) is not int or not 2 <= bits <= 16:
        raise InvalidValueError(
            f"Expected `bits` to be a whole number between 2 and 16 but got {bits!r}.", argument="bits", value=bits
        )
    return bits


def _rounded(values: Tensor, bits: int) -> Tensor:
    """Every row as multiples of its own scale."""
    levels = 2 ** (bits - 1) - 1
    wide = values.to(torch.promote_types(values.dtype, torch.float32))  # half precision is as coarse as the multiples
    scale = wide.abs().amax(dim=1, keepdim=True) / levels
    multiples = (wide / torch.where(scale > 0, scale, 1)).round_().clamp_(-levels, levels)
    return multiples.mul_(scale).to(values.dtype)


def _rounded_nbytes(n: int, bits: int) -> int:
    return -(-n * bits // 8) + 4


@dataclass
class RoundRecord:
    """What happened in one round: bytes per client on the wire, and who did not make it.

    Args:
        trained: Clients whose upload was taken.
        upload_bytes: Bytes that each client sent.
        download_bytes: Bytes that each client received.
        dropped: Clients whose upload was refused, and why.
        skipped: Clients that were sampled but had no data, or too few samples to train on.
        missed: Clients that trained but missed the synchronisation.
        diverged: Clients whose loss was not finite in some step, though all that they sent is.
        master: In a swarm, the client that brought the uploads together.
        late: In a rehearsed deployment, clients whose uploads came too late, and were not trained for it.
        staleness: There, how many rounds ago clients had downloaded, where any.
        claims: In a deployment, clients that several nodes say they are, and these nodes, first the one that is let in.
        limits: In a deployment, what an upload may be at most: the samples that it counts as, and how far it may go.
        simulated_seconds: There, how long the round took; None: nobody has looked at a clock.
    """

    trained: list[str] = field(default_factory=list)
    upload_bytes: dict[str, int] = field(default_factory=dict)
    download_bytes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    master: str | None = None
    late: list[str] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    claims: dict[str, list[str]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    simulated_seconds: float | None = None

    def upload(self, client: str, number: int) -> None:
        """Count bytes that a client sends: its state, or what a method sends beside it."""
        self.upload_bytes[client] = self.upload_bytes.get(client, 0) + number

    def download(self, client: str, number: int) -> None:
        """Count bytes that a client receives."""
        self.download_bytes[client] = self.download_bytes.get(client, 0) + number

    def combine(self, ranks: Ranks, order: Mapping[str, int]) -> None:
        """Take in what happened to the other ranks' clients, in the round's order of clients."""
        parts = [vars(record) for record in ranks.share(self)]
        for name, value in vars(self).items():
            if isinstance(value, dict):
                found = [item for part in parts for item in part[name].items()]
                value.clear()
                value.update(sorted(found, key=lambda item: order.get(item[0], -1)))
            elif isinstance(value, list):
                value[:] = sorted((client for part in parts for client in part[name]), key=lambda c: order.get(c, -1))
