"""Labels of points in a scatter chart, at heights at which no two labels overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import altair as alt

from lightning_fcl.evaluation.charts import Points

Box: TypeAlias = tuple[float, float, float]
"""Left edge, right edge and height of the middle of a label, in pixels from the left and from the top of a chart."""

LINE_HEIGHT = 12
"""Smallest distance in pixels between the middles of two labels that are above each other."""

_OFFSET, _LETTER_WIDTH = 8, 6.5
_LONGEST_NAME = 30


def chart_height(num_labels: int, min_height: int) -> int:
    """Return the height of a chart in pixels that has space for all labels, at least ``min_height``."""
    return max(min_height, LINE_HEIGHT * num_labels)


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Return a name for each line of a chart. Names of more than 30 characters are shortened to distinct names.

    A shortened name is without the words that all names start with, except for the last of these words. If it is still
    too long, its middle is left out. The names are unchanged if the shortened names are not distinct.

    Example:
        >>> shorten_names([f"grid-over-many-hyperparameters-lr-{rate}" for rate in (0.1, 0.01)]).values()
        dict_values(['…lr-0.1', '…lr-0.01'])
    """
    if max(map(len, names), default=0) <= _LONGEST_NAME:
        return {name: name for name in names}
    prefix = "".join(
        letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
    )
    ends = [match.end() for match in re.finditer(r"[-_/, ]+", prefix)] if len(names) > 1 else []
    start = ends[-2] if len(ends) > 1 else 0
    half = _LONGEST_NAME // 2 - 1
    shortened = {}
    for name in names:
        text = f"…{name[start:]}" if start else name
        shortened[name] = text if len(text) <= _LONGEST_NAME else f"{text[:half]}…{text[-half:]}"
    return shortened if len({*shortened.values()}) == len(shortened) else {name: name for name in names}


def axis_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper end of an axis, with a margin around the values.

    The margin is larger than the rounding errors of values in charts, which have four digits.
    """
    margin = max(0.08 * (max(values) - min(values)), 1e-3 * max(map(abs, values))) or 0.1
    return min(values) - margin, max(values) + margin


@dataclass(frozen=True)
class PointLabels:
    """Labels of the points of a scatter chart.

    The label of a point is right of the point if the point is in the left half of the chart, and left of the point
    otherwise. Labels that would overlap are moved down, or up at the bottom of the chart. A thin line connects a point
    and its label.

    Args:
        name: Field of the text of a label.
        x: Field of the horizontal position of a point.
        y: Field of the vertical position of a point.
        x_range: Lower and upper end of the horizontal axis.
        y_range: Lower and upper end of the vertical axis.
        width: Width of the chart in pixels. Labels do not overlap if the chart is wider.
        height: Height of the chart in pixels. `chart_height` returns a sufficient height.
        log: Whether the horizontal axis is logarithmic.
    """

    name: str
    x: str
    y: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int
    log: bool = False

    @property
    def field(self) -> str:
        """Name of the entry of a point with the place of its label, in pixels from the top of the chart."""
        return f"label of {self.x}"

    def layers(self, base: alt.Chart, title: str) -> list[alt.Chart]:
        """Return the layers of the labels.

        Args:
            base: Chart with the horizontal axis.
            title: Title of the vertical axis.
        """
        (low, high), scale = self.y_range, alt.Scale(domain=[*self.y_range], nice=False)
        point, label = (alt.Y(f"{field}:Q", title=title, scale=scale) for field in (self.y, "label"))
        # Places are in pixels, because charts round values to four digits.
        base = base.transform_calculate(label=f"{high} - {(high - low) / self.height} * datum['{self.field}']")
        ends = [math.log(end) for end in self.x_range] if self.log else self.x_range
        middle = math.exp(sum(ends) / 2) if self.log else sum(ends) / 2
        names = base.encode(y=label, text=f"{self.name}:N")
        right_labels = names.transform_filter(f"datum.{self.x} <= {middle}").mark_text(align="left", dx=_OFFSET)
        left_labels = names.transform_filter(f"datum.{self.x} > {middle}").mark_text(align="right", dx=-_OFFSET)
        lines = base.mark_rule(color="#cccccc").encode(y=point, y2="label:Q")
        return [lines, *(layer.encode(color=alt.value("#888888")) for layer in (right_labels, left_labels))]

    def set_heights(self, rows: Points) -> None:
        """Set the entry ``field`` of each point."""
        numbered_boxes = sorted(
            ((self._box(row), number) for number, row in enumerate(rows)), key=lambda entry: entry[0][2]
        )
        boxes = _move_down([box for box, _ in numbered_boxes])
        if any(height > self.height for _, _, height in boxes):
            # Move labels up from the bottom of the chart.
            flipped_boxes = [(start, end, max(0.0, self.height - height)) for start, end, height in reversed(boxes)]
            boxes = [(start, end, self.height - height) for start, end, height in reversed(_move_down(flipped_boxes))]
        for (_, number), (_, _, height) in zip(numbered_boxes, boxes, strict=True):
            rows[number][self.field] = height

    def _box(self, row: dict[str, float | str]) -> Box:
        """Return the box of a label at the height of its point."""
        (low, high), value = self.y_range, float(row[self.y])
        start, end, position = (math.log(x) if self.log else x for x in (*self.x_range, float(row[self.x])))
        x = self.width * (position - start) / (end - start)
        length = _OFFSET + _LETTER_WIDTH * len(str(row[self.name]))
        height = self.height * (high - value) / (high - low)
        return (x, x + length, height) if x <= self.width / 2 else (x - length, x, height)


def _move_down(boxes: Sequence[Box]) -> list[Box]:
    """Return the boxes at heights at which no two boxes overlap. A box is only moved down.

    Args:
        boxes: Boxes in ascending order of their heights.
    """
    result: list[Box] = []
    for left_edge, right_edge, height in boxes:
        new_height = height
        for other in sorted(middle for start, end, middle in result if start < right_edge and left_edge < end):
            if abs(other - new_height) < LINE_HEIGHT:
                new_height = other + LINE_HEIGHT
        result.append((left_edge, right_edge, new_height))
    return result
