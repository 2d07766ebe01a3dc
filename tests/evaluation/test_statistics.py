"""Tests of statistics over seeds against SciPy and hand-computed values, and of tables that compare runs."""

import io
import itertools

import numpy as np
import pandas as pd
import pytest
from raising import raises
from scipy import stats

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.run_table import RunTable
from lightning_fcl.evaluation.statistics import MIN_SEEDS, holm_correction, paired_p_value, seed_statistics
from lightning_fcl.evaluation.table import Cell


@pytest.mark.parametrize("n", [1, 2, 4, 5, 20])
def test_seed_statistics_equal_numpy_and_scipy(n):
    values = np.random.default_rng(n).normal(0.7, 0.1, n)
    number = seed_statistics(values)
    assert number.n == n and number.mean == pytest.approx(values.mean())
    assert number.std == (pytest.approx(values.std(ddof=1)) if n > 1 else None)
    expected = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values)) if n >= MIN_SEEDS else None
    assert number.interval == (pytest.approx(expected) if expected else None)
    cell = Cell(dict(enumerate(values)))
    assert (cell.n, cell.mean, cell.std) == (n, number.mean, number.std or 0.0)


def test_seed_statistics_interval_covers_the_mean_in_95_percent():
    draws = np.random.default_rng(0).normal(size=(4000, 5))
    ends = np.array([seed_statistics(values).interval for values in draws])
    covered = ((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).mean()
    # The standard error of this share is 0.0034.
    assert abs(covered - 0.95) < 0.015


def test_seed_statistics_without_values_raises():
    with raises(InvalidValueError, "values"):
        seed_statistics([])


def test_paired_p_value_equals_t_test_of_common_seeds():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=7), rng.normal(0.5, size=7)
    values, reference = dict(enumerate(first)), dict(zip([3, 1, 0, 6, 5, 4, 9], second, strict=True))
    common = [0, 1, 3, 4, 5, 6]
    expected = stats.ttest_1samp([values[seed] - reference[seed] for seed in common], 0).pvalue
    assert paired_p_value(values, reference) == pytest.approx(expected)
    assert paired_p_value(reference, values) == pytest.approx(expected)
    assert paired_p_value(values, {seed: reference[seed] for seed in common[:4]}) is None


def test_paired_p_value_equal_differences_are_no_noise():
    values = {seed: 0.1 * seed + 0.3 for seed in range(5)}
    assert paired_p_value(values, dict(values)) == 1.0
    assert paired_p_value({seed: value + 0.1 for seed, value in values.items()}, values) == 0.0


def test_holm_correction_rejects_as_the_step_down_procedure():
    rng = np.random.default_rng(2)
    for count, level in itertools.product([1, 2, 5], [0.01, 0.05, 0.2]):
        p_values = {str(number): float(p) for number, p in enumerate(rng.uniform(0, 0.1, count))}
        rejected = set()
        for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
            if p_values[name] > level / (count - rank):
                break
            rejected.add(name)
        corrected = holm_correction(p_values)
        assert {name for name, p in corrected.items() if p <= level} == rejected and [*corrected] == [*p_values]


def make_run(seed, value, **searched):
    metrics = {"final_accuracy/server": value, "upload_bytes/total": 1000.0, "final_accuracy/3": value}
    return {"seed": seed, "metrics": metrics} | ({"searched": searched} if searched else {})


def make_groups(**rows):
    return {row: [make_run(seed, value) for seed, value in enumerate(values)] for row, values in rows.items()}


def test_run_table_frame_equals_pandas_statistics():
    rng = np.random.default_rng(3)
    rows = {name: rng.normal(mean, 0.02, 6) for name, mean in (("a", 0.7), ("b", 0.8), ("c", 0.701))}
    frame = RunTable.from_runs(make_groups(**rows), reference="a").to_frame()
    assert {*frame["metric"]} == {"final_accuracy/server", "upload_bytes/total"}
    lines = frame[frame["metric"] == "final_accuracy/server"].set_index("row")
    for name, values in rows.items():
        series = pd.Series(values)
        assert lines.loc[name, "mean"] == pytest.approx(series.mean())
        assert lines.loc[name, "std"] == pytest.approx(series.std()) and lines.loc[name, "n"] == 6
        low, high = stats.t.interval(0.95, 5, series.mean(), series.sem())
        assert (lines.loc[name, "low"], lines.loc[name, "high"]) == pytest.approx((low, high))
    tests = [stats.ttest_rel(rows[name], rows["a"]).pvalue for name in "bc"]
    smaller, larger = sorted(tests)
    expected = {smaller: min(1, 2 * smaller), larger: max(min(1, 2 * smaller), larger)}
    assert [lines.loc[name, "p"] for name in "bc"] == pytest.approx([expected[p] for p in tests])
    assert np.isnan(lines.loc["a", "p"])
    read = pd.read_csv(io.StringIO(RunTable.from_runs(make_groups(**rows), reference="a").render("csv")))
    pd.testing.assert_frame_equal(read, frame, check_dtype=False)


def test_run_table_markdown_marks_significant_rows():
    rows = {"base": [0.7, 0.71, 0.69, 0.7, 0.72], "better": [0.8, 0.82, 0.79, 0.8, 0.81], "equal": [0.7] * 5}
    text = RunTable.from_runs(make_groups(**rows), ["final_accuracy/server"]).render("markdown")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "0.804 ± 0.011 [0.790, 0.818]*" in lines["better"] and "*" not in lines["equal"] + lines["base"]
    assert "Holm" in text and "against base" in text


def test_run_table_few_seeds_has_no_interval_and_no_test():
    table = RunTable.from_runs(make_groups(a=[0.7, 0.72], b=[0.9, 0.91]), ["final_accuracy/server"])
    text = table.render("markdown")
    assert "0.710 ± 0.014" in text and "[" not in text and "*" not in text
    assert table.to_frame()[["low", "high", "p"]].isna().all().all()


def test_run_table_searched_options_are_columns():
    groups = {f"lr={lr}": [make_run(0, lr, **{"model.lr": lr})] for lr in (0.1, 0.01)} | {"x": [make_run(0, 0.5)]}
    table = RunTable.from_runs(groups, ["final_accuracy/server"])
    frame = table.to_frame()
    assert frame["model.lr"].tolist()[:2] == [0.1, 0.01] and frame["model.lr"].isna().tolist() == [False, False, True]
    assert table.render("markdown").splitlines()[0].split("|")[2].strip() == "lr"


def test_run_table_latex_escapes_names():
    text = RunTable.from_runs(make_groups(**{"50 % of a_b": [0.5, 0.6]}), ["final_accuracy/server"]).render("latex")
    assert r"50 \% of a\_b" in text and r"0.550 $\pm$ 0.071" in text and r"\begin{tabular}" in text and "±" not in text


def test_run_table_unknown_names_raise():
    groups = make_groups(a=[0.7])
    with raises(UnknownNameError, "metrics", value="final_acuracy/server"):
        RunTable.from_runs(groups, ["final_acuracy/server"])
    with pytest.raises(ValueError, match="reference"):
        RunTable.from_runs(groups, reference="b")
    with raises(InvalidValueError, "seed"):
        RunTable.from_runs({"a": [make_run(3, 0.1), make_run(3, 0.2)]})
