"""Texts with numbers from a table: findings on the page of the leaderboard.

A template contains values in braces, such as ``{P4 TinyImageNet beta .5 | Replay | last_accuracy}``. `render_findings`
describes the forms.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.comparison_results import ComparisonResult, format_p_value
from lightning_fcl.evaluation.table import Table, is_size
from lightning_fcl.validation import did_you_mean, format_names

_VALUE = re.compile(r"\{([^{}]*)\}")
# Accuracies have three decimals. Sizes have a unit.
_BARE_NUMBER = re.compile(r"(?<![\w.])\d*\.\d{3,}|(?<![\w.])\d+(?:\.\d+)? [kM]B\b")
_LIST_ITEM = re.compile(r"(\d+\. |[-*] )")
_WIDTH = 128
_FIELDS = ("difference", "interval", "p", "verdict")


@dataclass(frozen=True)
class Findings:
    """Values for a template of findings.

    Args:
        table: Table of the leaderboard.
        comparisons: Results of the planned comparisons.
        protocols: Names of the protocols, in the order of the page.
    """

    table: Table
    comparisons: Sequence[ComparisonResult]
    protocols: Sequence[str]

    def value(self, expression: str) -> str:
        """Return the text of a value in braces, without the braces.

        Raises:
            InvalidValueError: If the expression has another form, or if a difference without a sign is negative.
            UnknownNameError: If the table has no such row, column or comparison.
        """
        expression = " ".join(expression.split())
        if expression.startswith("="):
            return expression[1:].strip()
        parts = [part.strip() for part in expression.split("|")]
        if parts[0] == "comparison" and len(parts) == 4:
            return self._comparison(parts[1], parts[2], parts[3])
        if len(parts) != 3:
            raise InvalidValueError(
                f"Expected a value of a finding to have three parts, but got {{{expression}}}.",
                hint="Write {PROTOCOL | METHOD | COLUMN}, or {= NUMBER} for a number that is not in the table.",
                argument="template",
                value=expression,
            )
        protocols = [name for name in self.protocols if fnmatchcase(name, parts[0])]
        if not protocols:
            raise _unknown(parts[0], self.protocols, "the protocol", expression)
        texts = [self._cells(protocol, parts[1], parts[2], expression) for protocol in protocols]
        return " and ".join([*([", ".join(texts[:-1])] if texts[:-1] else []), texts[-1]])

    def _cells(self, protocol: str, method: str, column: str, expression: str) -> str:
        """Return a mean, or the difference of the means of two methods."""
        column, signed = column.removesuffix("+").strip(), column.endswith("+")
        names = method.split(" - ")
        values = [
            sum(self._mean(f"{protocol} {name}", one, expression) for one in column.split(" + ")) for name in names
        ]
        size = is_size(column.split(" + ")[0])
        value = values[0] - values[1] if len(values) == 2 else values[0]
        digits, unit = (1, " MB") if size else (3, "")
        # Adding 0 converts -0 to 0.
        value = round(value / 1e6 if size else value, digits) + 0.0
        if len(values) == 2 and value < 0 and not signed:
            raise InvalidValueError(
                f"Expected the difference in {{{expression}}} to be positive, but got {value:.{digits}f}.",
                hint="Exchange the methods, and correct the words. To show the sign, write + after the column.",
                argument="template",
                value=expression,
            )
        return f"{value:{'+' * signed}.{digits}f}{unit}"

    def _mean(self, row: str, column: str, expression: str) -> float:
        cells = self.table.rows.get(row)
        if cells is None:
            raise _unknown(row, [*self.table.rows], "the row", expression)
        cell = cells.get(column)
        if cell is None or cell.mean is None:
            raise _unknown(column, [*cells], "the column", expression)
        return cell.mean

    def _comparison(self, protocol: str, methods: str, field: str) -> str:
        """Return a field of a planned comparison."""
        by_name = {result.planned.name: result for result in self.comparisons}
        name = f"{protocol}: {methods}"
        if name not in by_name:
            raise _unknown(name, [*by_name], "the comparison", name)
        if field not in _FIELDS:
            raise _unknown(field, _FIELDS, "the field", name)
        result = by_name[name]
        if field == "verdict":
            return result.verdict
        if field == "p":
            return format_p_value(result.corrected_p_value)
        if field == "interval":
            return "-" if result.interval is None else f"{result.interval[0]:+.3f} to {result.interval[1]:+.3f}"
        return "-" if result.difference is None else f"{result.difference:+.3f}"


def render_findings(template: str, findings: Findings) -> str:
    """Return a template in which the values in braces are replaced by numbers of the table.

    These values are possible:

    - ``{PROTOCOL | METHOD | COLUMN}``: mean over the seeds. Columns are the names in ``table.json``. Sizes are in MB.
      ``COLUMN + COLUMN`` is a sum. ``*`` in PROTOCOL selects several protocols, whose values form an enumeration.
    - ``{PROTOCOL | METHOD - METHOD | COLUMN}``: difference of the means. A negative difference is an error, because the
      words of a finding contain the direction. ``COLUMN+`` shows the sign and accepts negative differences.
    - ``{comparison | PROTOCOL | METHOD - METHOD | FIELD}``: ``difference``, ``interval``, ``p`` or ``verdict`` of a
      planned comparison.
    - ``{= NUMBER}``: a number that is not in the table, such as a published value.

    All other accuracies (three decimals) and sizes (kB, MB) in the template are errors. Paragraphs and items of lists
    are wrapped. Tables and headings are not wrapped.

    Args:
        template: Text with values in braces.
        findings: Values.

    Raises:
        InvalidValueError: If a value has another form, a number is not in braces, or a difference has another sign.
        UnknownNameError: If the table has no such row, column or comparison.
    """
    if bare := _BARE_NUMBER.search(_VALUE.sub("", template)):
        raise InvalidValueError(
            f"Expected accuracies and sizes of the findings to be values in braces, but got {bare[0]}.",
            hint=f"Write {{PROTOCOL | METHOD | COLUMN}}, or {{= {bare[0]}}} for a number that is not in the table.",
            argument="template",
            value=bare[0],
        )
    text = _VALUE.sub(lambda match: findings.value(match[1]), template)
    return "\n".join(_wrap(block) for block in _blocks(text)).strip()


def _blocks(text: str) -> list[list[str]]:
    """Return the lines of each paragraph, item of a list, line of a table, heading and empty line."""
    blocks: list[list[str]] = []
    continues = False
    for line in text.splitlines():
        single = not line.strip() or line.startswith(("|", "#"))
        if continues and not single and not _LIST_ITEM.match(line):
            blocks[-1].append(line)
        else:
            blocks.append([line])
        continues = not single
    return blocks


def _wrap(lines: Sequence[str]) -> str:
    if not lines[0].strip() or lines[0].startswith(("|", "#")):
        return lines[0]
    item = _LIST_ITEM.match(lines[0])
    indent = " " * len(item[0]) if item else ""
    text = " ".join(" ".join(lines).split())
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _unknown(name: str, known_names: Sequence[str], subject: str, expression: str) -> UnknownNameError:
    return UnknownNameError(
        f"Expected {subject} in {{{expression}}} to be among {format_names(known_names)}, but got {name}.",
        hint=did_you_mean(name, known_names),
        argument="template",
        value=name,
    )
