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
which uploads come, on how many come at once, or on who adds them up (`lightning_fcl.federation.exact`). Of clients that
have trained side by side, a mean takes in one weighted sum, in double precision.

All but the last three stream: their memory does not grow with the number of clients.

A reduction of your own is a `Reduction` with an `Accumulator`. It stands wherever a name does: in a module's
``reductions`` attribute, in ``FederatedStrategy(reductions={"model.head.*": Maximum()})``, and in YAML as a
``class_path``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.exact import CohortSums, ExactSums, round_to
from lightning_fcl.federation.packing import pack_nonzero, unpack_nonzero
from lightning_fcl.federation.ranks import Ranks

State = dict[str, Tensor]
"""Entries of a module's or server's state, by name."""


class Accumulator(Protocol):
    """Takes in the uploads of one round for all entries that have the same reduction, a few clients at a time.

    They come in no particular order: `lightning_fcl.federation.exact.ExactSums` adds them up so that it makes none.
    """

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Take in some clients' uploads, of shape (clients, ...), which are their own tensors: copy what is kept."""

    def result(self, server: Mapping[str, Tensor]) -> State:
        """The new server values, from those at the start of the round, when all uploads have come: at least one.

        It is asked for once.
        """


@runtime_checkable
class AddsCohorts(Protocol):
    """An `Accumulator` that accepts the sums of clients that have trained vectorized in place of their uploads."""

    def add_cohort(self, values: Mapping[str, Tensor], sums: CohortSums, weights: Sequence[float]) -> None:
        """Add uploads, shape (clients, ...). ``sums`` has the weighted sums of some of the entries."""


@runtime_checkable
class Reorders(Protocol):
    """An `Accumulator` whose result can depend on the order of the uploads."""

    def arrange(self, order: Sequence[int]) -> None:
        """Reorder the uploads by their present positions, so that they are in the order of the clients."""


@runtime_checkable
class Combines(Protocol):
    """An `Accumulator` whose uploads may come to several ranks."""

    def combine(self, ranks: Ranks) -> None:
        """Take in what came to the other ranks; all of them do, and come to the same."""


class Reduction:
    """How entries come together: where a client starts, what travels, and what the server makes of the uploads.

    A subclass gives a ``name`` and an `accumulator`, which entries with the same reduction share: its arguments, plain
    values, say whether two are the same.

    Example:
        >>> class Maximum(Reduction):
        ...     name = "maximum"
        ...
        ...     def accumulator(self):
        ...         return Gather(lambda rows, server: {n: torch.stack(r).amax(dim=0) for n, r in rows.items()})
        >>> accumulator = Maximum().accumulator()
        >>> accumulator.add({"w": torch.tensor([[1.0], [4.0]])}, weights=[1, 1])
        >>> accumulator.add({"w": torch.tensor([[3.0]])}, weights=[1])
        >>> accumulator.result({"w": torch.tensor([0.0])})
        {'w': tensor([4.])}
    """

    name: str
    """What it is called in messages and checkpoints."""

    down: bool = True
    """Whether a client receives the server's value at the start of a round."""

    up: bool = True
    """Whether a client sends its value at the end of a round."""

    once: bool = False
    """Whether a client keeps the server's value, which never changes, and receives it once."""

    own: bool = False
    """Whether the entry is local to a client: each client continues with its own value of the round before."""

    additive: bool = False
    """Whether the result depends on the uploads only by their sum.

    If so, the result is the server's value plus the sum of the uploads' differences from `nothing`. If the reduction is
    also ``weighted``, each difference is multiplied by the weight of its client, and the sum is divided by the sum of
    the weights.
    """

    weighted: bool = False
    """Whether the result depends on the clients' weights."""

    compressible: bool = False
    """Whether the entry may be uploaded as a lossy code, see `lightning_fcl.federation.wire.Compression`."""

    @property
    def averages(self) -> bool:
        """Whether the result is the weighted average of the uploads."""
        return self.additive and self.weighted

    def start(self, server: Tensor) -> Tensor:
        """The value at which a client starts a round, from the server's; where ``down`` is False, from its shape."""
        return server

    def nothing(self, server: Tensor) -> Tensor:
        """The value of a client that has nothing to send."""
        return self.start(server)

    def pack(self, value: Tensor) -> Tensor:
        """Return the tensor that is sent in place of one client's value. A subclass that overrides it has `unpack`."""
        return value

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return the value that `pack` has packed.

        Args:
            packed: The tensor that was sent.
            like: A tensor of the value's shape, dtype and device.

        Raises:
            InvalidValueError: If no such value is packed like this.
        """
        if packed.dtype != like.dtype or packed.shape != like.shape:
            raise InvalidValueError(
                f"Expected {like.dtype} of shape {tuple(like.shape)} but got {packed.dtype} of shape "
                f"{tuple(packed.shape)}."
            )
        return packed

    def wire_bytes(self, value: Tensor) -> int:
        """Return the number of bytes of one client's value as it is sent."""
        return self.pack(value).nbytes

    def accumulator(self) -> Accumulator:
        """What takes in a round's uploads: a new one for each round."""
        raise NotImplementedError(f"Expected `{type(self).__name__}`, whose entries travel up, to have an accumulator.")

    @property
    def by_shape(self) -> bool:
        """Whether the number of bytes of a value as it is sent depends on its shape and dtype alone."""
        return type(self).pack is Reduction.pack

    def hparams(self) -> dict[str, Any]:
        """What makes this reduction the one that it is, for checkpoints."""
        return {"name": self.name, **vars(self)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return self.name


class Gather:
    """An `Accumulator` that keeps all uploads of a round, for a rule that needs them at once.

    The rule makes the new values from the uploads of each entry, which an `Aggregator` that knows the clients' numbers
    gives in their order, and from the server's values. It is given what was ``kept`` of each, a copy.
    """

    def __init__(
        self,
        rule: Callable[[Mapping[str, list[Tensor]], Mapping[str, Tensor]], State],
        kept: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        self._rule, self._kept = rule, kept
        self._rows: dict[str, list[Tensor]] = {}

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        for name, value in values.items():
            self._rows.setdefault(name, []).extend(map(self._kept, value))

    def combine(self, ranks: Ranks) -> None:
        parts = ranks.share({name: [row.cpu() for row in rows] for name, rows in self._rows.items()})
        self._rows = {}
        for name, rows in (item for part in parts for item in part.items()):
            self._rows.setdefault(name, []).extend(rows)

    def arrange(self, order: Sequence[int]) -> None:
        """Put the uploads into this order of the places that they have."""
        self._rows = {name: [rows[place] for place in order] for name, rows in self._rows.items()}

    def result(self, server: Mapping[str, Tensor]) -> State:
        return self._rule({n: [row.to(server[n].device) for row in rows] for n, rows in self._rows.items()}, server)


def filled_rows(value: Tensor) -> Tensor:
    """The rows of a matrix that are not zeros alone."""
    return value[value.any(dim=1)]


class WeightedMean:
    """The weighted mean, from a sum and the weights."""

    def __init__(self) -> None:
        self._sums = ExactSums()
        self._weights: list[float] = []
        self._cohort: CohortSums = {}  # sums of the last cohort, which may be the only one

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values, weights)
        self._weights += weights

    def add_cohort(self, values: Mapping[str, Tensor], sums: CohortSums, weights: Sequence[float]) -> None:
        """Take in clients that have trained side by side, and the sums of some entries in place of their values."""
        self._add_last_cohort()
        self._cohort = {name: sums[name] for name in values if name in sums}
        self.add({name: value for name, value in values.items() if name not in self._cohort}, weights)

    def _add_last_cohort(self) -> None:
        self._sums.add_cohort(self._cohort)
        self._cohort = {}

    def combine(self, ranks: Ranks) -> None:
        self._add_last_cohort()
        self._sums.combine(ranks)
        self._weights = list(itertools.chain.from_iterable(ranks.share(self._weights)))

    def result(self, server: Mapping[str, Tensor]) -> State:
        if any(name in self._sums.by_name for name in self._cohort):
            self._add_last_cohort()
        weight, sums = math.fsum(self._weights), self._sums.by_name
        means = {n: round_to(value / weight + 0.0, server[n].dtype) for n, (value, _) in self._cohort.items()}
        while sums:  # each makes room for the next one's mean
            name, exact = sums.popitem()
            means[name] = exact.mean(weight, server[name])
        return {name: mean.to(server[name].device) for name, mean in means.items()}


class _SparseMean:
    """The weighted mean of each number over those who send it, from the sum of their weights."""

    def __init__(self) -> None:
        self._sums, self._weights = ExactSums(), ExactSums()

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values, weights)
        self._weights.add({name: (value != 0).float() for name, value in values.items()}, weights)

    def combine(self, ranks: Ranks) -> None:
        self._sums.combine(ranks)
        self._weights.combine(ranks)

    def result(self, server: Mapping[str, Tensor]) -> State:
        state: State = {}
        for name, exact in self._sums.by_name.items():
            old, share = server[name], self._weights.by_name[name].total()
            mean = round_to(exact.total() / share.masked_fill(share == 0, 1.0), old.dtype).to(old.device)
            state[name] = torch.where((share != 0).to(old.device), mean, old)
        return state


class _Sum:
    """The server's value and all uploads together, the server's as one more upload."""

    def __init__(self) -> None:
        self._sums = ExactSums()

    def add(self, values: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._sums.add(values)

    def combine(self, ranks: Ranks) -> None:
        self._sums.combine(ranks)

    def result(self, server: Mapping[str, Tensor]) -> State:
        sums = copy.deepcopy(self._sums)
        sums.add({name: server[name][None] for name in sums.by_name})
        return {name: exact.total(server[name].dtype).to(server[name].device) for name, exact in sums.by_name.items()}


class Mean(Reduction):
    """``mean``."""

    name = "mean"
    additive = weighted = compressible = True

    def accumulator(self) -> Accumulator:
        return WeightedMean()


class SparseMean(Reduction):
    """``sparse_mean``."""

    name = "sparse_mean"
    weighted = True

    def nothing(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def pack(self, value: Tensor) -> Tensor:
        """Return a bit for each element and the nonzero elements, or the value if it has no more bytes.

        Example:
            >>> value = torch.tensor([0.0] * 15 + [1.0])
            >>> Mean().pack(value).nbytes, SparseMean().pack(value).nbytes
            (64, 6)
        """
        return pack_nonzero(value)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        return unpack_nonzero(packed, like)

    def accumulator(self) -> Accumulator:
        return _SparseMean()


class Sum(Reduction):
    """``sum``."""

    name = "sum"
    down = False
    additive = True

    def start(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)

    def accumulator(self) -> Accumulator:
        return _Sum()


class Changes(Sum):
    """The reduction of what clients receive, and send changes of, which are added to it."""

    name = "changes"
    down = True

    def start(self, server: Tensor) -> Tensor:
        return server

    def nothing(self, server: Tensor) -> Tensor:
        return torch.zeros_like(server)


class Own(Reduction):
    """``none``."""

    name = "none"
    down = up = False
    own = True


class Download(Reduction):
    """``download``."""

    name = "download"
    up = False


class Fixed(Reduction):
    """``fixed``."""

    name = "fixed"
    down = up = False


REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "avg": lambda numbers, sizes: (numbers * sizes).sum() / sizes.sum(),
    "sum": lambda numbers, sizes: numbers.sum(),
    "min": lambda numbers, sizes: numbers.amin(),
    "max": lambda numbers, sizes: numbers.amax(),
}
"""How Lightning reduces numbers that are logged, by them and the sizes of their batches, both of shape (batches,)."""
