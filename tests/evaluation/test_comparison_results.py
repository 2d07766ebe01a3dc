"""Tests of planned comparisons and their results against hand-computed values and SciPy."""

import json

import numpy as np
import pytest
from raising import raises
from scipy import stats

from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError, UnknownNameError
from lightning_fcl.evaluation.comparison_results import (
    ComparisonResult,
    compare_rows,
    comparisons_table,
    read_comparison_results,
    write_comparison_results,
)
from lightning_fcl.evaluation.planned_comparisons import PlannedComparison, read_comparisons
from lightning_fcl.evaluation.sample_bits import encode_bits
from lightning_fcl.evaluation.sample_table import collect_samples, read_samples, write_samples
from lightning_fcl.evaluation.table import Cell, Table

METHODS = {"best": 0.6, "same": 0.6, "worse": 0.45}


def planned(first, second, protocol="P"):
    return PlannedComparison(protocol, first, second, f"Is {first} better?")


def draw_samples(num_seeds=6, num_samples=400):
    """Return the correctness of three methods, by row and seed. All methods are correct on the easy samples."""
    generator = np.random.default_rng(0)
    easiness = generator.random(num_samples)
    return {
        f"P {method}": {
            seed: easiness + generator.normal(0, 0.1, num_samples) > 1 - accuracy for seed in range(num_seeds)
        }
        for method, accuracy in METHODS.items()
    }


def make_table(samples):
    rows = {
        row: {"last_accuracy": Cell({seed: float(bits.mean()) for seed, bits in of.items()})}
        for row, of in samples.items()
    }
    return Table("leaderboard", "paper", "", {}, "", 0.0, rows)


FAMILY = (planned("best", "worse"), planned("worse", "same"), planned("best", "same"), planned("best", "missing"))


def test_compare_rows_claims_only_separated_differences():
    samples = draw_samples()
    results = compare_rows(make_table(samples), samples, FAMILY)
    assert [result.verdict for result in results] == ["higher", "lower", "not separated", "no claim"]
    assert [len(result.seeds) for result in results] == [6, 6, 6, 0]
    for result, comparison in zip(results[:3], FAMILY, strict=False):
        means = [[samples[row][seed].mean() for seed in range(6)] for row in comparison.rows]
        assert result.difference == pytest.approx(np.mean(means[0]) - np.mean(means[1]))
        assert result.p_value == pytest.approx(stats.ttest_rel(*means).pvalue)
        low, high = result.interval
        assert low < result.difference < high
    # Four planned comparisons: the comparison without runs counts as p = 1.
    p_values = sorted(result.p_value for result in results[:3])
    expected = np.maximum.accumulate([4 * p_values[0], 3 * p_values[1], min(2 * p_values[2], 1)])
    assert sorted(result.corrected_p_value for result in results[:3]) == pytest.approx(expected.tolist())
    assert results[3] == ComparisonResult(FAMILY[3])


def test_compare_rows_exchanged_rows_negate_the_result():
    samples = draw_samples()
    table = make_table(samples)
    forward, backward = (
        compare_rows(table, samples, [planned(*names)])[0] for names in (("best", "worse"), ("worse", "best"))
    )
    assert backward.difference == pytest.approx(-forward.difference) and backward.p_value == forward.p_value
    # The replicates of both differ, because the order of equal columns differs.
    assert backward.interval == pytest.approx((-forward.interval[1], -forward.interval[0]), abs=0.004)


def test_compare_rows_uses_common_seeds():
    samples = draw_samples()
    del samples["P worse"][0]
    result = compare_rows(make_table(samples), samples, [planned("best", "worse")])[0]
    expected = np.mean([samples["P best"][seed].mean() - samples["P worse"][seed].mean() for seed in range(1, 6)])
    assert result.seeds == (1, 2, 3, 4, 5) and result.difference == pytest.approx(expected)
    assert result.verdict == "higher"


def test_compare_rows_fewer_than_five_common_seeds_claims_nothing():
    samples = draw_samples()
    for seed in (0, 1):
        del samples["P worse"][seed]
    result = compare_rows(make_table(samples), samples, [planned("best", "worse")])[0]
    assert (len(result.seeds), result.interval, result.p_value, result.corrected_p_value) == (4, None, None, None)
    assert result.verdict == "no claim"


def test_compare_rows_without_samples_claims_nothing():
    samples = draw_samples()
    table = make_table(samples)
    del samples["P worse"][3]
    result = compare_rows(table, samples, [planned("best", "worse")])[0]
    assert result.p_value < 0.05 and result.interval is None and result.verdict == "no claim"


def test_compare_rows_samples_of_other_runs_raise_and_own_samples_work():
    samples = draw_samples()
    table = make_table(samples)
    other = {row: dict(of) for row, of in samples.items()}
    other["P worse"][2] = ~other["P worse"][2]
    with raises(InvalidValueError, "samples"):
        compare_rows(table, other, [planned("best", "worse")])
    other["P worse"][2] = samples["P worse"][2][:-8]
    with raises(InvalidValueError, "samples"):
        compare_rows(table, other, [planned("best", "worse")])
    assert compare_rows(table, samples, [planned("best", "worse")])[0].verdict == "higher"


@pytest.mark.parametrize(
    ("interval", "p_value", "expected"),
    [
        ((0.01, 0.02), 0.05, "higher"),
        ((0.01, 0.02), 0.051, "not separated"),
        ((-0.01, 0.02), 0.01, "not separated"),
        ((-0.02, -0.01), 0.01, "lower"),
        ((0.0, 0.02), 0.01, "not separated"),
        (None, 0.01, "no claim"),
        ((0.01, 0.02), None, "no claim"),
    ],
)
def test_verdict_needs_interval_and_test(interval, p_value, expected):
    result = ComparisonResult(FAMILY[0], (0,), 0.015, interval, p_value, p_value)
    assert result.verdict == expected


def test_comparisons_table_and_file_contain_the_results(tmp_path):
    results = (
        ComparisonResult(FAMILY[0], (0, 1, 2, 3, 4), 0.1234, (0.1, 0.15), 0.0001, 0.0004),
        ComparisonResult(FAMILY[1], (0,), -0.05),
        ComparisonResult(FAMILY[3]),
    )
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in comparisons_table(results).splitlines()]
    assert lines[0] == ["question", "comparison", "seeds", "difference", "95 % interval", "p (Holm)", "verdict"]
    assert lines[2:] == [
        ["Is best better?", "P: best - worse", "5", "+0.123", "+0.100 to +0.150", "< 0.001", "higher"],
        ["Is worse better?", "P: worse - same", "1", "-0.050", "-", "-", "no claim"],
    ]
    assert comparisons_table(results[2:]) == ""
    path = write_comparison_results(tmp_path / "comparisons.json", results)
    assert read_comparison_results(path) == results
    assert json.loads(path.read_text())["comparisons"][0]["verdict"] == "higher"


def test_samples_are_collected_written_and_read(tmp_path):
    bits = [np.array([True, False, True]), np.array([False, False, True])]
    results = [
        {"seed": 4, "recipe": {"row": "P a"}, "record": {"totals": [2, 1], "rounds": [{}]}},
        *(
            {
                "seed": seed,
                "recipe": {"row": row},
                "record": {"totals": [2, 1], "rounds": [{"correct_samples": {"server": encode_bits(one)}}]},
            }
            for row, seed, one in (("P a", 1, bits[0]), ("P a", 0, bits[1]), ("P b", 0, bits[0]))
        ),
    ]
    samples = collect_samples(results, ["P a"])
    path = write_samples(tmp_path / "samples.json", samples)
    read = read_samples(path)
    assert {row: sorted(of) for row, of in read.items()} == {"P a": [0, 1]}
    assert np.array_equal(read["P a"][1], bits[0]) and np.array_equal(read["P a"][0], bits[1])


RESULTS = (ComparisonResult(FAMILY[0], (0,), 0.1),)
HINT = "Write the file with `lightning-fcl leaderboard`."


def check_fix(path, read, write, content):
    """Check that reading fails with the hint, and that reading works after writing the file."""
    with pytest.raises((DamagedFileError, InvalidValueError, MissingFileError)) as error:
        read(path)
    assert HINT in str(error.value)
    write(path, content)
    assert len(read(path)) == 1


def test_damaged_comparisons_are_fixed_by_writing_them_again(tmp_path):
    path = tmp_path / "comparisons.json"
    path.write_text('{"format": 1, "comparisons": [{"interval": [1]}]}')
    with raises(DamagedFileError, value=path):
        read_comparison_results(path)
    check_fix(path, read_comparison_results, write_comparison_results, RESULTS)


def test_damaged_samples_are_fixed_by_writing_them_again(tmp_path):
    path = tmp_path / "samples.json"
    path.write_text('{"format": 1, "rows": {"P a": {"0": {"n": 20, "bits": "gYA="}}}}')
    with raises(DamagedFileError, value=path):
        read_samples(path)
    check_fix(path, read_samples, write_samples, {"P a": {0: np.array([True, False])}})


def test_missing_comparisons_are_fixed_by_writing_them(tmp_path):
    check_fix(tmp_path / "comparisons.json", read_comparison_results, write_comparison_results, RESULTS)


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
def test_comparisons_of_another_format_are_fixed_by_writing_them_again(tmp_path, text):
    path = tmp_path / "comparisons.json"
    path.write_text(text)
    check_fix(path, read_comparison_results, write_comparison_results, RESULTS)


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
def test_samples_of_another_format_are_fixed_by_writing_them_again(tmp_path, text):
    path = tmp_path / "samples.json"
    path.write_text(text)
    check_fix(path, read_samples, write_samples, {"P a": {0: np.array([True, False])}})


def test_read_comparisons_suggested_method_works():
    protocols = {"P": ["FedCBDR", "Replay"]}
    with pytest.raises(UnknownNameError) as error:
        read_comparisons({"comparisons": [entry("FedCDBR", "Replay")]}, protocols)
    assert "Did you mean FedCBDR?" in str(error.value)
    (comparison,) = read_comparisons({"comparisons": [entry("FedCBDR", "Replay")]}, protocols)
    assert comparison.rows == ("P FedCBDR", "P Replay")


def entry(first="a", second="b", **other):
    return {"protocol": "P", "first": first, "second": second, "question": "Is a better?", **other}


PROTOCOLS = {"P": ["a", "b", *map(str, range(6))], "Q": ["a"]}


def test_read_comparisons_accepts_ten_entries():
    entries = [entry(second=second) for second in ("b", *map(str, range(6)))]
    entries += [entry(first="b", second=second) for second in "012"]
    found = read_comparisons({"comparisons": entries}, PROTOCOLS)
    assert len(found) == 10 and found[0] == PlannedComparison("P", "a", "b", "Is a better?")
    assert found[0].rows == ("P a", "P b") and read_comparisons({}, PROTOCOLS) == ()
    with raises(InvalidValueError, "comparisons"):
        read_comparisons({"comparisons": [*entries, entry(first="b", second="3")]}, PROTOCOLS)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": 1},
        ["a"],
        [{"protocol": "P", "first": "a", "second": "b"}],
        [entry(more="x")],
        [entry(question=1)],
        [entry(second="a")],
        [entry(), entry("b", "a")],
    ],
)
def test_read_comparisons_rejects_invalid_entries(entries):
    with raises(InvalidValueError, "comparisons"):
        read_comparisons({"comparisons": entries}, PROTOCOLS)


@pytest.mark.parametrize("change", [{"protocol": "p"}, {"second": "B"}, {"protocol": "Q"}])
def test_read_comparisons_rejects_unknown_names(change):
    with raises(UnknownNameError, "comparisons"):
        read_comparisons({"comparisons": [entry(**change)]}, PROTOCOLS)
