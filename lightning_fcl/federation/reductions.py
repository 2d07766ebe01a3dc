"""Reductions: how the entries of a federated state come together at the end of a round.

Every entry of a module's state has one *reduction*. These are known by name:

========================  ===========================================================================================
``mean``                  average of the uploads, weighted by client (the default; FedAvg)
``sparse_mean``           average of each number over the uploads where it is not zero, weighted by client; if there
                          is none, the server's. Zeros do not travel (a base of which clients send parts)
``sum``                   a client starts each round at zero; the uploads are added to the server's value
``none``                  stays with the client: never uploaded, never downloaded
``download``              the server's: clients receive it and send nothing back
``fixed``                 the same everywhere from the start: it never travels (a reservoir's random weights)
``median``                coordinate-wise median of the uploads (unweighted)
``trimmed_mean``          coordinate-wise mean without a tenth at each end (unweighted); ``TrimmedMean(0.2)``: a fifth
``krum``                  the one upload that is nearest to its neighbours, for all ``krum`` entries together;
                          ``Krum(1)`` allows for one client that lies
========================  ===========================================================================================

Means and sums are exact, and the others go by sorted values or by the clients' numbers: none depends on the order in
which uploads come, on how many come at once, or on who adds them up (`lightning_fcl.federation.exact_sum`). Of clients
that have trained side by side, a mean takes in one weighted sum, in double precision.

All but the last three stream: their memory does not grow with the number of clients.

A reduction of your own is a `Reduction` with an `Accumulator`. It stands wherever a name does: in a module's
``reductions`` attribute, in ``FederatedStrategy(reductions={"model.head.*": Maximum()})``, and in YAML as a
``class_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.accumulators import Accumulator, PlainSums, SparseMeans, WeightedMean
from lightning_fcl.federation.packing import pack_nonzero, unpack_nonzero


class Reduction:
    """How entries come together: where a client starts, what travels, and what the server makes of the uploads.

    A subclass gives a ``name`` and a `make_accumulator`, which entries with the same reduction share: its arguments,
    plain values, say whether two are the same.

    Example:
        >>> from lightning_fcl.federation.accumulators import GatheringAccumulator
        >>> class Maximum(Reduction):
        ...     name = "maximum"
        ...
        ...     def make_accumulator(self):
        ...         return GatheringAccumulator(lambda rows, _: {n: torch.stack(r).amax(0) for n, r in rows.items()})
        >>> accumulator = Maximum().make_accumulator()
        >>> accumulator.update({"w": torch.tensor([[1.0], [4.0]])}, weights=[1, 1])
        >>> accumulator.update({"w": torch.tensor([[3.0]])}, weights=[1])
        >>> accumulator.compute({"w": torch.tensor([0.0])})
        {'w': tensor([4.])}
    """

    name: str
    """What it is called in messages and checkpoints."""

    is_downloaded: bool = True
    """Whether a client receives the server's value at the start of a round."""

    is_uploaded: bool = True
    """Whether a client sends its value at the end of a round."""

    once: bool = False
    """Whether a client keeps the server's value, which never changes, and receives it once."""

    is_local: bool = False
    """Whether the entry is local to a client: each client continues with its own value of the round before."""

    additive: bool = False
    """Whether the result depends on the uploads only by their sum.

    If so, the result is the server's value plus the sum of the uploads' differences from `empty_upload`. If the
    reduction is also ``weighted``, each difference is multiplied by the weight of its client, and the sum is divided by
    the sum of the weights.
    """

    weighted: bool = False
    """Whether the result depends on the clients' weights."""

    compressible: bool = False
    """Whether the entry may be uploaded as a lossy code, see `lightning_fcl.federation.compression.Compression`."""

    @property
    def averages(self) -> bool:
        """Whether the result is the weighted average of the uploads."""
        return self.additive and self.weighted

    def initial_value(self, server: Tensor) -> Tensor:
        """The value at which a client starts a round, from the server's; from its shape if not ``is_downloaded``."""
        return server

    def empty_upload(self, server: Tensor) -> Tensor:
        """The value of a client that has nothing to send."""
        return self.initial_value(server)

    def pack(self, value: Tensor) -> Tensor:
        """Return the tensor that is sent in place of one client's value. A subclass that overrides it has `unpack`."""
        return value

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        """Return the value that `pack` has packed.

        Args:
            packed: The tensor that was sent.
            reference: A tensor of the value's shape, dtype and device.

        Raises:
            InvalidValueError: If no such value is packed like this.
        """
        if packed.dtype != reference.dtype or packed.shape != reference.shape:
            raise InvalidValueError(
                f"Expected {reference.dtype} of shape {tuple(reference.shape)} but got {packed.dtype} of shape "
                f"{tuple(packed.shape)}."
            )
        return packed

    def upload_nbytes(self, value: Tensor) -> int:
        """Return the number of bytes of one client's value as it is sent."""
        return self.pack(value).nbytes

    def make_accumulator(self) -> Accumulator:
        """What takes in a round's uploads: a new one for each round."""
        raise NotImplementedError(f"Expected `{type(self).__name__}`, whose entries travel up, to have an accumulator.")

    @property
    def has_static_size(self) -> bool:
        """Whether the number of bytes of a value as it is sent depends on its shape and dtype alone."""
        return type(self).pack is Reduction.pack

    def fingerprint(self) -> dict[str, Any]:
        """What makes this reduction the one that it is, for checkpoints."""
        return {"name": self.name, **vars(self)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return self.name


class Mean(Reduction):
    """``mean``."""

    name = "mean"
    additive = weighted = compressible = True

    def make_accumulator(self) -> Accumulator:
        return WeightedMean()


class SparseMean(Reduction):
    """``sparse_mean``."""

    name = "sparse_mean"
    weighted = True

    def empty_upload(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def pack(self, value: Tensor) -> Tensor:
        """Return a bit for each element and the nonzero elements, or the value if it has no more bytes.

        Example:
            >>> value = torch.tensor([0.0] * 15 + [1.0])
            >>> Mean().pack(value).nbytes, SparseMean().pack(value).nbytes
            (64, 6)
        """
        return pack_nonzero(value)

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        return unpack_nonzero(packed, reference)

    def make_accumulator(self) -> Accumulator:
        return SparseMeans()


class Sum(Reduction):
    """``sum``."""

    name = "sum"
    is_downloaded = False
    additive = True

    def initial_value(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def make_accumulator(self) -> Accumulator:
        return PlainSums()


class DeltaSum(Sum):
    """The reduction of what clients receive, and send changes of, which are added to it."""

    name = "delta_sum"
    is_downloaded = True

    def initial_value(self, server: Tensor) -> Tensor:
        return server

    def empty_upload(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)


class Local(Reduction):
    """``none``."""

    name = "local"
    is_downloaded = is_uploaded = False
    is_local = True


class DownloadOnly(Reduction):
    """``download``."""

    name = "download_only"
    is_uploaded = False


class Constant(Reduction):
    """``fixed``."""

    name = "constant"
    is_downloaded = is_uploaded = False


METRIC_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "avg": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "sum": lambda numbers, sizes: numbers.sum(),
    "min": lambda numbers, sizes: numbers.amin(),
    "max": lambda numbers, sizes: numbers.amax(),
}
"""How Lightning reduces numbers that are logged, by them and the sizes of their batches, both of shape (batches,)."""
