"""Ours against a paper's numbers: which are near, and what the figure shows."""

import pytest

from lightning_fcl.evaluation.against import Verdict, against_figure, verdict
from lightning_fcl.evaluation.table import Cell, Table

ROWS = {
    "one": {
        "accuracy/server": Cell({0: 0.50, 1: 0.52}, 0.56),  # as printed, .510 and .560: near
        "loss/server": Cell({0: 0.50, 1: 0.60}, 0.65),  # .1 from the mean, the deviation is .071: in the spread
        "bytes/server": Cell({0: 1.0}),
    },
    "two": {
        "accuracy/server": Cell({0: 0.50}, 0.8),  # one seed has no spread
        "loss/server": Cell({0: 0.1, 1: 0.102}, 0.5),
        "gain/server": Cell({}, 0.5),  # not measured
    },
}


def table(rows=ROWS, scale="paper"):
    return Table("toy", scale, "", {}, "", 1.0, rows)


def test_numbers_are_near_in_the_spread_or_outside():
    assert verdict(table()) == Verdict(near=1, spread=1, outside=3)
    assert verdict(table({"one": {"a/server": Cell({0: 0.4504}, 0.5)}})).near == 1
    assert verdict(table({"one": {"a/server": Cell({0: 0.4486}, 0.5)}})).outside == 1


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        ((9, 0, 1), "reproduced"),
        ((5, 0, 5), "partly reproduced"),
        ((4, 0, 5), "not reproduced"),
        ((0,) * 3, "not compared"),
    ],
)
def test_the_verdict(counts, word):
    assert Verdict(*counts).word == word


def test_the_figure_has_each_number_and_names_those_furthest_out():
    figure = against_figure(table())
    panel, names = figure.axes
    points = [point for box in panel.containers for point in box.lines[0].get_xydata().tolist()]
    assert sorted(points) == [pytest.approx(point) for point in ((0.5, 0.101), (0.56, 0.51), (0.65, 0.55), (0.8, 0.5))]
    (listed,) = (text.get_text() for text in names.texts)
    assert listed.split("\n")[1:3] == ["1  two", "    loss server: 0.101, paper 0.500"]
    assert [text.get_text() for text in panel.texts] == ["1", "2", "3"]
    assert panel.get_xlim() == panel.get_ylim()
    assert "at its scale" in panel.get_xlabel()


def test_points_close_by_share_their_numbers():
    rows = {row: {"accuracy/server": Cell({0: y}, 0.6)} for row, y in {"a": 0.9, "b": 0.901, "c": 0.1}.items()}
    assert [text.get_text() for text in against_figure(table(rows)).axes[0].texts] == ["1", "2, 3"]


def test_the_figure_at_another_scale_says_so():
    assert "of its own scale, ours at the scale `small`" in against_figure(table(scale="small")).axes[0].get_xlabel()


def test_without_numbers_of_the_paper_there_is_no_figure():
    assert against_figure(table({"one": {"accuracy/server": Cell({0: 0.5})}})) is None
