"""The parts of recipes' pages that are made of tables: what stands between ``<!-- NAME -->`` and ``<!-- end -->``.

A page's own text stays. ``<!-- verdict -->`` says how near a table is to the paper, ``<!-- written -->`` what wrote it,
``<!-- papers -->`` lists papers; other names are those of layouts in ``rows.yaml``, and parts of no such name are left
as they are. ``<!-- written: small -->`` is of the table in the folder ``small``.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lightning_fcl.errors import did_you_mean
from lightning_fcl.evaluation.against import NEAR, near, verdict
from lightning_fcl.evaluation.markdown import markdown_table
from lightning_fcl.evaluation.table import Cell, Table, metric_number

__all__ = ["Layout", "papers_block", "render", "verdict_block", "written_block"]

_BLOCK = re.compile(r"(<!-- ([\w-]+)(?:: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_KINDS = ("mean", "percentile")
_WIDTH = 128
_PERCENTILES = """The paper's number, and how much of what our seeds gave lies below it; bold: outside their range."""


@dataclass(frozen=True)
class Layout:
    """What a table of a page shows, as ``rows.yaml`` says it under ``tables``.

    Args:
        of: The folder of its ``table.json``, from that of the page.
        lines: For each of the first columns its heading, and the entries: a list, or a mapping of what is shown to what
            stands for it below. There is a line for each combination. By default all rows.
        columns: The other columns, as a list or mapping, too.
        row: The row of a cell, with ``{heading}`` and ``{column}`` in place of the entries. By default the first
            column's.
        metric: The metric of a cell, likewise. By default the column.
        sort: The column by whose means the lines are sorted, highest first. By default they stand as told.
        bold: Whether means further than `NEAR` from the paper's number are bold.
        kind: ``mean``: mean ± standard deviation (paper). ``percentile``: the paper's number, and how much of what our
            seeds gave lies below it, half of what is equal counted; bold outside their range.

    Example:
        >>> Layout.read("main", {"columns": ["a/server"], "kinds": "percentile"})
        Traceback (most recent call last):
        ValueError: Expected table main to have columns, of, lines, ... but got kinds. Did you mean kind?
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
        """A layout, of which ``rows.yaml`` says this.

        Raises:
            ValueError: If an entry is not known or missing.
        """
        known = [field.name for field in fields(cls)]
        if unknown := [key for key in content if key not in known]:
            raise ValueError(
                f"Expected table {name} to have {', '.join(known)} but got {unknown[0]}."
                f"{did_you_mean(unknown[0], known)}"
            )
        if "columns" not in content:
            raise ValueError(f"Expected table {name} to have `columns` but got {', '.join(content) or 'nothing'}.")
        lines = {str(heading): _labelled(of) for heading, of in content.get("lines", {}).items()}
        layout = cls(**{**content, "columns": _labelled(content["columns"]), "lines": lines or None})
        if layout.kind not in _KINDS:
            raise ValueError(f"Expected `kind` of table {name} to be {' or '.join(_KINDS)} but got {layout.kind}.")
        if layout.sort and layout.sort not in layout.columns:
            columns = ", ".join(layout.columns)
            raise ValueError(f"Expected `sort` of table {name} to be one of {columns} but got {layout.sort}.")
        return layout

    def places(self, rows: Sequence[str]) -> list[tuple[list[str], dict[str, tuple[str, str]]]]:
        """For each line what its first columns say, and for each other column the row and the metric.

        Args:
            rows: All rows that there are.

        Raises:
            ValueError: If a row is not among them.
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
                    raise ValueError(f"Expected rows among {', '.join(rows)} but got {row}.{did_you_mean(row, rows)}")
                cells[label] = (row, self.metric.format_map(words))
            result.append(([label for label, _ in entries], cells))
        return result

    def markdown(self, table: Table, rows: Sequence[str]) -> str:
        """The table as a page shows it; rows that were not run are left out.

        Raises:
            ValueError: If a row is not among ``rows``, or a metric not in the table.
        """
        lines = []
        for labels, places in self.places(rows):
            if unknown := [metric for _, metric in places.values() if metric not in table.metrics]:
                raise ValueError(f"Expected metrics among {', '.join(table.metrics)} but got {unknown[0]}.")
            cells = {label: table.rows.get(row, {}).get(metric) for label, (row, metric) in places.items()}
            if any(cells.values()):
                names = {label: metric for label, (_, metric) in places.items()}
                texts = ["-" if cell is None else self._shown(names[label], cell) for label, cell in cells.items()]
                lines.append((cells.get(self.sort), [*labels, *texts]))
        if self.sort:
            lines.sort(
                key=lambda line: -np.inf if line[0] is None or line[0].mean is None else line[0].mean, reverse=True
            )
        shown = markdown_table([*(self.lines or {"row": {}}), *self.columns], [line for _, line in lines])
        return f"{_PERCENTILES}\n\n{shown}" if self.kind == "percentile" else shown

    def _shown(self, name: str, cell: Cell) -> str:
        if self.kind == "percentile":
            return _percentile(name, cell)
        far = self.bold and cell.paper is not None and not near(cell)
        return cell.text(name, "**" if far else "")


def render(text: str, parts: Callable[[str, str], str | None]) -> str:
    r"""A page with its parts made anew.

    Args:
        text: The page.
        parts: What stands between the marks of a name, of the table in a folder; None where that stays.

    Example:
        >>> page = "a\n<!-- main: small -->\nold\n<!-- end -->\nb\n<!-- mine -->\nstays\n<!-- end -->"
        >>> print(render(page, lambda name, of: f"{name} of {of}" if name == "main" else None))
        a
        <!-- main: small -->
        main of small
        <!-- end -->
        b
        <!-- mine -->
        stays
        <!-- end -->
    """

    def anew(found: re.Match[str]) -> str:
        part = parts(found[2], found[3] or "")
        return found[0] if part is None else f"{found[1]}{part}\n{found[4]}"

    return _BLOCK.sub(anew, text)


def verdict_block(table: Table | None, why: str) -> str:
    """One sentence on how near a table is to the paper's, why, and the figure that shows it."""
    found = verdict(table) if table else None
    if table is None or not found or not found.cells:
        return _wrapped(f"**Not compared**: no number that the paper tells has been measured at its scale. {why}")
    at = "" if table.scale == "paper" else f" at the scale `{table.scale}`, beside numbers of the paper's own scale"
    text = (
        f"**{found.word.capitalize()}**{at}: of the {found.cells} numbers that the paper tells, ours are within {NEAR}"
    )
    text += f" of {found.near}, within two standard deviations over the seeds of {found.spread} more, and further from "
    text += f"{found.outside}. {why}"
    return f"{_wrapped(text)}\n\n![Ours against the paper's numbers, cell by cell](against-paper.png)"


def written_block(table: Table, folder: str = "") -> str:
    """What wrote a table, where and how long."""
    versions, path = table.versions, f"{folder}/table.json" if folder else "table.json"
    text = f"Written by `{table.command}` by version {versions.get('lightning-fcl')} on {table.machine}, torch "
    text += f"{versions.get('torch')}, in {max(round(table.seconds / 60), 1)} minutes, one run after the other; "
    return _wrapped(f"{text}{_seeds(table)}. The same numbers, seed by seed: [table.json]({path}).")


def papers_block(papers: Mapping[str, tuple[Table | None, str]]) -> str:
    """A line for each paper: how near its table is, if there is one of its scale, and why."""
    lines = []
    for paper, (table, why) in papers.items():
        found = verdict(table) if table else None
        counts = [found.cells, found.near, found.spread, found.outside] if found and found.cells else ["-"] * 4
        word = found.word if found else "not compared"
        lines.append([f"[{paper}]({paper}/README.md)", word, *map(str, counts), why])
    head = ["paper", "verdict", "numbers", f"within {NEAR}", "in the spread", "outside", "why"]
    return markdown_table(head, lines)


def _percentile(name: str, cell: Cell) -> str:
    """Where the paper's number lies among what the seeds gave, all as printed, to three digits."""
    if cell.paper is None or not cell.values:
        return "-"
    paper, ours = round(cell.paper, 3), np.round(list(cell.values.values()), 3)
    percent = 50 * float(np.mean(ours < paper) + np.mean(ours <= paper))
    mark = "" if ours.min() <= paper <= ours.max() else "**"
    return f"{metric_number(name, paper)}, {mark}{percent:.0f} %{mark}"


def _seeds(table: Table) -> str:
    """The seeds, and the rows that have others."""
    rows: dict[tuple[int, ...], list[str]] = {}
    for row, cells in table.rows.items():
        rows.setdefault(tuple(sorted({seed for cell in cells.values() for seed in cell.values})), []).append(row)
    most = max(rows, key=lambda seeds: len(rows[seeds]), default=())
    others = [f"{', '.join(names)}: {_numbers(seeds)}" for seeds, names in rows.items() if seeds != most]
    return _numbers(most) + (f" ({'; '.join(others)})" if others else "")


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
