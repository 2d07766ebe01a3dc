"""Privacy accounting of Gaussian releases with the package ``dp-accounting``.

The privacy guarantee is (epsilon, delta)-differential privacy (Dwork et al., 2006). The accountants are privacy loss
distributions (``"pld"``; Koskela et al., 2020) and Rényi differential privacy (``"rdp"``; Mironov, 2017). Only this
module imports ``dp_accounting``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Literal

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.validation import above, between, require_package

Accountant = Literal["pld", "rdp"]
"""Accountant: privacy loss distributions (``"pld"``) or Rényi differential privacy (``"rdp"``)."""

_PURPOSE = "computes the privacy budget"

_TOLERANCE = 1e-4
"""Absolute tolerance of a calibrated noise multiplier."""

_INTERVAL = 5e-4
"""Step of the grid of privacy losses. The accountant rounds up, so a larger step only increases epsilon.

For 10,000 releases with noise multiplier 4 and sampling probability 0.01, epsilon is 0.3 % larger than with 1e-4.
"""


@dataclass(frozen=True)
class Release:
    """A release of a sum with Gaussian noise, to which each unit contributes at most a vector of norm 1.

    Args:
        noise_multiplier: Standard deviation of the noise, divided by the maximum norm of one unit's contribution.
        sampling_prob: Probability that a unit is sampled for the sum, independently of other units. 1: every unit can
            contribute.

    Raises:
        ValueError: If an argument is out of range.
    """

    noise_multiplier: float
    sampling_prob: float = 1.0

    def __post_init__(self) -> None:
        above(0, noise_multiplier=self.noise_multiplier)
        above(0, sampling_prob=self.sampling_prob)
        between(0, 1, sampling_prob=self.sampling_prob)


def compute_epsilon(releases: Iterable[Release], delta: float, accountant: Accountant = "pld") -> float:
    """Return the epsilon of several releases together, for the given delta.

    The guarantee compares two datasets of which one has one unit more (add or remove).

    Args:
        releases: The releases. Their order has no influence.
        delta: Delta, above 0 and below 1.
        accountant: The accountant.

    Raises:
        MissingPackageError: If ``dp-accounting`` is not installed.

    Example:
        >>> round(compute_epsilon([Release(3.7306)], delta=1e-5), 2)
        1.0
        >>> round(compute_epsilon([Release(1.5, 0.04)] * 2250, delta=1e-5), 2)
        6.77
    """
    counts = Counter(releases)
    ordered = sorted(counts.items(), key=lambda item: (item[0].noise_multiplier, item[0].sampling_prob))
    return _epsilon(tuple(ordered), delta, accountant)


def find_noise_multiplier(
    epsilon: float, delta: float, num_releases: int, sampling_prob: float = 1.0, accountant: Accountant = "pld"
) -> float:
    """Return the smallest noise multiplier with which some equal releases together have at most the given epsilon.

    The result is at most 1e-4 above the smallest noise multiplier, and never below it.

    Args:
        epsilon: Epsilon of all releases together, above 0.
        delta: Delta, above 0 and below 1.
        num_releases: Number of releases, at least 1.
        sampling_prob: Probability that a unit is sampled for a release. See `Release`.
        accountant: The accountant.

    Raises:
        MissingPackageError: If ``dp-accounting`` is not installed.

    Example:
        >>> round(find_noise_multiplier(1.0, 1e-5, num_releases=1), 2)
        3.73
    """

    def fits(noise_multiplier: float) -> bool:
        counts = ((Release(noise_multiplier, sampling_prob), num_releases),)
        return _epsilon(counts, delta, accountant) <= epsilon

    low, high = 0.0, 1.0  # `low` does not fit, because a release without noise has no privacy.
    while not fits(high):
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def max_releases(
    epsilon: float,
    delta: float,
    release: Release,
    limit: int,
    earlier: Mapping[Release, int],
    accountant: Accountant = "pld",
) -> int:
    """Return the maximum number of equal releases that keep the epsilon of all releases within a budget.

    Args:
        epsilon: The budget.
        delta: Delta, above 0 and below 1.
        release: The release that is repeated.
        limit: Upper limit of the result.
        earlier: Number of earlier releases of each kind.
        accountant: The accountant.

    Example:
        >>> max_releases(1.0, 1e-5, Release(3.7307), limit=10, earlier={})
        1
    """

    def fits(number: int) -> bool:
        return compute_epsilon((Counter(earlier) + Counter({release: number})).elements(), delta, accountant) <= epsilon

    if fits(limit):
        return limit
    low, high = 0, limit  # `low` fits, `high` does not.
    if not fits(0):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_delta(delta: float, num_units: int, units: str = "clients") -> None:
    """Raise InvalidValueError if ``delta`` is not below 1 divided by the number of units, such as clients.

    With a larger delta, publishing the data of one random unit would satisfy the guarantee.
    """
    if not delta < 1 / num_units:
        raise InvalidValueError(
            f"Expected `delta` to be below 1 / {num_units} (one divided by the number of {units}), but got {delta:g}.",
            hint=f"Use for example `delta={_round_down(0.1 / num_units):g}`.",
            argument="delta",
            value=delta,
        )


def _round_down(value: float) -> float:
    """Return the largest power of 10 that is not above ``value``."""
    return 10.0 ** math.floor(math.log10(value))


@contextmanager
def _without_order_warnings() -> Iterator[None]:
    """Temporarily hide warnings about orders of Rényi divergence that the accountant leaves out.

    Epsilon is the minimum over all orders, so fewer orders only increase epsilon.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@lru_cache(maxsize=64)
def _loss_distribution(release: Release) -> Any:
    """Return the privacy loss distribution of one release, as an object of ``dp_accounting``."""
    distributions = require_package("dp_accounting.pld.privacy_loss_distribution", _PURPOSE, "privacy")
    return distributions.from_gaussian_mechanism(
        release.noise_multiplier, value_discretization_interval=_INTERVAL, sampling_prob=release.sampling_prob
    )


@lru_cache(maxsize=1024)
def _epsilon(counts: tuple[tuple[Release, int], ...], delta: float, accountant: Accountant) -> float:
    if not counts:
        return 0.0
    if accountant == "pld":
        distributions = [_loss_distribution(release).self_compose(count) for release, count in counts]
        return float(reduce(lambda first, second: first.compose(second), distributions).get_epsilon_for_delta(delta))
    package = require_package("dp_accounting", _PURPOSE, "privacy")
    renyi = package.rdp.RdpAccountant()
    with _without_order_warnings():
        for release, count in counts:
            gaussian = package.GaussianDpEvent(release.noise_multiplier)
            renyi.compose(package.PoissonSampledDpEvent(release.sampling_prob, gaussian), count)
        return float(renyi.get_epsilon(delta))
