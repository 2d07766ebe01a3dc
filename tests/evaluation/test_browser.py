"""Tests of reports in Chromium, which `.ci/run` installs. Without it, the tests fail in CI and are skipped locally."""

import itertools
from pathlib import Path

import pytest

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.comparison import compare_page
from lightning_fcl.evaluation.results import read_results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the report of a run and the report of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        small = [
            "--trainer.max_epochs",
            "6",
            "--data.partition.num_clients",
            "4",
            "--trainer.enable_progress_bar",
            "false",
        ]
        main(["fit", "quickstart", *small, "--trainer.strategy.local_epochs", "1", "--out", str(folder / name)])
    main(["report", str(folder)])
    return {"run": folder / "one" / "report.html", "runs": folder / "report.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["run", "runs"])
def test_report_in_browser_draws_without_error_or_request(opened, pages, name, width, scheme):
    page, said, asked = opened(pages[name], width, scheme)
    charts = page.locator(".chart")
    page.wait_for_function(
        "document.querySelectorAll('.chart svg').length == document.querySelectorAll('.chart').length"
    )
    assert charts.count() >= 2
    for chart in range(charts.count()):
        box = charts.nth(chart).locator("svg").first.bounding_box()
        assert 0 < box["width"] <= width and box["height"] > 50
        # The chart contains shapes.
        assert charts.nth(chart).locator("svg path").count() > 2
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == [] and asked == [pages[name].as_uri()]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("number", [2, 6, 12])
def test_compare_page_in_browser_long_names_do_not_overlap(opened, pages, tmp_path, number, width):
    results = read_results(pages["run"].parent)
    results["metrics"] |= {"average_accuracy/clients": 0.7, "forgetting/clients": 0.1}
    groups = {f"optimizer.momentum=0.{n},a_quite_long_name_without_any_space_{n}": [results] for n in range(number)}
    path = tmp_path / "report.html"
    path.write_text(compare_page(groups))
    page, said, _ = opened(path, width)
    page.wait_for_function(
        "document.querySelectorAll('.chart svg').length == document.querySelectorAll('.chart').length"
    )
    boxes_of_charts = page.evaluate(
        """[...document.querySelectorAll('.chart svg')].map(svg => [...svg.querySelectorAll('text')]
            .filter(text => text.textContent && getComputedStyle(text).opacity > 0)
            .map(text => text.getBoundingClientRect())
            .map(box => [box.left, box.top, box.right, box.bottom]))"""
    )
    assert len(boxes_of_charts) == 3 and said == []
    for boxes in boxes_of_charts:
        # A pixel of the line height of a font has no ink.
        for one, other in itertools.combinations(boxes, 2):
            wide, high = (min(one[2 + i], other[2 + i]) - max(one[i], other[i]) for i in (0, 1))
            assert wide <= 1 or high <= 2
        assert all(box[0] >= 0 and box[2] <= width for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_report_in_browser_has_tooltips_model_selector_and_copy_button(browser, pages):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(pages["run"].as_uri())
    point = page.locator(".chart").first.locator("svg [aria-roledescription='point']").first
    point.hover()
    page.locator("#vg-tooltip-element.visible").wait_for()
    assert "accuracy" in page.locator("#vg-tooltip-element").inner_text()
    second = page.locator(".chart").nth(1)
    before = second.locator("svg").inner_html()
    second.locator("select").select_option(index=1)
    page.wait_for_function(
        "([chart, before]) => chart.querySelector('svg').innerHTML != before", arg=[second.element_handle(), before]
    )
    page.locator("summary", has_text="Recipe").click()
    page.locator("details[open] button").last.click()
    assert page.evaluate("navigator.clipboard.readText()") == (pages["run"].parent / "config.yaml").read_text()
    context.close()


def test_sort_script_click_on_heading_sorts_table(opened, tmp_path):
    script = (Path(__file__).parents[2] / "docs" / "_static" / "sort.js").read_text()
    rows = "".join(
        f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in {"a": "0.5 ± 0.1", "b": "10", "c": "-"}.items()
    )
    table = f"<table><thead><tr><th>name</th><th>value</th></tr></thead><tbody>{rows}</tbody></table>"
    (tmp_path / "page.html").write_text(f"<script>{script}</script><div class='sortable'>{table}</div>{table}")
    page, said, _ = opened(tmp_path / "page.html")
    name, value = (page.locator(".sortable th").nth(number) for number in (0, 1))
    order = page.locator(".sortable td:first-child")
    value.click()
    assert order.all_inner_texts() == ["b", "a", "c"] and value.get_attribute("aria-sort") == "descending"
    value.press("Enter")
    assert order.all_inner_texts() == ["c", "a", "b"]
    name.click()
    assert order.all_inner_texts() == ["a", "b", "c"] and value.get_attribute("aria-sort") is None
    page.locator("table").nth(1).locator("th").nth(1).click()
    # Only the first table is in an element with the class `sortable`, so the second table keeps its order.
    assert page.locator("table").nth(1).locator("td:first-child").all_inner_texts() == ["a", "b", "c"]
    assert said == []
