"""The figures of a paper: what is drawn, against the results by hand."""

import itertools

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_fcl.evaluation import panels, plots
from lightning_fcl.evaluation.communication import BANDWIDTHS
from lightning_fcl.evaluation.figures import write_figures
from lightning_fcl.evaluation.panels import (
    density_panels,
    experience_labels,
    experience_names,
)

EDGES = [-1.0, -0.5, 0.0, 0.5, 1.0]


def results(seed=0, experiences=4, owners=("ann", "2"), names=("sit", "walk", "run", "2")):
    """Two rounds in each class-incremental experience; the readout, and so the server, is ready in the second."""
    rng = np.random.default_rng(seed)
    rounds, entries = [], []
    for r in range(2 * experiences):
        correct = {"server": rng.integers(11, size=4).tolist()} if r % 2 else {}
        rounds.append({"round": r, "experience": {"server": r // 2, "a": r // 2}, "correct": correct})
        groups = {name: rng.dirichlet(np.ones(4)).tolist() for name in names}
        of = {owner: rng.dirichlet(np.ones(4)).tolist() for owner in owners}
        if r % 2:
            entries.append({"experience": r // 2, "all": rng.random(4).tolist(), "groups": groups, "owners": of})
    tasks = [[e] for e in range(4)]
    record = {"groups": list(names), "totals": [10] * 4, "tasks": {"a": tasks, "server": tasks}, "rounds": rounds}
    return {"record": record, "densities": {"edges": EDGES, "experiences": entries}}


@pytest.fixture
def rows():
    return {"A": [results(seed) for seed in range(3)], "B": [results(7)]}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = plots.blank_figure

    def keep(*size):
        figures.append(save(*size))
        return figures[-1]

    for module in (plots, panels):
        monkeypatch.setattr(module, "blank_figure", keep)
    return figures


def lines(panel):
    return {line.get_label(): line for line in panel.get_lines()}


def steps(panel):
    return {patch.get_label(): patch.get_data().values for patch in panel.patches}


def figure(**entries):
    return {"file": "a.png", "kind": "activation_density", "title": "Title", "panels": {"": {"a": "A"}}, **entries}


def test_stream_accuracy_is_mean_and_deviation_over_seeds(tmp_path, rows, drawn):
    shown = {"both": {"first": "A", "second": "B"}, "one": {"second": "B"}}
    (path,) = write_figures(tmp_path, [figure(kind="stream_accuracy", panels=shown)], rows)
    both, one = drawn[0].axes
    expected = []
    for run in rows["A"]:
        after = [entry["correct"]["server"] for entry in run["record"]["rounds"] if entry["correct"]]
        expected.append([sum(correct[: e + 1]) / (10 * (e + 1)) for e, correct in enumerate(after)])
    np.testing.assert_allclose(lines(both)["first"].get_ydata(), np.mean(expected, axis=0))
    assert lines(both)["first"].get_xdata().tolist() == [1, 2, 3, 4]
    (band,) = both.collections  # none around the single seed of B
    low, high = np.mean(expected, 0) - np.std(expected, 0, ddof=1), np.mean(expected, 0) + np.std(expected, 0, ddof=1)
    corners = band.get_paths()[0].vertices
    for x, bounds in enumerate(zip(low, high, strict=True), 1):
        at = corners[corners[:, 0] == x, 1]
        assert (at.min(), at.max()) == pytest.approx(bounds)
    assert lines(both)["second"].get_color() == lines(one)["second"].get_color() != lines(both)["first"].get_color()
    assert [tick.get_text() for tick in both.get_xticklabels()] == ["sit", "walk", "run", "2"]
    assert [panel.get_title("left") for panel in (both, one)] == ["both", "one"]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["first", "second"]
    assert drawn[0].get_suptitle() == "Title"
    image = matplotlib.image.imread(path)
    assert 700 < image.shape[1] <= 1400 and image[..., :3].std() > 0.05


def test_a_run_that_ended_early_and_other_orders_of_classes(tmp_path, rows, drawn):
    rows["B"] = [results(7, experiences=2, names=("run", "walk", "sit", "2"))]
    shown = {"": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(kind="stream_accuracy", panels=shown)], rows)
    panel = drawn[0].axes[0]
    assert lines(panel)["second"].get_xdata().tolist() == [1, 2]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1", "2", "3", "4"]


def test_density_is_the_mean_over_seeds_of_the_last_one(tmp_path, rows, drawn):
    shown = {"": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(panels=shown)], rows)
    ours = steps(drawn[0].axes[0])
    for label, row in (("first", "A"), ("second", "B")):
        last = [run["densities"]["experiences"][-1] for run in rows[row]]
        expected = [entry["all"] for entry in last]
        np.testing.assert_allclose(ours[label], np.mean(expected, axis=0))


def test_panels_of_experiences_show_each_of_a_row(tmp_path, rows, drawn):
    write_figures(tmp_path, [figure(experiences=True, panels={"B": {"B": "B"}})], rows)
    found = steps(drawn[0].axes[0])
    assert list(found) == ["after sit", "after walk", "after run", "after 2"]
    for number, values in enumerate(found.values()):
        entries = [run["densities"]["experiences"][number]["all"] for run in rows["B"]]
        np.testing.assert_allclose(values, np.mean(entries, axis=0))


def test_figures_whose_rows_were_not_run_are_left_out(tmp_path, rows, capsys):
    wanted = [figure(file="one.png", panels={"": {"a": "A", "c": "C"}}), figure(file="two.png")]
    assert write_figures(tmp_path, wanted, rows) == [tmp_path / "two.png"]
    assert capsys.readouterr().err == "Figure one.png is left out: not run: C.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["two.png"]


def test_panels_whose_rows_were_not_run_are_left_out_of_their_figure(tmp_path, rows, drawn, capsys):
    shown = {"run": {"a": "A", "b": "B"}, "not run": {"a": "A", "c": "C"}}
    for kind in ("stream_accuracy", "activation_density"):
        assert write_figures(tmp_path, [figure(kind=kind, panels=shown)], rows) == [tmp_path / "a.png"]
        assert capsys.readouterr().err == "Panels of figure a.png are left out: not run: C.\n"
        assert [panel.get_title("left") for panel in drawn[-1].axes] == ["run"]


def test_what_the_results_lack_is_named(tmp_path, rows):
    del rows["A"][1]["densities"]
    with pytest.raises(ValueError, match=r"`densities` in the results of row A but got none\. Add `ActivationDensity`"):
        write_figures(tmp_path, [figure()], rows)


def test_names_of_experiences():
    record = {"groups": ["a", "b", "c" * 30], "tasks": {"server": [[0], [1]]}}
    assert experience_names(record) == ["a", "b"]
    other = {**record, "tasks": {"server": [[1], [0]]}}
    assert experience_labels([record, record]) == ["after a", "after b"]
    assert experience_labels([record, other]) == ["after experience 1", "after experience 2"]
    for tasks in ([[0], [0]], [[0], [2]]):
        assert experience_names({**record, "tasks": {"server": tasks}}) == ["1", "2"]


def test_a_legend_names_at_most_some_of_many_lines(drawn):
    density_panels({"": {f"line {n}": (EDGES, [0.5] * 4) for n in range(25)}}, ordered=True)
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names[0] == "line 0" and names[-1] == "line 24" and len(names) <= 11


def study(seed=0, tasks=3, scale=1.0, clients="ab"):
    """Two rounds in each task; clients are tested in the second, and have their own orders of the tasks."""
    rng = np.random.default_rng(seed)
    order = {client: [[2 * t, 2 * t + 1] for t in rng.permutation(3)[:tasks].tolist()] for client in clients}
    rounds = []
    for r in range(2 * tasks):
        correct = {client: rng.integers(11, size=6).tolist() for client in (*clients, "server")}
        rounds.append(
            {
                "round": r,
                "experience": dict.fromkeys((*clients, "server"), r // 2),
                "correct": correct if r % 2 else {"server": correct["server"]},
                "upload_bytes": {client: int(scale * (1000 + 100 * r)) for client in clients[: 1 + r % 2]},
                "download_bytes": dict.fromkeys(clients[: 1 + r % 2], int(3000 * scale)),
            }
        )
    record = {
        "groups": list("uvwxyz"),
        "totals": [10] * 6,
        "tasks": {**order, "server": [[0], [1], [2]]},
        "rounds": rounds,
    }
    return {"record": record}


def by_hand(run):
    """Average accuracy and forgetting after each task, mean over the clients, in plain Python."""
    record, accuracies, forgettings = run["record"], [], []
    for client, tasks in record["tasks"].items():
        if client == "server":
            continue
        ends = [entry["correct"][client] for entry in record["rounds"] if client in entry["correct"]]
        on = [[sum(correct[g] for g in task) / 20 for task in tasks] for correct in ends]
        accuracies.append([np.mean(on[t][: t + 1]) for t in range(len(on))])
        forgettings.append(
            [np.mean([max(on[s][d] for s in range(d, t)) - on[t][d] for d in range(t)]) for t in range(1, len(on))]
        )
    return np.mean(accuracies, axis=0), np.mean(forgettings, axis=0)


@pytest.mark.seconds
def test_average_accuracy_and_forgetting_after_each_task(tmp_path, drawn):
    rows = {"A": [study(seed) for seed in range(3)], "B": [study(9)]}
    shown = {"x": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(kind="average_accuracy", panels=shown)], rows)
    accuracy, forgotten = drawn[0].axes
    for label, row in (("first", "A"), ("second", "B")):
        expected = [np.mean(part, axis=0) for part in zip(*map(by_hand, rows[row]), strict=True)]
        for panel, values, x in ((accuracy, expected[0], [1, 2, 3]), (forgotten, expected[1], [2, 3])):
            assert lines(panel)[label].get_xdata().tolist() == x
            np.testing.assert_allclose(lines(panel)[label].get_ydata(), values)
    corners = accuracy.collections[0].get_paths()[0].vertices
    third = [by_hand(run)[0][2] for run in rows["A"]]
    spread = np.mean(third) - np.std(third, ddof=1), np.mean(third) + np.std(third, ddof=1)
    assert (corners[corners[:, 0] == 3, 1].min(), corners[corners[:, 0] == 3, 1].max()) == pytest.approx(spread)
    assert len(accuracy.collections) == 1  # none around a single seed
    several = {"x": {"first": "A"}, "y": {"second": "B"}, "z": {"first": "A"}}
    (path,) = write_figures(tmp_path, [figure(kind="average_accuracy", panels=several)], rows)
    assert [panel.get_title("left") for panel in drawn[1].axes[:3]] == ["x", "y", "z"]
    np.testing.assert_allclose(lines(drawn[1].axes[4])["second"].get_ydata(), by_hand(rows["B"][0])[1])
    assert matplotlib.image.imread(path)[..., :3].std() > 0.02
    for run in rows["B"]:
        for entry in run["record"]["rounds"]:
            entry["correct"] = {"server": [0] * 6}
    with pytest.raises(ValueError, match="clients with several tasks in the results of row B but none was tested"):
        write_figures(tmp_path, [figure(kind="average_accuracy", panels=shown)], rows)


@pytest.mark.seconds
def test_volume_and_time_of_the_communication(tmp_path, drawn):
    rows = {"A": [study(0), study(1, scale=3.0)], "B": [study(2)], "C": [study(3)]}
    shown = {"all": {"first": "A", "second": "B", "third": "C"}, "one": {"third": "C"}}
    (path,) = write_figures(tmp_path, [figure(kind="communication", panels=shown)], rows)
    left, right, _, alone = drawn[0].axes
    # Rounds of one client and of two in turn; each sends 1000, 1100, ... bytes and receives 3000.
    up, down = sum((1 + r % 2) * (1000 + 100 * r) for r in range(6)), 9 * 3000
    bars = [patch.get_width() for patch in left.patches]
    np.testing.assert_allclose(bars, np.array([2 * up, 2 * down, up, down, up, down]) / 1e6)
    assert [text.get_text() for text in left.get_yticklabels()] == ["first", "second", "third"]
    seconds = sum(1000 + 100 * r + 3000 for r in range(6)) / np.array(BANDWIDTHS)
    assert list(lines(right)) == ["first", "second, third"] and list(lines(alone)) == ["third"]
    np.testing.assert_allclose(lines(right)["first"].get_ydata(), 2 * seconds)
    np.testing.assert_allclose(lines(right)["second, third"].get_ydata(), seconds)
    assert (right.get_xscale(), right.get_yscale()) == ("log", "log")
    assert matplotlib.image.imread(path)[..., :3].std() > 0.02
    write_figures(tmp_path, [figure(kind="volume_by_round", panels={"all": shown["all"]})], rows)
    by_round = np.array([(1 + r % 2) * (4000 + 100 * r) for r in range(6)]) / 1e6
    (panel,) = drawn[1].axes
    np.testing.assert_allclose(lines(panel)["first"].get_ydata(), 2 * by_round)
    np.testing.assert_allclose(lines(panel)["second, third"].get_ydata(), by_round)


def inside(figure):
    """Whether the figure, its legends and all names of rows lie within it, and no name of a bar upon another."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, (width, height) = canvas.get_renderer(), canvas.get_width_height()
    legends = [*figure.legends, *(panel.get_legend() for panel in figure.axes if panel.get_legend())]
    parts = [*legends, *figure.axes, *bar_names(figure)]
    boxes = [part.get_tightbbox(renderer) for part in parts]
    names = sorted((box.y0, box.y1) for box in boxes[len(legends) + len(figure.axes) :])
    apart = all(above[0] >= below[1] for below, above in itertools.pairwise(names))
    return apart and all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)


def bar_names(figure):
    return [text for panel in figure.axes if panel.patches for text in panel.get_yticklabels()]


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["average_accuracy", "communication", "volume_by_round"])
@pytest.mark.parametrize("number", [1, 16])
def test_every_one_of_many_rows_is_named_within_the_figure(tmp_path, drawn, kind, number):
    rows = {f"method number {n}": [study(n, scale=1 + n)] for n in range(number)}
    write_figures(tmp_path, [figure(kind=kind, panels={"data": {row: row for row in rows}})], rows)
    legends = drawn[0].legends or [panel.get_legend() for panel in drawn[0].axes if panel.get_legend()]
    assert [text.get_text() for text in legends[0].get_texts()] == list(rows)
    assert inside(drawn[0])
