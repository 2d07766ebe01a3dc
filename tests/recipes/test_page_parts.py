"""Tests of the generated blocks in the pages of recipes."""

import re

import pytest
import vl_convert

from lightning_fcl.evaluation.table import Cell, Table

ROWS = {
    f"{share} {method}": {
        "final/server": Cell({0: base + share, 1: base + share + 0.02}, 0.6),
        "training/server": Cell({0: 0.9, 1: 0.9}),
    }
    for share in (0.25, 0.5)
    for method, base in {"RR": 0.1, "IP": 0.12}.items()
}


def table(rows=ROWS, **other):
    made = {
        "paper": "toy",
        "scale": "paper",
        "command": "lightning-fcl reproduce toy",
        "versions": {"lightning-fcl": "0.2.0", "torch": "2.15.0"},
        "machine": "a box",
    }
    return Table(**{**made, "seconds": 600.0, "rows": rows, **other})


def lines(text):
    return [re.sub(" +", " ", line) for line in text.splitlines()]


@pytest.fixture
def shown(make_pages):
    def shown(rows=ROWS, **content):
        return lines(make_pages.Layout.read("main", content).markdown(table(rows), list(ROWS)))

    return shown


def test_layout_without_lines_has_one_line_per_row(shown):
    text = shown(columns={"test": "final/server"}, bold=True)
    assert text[0] == "| row | test |"
    assert text[2:] == [
        "| 0.25 RR | **0.360** ± 0.014 (0.600) |",
        "| 0.25 IP | **0.380** ± 0.014 (0.600) |",
        "| 0.5 RR | 0.610 ± 0.014 (0.600) |",
        "| 0.5 IP | 0.630 ± 0.014 (0.600) |",
    ]


def test_layout_two_leading_columns_has_each_combination(shown):
    kinds = {"test": "final/server", "training": "training/server"}
    text = shown(lines={"share": [0.25], "on": kinds}, columns=["RR", "IP"], row="{share} {column}", metric="{on}")
    assert text[0] == "| share | on | RR | IP |"
    assert text[2:] == [
        "| 0.25 | test | 0.360 ± 0.014 (0.600) | 0.380 ± 0.014 (0.600) |",
        "| 0.25 | training | 0.900 ± 0.000 | 0.900 ± 0.000 |",
    ]


def test_layout_sort_orders_lines_and_omits_missing_rows(shown):
    names = {"first": "0.25 RR", "second": "0.5 RR", "third": "0.5 IP"}
    rows = {row: of for row, of in ROWS.items() if row != "0.5 IP"}
    text = shown(rows, lines={"method": names}, columns={"test": "final/server"}, sort="test")
    assert [line.split(" | ")[0] for line in text[2:]] == ["| second", "| first"]


def test_layout_percentile_shows_percentile_of_paper_value(shown):
    values = {seed: 0.1 * seed for seed in range(10)}
    rows = {
        "0.25 RR": {"final/server": Cell(values, 0.45)},
        # The paper's value equals the lowest of ten values. An equal value counts as half a lower value: 5 %.
        "0.25 IP": {"final/server": Cell(values, 0.0)},
        "0.5 RR": {"final/server": Cell(values, 0.95)},
        # Both values are equal after rounding to three digits.
        "0.5 IP": {"final/server": Cell({0: 0.5000001}, 0.5)},
    }
    text = shown(rows, columns={"test": "final/server"}, kind="percentile")
    assert "A percentage is bold if the paper's value is outside the range of our seeds." in text[0]
    cells = [line.split(" | ")[1].strip(" |") for line in text[4:]]
    assert cells == ["0.450, 50 %", "0.000, 5 %", "0.950, **100 %**", "0.500, 50 %"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"columns": ["a"], "line": {}}, "but got line. Did you mean lines?"),
        ({"lines": {}}, "Expected table main to have `columns`, but got lines"),
        ({"columns": ["a"], "kind": "median"}, "`kind` of table main to be mean or percentile, but got median"),
        ({"columns": ["a"], "sort": "b"}, "`sort` of table main to be one of a, but got b"),
        ({"columns": ["final/server"], "lines": {"row": ["0.25 RRR"]}}, "but got 0.25 RRR. Did you mean 0.25 RR?"),
        ({"columns": ["finl/server"]}, "Expected metrics among final/server, training/server, but got finl/server"),
    ],
)
def test_layout_invalid_raises_with_reason(shown, content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        shown(**content)


def test_verdict_block_contains_counts_and_reason(make_pages):
    text = make_pages.verdict_block(table(), "The data differs.")
    paragraph = " ".join(text.split("\n\n")[0].split())
    assert paragraph.startswith("**Partly reproduced**. We compare 4 values with the paper. Our mean differs")
    assert "by at most 0.05 for 2 of them. For 0 of them, the difference is larger, but at most two" in paragraph
    assert paragraph.endswith("For 2 of them, the difference is larger than both limits. The data differs.")
    assert "(against-paper.png)" in text
    assert "at the scale `small`, compared with values at the paper's" in make_pages.verdict_block(
        table(scale="small"), ""
    )
    for nothing in (None, table({"0.5 RR": {"training/server": Cell({0: 0.9})}})):
        assert make_pages.verdict_block(nothing, "It is too large.").startswith("**Not compared**")
        assert "png" not in make_pages.verdict_block(nothing, "It is too large.")


def test_written_block_contains_command_time_and_seeds(make_pages):
    one, two = Cell({0: 0.5}), Cell({0: 0.5, 1: 0.6})
    made = table({"a": {"m": one}, "b": {"m": two}, "c": {"m": two}})
    assert " ".join(make_pages.written_block(made, "small").split()) == (
        "Written by `lightning-fcl reproduce toy` with lightning-fcl 0.2.0 on a box, torch 2.15.0. The run times add "
        "up to 10 minutes, with seeds 0 to 1 (a: seed 0). The values of each seed: [table.json](small/table.json)."
    )


def test_written_block_counts_many_rows_with_other_seeds(make_pages):
    one, two = Cell({0: 0.5}), Cell({0: 0.5, 1: 0.6})
    made = table({**{f"r{i}": {"m": one} for i in range(9)}, **{f"s{i}": {"m": two} for i in range(10)}})
    assert "with seeds 0 to 1 (9 rows: seed 0)." in " ".join(make_pages.written_block(made, "").split())


def test_boards_block_has_separate_table_of_bounds(make_pages):
    made = table({"P a": {"last_accuracy": Cell({0: 0.5})}, "P b": {"last_accuracy": Cell({0: 0.6})}})
    text = make_pages.boards_block(made, {"P": {"a": {}}, "Q": {"a": {}}}, {"P": {"b": {}}})
    methods, bounds = text.split("Bounds of P:")
    assert "| a " in methods and "(p.png)" in methods and "| b " not in methods and "Q" not in text
    assert "| b " in bounds and "| a " not in bounds


def test_papers_block_has_one_line_per_paper(make_pages):
    text = lines(make_pages.papers_block({"toy": (table(), "Small."), "large": (None, "Needs a GPU.")}))
    assert text[2:] == [
        "| [toy](toy/README.md) | partly reproduced | 4 | 2 | 0 | 2 | Small. |",
        "| [large](large/README.md) | not compared | - | - | - | - | Needs a GPU. |",
    ]


def test_render_block_without_new_text_is_unchanged(make_pages):
    page = "a\n<!-- main: small -->\nold\n<!-- end -->\nb\n<!-- mine -->\nstays\n<!-- end -->"
    made = make_pages.render(page, lambda name, of: f"{name} of {of}" if name == "main" else None)
    assert made == page.replace("old", "main of small")


def test_against_figure_numbers_the_largest_deviations(make_pages):
    rows = {
        "one": {"accuracy/server": Cell({0: 0.50, 1: 0.52}, 0.56), "loss/server": Cell({0: 0.50, 1: 0.60}, 0.65)},
        "two": {"accuracy/server": Cell({0: 0.50}, 0.8), "loss/server": Cell({0: 0.1, 1: 0.102}, 0.5)},
    }
    figure = make_pages.against_figure(table(rows))
    data = figure["datasets"]
    assert [row["ours"] for row in data["rows"]] == pytest.approx([0.51, 0.55, 0.5, 0.101])
    assert data["names"][0]["names"].split("\n")[1:3] == ["1 two", "· loss server: 0.101, paper 0.500"]
    assert [point["numbers"] for point in data["far"]] == ["1", "2", "3"]
    text = vl_convert.vegalite_to_svg(figure)
    assert "at its scale" in text and "loss server" in text
    other = vl_convert.vegalite_to_svg(make_pages.against_figure(table(rows, scale="small")))
    assert "ours at the scale `small`" in other
    assert make_pages.against_figure(table({"one": {"accuracy/server": Cell({0: 0.5})}})) is None


def test_against_figure_close_points_share_a_label(make_pages):
    rows = {row: {"accuracy/server": Cell({0: y}, 0.6)} for row, y in {"a": 0.9, "b": 0.901, "c": 0.1}.items()}
    assert [point["numbers"] for point in make_pages.against_figure(table(rows))["datasets"]["far"]] == ["1", "2, 3"]
