"""Tests of the lines of charts: a line has a vertex for each measured value and no gaps."""

from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert

from lightning_fcl.evaluation import charts, comparison, report
from lightning_fcl.evaluation.curves import curves
from lightning_fcl.evaluation.record import get_quantity

MODELS = ("server", "a", "b")
HEIGHT = 400


def random_record(rng, measured, every=1):
    """Return a record of a random length in which models and groups are missing in random rounds."""
    rounds = []
    number_of_rounds = int(rng.integers(2, 9))
    for number in range(number_of_rounds):
        tested = [model for model in MODELS if number % every == 0 and rng.random() < 0.8]
        entry = {"round": number, "experience": dict.fromkeys(MODELS, 3 * number // number_of_rounds)}
        if measured:
            values = {model: rng.normal(500, 90) if rng.random() < 0.7 else None for model in tested}
            entry["values"] = {model: {"MSE": {"0": value}} for model, value in values.items()}
        else:
            entry["correct"] = {model: rng.integers(0, 11, 3).tolist() for model in tested}
        rounds.append(entry)
        if measured:
            entry["experience"] = dict.fromkeys(MODELS, 0)
    groups = ["x"] if measured else ["x", "y", "z"]
    record = {"groups": groups, "totals": [10] * len(groups), "rounds": rounds}
    record["tasks"] = {model: [[group] for group in range(len(groups))] for model in MODELS}
    return record | ({"measures": [{"name": "MSE", "higher_is_better": False}]} if measured else {})


def drawn_lines(chart):
    """Return the subpaths of each line of a chart: the number of vertices of each subpath."""
    svg = vl_convert.vegalite_to_svg({**chart, "width": 600, "height": HEIGHT, "autosize": "pad"})
    lines = []
    for group in ElementTree.fromstring(svg).iter():
        if "mark-line" in group.get("class", ""):
            paths = [path.get("d") for path in group.iter() if path.tag.endswith("path") and path.get("d")]
            lines += [[part.count("L") + 1 for part in path.split("M")[1:]] for path in paths]
    return sorted(lines)


@pytest.mark.seconds
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("measured", [False, True])
def test_lines_with_missing_values_join_all_measured_values(seed, measured):
    rng = np.random.default_rng(seed)
    groups = {
        f"row {row}": [
            {"record": random_record(rng, measured, every=1 + row % 2), "seed": s} for s in range(1 + row % 3)
        ]
        for row in range(3 if seed % 2 else 9)
    }
    record = groups["row 0"][0]["record"]
    quantity = get_quantity(record)
    chart = comparison.rounds_chart(groups, quantity)
    view = chart["params"][0]["value"]
    counts = {label: 0 for label in groups}
    for row in chart["datasets"]["rows"]:
        counts[row["line"]] += row["view"] == view and row["value"] is not None
    # With more rows than colors, the highlighted line is drawn a second time.
    expected = [[n] for n in counts.values() if n] + (
        [[counts["row 0"]]] if len(groups) > 7 and counts["row 0"] else []
    )
    assert drawn_lines(chart) == sorted(expected)
    for label, runs in groups.items():
        measured_rounds = {
            number + 1
            for run in runs
            for number, value in zip(*overall(run["record"]), strict=True)
            if np.isfinite(value)
        }
        points = [row["round"] for row in chart["datasets"]["rows"] if (row["line"], row["view"]) == (label, view)]
        assert view.startswith("mean") or points == sorted(measured_rounds)
    by_model = curves(record)
    if (overview := report.overview_chart(record, by_model)) is not None:
        server = by_model.get("server")
        # With a single task, the values on the whole test set are the values on all experiences so far.
        values = [server.overall, server.seen_classes][: 1 if measured else 2] if server is not None else []
        clients = {number for model, curve in by_model.items() if model != "server" for number in finite_rounds(curve)}
        lengths = [*(int(np.isfinite(value).sum()) for value in values), len(clients)]
        assert drawn_lines(overview) == sorted([n] for n in lengths if n)


def overall(record):
    server = curves(record).get("server")
    return ([], []) if server is None else (server.rounds.tolist(), server.overall.tolist())


def finite_rounds(curve):
    return curve.rounds[np.isfinite(curve.seen_classes)].tolist()


def test_over_seeds_one_seed_in_a_round_has_no_std():
    nan = np.nan
    first, second = charts.over_seeds([np.array([0.5, nan, 0.7]), np.array([0.3, nan, nan, nan])])
    assert (first["round"], first["value"], first["seeds"]) == (1, 0.4, 2)
    assert first["std"] == pytest.approx(0.02**0.5) and first["high"] == pytest.approx(0.4 + 0.02**0.5)
    assert second == {"round": 3, "value": 0.7, "std": "-", "seeds": 1}
