"""Tests of the blocks of the leaderboard's page: planned comparisons, average ranks and findings."""

import re
from dataclasses import replace

import pytest
import yaml

from lightning_fcl.evaluation.comparison_results import compare_rows, read_comparison_results
from lightning_fcl.evaluation.findings import Findings, render_findings
from lightning_fcl.evaluation.planned_comparisons import read_comparisons
from lightning_fcl.evaluation.sample_table import read_samples
from lightning_fcl.evaluation.table import Cell, Table, read_table, write_table
from lightning_fcl.runs.paper_rows import list_protocols, read_rows, recipes_folder

LEADERBOARD = recipes_folder() / "leaderboard"


def test_committed_comparisons_equal_recomputed_results():
    content, samples_path = read_rows(LEADERBOARD), LEADERBOARD / "samples.json"
    samples = read_samples(samples_path) if samples_path.is_file() else {}
    planned = read_comparisons(content, list_protocols(content))
    found = compare_rows(read_table(LEADERBOARD / "table.json"), samples, planned)
    committed = read_comparison_results(LEADERBOARD / "comparisons.json")
    assert len(found) == len(committed)
    for one, other in zip(found, committed, strict=True):
        assert (one.planned, one.seeds, one.verdict) == (other.planned, other.seeds, other.verdict)
        assert one.difference == pytest.approx(other.difference) and one.p_value == pytest.approx(other.p_value)
        # Versions of NumPy can draw other replicates.
        assert one.interval == pytest.approx(other.interval, abs=0.002)


def test_committed_findings_change_with_the_table():
    """Each value of the template comes from the table: with other values, the text has other numbers."""
    template = (LEADERBOARD / "findings.md.in").read_text()
    table = read_table(LEADERBOARD / "table.json")
    values = Findings(
        table,
        read_comparison_results(LEADERBOARD / "comparisons.json"),
        [*list_protocols(read_rows(LEADERBOARD))],
    )
    places = re.findall(r"\{([^{}=][^{}]*)\}", template)
    assert len(places) > 20
    doubled = {
        row: {name: Cell({seed: 2 * value for seed, value in cell.values.items()}) for name, cell in cells.items()}
        for row, cells in table.rows.items()
    }
    other = replace(values, table=replace(table, rows=doubled))
    text = render_findings(template, values)
    assert " ".join(text.split()) in " ".join((LEADERBOARD / "README.md").read_text().split())
    for place in places:
        if not place.startswith("comparison"):
            assert values.value(place) != other.value(place), place


@pytest.fixture
def toy(tmp_path, monkeypatch, make_pages):
    """Return the recipe folder of a leaderboard with three methods and two protocols."""
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    methods = ["a", "b", "c"]
    rows = {
        "base": "base.yaml",
        "rows": {name: {"configs": []} for name in methods},
        "grids": [{"with": {"P": {}, "Q": {}}, "rows": methods}],
        "whole": ["P a"],
        "comparisons": [{"protocol": "P", "first": "a", "second": "b", "question": "Is a better?"}],
        "ranking": {"methods": methods, "protocols": ["P", "Q"]},
    }
    (folder / "rows.yaml").write_text(yaml.safe_dump(rows))
    names = ("comparisons", "ranking", "findings")
    (folder / "README.md").write_text("".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in names))
    for module in ("lightning_fcl.runs.paper_rows", "make_pages"):
        monkeypatch.setattr(f"{module}.recipes_folder", lambda: folder.parent)
    return folder


def write_toy_table(folder, methods="abc"):
    rows = {
        f"{protocol} {method}": {"last_accuracy": Cell({0: accuracy})}
        for protocol in "PQ"
        for method, accuracy in zip(methods, (0.5, 0.4, 0.3), strict=False)
    }
    write_table(folder, Table("toy", "paper", "", {}, "a box", 60.0, rows))


def test_main_copies_statistics_and_writes_blocks(make_pages, toy, tmp_path):
    out = tmp_path / "out"
    write_toy_table(out)
    planned = {"protocol": "P", "first": "a", "second": "b", "question": "Is a better?"}
    result = '"seeds": [0], "difference": 0.1, "interval": null, "p_value": null, "corrected_p_value": null'
    text = f'{{"format": 1, "comparisons": [{{"planned": {planned}, {result}}}]}}'.replace("'", '"')
    (out / "comparisons.json").write_text(text)
    (out / "samples.json").write_text('{"format": 1, "rows": {}}')
    (out / "ranking.png").write_bytes(b"a picture")
    (toy / "findings.md.in").write_text(
        "- a reaches {P | a | last_accuracy}, {P | a - c | last_accuracy} more than c.\n"
    )
    make_pages.main([out])
    names = {"table.json", "comparisons.json", "samples.json", "ranking.png"}
    assert names | {"rows.yaml", "README.md", "findings.md.in"} == {path.name for path in toy.iterdir()}
    page = re.sub(" +", " ", (toy / "README.md").read_text())
    assert "old" not in page
    assert "| Is a better? | P: a - b | 1 | +0.100 |" in page
    assert "| a | 1.00 |" in page and "(ranking.png)" in page
    assert "- a reaches 0.500, 0.200 more than c." in page


def test_main_without_statistics_keeps_blocks(make_pages, toy, tmp_path):
    write_toy_table(tmp_path / "out", "ab")
    make_pages.main([tmp_path / "out"])
    assert (toy / "README.md").read_text().count("old") == 3
