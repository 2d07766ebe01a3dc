"""Tests of findings whose numbers come from a table."""

import pytest
from raising import raises

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.comparison_results import ComparisonResult
from lightning_fcl.evaluation.findings import Findings, render_findings
from lightning_fcl.evaluation.planned_comparisons import PlannedComparison
from lightning_fcl.evaluation.table import Cell, Table

PROTOCOLS = ("P4 A beta .5", "P4 A beta .1", "P4 A beta .05", "P5")


def make_findings(shift=0.0):
    rows = {
        f"{protocol} {method}": {
            "last_accuracy": Cell({0: accuracy - 0.1 * number, 1: accuracy - 0.1 * number + 0.01}),
            "upload_bytes": Cell({0: 2.5e6}),
            "download_bytes": Cell({0: 0.16e6}),
        }
        for number, protocol in enumerate(PROTOCOLS)
        for method, accuracy in {"STSA-E": 0.5, "DER++": 0.4 + shift}.items()
    }
    planned = PlannedComparison("P5", "STSA-E", "DER++", "Why?")
    results = (
        ComparisonResult(planned, (0, 1, 2, 3, 4), 0.0561, (0.0123, 0.1), 0.004, 0.04),
        ComparisonResult(PlannedComparison("P5", "DER++", "STSA-F", "Why?"), (0,), -0.1),
    )
    return Findings(Table("leaderboard", "paper", "", {}, "", 0.0, rows), results, PROTOCOLS)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{P5 | STSA-E | last_accuracy}", "0.205"),
        ("{P4 A beta .5|DER++|last_accuracy}", "0.405"),
        ("{P4 A beta\n   .5 | DER++ | last_accuracy}", "0.405"),
        ("{P4 A beta * | STSA-E | last_accuracy}", "0.505, 0.405 and 0.305"),
        ("{P4 A beta .?? | STSA-E | last_accuracy}", "0.305"),
        ("{P4 A beta .* | STSA-E - DER++ | last_accuracy}", "0.100, 0.100 and 0.100"),
        ("{P5 | DER++ - STSA-E | last_accuracy+}", "-0.100"),
        ("{P5 | STSA-E - DER++ | last_accuracy +}", "+0.100"),
        ("{P5 | DER++ | upload_bytes}", "2.5 MB"),
        ("{P5 | DER++ | upload_bytes + download_bytes}", "2.7 MB"),
        ("{comparison | P5 | STSA-E - DER++ | difference}", "+0.056"),
        ("{comparison | P5 | STSA-E - DER++ | interval}", "+0.012 to +0.100"),
        ("{comparison | P5 | STSA-E - DER++ | p}", "0.040"),
        ("{comparison | P5 | STSA-E - DER++ | verdict}", "higher"),
        ("{comparison | P5 | DER++ - STSA-F | interval}", "-"),
        ("{= 0.431}", "0.431"),
        (
            "beta 0.05, 27 to 40 %, 1,280 dimensions, 200 samples",
            "beta 0.05, 27 to 40 %, 1,280 dimensions, 200 samples",
        ),
    ],
)
def test_render_findings_replaces_values(template, expected):
    assert render_findings(template, make_findings()) == expected


def test_render_findings_wraps_items_and_keeps_tables():
    value = "{P5 | STSA-E | last_accuracy}"
    word = "word " * 25
    template = (
        f"1. **First** {value}\n   {word}\n{word}end\n2. Second\n\nText\nmore\n\n### Head\n| a | {value} |\n| b |\n"
    )
    text = render_findings(template, make_findings())
    lines = text.splitlines()
    assert lines[0].startswith("1. **First** 0.205 word word") and max(map(len, lines)) <= 128
    assert lines[1].startswith("   word") and "2. Second" in lines and "Text more" in lines
    assert lines[-3:] == ["### Head", "| a | 0.205 |", "| b |"]


@pytest.mark.parametrize(
    "template",
    [
        "an accuracy of 0.431",
        "by .431",
        "needs 4.9 MB",
        "needs 20 kB.",
        "{P5 | STSA-E}",
        "{P5 | STSA-E | last_accuracy | more}",
        "{P5 | DER++ - STSA-E | last_accuracy}",
    ],
)
def test_render_findings_rejects_bare_numbers_and_other_signs(template):
    with raises(InvalidValueError, "template"):
        render_findings(template, make_findings())


@pytest.mark.parametrize(
    "template",
    [
        "{P6 | STSA-E | last_accuracy}",
        "{P5 | STSA | last_accuracy}",
        "{P5 | STSA-E | accuracy}",
        "{comparison | P5 | DER++ - STSA-E | p}",
        "{comparison | P5 | STSA-E - DER++ | mean}",
    ],
)
def test_render_findings_rejects_unknown_names(template):
    with raises(UnknownNameError, "template"):
        render_findings(template, make_findings())


def test_render_findings_hints_are_fixes_that_work():
    findings = make_findings()
    with pytest.raises(InvalidValueError, match=r"or \{= 0\.431\} for a number that is not in the table"):
        render_findings("reached 0.431", findings)
    assert render_findings("reached {= 0.431}", findings) == "reached 0.431"
    with pytest.raises(InvalidValueError, match=r"Write {PROTOCOL \| METHOD \| COLUMN}"):
        render_findings("{P5 | DER++}", findings)
    assert render_findings("{P5 | DER++ | last_accuracy}", findings) == "0.105"
    with pytest.raises(InvalidValueError, match="Exchange the methods"):
        render_findings("{P5 | STSA-E - DER++ | last_accuracy}", make_findings(shift=0.2))
    assert render_findings("{P5 | DER++ - STSA-E | last_accuracy}", make_findings(shift=0.2)) == "0.100"


def test_render_findings_suggested_column_works():
    with pytest.raises(UnknownNameError) as error:
        render_findings("{P5 | DER++ | lastaccuracy}", make_findings())
    assert "Did you mean last_accuracy?" in str(error.value)
    assert render_findings("{P5 | DER++ | last_accuracy}", make_findings()) == "0.105"
