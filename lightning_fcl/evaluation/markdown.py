"""The one way in which tables are written: Markdown that a terminal shows well, too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of even width; those of numbers, but not the first, are set to the right."""
    columns = []
    for number, column in enumerate(zip(head, *lines, strict=True)):
        cells = [cell.replace("|", "\\|") for cell in column]
        right = number > 0 and all(cell.startswith(tuple("+-0123456789")) for cell in cells[1:])
        width = max(3, *map(len, cells))
        cells.insert(1, "-" * (width - right) + ":" * right)
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))
