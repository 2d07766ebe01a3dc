"""Reductions: how the entries of a federated state come together at the end of a round.

Every entry of a module's state has one *reduction*:

========================  ===========================================================================================
``mean``                  average of the uploads, weighted by client (the default; FedAvg)
``sparse_mean``           average of each number over the uploads where it is not zero, weighted by client; if there
                          is none, the server's. Zeros do not travel (a base of which clients send parts)
``sum``                   a client starts each round at zero; the uploads are added to the server's value
``cat``                   a client starts each round empty; the uploads are appended to the server's value
``none``                  stays with the client: never uploaded, never downloaded
``download``              the server's: clients receive it and send nothing back
``fixed``                 the same everywhere from the start: it never travels (a reservoir's random weights)
``median``                coordinate-wise median of the uploads (unweighted)
``trimmed_mean``          coordinate-wise mean without the ``trim`` fraction at each end (unweighted)
``krum``                  the one upload that is nearest to its neighbours, for all ``krum`` entries together
========================  ===========================================================================================

All but the last three stream: their memory does not grow with the number of clients (beyond what ``cat`` is asked to
keep). The last three need all uploads of a round at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
Reduction = Literal["mean", "sparse_mean", "sum", "cat", "none", "download", "fixed", "median", "trimmed_mean", "krum"]

_ROBUST = ("median", "trimmed_mean", "krum")


def entries(module: nn.Module) -> State:
    """The live tensors of a module's state by name, each once: tied weights go by their first name.

    Raises:
        ValueError: If the module has extra state that is no tensor.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> entries(nn.ModuleList([layer, layer])).keys()
        dict_keys(['0.weight', '0.bias'])
    """
    state: State = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state"):
            raise ValueError(
                f"Expected a state of tensors but `{name}` is extra state, which no mean can take. Keep it in a buffer."
            )
        if id(value) not in seen:
            seen.add(id(value))
            state[name] = value
    return state


def load_entries(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write a state into a module in place; an entry that changed its shape (``cat``) takes the new one."""
    for name, tensor in entries(module).items():
        if tensor.shape == state[name].shape:
            tensor.data.copy_(state[name])
        else:
            tensor.data = state[name].clone()


def declare(state: Mapping[str, Tensor], *rules: Mapping[str, str]) -> dict[str, Reduction]:
    """Give every entry of a state its reduction.

    Args:
        state: The entries' names and tensors, as in ``module.state_dict()``.
        rules: Mappings from a shell-style pattern (``"head.*"``) to a reduction. Later rules win over earlier ones.

    Returns:
        The reduction of every entry; ``"mean"`` where no rule matches.

    Raises:
        ValueError: If a reduction is unknown or a pattern matches no entry.

    Example:
        >>> declare({"body.weight": torch.zeros(1), "head.weight": torch.zeros(1)}, {"head.*": "none"})
        {'body.weight': 'mean', 'head.weight': 'none'}
    """
    reductions: dict[str, Reduction] = dict.fromkeys(state, "mean")
    for pattern, reduction in (item for rule in rules for item in rule.items()):
        if reduction not in get_args(Reduction):
            raise ValueError(
                f"Expected the reduction of `{pattern}` to be one of {', '.join(get_args(Reduction))} "
                f"but got `{reduction}`."
            )
        matches = [name for name in state if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(
                f"Expected the pattern `{pattern}` in `reductions` to match an entry of the module's state but it "
                f"matches none. The entries are: {', '.join(state)}."
            )
        reductions.update(dict.fromkeys(matches, reduction))  # type: ignore[arg-type]
    return reductions


def reductions_of(module: nn.Module, rules: Mapping[str, str] | None = None) -> dict[str, Reduction]:
    """The reduction of every entry of a module's state: its own ``reductions`` attribute, with ``rules`` going over it.

    Raises:
        ValueError: As `declare` does.

    Example:
        >>> reductions_of(nn.Linear(1, 1), {"bias": "none"})
        {'weight': 'mean', 'bias': 'none'}
    """
    return declare(entries(module), getattr(module, "reductions", {}), rules or {})


def travels_down(reduction: Reduction) -> bool:
    """Whether a client receives the server's value of an entry at the start of a round."""
    return reduction not in ("none", "sum", "cat", "fixed")


def travels_up(reduction: Reduction) -> bool:
    """Whether a client sends its value of an entry at the end of a round."""
    return reduction not in ("none", "download", "fixed")


def wire_bytes(value: Tensor, reduction: Reduction) -> int:
    """Bytes that a value takes on the wire: where zeros do not travel, one bit for each number and those that are left.

    Example:
        >>> value = torch.tensor([0.0] * 15 + [1.0])
        >>> wire_bytes(value, "mean"), wire_bytes(value, "sparse_mean")
        (64, 6)
    """
    if reduction != "sparse_mean":
        return value.nbytes
    return min(value.nbytes, int(value.count_nonzero()) * value.element_size() + -(-value.numel() // 8))


def neutral(value: Tensor, reduction: Reduction) -> Tensor:
    """The value at which a client starts a round: zero for ``sum``, empty for ``cat``, else ``value`` itself."""
    if reduction == "sum":
        return torch.zeros_like(value)
    if reduction == "cat":
        return value[:0]
    return value


def median(stack: Tensor) -> Tensor:
    """Coordinate-wise median over the first dimension; the mean of the middle two for an even number.

    Example:
        >>> median(torch.tensor([[1.0], [2.0], [30.0], [4.0]]))
        tensor([3.])
    """
    return _cast(torch.quantile(stack.double(), 0.5, dim=0), stack.dtype)


def trimmed_mean(stack: Tensor, trim: float) -> Tensor:
    """Coordinate-wise mean over the first dimension without the ``trim`` fraction of values at each end.

    Raises:
        ValueError: If ``trim`` is not in [0, 0.5).

    Example:
        >>> trimmed_mean(torch.tensor([[0.0], [1.0], [2.0], [99.0]]), trim=0.25)
        tensor([1.5000])
    """
    if not 0 <= trim < 0.5:
        raise ValueError(f"Expected `trim` to be at least 0 and below 0.5 but got {trim}.")
    k = int(trim * len(stack))
    return _cast(stack.double().sort(dim=0).values[k : len(stack) - k].mean(dim=0), stack.dtype)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Counters (`num_batches_tracked`) and other integers become the nearest integer."""
    return value.to(dtype) if dtype.is_floating_point or dtype.is_complex else value.round().to(dtype)


def _add_in_pieces(total: Tensor, value: Tensor, factor: float) -> None:
    """Add in pieces that stay in the cache: six times faster than one copy of a large tensor in double precision."""
    size = 1 << 16
    for part, piece in zip(torch.split(total.view(-1), size), torch.split(value.reshape(-1), size), strict=True):
        part.add_(piece.to(part.dtype), alpha=factor)


def krum(uploads: Tensor, byzantine: int) -> int:
    """Index of the upload with the smallest summed squared distance to its nearest neighbours (Blanchard et al. 2017).

    Args:
        uploads: Flattened uploads, shape (clients, parameters).
        byzantine: Number ``f`` of clients that may lie; the ``clients - f - 2`` nearest neighbours count, at least 1.

    Example:
        >>> krum(torch.tensor([[0.0], [0.1], [0.2], [50.0]]), byzantine=1)
        0
    """
    distances = torch.cdist(uploads.double()[None], uploads.double()[None])[0] ** 2
    neighbours = max(1, min(len(uploads) - byzantine - 2, len(uploads) - 1))
    if len(uploads) == 1:
        return 0
    nearest = distances.sort(dim=1).values[:, 1 : 1 + neighbours]
    return int(nearest.sum(dim=1).argmin())


class Aggregator:
    """Brings the uploads of one round together, entry by entry, as each entry's reduction says.

    Args:
        reductions: Reduction of every entry, from `declare`.
        trim: Fraction cut at each end by ``trimmed_mean``.
        byzantine: Number of lying clients that ``krum`` allows for.

    Example:
        >>> aggregator = Aggregator({"w": "mean", "n": "sum"})
        >>> aggregator.add({"w": torch.tensor([1.0]), "n": torch.tensor([2.0])}, weight=1)
        >>> aggregator.add({"w": torch.tensor([4.0]), "n": torch.tensor([3.0])}, weight=2)
        >>> aggregator.result({"w": torch.tensor([0.0]), "n": torch.tensor([10.0])})
        {'w': tensor([3.]), 'n': tensor([15.])}
    """

    def __init__(self, reductions: Mapping[str, Reduction], trim: float = 0.1, byzantine: int = 0) -> None:
        self.reductions = dict(reductions)
        self.trim = trim
        self.byzantine = byzantine
        self.uploads = 0
        self._weight = 0.0
        self._sums: State = {}
        self._shares: State = {}  # the weight behind each number of a sum of ``sparse_mean``
        self._lists: dict[str, list[Tensor]] = {}
        self._shapes: dict[str, torch.Size] = {}

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Take in one client's upload.

        Args:
            upload: The client's state; entries that do not travel up are ignored.
            weight: The client's weight in means, above 0.

        Raises:
            ValueError: If ``weight`` is not a positive number, or a shape differs from that of the earlier uploads.
        """
        travelling = {name: upload[name][None] for name, kind in self.reductions.items() if travels_up(kind)}
        self.add_all(travelling, [weight])

    def add_all(self, uploads: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Take in several clients' uploads at once, stacked.

        Args:
            uploads: The clients' states, every entry of shape (clients, ...).
            weights: Each client's weight in means, above 0.

        Raises:
            ValueError: As `add` does.
        """
        wrong = [weight for weight in weights if not 0 < weight < float("inf")]
        if wrong:
            raise ValueError(f"Expected `weight` to be a positive number but got {wrong[0]}.")
        for name, reduction in self.reductions.items():
            if not travels_up(reduction):
                continue
            value = uploads[name].detach()
            if reduction != "cat" and value.shape[1:] != self._shapes.setdefault(name, value.shape[1:]):
                raise ValueError(
                    f"Expected `{name}` of shape {tuple(self._shapes[name])}, as the other clients sent it, but got "
                    f"{tuple(value.shape[1:])}."
                )
            if reduction == "cat" or reduction in _ROBUST:
                self._lists.setdefault(name, []).extend(value.clone())
                continue
            # In double precision the sum of identical uploads is each of them to the bit, whatever the weights.
            wide = torch.complex128 if value.is_complex() else torch.float64
            wide = torch.float32 if value.device.type == "mps" else wide
            if name not in self._sums:
                self._sums[name] = torch.zeros(value.shape[1:], dtype=wide, device=value.device)
            if reduction == "sparse_mean":
                share = torch.tensordot(self._sums[name].new_tensor(weights), (value != 0).to(wide), dims=1)
                self._shares[name] = self._shares[name] + share if name in self._shares else share
            factors = weights if reduction in ("mean", "sparse_mean") else [1.0] * len(weights)
            if len(factors) == 1:
                _add_in_pieces(self._sums[name], value[0], factors[0])
            else:
                value = value.to(wide)
                self._sums[name].add_(torch.tensordot(value.new_tensor(factors), value, dims=1))
        self._weight += sum(weights)
        self.uploads += len(weights)

    def result(self, server: Mapping[str, Tensor]) -> State:
        """The new server state.

        Args:
            server: The server state at the start of the round: the value of entries that do not travel up, and what
                ``sum`` and ``cat`` add to. Returned unchanged if no upload came.
        """
        if not self.uploads:
            return dict(server)
        chosen = self._krum_choice()
        return {name: self._entry(name, server[name], chosen) for name in self.reductions}

    def _entry(self, name: str, server: Tensor, chosen: int) -> Tensor:
        match self.reductions[name]:
            case "mean":
                return _cast(self._sums[name] / self._weight, server.dtype)
            case "sparse_mean":
                sent = self._shares[name] != 0
                mean = self._sums[name] / self._shares[name].masked_fill(~sent, 1.0)
                return torch.where(sent, _cast(mean, server.dtype), server)
            case "sum":
                return (self._sums[name] + server).to(server.dtype)
            case "cat":
                return torch.cat([server, *self._lists[name]])
            case "median":
                return median(torch.stack(self._lists[name]))
            case "trimmed_mean":
                return trimmed_mean(torch.stack(self._lists[name]), self.trim)
            case "krum":
                return self._lists[name][chosen]
        return server

    def _krum_choice(self) -> int:
        names = [name for name, reduction in self.reductions.items() if reduction == "krum"]
        if not names:
            return 0
        rows = [torch.cat([self._lists[name][i].flatten().double() for name in names]) for i in range(self.uploads)]
        return krum(torch.stack(rows), self.byzantine)


class ServerOptimizer:
    """Steps the server's parameters with a `torch.optim` optimizer on the pseudo-gradient (Reddi et al. 2021).

    The pseudo-gradient is the server state minus the aggregate: ``SGD(lr=1)`` is FedAvg, ``SGD(lr=1, momentum=.9)``
    FedAvgM, ``Adam`` FedAdam. It moves the floating-point parameters that are averaged; buffers take the aggregate.

    Args:
        factory: Makes the optimizer from a list of parameters.
        names: The entries that it moves.

    Example:
        >>> optimizer = ServerOptimizer(lambda params: torch.optim.SGD(params, lr=0.5), names=["w"])
        >>> optimizer.step(server={"w": torch.tensor([1.0])}, aggregate={"w": torch.tensor([3.0])})
        {'w': tensor([2.])}
    """

    def __init__(self, factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], names: list[str]) -> None:
        self._factory = factory
        self._names = names
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._pending: dict[str, object] | None = None

    def step(self, server: Mapping[str, Tensor], aggregate: Mapping[str, Tensor]) -> State:
        """The server state after one step from ``server`` towards ``aggregate``."""
        if self._optimizer is None:
            self._parameters = [nn.Parameter(server[name].clone()) for name in self._names]
            self._optimizer = self._factory(self._parameters)
            if self._pending is not None:
                self._optimizer.load_state_dict(self._pending)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.data.copy_(server[name])
            parameter.grad = (server[name] - aggregate[name]).to(parameter.dtype)
        self._optimizer.step()
        moved = {name: p.detach().clone() for name, p in zip(self._names, self._parameters, strict=True)}
        return {**aggregate, **moved}

    def state_dict(self) -> dict[str, object]:
        """The optimizer's state, for checkpoints; before the first step the one it took over, if any."""
        return self._optimizer.state_dict() if self._optimizer is not None else self._pending or {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over the state of an earlier run at the next step."""
        self._optimizer = None
        self._pending = state or None
