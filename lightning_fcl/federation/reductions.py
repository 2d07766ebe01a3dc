"""Reductions: how the server combines the uploads of each entry of a state at the end of a round.

Every entry of a module's state has one *reduction*. The built-in reductions have these names:

========================  ===========================================================================================
``mean``                  mean of the uploads, weighted by client (the default; FedAvg)
``sparse_mean``           mean of each element over the uploads where it is not zero, weighted by client; the server's
                          value if there is no such upload. Zeros are not transmitted
``sum``                   sum of the server's value and the uploads; clients start each round at zero
``local``                 client-local: never uploaded or downloaded
``download_only``         the server's value: clients download it and upload nothing
``constant``              identical on the server and all clients; never transmitted (random weights of a reservoir)
``median``                coordinate-wise median of the uploads (unweighted)
``trimmed_mean``          coordinate-wise mean without 10 % of the values (rounded down) at each end (unweighted);
                          ``TrimmedMean(0.2)`` removes 20 % at each end
``krum``                  the upload that is nearest to its neighbors, selected over all ``krum`` entries together;
                          ``Krum(1)`` assumes one malicious client
========================  ===========================================================================================

Results do not depend on the order of the uploads, on the number of uploads that arrive together, or on the process that
adds the uploads. Means and sums are exact (`lightning_fcl.federation.exact_sum`). The other reductions use sorted
values or the clients' indices. There is one exception: for clients that train vectorized, a mean adds one weighted sum
that is computed in double precision. Rounding of this sum can depend on the group of clients.

Only the last three reductions keep all uploads of a round in memory.

A custom reduction is a subclass of `Reduction` with an `Accumulator`. Use an object of the subclass in place of a name:
in a module's ``reductions`` attribute, in ``FederatedStrategy(reductions={"model.head.*": Maximum()})``, or in YAML as
a ``class_path``.
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
    """A rule for an entry: the value at which a client starts, what clients transmit, and how uploads are combined.

    A subclass defines ``name`` and `make_accumulator`. Entries with equal reductions share an accumulator. Reductions
    are equal if they have the same class and equal arguments, which must be plain values.

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
    """Name in messages and checkpoints."""

    is_downloaded: bool = True
    """Whether a client downloads the server's value at the start of a round."""

    is_uploaded: bool = True
    """Whether a client uploads its value at the end of a round."""

    once: bool = False
    """Whether a client downloads the server's value only once and keeps it. The server must not change the value."""

    is_local: bool = False
    """Whether the entry is client-local: each client continues with its own value of the previous round."""

    additive: bool = False
    """Whether the server can compute the result from the sum of the uploads alone.

    If True, the result is the server's value plus the sum of all differences between an upload and `empty_upload`. If
    the reduction is also ``weighted``, each difference is multiplied by the client's weight, and the sum is divided by
    the sum of the weights.
    """

    weighted: bool = False
    """Whether the result depends on the clients' weights."""

    compressible: bool = False
    """Whether lossy compression supports entries with this reduction. See `Compression`."""

    @property
    def averages(self) -> bool:
        """Whether the result is the weighted average of the uploads."""
        return self.additive and self.weighted

    def initial_value(self, server: Tensor) -> Tensor:
        """Return the value at which a client starts a round.

        If the reduction is not ``is_downloaded``, the result must depend only on the shape of ``server``.
        """
        return server

    def empty_upload(self, server: Tensor) -> Tensor:
        """Return the value of an upload that contributes nothing. An update is an upload minus this value."""
        return self.initial_value(server)

    def pack(self, value: Tensor) -> Tensor:
        """Return the tensor to send in place of a client's value. If you override `pack`, also override `unpack`."""
        return value

    def unpack(self, packed: Tensor, reference: Tensor) -> Tensor:
        """Return the value that was passed to `pack`.

        Args:
            packed: The tensor that was sent.
            reference: A tensor with the value's shape, dtype and device.

        Raises:
            InvalidValueError: If ``packed`` is not a possible result of `pack` for a value like ``reference``.
        """
        if packed.dtype != reference.dtype or packed.shape != reference.shape:
            raise InvalidValueError(
                f"Expected {reference.dtype} of shape {tuple(reference.shape)}, but got {packed.dtype} of shape "
                f"{tuple(packed.shape)}."
            )
        return packed

    def upload_nbytes(self, value: Tensor) -> int:
        """Return the number of bytes that one client sends for a value."""
        return self.pack(value).nbytes

    def make_accumulator(self) -> Accumulator:
        """Return a new accumulator for the uploads of one round."""
        raise NotImplementedError(
            f"Expected `{type(self).__name__}` to define `make_accumulator`, because its entries are uploaded."
        )

    @property
    def has_static_size(self) -> bool:
        """Whether the number of bytes to send for a value depends only on the shape and the dtype of the value."""
        return type(self).pack is Reduction.pack

    def fingerprint(self) -> dict[str, Any]:
        """Return the name and the arguments, which a checkpoint must match to be resumed."""
        return {"name": self.name, **vars(self)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return self.name


class Mean(Reduction):
    """The mean of the uploads, weighted by client (``mean``)."""

    name = "mean"
    additive = weighted = compressible = True

    def make_accumulator(self) -> Accumulator:
        return WeightedMean()


class SparseMean(Reduction):
    """The weighted mean of each element over the uploads in which the element is not zero (``sparse_mean``)."""

    name = "sparse_mean"
    weighted = True

    def empty_upload(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def pack(self, value: Tensor) -> Tensor:
        """Return one bit per element and the nonzero elements as bytes, or the value if the bytes are not shorter.

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
    """The sum of the server's value and the uploads (``sum``). Clients start each round at zero."""

    name = "sum"
    is_downloaded = False
    additive = True

    def initial_value(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def make_accumulator(self) -> Accumulator:
        return PlainSums()


class DeltaSum(Sum):
    """A sum for entries that clients download. Clients upload changes, which are added to the server's value."""

    name = "delta_sum"
    is_downloaded = True

    def initial_value(self, server: Tensor) -> Tensor:
        return server

    def empty_upload(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)


class Local(Reduction):
    """The reduction of client-local entries, which are never uploaded or downloaded (``local``)."""

    name = "local"
    is_downloaded = is_uploaded = False
    is_local = True


class DownloadOnly(Reduction):
    """The reduction of entries that clients download and do not upload (``download_only``)."""

    name = "download_only"
    is_uploaded = False


class Constant(Reduction):
    """The reduction of entries that are identical on the server and all clients, and never sent (``constant``)."""

    name = "constant"
    is_downloaded = is_uploaded = False


METRIC_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "avg": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "sum": lambda numbers, sizes: numbers.sum(),
    "min": lambda numbers, sizes: numbers.amin(),
    "max": lambda numbers, sizes: numbers.amax(),
}
"""Functions that reduce logged numbers, by Lightning's name of the reduction.

The arguments of a function are the numbers and the batch sizes, each of shape (batches,).
"""
