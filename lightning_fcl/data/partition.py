"""Divide samples among clients: pure functions from labels or owners to index lists.

Every function returns a dictionary from a client's name to its sorted indices. No sample goes to two clients, and all
randomness comes from the generator that is handed in. Except for `by_client`, clients are called "0", "1", and so on.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["by_client", "class_subsets", "dirichlet", "iid", "shards"]

IntArray: TypeAlias = NDArray[np.int64]

_ATTEMPTS = 1000


def by_client(client: NDArray[Any]) -> dict[str, IntArray]:
    """Give every sample to its natural owner.

    Args:
        client: Owner of each sample, integers or strings, shape ``(n,)``.

    Returns:
        Owner as a string -> sorted indices, in the order of the owners (integers by value).

    Raises:
        ValueError: If `client` is empty, not one-dimensional, or neither integers nor strings.

    Example:
        >>> {name: index.tolist() for name, index in by_client(np.array([10, 2, 10])).items()}
        {'2': [1], '10': [0, 2]}
    """
    owners = _column("client", client, "iuU", "integers or strings")
    return {str(owner): np.flatnonzero(owners == owner).astype(np.int64) for owner in np.unique(owners)}


def iid(n: int, n_clients: int, rng: np.random.Generator) -> dict[str, IntArray]:
    """Deal `n` samples to clients uniformly at random; sizes differ by one at most.

    Args:
        n: Number of samples.
        n_clients: Number of clients, from 1 to `n`.
        rng: Source of randomness.

    Returns:
        Client -> sorted indices; all samples are used.

    Raises:
        ValueError: If there are fewer samples than clients.

    Example:
        >>> sorted(len(index) for index in iid(7, 3, np.random.default_rng(0)).values())
        [2, 2, 3]
    """
    _require_clients(n, n_clients)
    return _named(np.array_split(rng.permutation(n), n_clients))


def dirichlet(
    y: ArrayLike, n_clients: int, alpha: float, rng: np.random.Generator, min_size: int = 1
) -> dict[str, IntArray]:
    """Divide each class among the clients in proportions drawn from a symmetric Dirichlet distribution.

    Yurochkin et al. 2019, "Bayesian nonparametric federated learning of neural networks", section 4: for every class c,
    p_c ~ Dir(alpha, ..., alpha) over the clients. Sizes are not balanced. The whole division is drawn again until every
    client has `min_size` samples.

    Args:
        y: Labels, integers, shape ``(n,)``.
        n_clients: Number of clients, from 1 to n.
        alpha: Concentration, above 0 and at most 1e6: small values give clients few classes, large ones nearly equal
            shares.
        rng: Source of randomness.
        min_size: Fewest samples that a client may have.

    Returns:
        Client -> sorted indices; all samples are used.

    Raises:
        ValueError: If an argument is out of range, or if 1000 draws gave no division with `min_size` samples each.

    Example:
        >>> y = np.repeat([0, 1], 50)
        >>> parts = dirichlet(y, n_clients=4, alpha=0.5, rng=np.random.default_rng(0), min_size=5)
        >>> sum(len(index) for index in parts.values()), min(len(index) for index in parts.values()) >= 5
        (100, True)
    """
    labels = _column("y", y, "iu", "integers")
    _require_clients(len(labels), n_clients)
    if not 0 < alpha <= 1e6:
        raise ValueError(
            f"Expected `alpha` to be above 0 and at most 1e6 but got {alpha}. For equal shares use `iid` instead."
        )
    if not 0 <= min_size <= len(labels) // n_clients:
        raise ValueError(
            f"Expected `min_size` to be between 0 and {len(labels) // n_clients}, what {len(labels)} samples allow "
            f"{n_clients} clients, but got {min_size}. Lower it, or take fewer clients."
        )
    for _ in range(_ATTEMPTS):
        parts = _dirichlet_once(labels, n_clients, alpha, rng)
        if min(len(part) for part in parts) >= min_size:
            return _named(parts)
    raise ValueError(
        f"Expected a division with `min_size`={min_size} samples per client but {_ATTEMPTS} draws with "
        f"`alpha`={alpha} and {n_clients} clients gave none. Raise `alpha`, or lower `min_size` or `n_clients`."
    )


def shards(y: ArrayLike, n_clients: int, shards_per_client: int, rng: np.random.Generator) -> dict[str, IntArray]:
    """Sort the samples by label, cut them in shards of equal size, and deal each client a few shards at random.

    McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", section 3 (there
    100 clients with 2 shards of 300). Samples of one class keep their order, so shards do not depend on `rng`, only
    who gets them.

    Args:
        y: Labels, integers, shape ``(n,)``.
        n_clients: Number of clients.
        shards_per_client: Shards for each client; ``n_clients * shards_per_client`` is at most n.
        rng: Source of randomness.

    Returns:
        Client -> sorted indices; all samples are used, and sizes of shards differ by one at most.

    Raises:
        ValueError: If there are more shards than samples, or none.

    Example:
        >>> y = np.array([1, 0, 1, 0])
        >>> parts = shards(y, n_clients=2, shards_per_client=1, rng=np.random.default_rng(0))
        >>> sorted(index.tolist() for index in parts.values())
        [[0, 2], [1, 3]]
    """
    labels = _column("y", y, "iu", "integers")
    _require_clients(len(labels), n_clients)
    if not 1 <= shards_per_client <= len(labels) // n_clients:
        raise ValueError(
            f"Expected `shards_per_client` to be between 1 and {len(labels) // n_clients}, what {len(labels)} samples "
            f"allow {n_clients} clients, but got {shards_per_client}. Take fewer shards or fewer clients."
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), n_clients * shards_per_client)
    dealt = rng.permutation(len(pieces)).reshape(n_clients, shards_per_client)
    return _named([np.concatenate([pieces[shard] for shard in hand]) for hand in dealt])


def class_subsets(
    y: ArrayLike,
    n_clients: int,
    classes_per_client: int | tuple[int, int],
    rng: np.random.Generator,
    fraction: float | tuple[float, float] = 1.0,
) -> dict[str, IntArray]:
    """Give each client a random subset of the classes and a random fraction of their samples.

    Clients never share a sample. Where the fractions that clients ask of one class add up to 1 or less, each client
    gets its fraction (to within one sample). Where they ask for more than there is, as with ``fraction=1.0`` and a
    class that several clients hold, the class is divided in proportion to what they ask: equally, if all ask the
    same. Classes that no client drew stay unused.

    Args:
        y: Labels, integers, shape ``(n,)``.
        n_clients: Number of clients.
        classes_per_client: Number of classes, or an inclusive range from which each client draws its own number.
        rng: Source of randomness.
        fraction: Share of a class's samples, above 0 and at most 1, or a range from which each client draws its own.

    Returns:
        Client -> sorted indices.

    Raises:
        ValueError: If an argument is out of range, or if a client would get no sample of one of its classes.

    Example:
        >>> y = np.repeat(np.arange(5), 20)
        >>> parts = class_subsets(y, 3, classes_per_client=2, rng=np.random.default_rng(0), fraction=0.1)
        >>> [(len(index), len(np.unique(y[index]))) for index in parts.values()]
        [(4, 2), (4, 2), (4, 2)]
    """
    labels = _column("y", y, "iu", "integers")
    _require_clients(len(labels), n_clients)
    classes = np.unique(labels)
    fewest, most = classes_per_client if isinstance(classes_per_client, tuple) else (classes_per_client,) * 2
    if not 1 <= fewest <= most <= len(classes):
        raise ValueError(
            f"Expected `classes_per_client` to be between 1 and {len(classes)}, the classes that `y` has, "
            f"but got {classes_per_client}. A range is (lowest, highest)."
        )
    low, high = fraction if isinstance(fraction, tuple) else (fraction, fraction)
    if not 0 < low <= high <= 1:
        raise ValueError(
            f"Expected `fraction` to be above 0 and at most 1 but got {fraction}. A range is (lowest, highest)."
        )
    asked = np.zeros((n_clients, len(classes)))
    for client in range(n_clients):
        own = rng.choice(len(classes), size=rng.integers(fewest, most, endpoint=True), replace=False)
        asked[client, own] = rng.uniform(low, high)
    pieces = [_divide(labels, label, asked[:, column], rng) for column, label in enumerate(classes)]
    return _named([np.concatenate([piece[client] for piece in pieces]) for client in range(n_clients)])


def _divide(labels: IntArray, label: np.int64, asked: NDArray[np.float64], rng: np.random.Generator) -> list[IntArray]:
    members = rng.permutation(np.flatnonzero(labels == label))
    # Rounding the running sum, not each share, keeps the total within the class and uses it up when all of it is
    # asked for.
    ends = np.rint(np.cumsum(asked) / max(1.0, asked.sum()) * len(members)).astype(np.int64)
    parts = np.split(members, ends)[:-1]
    for client, part in enumerate(parts):
        if asked[client] > 0 and len(part) == 0:
            raise ValueError(
                f"Expected at least one sample of class {label} for client '{client}' but {np.count_nonzero(asked)} "
                f"clients hold the class, which has {len(members)} samples, and the `fraction` of this one is "
                f"{asked[client]:.3g}. Raise `fraction`, or lower `n_clients` or `classes_per_client`."
            )
    return parts


def _dirichlet_once(labels: IntArray, n_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    pieces = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(n_clients, alpha))
        pieces.append(np.split(members, np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)))
    return [np.concatenate([piece[client] for piece in pieces]) for client in range(n_clients)]


def _named(parts: list[IntArray]) -> dict[str, IntArray]:
    return {str(client): np.sort(part).astype(np.int64) for client, part in enumerate(parts)}


def _column(name: str, values: ArrayLike, kinds: str, words: str) -> NDArray[Any]:
    column = np.asarray(values)
    if column.ndim != 1 or column.size == 0 or column.dtype.kind not in kinds:
        raise ValueError(
            f"Expected `{name}` to hold {words} in one dimension but got {column.dtype} of shape {column.shape}. "
            "Pass one entry per sample."
        )
    return column


def _require_clients(n: int, n_clients: int) -> None:
    if not 1 <= n_clients <= n:
        raise ValueError(
            f"Expected `n_clients` to be between 1 and {n}, the number of samples, but got {n_clients}. Take fewer "
            "clients."
        )
