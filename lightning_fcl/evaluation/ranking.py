"""Average ranks of methods over protocols, with Friedman's test and Nemenyi's critical distance (Demsar, 2006)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.comparison_results import format_p_value
from lightning_fcl.evaluation.continual import FloatArray
from lightning_fcl.evaluation.planned_comparisons import check_known
from lightning_fcl.evaluation.statistics import SIGNIFICANCE
from lightning_fcl.evaluation.table import Table, markdown_table
from lightning_fcl.validation import require_package

MAX_METHODS = 10
"""Maximum number of methods of a ranking. The critical distance increases with the number of methods."""

_MIN_METHODS, _MIN_PROTOCOLS = 3, 2
_METRIC = "last_accuracy"


@dataclass(frozen=True)
class RankingPlan:
    """Methods and protocols of a ranking, fixed before the runs.

    Args:
        methods: Names of the methods.
        protocols: Names of the protocols.
    """

    methods: tuple[str, ...]
    protocols: tuple[str, ...]


@dataclass(frozen=True)
class Ranking:
    """Average ranks of methods, the lowest rank first. The method with the highest value has rank 1.

    Args:
        ranks: Average rank of each method.
        num_protocols: Number of protocols.
        statistic: Friedman's chi-squared statistic, corrected for ties.
        p_value: P-value of Friedman's test that all methods have the same expected rank.
        critical_distance: Smallest significant difference of two average ranks, see `critical_distance`.
    """

    ranks: Mapping[str, float]
    num_protocols: int
    statistic: float
    p_value: float
    critical_distance: float

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Largest groups of methods with ranks within the critical distance, each of at least two methods."""
        methods, groups = [*self.ranks], list[tuple[str, ...]]()
        for start, first in enumerate(methods):
            members = [m for m in methods[start:] if self.ranks[m] - self.ranks[first] < self.critical_distance]
            if len(members) > 1 and not (groups and members[-1] in groups[-1]):
                groups.append(tuple(members))
        return groups

    @property
    def text(self) -> str:
        """A sentence with the result of Friedman's test, and a sentence with the critical distance."""
        p_value = format_p_value(self.p_value)
        return (
            f"Friedman's test on {len(self.ranks)} methods and {self.num_protocols} protocols: chi-squared = "
            f"{self.statistic:.1f}, p {p_value if p_value.startswith('<') else f'= {p_value}'}. Two average ranks that "
            f"differ by at least {self.critical_distance:.2f} are separated (Nemenyi's test, p at most {SIGNIFICANCE})."
        )


def read_ranking(content: Mapping[str, Any], protocols: Mapping[str, Collection[str]]) -> RankingPlan | None:
    """Return the entry ``ranking`` of ``rows.yaml``. None if there is no such key.

    Args:
        content: Content of ``rows.yaml``.
        protocols: Methods of each protocol.

    Raises:
        InvalidValueError: If the entry has other keys, fewer than three or more than ten methods, fewer than two
            protocols, or a name twice.
        UnknownNameError: If a protocol is unknown, or does not have a method.
    """
    entry = content.get("ranking")
    if not entry:
        return None
    if not isinstance(entry, Mapping) or {*entry} != {"methods", "protocols"}:
        raise InvalidValueError(
            f"Expected `ranking` to have the keys methods and protocols, but got {entry}.",
            argument="ranking",
            value=entry,
        )
    for key, min_names, max_names in (("methods", _MIN_METHODS, MAX_METHODS), ("protocols", _MIN_PROTOCOLS, None)):
        names = entry[key]
        limits = (
            f"at least {min_names} different names"
            if max_names is None
            else f"{min_names} to {max_names} different names"
        )
        if not isinstance(names, list) or not min_names <= len({*map(str, names)}) == len(names) <= (
            max_names or len(names)
        ):
            raise InvalidValueError(
                f"Expected `{key}` of `ranking` to be a list of {limits}, but got {names}.", argument=key, value=names
            )
    for protocol in entry["protocols"]:
        check_known(protocol, protocols, "`protocols` of `ranking`", "protocols")
        for method in entry["methods"]:
            check_known(method, protocols[protocol], f"`methods` of `ranking`, which needs {protocol},", "methods")
    return RankingPlan(tuple(entry["methods"]), tuple(entry["protocols"]))


def rank_methods(table: Table, plan: RankingPlan) -> Ranking | None:
    """Return the average ranks of the mean last accuracy. None if a row was not run.

    Args:
        table: Table with the last accuracy of each row.
        plan: Methods and protocols.
    """
    cells = [[table.rows.get(f"{p} {m}", {}).get(_METRIC) for m in plan.methods] for p in plan.protocols]
    means = [[math.nan if cell is None or cell.mean is None else cell.mean for cell in of] for of in cells]
    values = np.array(means)
    if not np.isfinite(values).all():
        return None
    stats = require_package("scipy.stats", "computes Friedman's test")
    ranks = average_ranks(values)
    # Means of equal values can differ by rounding errors.
    test = stats.friedmanchisquare(*np.round(values, 9).T)
    order = np.argsort(ranks, kind="stable")
    return Ranking(
        {plan.methods[number]: float(ranks[number]) for number in order},
        len(plan.protocols),
        float(test.statistic),
        float(test.pvalue),
        critical_distance(len(plan.methods), len(plan.protocols)),
    )


def average_ranks(values: ArrayLike) -> FloatArray:
    """Return the rank of each column, averaged over the rows. Rank 1 is the highest value. Equal values share a rank.

    Args:
        values: Values of methods (columns) on data sets (rows).

    Example:
        >>> average_ranks([[0.9, 0.8, 0.7], [0.5, 0.6, 0.5]]).tolist()
        [1.75, 1.5, 2.75]
    """
    stats = require_package("scipy.stats", "computes ranks")
    ranks: FloatArray = stats.rankdata(-np.round(np.asarray(values, dtype=np.float64), 9), axis=1).mean(axis=0)
    return ranks


def critical_distance(num_methods: int, num_protocols: int, significance: float = SIGNIFICANCE) -> float:
    """Return Nemenyi's critical distance of average ranks (Demsar, 2006).

    Args:
        num_methods: Number of methods.
        num_protocols: Number of data sets.
        significance: Probability that at least one pair of equal methods differs by the critical distance or more.

    Example:
        >>> round(critical_distance(4, 14), 2)
        1.25
    """
    stats = require_package("scipy.stats", "computes critical distances")
    quantile = float(stats.studentized_range.ppf(1 - significance, num_methods, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(num_methods * (num_methods + 1) / (6 * num_protocols))


def ranking_table(ranking: Ranking) -> str:
    """Return the average ranks as a table in Markdown, with the methods that are not separated from each method."""
    lines = []
    for method, rank in ranking.ranks.items():
        near_methods = [
            other
            for other, other_rank in ranking.ranks.items()
            if other != method and abs(other_rank - rank) < ranking.critical_distance
        ]
        lines.append([method, f"{rank:.2f}", ", ".join(near_methods) or "-"])
    return markdown_table(["method", "average rank", "not separated from"], lines)
