"""Planned comparisons and the ranking of `lightning-fcl leaderboard`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fcl.evaluation.planned_comparisons import PlannedComparison, read_comparisons
from lightning_fcl.evaluation.ranking import RankingPlan, rank_methods, ranking_table, read_ranking
from lightning_fcl.evaluation.sample_table import collect_samples, write_samples
from lightning_fcl.evaluation.table import Table


@dataclass(frozen=True)
class StatisticsPlan:
    """Statistics of the leaderboard that are fixed before the runs.

    Args:
        comparisons: Comparisons of two methods.
        ranking: Methods and protocols of the ranking. None for no ranking.
    """

    comparisons: Sequence[PlannedComparison]
    ranking: RankingPlan | None

    @classmethod
    def read(cls, content: Mapping[str, Any], protocols: Mapping[str, Collection[str]]) -> StatisticsPlan:
        """Return the plan in the content of a ``rows.yaml``, given the methods of each protocol."""
        return cls(read_comparisons(content, protocols), read_ranking(content, protocols))

    @property
    def rows(self) -> set[str]:
        """Rows of the planned comparisons."""
        return {row for planned in self.comparisons for row in planned.rows}

    def write(self, out: Path, table: Table, results: Sequence[Mapping[str, Any]]) -> str:
        """Write the statistics, and return them as text.

        The files are ``samples.json``, ``comparisons.json`` and ``ranking.png``. Without planned comparisons, or
        without the runs of the ranking, the files are not written.

        Args:
            out: Output folder.
            table: Table of the leaderboard.
            results: Contents of ``results.json`` of all runs.
        """
        # These modules import SciPy and Altair, which takes a second.
        from lightning_fcl.evaluation.charts import write_png
        from lightning_fcl.evaluation.comparison_results import (
            compare_rows,
            comparisons_table,
            write_comparison_results,
        )
        from lightning_fcl.evaluation.ranking_chart import ranking_chart

        parts = []
        if self.comparisons:
            samples = collect_samples(results, self.rows)
            compared = compare_rows(table, samples, self.comparisons)
            write_samples(out / "samples.json", samples)
            write_comparison_results(out / "comparisons.json", compared)
            if text := comparisons_table(compared):
                parts.append(f"Planned comparisons of the last accuracy\n\n{text}\n")
        if self.ranking and (ranking := rank_methods(table, self.ranking)):
            write_png(out / "ranking.png", ranking_chart(ranking))
            parts.append(f"Average ranks of the last accuracy\n\n{ranking_table(ranking)}\n\n{ranking.text}\n")
        return "\n".join(parts)
