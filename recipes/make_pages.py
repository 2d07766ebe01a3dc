"""Update the pages and tables of the recipes: ``python recipes/make_pages.py [RUN ...]``.

Each RUN is an output folder of ``lightning-fcl reproduce``, such as ``runs/flwf-paper``. The script copies the table
and figures of a RUN to the folder of its recipes. It also draws a figure that compares the table with the paper.

The script then rewrites the text between ``<!-- NAME -->`` and ``<!-- end -->`` in each page. NAME can be:

- ``verdict``: how well the table agrees with the paper.
- ``written``: the command, versions and machine that wrote the table.
- ``papers``: the table of all papers with their verdicts.
- ``boards``: a table and a picture for each protocol of the leaderboard.
- ``comparisons``: the results of the planned comparisons in ``comparisons.json``.
- ``ranking``: the average ranks of methods, and the picture ``ranking.png``.
- ``findings``: the text of ``findings.md.in``, with the numbers of ``table.json`` and ``comparisons.json``.
- The name of a layout under ``tables`` in ``rows.yaml``: a table with this layout.

Blocks with other names and all text outside of blocks stay unchanged. A block ``verdict`` or ``written`` can name a
folder after a colon, relative to the page: ``<!-- written: small -->`` describes the table in the subfolder ``small``.
"""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.comparison import comparison_points, scatter
from lightning_fcl.evaluation.comparison_results import comparisons_table, read_comparison_results
from lightning_fcl.evaluation.findings import Findings, render_findings
from lightning_fcl.evaluation.leaderboard import leaderboard_table
from lightning_fcl.evaluation.ranking import rank_methods, ranking_table, read_ranking
from lightning_fcl.evaluation.table import NEAR_TOLERANCE, Cell, Table, markdown_table, metric_number, read_table
from lightning_fcl.io.atomic import write_atomic
from lightning_fcl.io.paths import safe_join
from lightning_fcl.io.reading import read_text
from lightning_fcl.runs.paper_rows import (
    expand_grids,
    list_protocols,
    paper_folder,
    paper_rows,
    read_rows,
    recipes_folder,
    scale_folder,
    slug,
)
from lightning_fcl.validation import did_you_mean

_BLOCK = re.compile(r"(<!-- ([\w-]+)(?:: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_KINDS = ("mean", "percentile")
_WIDTH = 128
_NAMED = 8
_STATISTICS = ("comparisons.json", "samples.json", "ranking.png")
_PERCENTILES = (
    "Each cell contains the paper's value, and the percentage of our seeds with a lower value. A seed with an equal "
    "value counts half. A percentage is bold if the paper's value is outside the range of our seeds."
)


@dataclass(frozen=True)
class Layout:
    """The layout of a table in a page, from ``tables`` in ``rows.yaml``.

    A table has a line for each combination of the texts in its leading columns. The cells of all other columns contain
    a metric of a row of the paper.

    Args:
        columns: The value of each column by its heading. ``row`` and ``metric`` can contain the value as ``{column}``.
        of: Folder of the ``table.json``, relative to the folder of the page.
        lines: The leading columns by their headings. Each leading column maps its texts to values. ``row`` and
            ``metric`` can contain these values as ``{HEADING}``. By default, there is one leading column, which
            contains all rows of the paper.
        row: Template for the row of the paper that a cell shows. By default, the value of the first leading column.
        metric: Template for the metric that a cell shows. By default, the value of the column.
        sort: Heading of the column by which lines are sorted, highest mean first. By default, lines are not sorted.
        bold: Whether to print a mean in bold if it differs by more than 0.05 from the paper's value.
        kind: ``mean`` for means and standard deviations, or ``percentile`` for the percentile of the paper's value.
    """

    columns: Mapping[str, str]
    of: str = ""
    lines: Mapping[str, Mapping[str, str]] | None = None
    row: str = ""
    metric: str = "{column}"
    sort: str = ""
    bold: bool = False
    kind: str = "mean"

    @classmethod
    def read(cls, name: str, content: Mapping[str, Any]) -> Layout:
        """Return the layout with this name and content in ``rows.yaml``.

        Raises:
            ValueError: If a key or value is invalid.
        """
        field_names = [field.name for field in fields(cls)]
        if unknown := [key for key in content if key not in field_names]:
            raise ValueError(
                f"Expected table {name} to have only the keys {', '.join(field_names)}, but got {unknown[0]}."
                f"{did_you_mean(unknown[0], field_names)}"
            )
        if "columns" not in content:
            raise ValueError(f"Expected table {name} to have `columns`, but got {', '.join(content) or 'nothing'}.")
        lines = {str(heading): _labelled(of) for heading, of in content.get("lines", {}).items()}
        layout = cls(**{**content, "columns": _labelled(content["columns"]), "lines": lines or None})
        if layout.kind not in _KINDS:
            raise ValueError(f"Expected `kind` of table {name} to be {' or '.join(_KINDS)}, but got {layout.kind}.")
        if layout.sort and layout.sort not in layout.columns:
            columns = ", ".join(layout.columns)
            raise ValueError(f"Expected `sort` of table {name} to be one of {columns}, but got {layout.sort}.")
        return layout

    def places(self, rows: Sequence[str]) -> list[tuple[list[str], dict[str, tuple[str, str]]]]:
        """Return a pair per line: the texts of the leading columns, and ``{heading: (row, metric)}`` of other columns.

        Args:
            rows: All rows of the paper.

        Raises:
            ValueError: If a row does not exist.
        """
        lines = self.lines or {"row": {row: row for row in rows}}
        template = self.row or f"{{{next(iter(lines))}}}"
        result = []
        for entries in itertools.product(*(of.items() for of in lines.values())):
            line = dict(zip(lines, (value for _, value in entries), strict=True))
            cells = {}
            for label, column in self.columns.items():
                words = {**line, "column": column}
                row = template.format_map(words)
                if row not in rows:
                    raise ValueError(f"Expected rows among {', '.join(rows)}, but got {row}.{did_you_mean(row, rows)}")
                cells[label] = (row, self.metric.format_map(words))
            result.append(([label for label, _ in entries], cells))
        return result

    def markdown(self, table: Table, rows: Sequence[str]) -> str:
        """Return the table in Markdown. Lines for which ``table`` has no cell are left out.

        Raises:
            ValueError: If ``table`` does not have a metric of the layout.
        """
        lines = []
        for labels, places in self.places(rows):
            if unknown := [metric for _, metric in places.values() if metric not in table.metrics]:
                raise ValueError(f"Expected metrics among {', '.join(table.metrics)}, but got {unknown[0]}.")
            cells = {label: table.rows.get(row, {}).get(metric) for label, (row, metric) in places.items()}
            if any(cells.values()):
                names = {label: metric for label, (_, metric) in places.items()}
                texts = ["-" if cell is None else self._shown(names[label], cell) for label, cell in cells.items()]
                lines.append((cells.get(self.sort), [*labels, *texts]))
        if self.sort:
            lines.sort(
                key=lambda line: -np.inf if line[0] is None or line[0].mean is None else line[0].mean, reverse=True
            )
        table_text = markdown_table([*(self.lines or {"row": {}}), *self.columns], [line for _, line in lines])
        return f"{_PERCENTILES}\n\n{table_text}" if self.kind == "percentile" else table_text

    def _shown(self, name: str, cell: Cell) -> str:
        if self.kind == "percentile":
            return _percentile(name, cell)
        far = self.bold and cell.verdict in ("spread", "outside")
        return cell.text(name, "**" if far else "")


def render(text: str, parts: Callable[[str, str], str | None]) -> str:
    r"""Return a page in which the texts of the blocks are replaced.

    Args:
        text: The page.
        parts: Function that takes the name and the subfolder of a block. Returns the new text of the block, or None
            to keep the block.
    """

    def anew(match: re.Match[str]) -> str:
        block_text = parts(match[2], match[3] or "")
        return match[0] if block_text is None else f"{match[1]}{block_text}\n{match[4]}"

    return _BLOCK.sub(anew, text)


def verdict_block(table: Table | None, reason: str) -> str:
    """Return the verdict, its reason, and a link to the figure that compares the table with the paper.

    If no value can be compared, the text contains no link.
    """
    verdict_counts = table.verdict_counts if table else None
    if table is None or not verdict_counts or not sum(verdict_counts):
        return _wrapped(f"**Not compared**: no value that the paper reports has been measured at its scale. {reason}")
    scale_note = (
        "" if table.scale == "paper" else f" at the scale `{table.scale}`, compared with values at the paper's scale"
    )
    text = (
        f"**{verdict_counts.verdict.capitalize()}**{scale_note}. We compare {sum(verdict_counts)} values with the "
        "paper. Our mean differs from the paper's value by at most "
    )
    text += f"{NEAR_TOLERANCE} for {verdict_counts.num_near} of them. For {verdict_counts.num_within_spread} of them, "
    text += "the difference is larger, but at most two standard deviations over the seeds. For "
    text += f"{verdict_counts.num_outside} of them, the difference is larger than both limits. {reason}"
    return f"{_wrapped(text)}\n\n![Our values against the paper's values](against-paper.png)"


def written_block(table: Table, folder: str = "") -> str:
    """Return a text with the command, versions, machine, run time and seeds of a table, and a link to the values."""
    versions, path = table.versions, f"{folder}/table.json" if folder else "table.json"
    text = f"Written by `{table.command}` with lightning-fcl {versions.get('lightning-fcl')} on {table.machine}, torch "
    text += f"{versions.get('torch')}. The run times add up to {max(round(table.seconds / 60), 1)} minutes, with "
    return _wrapped(f"{text}{_seeds(table)}. The values of each seed: [table.json]({path}).")


def boards_block(
    table: Table,
    protocols: Mapping[str, Mapping[str, Mapping[str, str]]],
    bounds: Mapping[str, Mapping[str, Mapping[str, str]]],
) -> str:
    """Return a sortable table and a link to a picture for each protocol of the leaderboard with finished rows.

    Args:
        table: Table of the leaderboard.
        protocols: Notes of each method, by protocol and method.
        bounds: Notes of each bound, by protocol and bound. Bounds have a separate table.
    """
    parts = []
    for protocol, notes in protocols.items():
        if lines := leaderboard_table(table, protocol, notes):
            image_link = f"![Accuracy against communication and time under {protocol}]({slug(protocol)}.png)"
            parts.append(f'### {protocol}\n\n<div class="sortable">\n\n{lines}\n\n</div>\n\n{image_link}')
        if lines := leaderboard_table(table, protocol, bounds.get(protocol, {})):
            parts.append(f"Bounds of {protocol}:\n\n{lines}")
    return "\n\n".join(parts)


def statistics_block(name: str, table: Table, folder: Path) -> str | None:
    """Return the text of the block ``comparisons``, ``ranking`` or ``findings`` of the leaderboard.

    None if the file of the block is missing, or if the table does not have all rows of the ranking.
    """
    content, results_path, template_path = read_rows(folder), folder / "comparisons.json", folder / "findings.md.in"
    protocols = list_protocols(content)
    results = read_comparison_results(results_path) if results_path.is_file() else ()
    if name == "comparisons":
        return comparisons_table(results) or None
    if name == "findings":
        values = Findings(table, results, [*protocols])
        return render_findings(read_text(template_path), values) if template_path.is_file() else None
    plan = read_ranking(content, protocols)
    if plan is None or (ranking := rank_methods(table, plan)) is None:
        return None
    return f"{_wrapped(ranking.text)}\n\n{ranking_table(ranking)}\n\n![Average ranks of the methods](ranking.png)"


def papers_block(papers: Mapping[str, tuple[Table | None, str]]) -> str:
    """Return a table with a line for each paper: its verdict, the number of values in each group, and the reason.

    Args:
        papers: For each paper by name, its table at the paper's scale or None, and the reason of the verdict.
    """
    lines = []
    for paper, (table, reason) in papers.items():
        verdict_counts = table.verdict_counts if table else None
        counts = [sum(verdict_counts), *verdict_counts] if verdict_counts and sum(verdict_counts) else ["-"] * 4
        word = verdict_counts.verdict if verdict_counts else "not compared"
        lines.append([f"[{paper}]({paper}/README.md)", word, *map(str, counts), reason])
    head = ["paper", "verdict", "numbers", f"within {NEAR_TOLERANCE}", "within 2 standard deviations", "outside", "why"]
    return markdown_table(head, lines)


def _percentile(name: str, cell: Cell) -> str:
    """Return the paper's value, and the percentage of seeds with a lower value, or "-" if there is nothing to compare.

    Values are rounded to three decimal places. A seed with an equal value counts half.
    """
    if cell.paper is None or not cell.values:
        return "-"
    paper, seed_values = round(cell.paper, 3), np.round(list(cell.values.values()), 3)
    percent = 50 * float(np.mean(seed_values < paper) + np.mean(seed_values <= paper))
    mark = "" if seed_values.min() <= paper <= seed_values.max() else "**"
    return f"{metric_number(name, paper)}, {mark}{percent:.0f} %{mark}"


def _seeds(table: Table) -> str:
    """Return a text with the seeds of most rows. Rows with other seeds follow in brackets, or their number."""
    rows: dict[tuple[int, ...], list[str]] = {}
    for row, cells in table.rows.items():
        rows.setdefault(tuple(sorted({seed for cell in cells.values() for seed in cell.values})), []).append(row)
    common_seeds = max(rows, key=lambda seeds: len(rows[seeds]), default=())
    other_rows = [
        f"{', '.join(names) if len(names) <= _NAMED else f'{len(names)} rows'}: {_numbers(seeds)}"
        for seeds, names in rows.items()
        if seeds != common_seeds
    ]
    return _numbers(common_seeds) + (f" ({'; '.join(other_rows)})" if other_rows else "")


def _numbers(seeds: Sequence[int]) -> str:
    if len(seeds) < 2:
        return f"seed {seeds[0]}" if seeds else "no seed"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def _labelled(content: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    pairs = content.items() if isinstance(content, Mapping) else ((entry, entry) for entry in content)
    return {str(label): str(value) for label, value in pairs}


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def against_figure(table: Table) -> charts.Spec | None:
    """Return a figure of each mean against the paper's value.

    Numbers mark the points with the largest deviations. A list next to the plot contains the rows and metrics of these
    points.

    Returns:
        The figure, or None if no value can be compared.
    """
    if not (rows := comparison_points(table)):
        return None
    far = sorted((row for row in rows if row["agreement"] != "within 0.05"), key=lambda row: -row["deviation"])[:_NAMED]
    places: dict[tuple[float, float], list[str]] = {}
    names = ["largest deviations:"] if far else []
    for number, row in enumerate(far, start=1):
        point = row["paper"], row["ours"]
        close = next((place for place in places if np.hypot(*np.subtract(place, point)) < NEAR_TOLERANCE / 2), point)
        places.setdefault(close, []).append(str(number))
        names.append(f"{number} {row['row']}\n· {row['metric']}: {row['ours']:.3f}, paper {row['paper']:.3f}")
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    scale = "at its scale" if table.scale == "paper" else f"at the paper's scale, ours at the scale `{table.scale}`"
    points = scatter(rows, f", {scale}", charts.color_scale("metric", metrics), charts.shape("metric", metrics))
    numbers = charts.get_chart("far").mark_text(align="left", dx=6, dy=-6, fontWeight="bold")
    numbers = numbers.encode(x="paper:Q", y="ours:Q", text="numbers:N")
    listed = (
        charts.get_chart("names")
        .mark_text(align="left", baseline="top")
        .encode(x=alt.value(0), y=alt.value(0), text="names:N")
    )
    figure = alt.hconcat(
        alt.layer(points, numbers).properties(width=480, height=480),
        listed.properties(width=10, height=10, view=alt.ViewConfig(stroke=None)),
    )
    figure = figure.resolve_scale(color="independent", shape="independent")
    return charts.spec(
        figure.properties(title=f"{table.paper}: our values against the paper's values"),
        rows=rows,
        far=[{"paper": x, "ours": y, "numbers": ", ".join(of)} for (x, y), of in places.items()],
        names=[{"names": "\n".join(names)}],
    )


def take_in(folder: Path) -> list[Path]:
    """Copy the table and figures of a run to the folder of its recipes, and draw the comparison with the paper.

    Args:
        folder: Output folder of ``lightning-fcl reproduce``.

    Returns:
        The paths of the written files.

    Raises:
        ValueError: If the scale of the table is ``smoke``, or if rows are missing.
    """
    table = read_table(folder / "table.json")
    home = paper_folder(table.paper)
    if table.scale == "smoke":
        raise ValueError(
            f"Expected a table of a scale other than `smoke`, but the table in {folder} has the scale `smoke`."
        )
    content = read_rows(home)
    # At the paper's scale, `whole` lists the required rows, and all other rows are optional. Without `whole`, all rows
    # are required.
    row_names = content.get("whole") if table.scale == "paper" else None
    if missing := [row for row in row_names or paper_rows(home, None, table.scale) if row not in table.rows]:
        raise ValueError(
            f"Expected all rows of {table.paper} in {folder}, but could not find {', '.join(missing)}. Run `reproduce` "
            "without `--rows`."
        )
    figures = [one for one in content.get("figures", []) if table.scale in one.get("scales", [table.scale])]
    boards = [f"{slug(protocol)}.png" for protocol in list_protocols(content)]
    names = ["table.json", *(figure["file"] for figure in figures), *boards, *_STATISTICS]
    target_folder = scale_folder(home, table.scale)
    target_folder.mkdir(exist_ok=True)
    path_pairs = [(safe_join(folder, name), safe_join(target_folder, name)) for name in names]
    written_paths = [write_atomic(to, path.read_bytes()) for path, to in path_pairs if path.is_file()]
    comparison_figure = against_figure(table)
    return (
        [*written_paths, charts.write_png(target_folder / "against-paper.png", comparison_figure)]
        if comparison_figure
        else written_paths
    )


def pages(recipes: Path) -> dict[Path, str]:
    """Return the new text of each page in the recipes folder, by the path of the page."""
    text_by_page = {path: _page(path) for path in sorted(recipes.glob("*/README.md"))}
    compared_ones = [path.parent for path, text in text_by_page.items() if "<!-- verdict" in text]
    papers = {folder.name: (_table(folder), _why(folder)) for folder in compared_ones}
    summary = recipes / "README.md"
    if summary.is_file():
        text = summary.read_text(encoding="utf-8")
        text_by_page[summary] = render(text, lambda name, _: papers_block(papers) if name == "papers" else None)
    return text_by_page


def layouts(folder: Path) -> dict[str, Layout]:
    """Return the layout of each table of a paper, by the name of the layout.

    Raises:
        ValueError: If a layout is invalid, or contains a row that does not exist.
    """
    layouts_by_name = {
        name: Layout.read(name, content) for name, content in read_rows(folder).get("tables", {}).items()
    }
    for name, layout in layouts_by_name.items():
        try:
            layout.places(_rows(folder / layout.of))
        except (KeyError, ValueError) as error:
            raise ValueError(f"Expected table {name} of {folder.name} to have a valid layout. {error}") from error
    return layouts_by_name


def _page(path: Path) -> str:
    folder = path.parent
    layouts_by_name = layouts(folder)

    def part(name: str, subfolder: str) -> str | None:
        if name in layouts_by_name:
            layout = layouts_by_name[name]
            return layout.markdown(table, _rows(folder / layout.of)) if (table := _table(folder / layout.of)) else None
        if name == "boards":
            if (table := _table(folder)) is None:
                return None
            content = read_rows(folder)
            return boards_block(table, list_protocols(content, "method"), list_protocols(content, "bound"))
        if name in ("comparisons", "ranking", "findings"):
            return statistics_block(name, table, folder) if (table := _table(folder)) else None
        if name == "verdict":
            return verdict_block(_table(folder / subfolder), _why(folder))
        return written_block(table, subfolder) if name == "written" and (table := _table(folder / subfolder)) else None

    return render(path.read_text(encoding="utf-8"), part)


def _table(folder: Path) -> Table | None:
    path = folder / "table.json"
    return read_table(path) if path.is_file() else None


def _rows(folder: Path) -> list[str]:
    """Return the rows of a paper. ``folder`` is the paper's folder, or the subfolder of one of its scales."""
    home = folder if (folder / "rows.yaml").is_file() else folder.parent
    return list(expand_grids(read_rows(home)))


def _why(folder: Path) -> str:
    return " ".join(str(read_rows(folder).get("why", "")).split())


def main(runs: Sequence[str]) -> None:
    """Copy the tables and figures of the runs, then write the pages that have changed."""
    for run in runs:
        for path in take_in(Path(run)):
            print(f"Wrote {path}")
    for path, text in pages(recipes_folder()).items():
        if path.read_text(encoding="utf-8") != text:
            print(f"Wrote {write_atomic(path, text)}")


if __name__ == "__main__":
    main(sys.argv[1:])
