"""The device report for readers: Markdown tables whose columns are aligned, so that a terminal shows them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fcl.errors import require
from lightning_fcl.evaluation.table import markdown_table


def report_text(report: Mapping[str, Any]) -> str:
    jinja2 = require("jinja2", "writes device reports")
    template = jinja2.Template(Path(__file__).with_name("report.md").read_text(encoding="utf-8"))
    text: str = template.render(report, table=markdown_table, whole=_sums, size=_size, seconds=_seconds, number=_number)
    return text.rstrip("\n") + "\n"


def _sums(rows: Sequence[tuple[str, int, int]]) -> list[list[str]]:
    return [[name, *map(_number, (frozen, trained, frozen + trained))] for name, frozen, trained in rows]


def _number(value: int) -> str:
    return f"{value:,}"


def _size(value: int) -> str:
    return f"{value:,} B"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
