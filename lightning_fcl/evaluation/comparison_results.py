"""Results of planned comparisons, stored in ``comparisons.json``: difference, interval, p-value and verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightning_fcl.errors import DamagedFileError, InvalidValueError
from lightning_fcl.evaluation.crossed_bootstrap import crossed_interval
from lightning_fcl.evaluation.planned_comparisons import PlannedComparison
from lightning_fcl.evaluation.sample_table import SampleTable
from lightning_fcl.evaluation.statistics import MIN_SEEDS, SIGNIFICANCE, holm_correction, paired_p_value
from lightning_fcl.evaluation.table import Table, markdown_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.reading import read_json

_FORMAT = 1
_HINT = "Write the file with `lightning-fcl leaderboard`."
_METRIC = "last_accuracy"
_ROUNDING_ERROR = 1e-6


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a planned comparison. Differences are the last accuracy of the first method minus that of the second.

    Args:
        planned: The comparison.
        seeds: Seeds that both methods have.
        difference: Mean difference over the seeds. None without seeds.
        interval: 95 % bootstrap interval of the difference over seeds and test samples. None for fewer than `MIN_SEEDS`
            seeds, or if the predictions on single test samples are missing.
        p_value: P-value of the paired t-test over the seeds. None for fewer than `MIN_SEEDS` seeds.
        corrected_p_value: P-value with Holm's correction for all planned comparisons. None if there is no p-value.
    """

    planned: PlannedComparison
    seeds: tuple[int, ...] = ()
    difference: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    corrected_p_value: float | None = None

    @property
    def verdict(self) -> str:
        """Verdict on the first method: ``higher``, ``lower``, ``not separated`` or ``no claim``.

        Higher and lower need a corrected p-value of at most 0.05 and an interval without 0. Without both numbers, the
        verdict is ``no claim``.
        """
        if self.interval is None or self.corrected_p_value is None:
            return "no claim"
        low, high = self.interval
        if self.corrected_p_value > SIGNIFICANCE or low <= 0 <= high:
            return "not separated"
        return "higher" if low > 0 else "lower"


def compare_rows(
    table: Table, samples: SampleTable, comparisons: Sequence[PlannedComparison]
) -> tuple[ComparisonResult, ...]:
    """Return the results of all planned comparisons.

    Holm's correction is for all planned comparisons. A comparison without a p-value counts as p = 1, so that runs that
    are missing do not make other comparisons significant.

    Args:
        table: Table with the last accuracy of each row and seed.
        samples: Predictions on single test samples, as `collect_samples` or `read_samples` returns them.
        comparisons: All planned comparisons.

    Raises:
        InvalidValueError: If the accuracy on ``samples`` differs from the table, or if two rows of a comparison have
            different numbers of test samples.
    """
    results = {planned.name: _compare(table, samples, planned) for planned in comparisons}
    tests = {name: 1.0 if result.p_value is None else result.p_value for name, result in results.items()}
    corrected = holm_correction(tests)
    return tuple(
        ComparisonResult(**{**vars(result), "corrected_p_value": None if result.p_value is None else corrected[name]})
        for name, result in results.items()
    )


def _compare(table: Table, samples: SampleTable, planned: PlannedComparison) -> ComparisonResult:
    """Return the result of a comparison without correction for several tests."""
    cells = [table.rows.get(row, {}).get(_METRIC) for row in planned.rows]
    first, second = ({} if cell is None else cell.values for cell in cells)
    seeds = tuple(sorted(first.keys() & second.keys()))
    if not seeds:
        return ComparisonResult(planned)
    difference = float(np.mean([first[seed] - second[seed] for seed in seeds]))
    bits = [[samples.get(row, {}).get(seed) for seed in seeds] for row in planned.rows]
    known_bits = [[array for array in of_row if array is not None] for of_row in bits]
    interval = None
    if len(seeds) >= MIN_SEEDS and all(len(of_row) == len(seeds) for of_row in known_bits):
        for row, values, of_row in zip(planned.rows, (first, second), known_bits, strict=True):
            for seed, array in zip(seeds, of_row, strict=True):
                _check_samples(
                    f"row {row}, seed {seed}", len(known_bits[0][0]), len(array), values[seed], float(array.mean())
                )
        correct = np.array(known_bits, dtype=np.int8)
        interval = crossed_interval(correct[0] - correct[1])
    return ComparisonResult(planned, seeds, difference, interval, paired_p_value(first, second))


def _check_samples(source: str, expected_number: int, number: int, expected_accuracy: float, accuracy: float) -> None:
    """Raise InvalidValueError if samples are not those of the table."""
    if number != expected_number or abs(accuracy - expected_accuracy) > _ROUNDING_ERROR:
        raise InvalidValueError(
            f"Expected `samples` of {source} to have {expected_number} test samples and the accuracy "
            f"{expected_accuracy:.4f} of the table, but got {number} test samples and the accuracy {accuracy:.4f}.",
            hint="Use table.json and samples.json of the same command `lightning-fcl leaderboard`.",
            argument="samples",
            value=accuracy,
        )


def comparisons_table(results: Iterable[ComparisonResult]) -> str:
    """Return the results as a table in Markdown. Comparisons without common seeds are left out."""
    lines = [
        [
            result.planned.question,
            result.planned.name,
            str(len(result.seeds)),
            f"{result.difference:+.3f}",
            "-" if result.interval is None else f"{result.interval[0]:+.3f} to {result.interval[1]:+.3f}",
            format_p_value(result.corrected_p_value),
            result.verdict,
        ]
        for result in results
        if result.difference is not None
    ]
    heads = ["question", "comparison", "seeds", "difference", "95 % interval", "p (Holm)", "verdict"]
    return markdown_table(heads, lines) if lines else ""


def format_p_value(p_value: float | None) -> str:
    """Return a p-value with three decimals, or "-" for None.

    Example:
        >>> format_p_value(0.0004), format_p_value(0.042), format_p_value(None)
        ('< 0.001', '0.042', '-')
    """
    return "-" if p_value is None else "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def write_comparison_results(path: Path, results: Iterable[ComparisonResult]) -> Path:
    """Write ``comparisons.json``, and return its path."""
    lines = [{**asdict(result), "verdict": result.verdict} for result in results]
    return write_atomic(path, json.dumps({"format": _FORMAT, "comparisons": lines}, indent=1) + "\n")


def read_comparison_results(path: Path) -> tuple[ComparisonResult, ...]:
    """Return the content of a ``comparisons.json``.

    Raises:
        DamagedFileError: If the file has another content.
        MissingFileError: If there is no such file.
    """
    content = read_json(path, "results of comparisons in ", _FORMAT, _HINT)
    try:
        results = []
        for entry in content["comparisons"]:
            low_high, values = entry["interval"], {key: value for key, value in entry.items() if key != "verdict"}
            values |= {"planned": PlannedComparison(**entry["planned"]), "seeds": tuple(map(int, entry["seeds"]))}
            values |= {"interval": None if low_high is None else (float(low_high[0]), float(low_high[1]))}
            results.append(ComparisonResult(**values))
        return tuple(results)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"Expected {path} to contain results of comparisons, but reading it failed: {error!r}.",
            hint=_HINT,
            value=path,
        ) from error
