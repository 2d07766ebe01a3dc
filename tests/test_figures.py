"""The figures of a paper: what is drawn, against the results by hand."""

import matplotlib.image
import numpy as np
import pytest

from lightning_fcl import panels
from lightning_fcl.figures import check_figures, write_figures
from lightning_fcl.panels import (
    density_figure,
    density_panels,
    experience_labels,
    experience_names,
    stream_accuracy_figure,
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
    save = panels.blank_figure

    def keep(*size):
        figures.append(save(*size))
        return figures[-1]

    monkeypatch.setattr(panels, "blank_figure", keep)
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


@pytest.mark.parametrize(
    ("of", "kind", "name"),
    [
        ("all", None, None),
        ("ann", "owners", "ann"),
        ("walk", "groups", "walk"),
        ("group 2", "groups", "2"),
        ("owner 2", "owners", "2"),
    ],
)
def test_density_is_the_mean_over_seeds_of_the_last_one(tmp_path, rows, drawn, of, kind, name):
    shown = {"": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(of=of, panels=shown)], rows)
    ours = steps(drawn[0].axes[0])
    for label, row in (("first", "A"), ("second", "B")):
        last = [run["densities"]["experiences"][-1] for run in rows[row]]
        expected = [entry[kind][name] if kind else entry["all"] for entry in last]
        np.testing.assert_allclose(ours[label], np.mean(expected, axis=0))


def test_panels_may_show_other_samples_and_experiences(tmp_path, rows, drawn):
    shown = {
        "last": {"lines": {"first": "A"}, "of": "ann"},
        "walk": {"lines": {"B": "B"}, "of": "walk", "experiences": True},
        "own": {"first": "A"},
    }
    write_figures(tmp_path, [figure(of="sit", panels=shown)], rows)
    last, walk, own = drawn[0].axes
    entries = {row: [run["densities"]["experiences"] for run in rows[row]] for row in rows}
    np.testing.assert_allclose(steps(last)["first"], np.mean([run[-1]["owners"]["ann"] for run in entries["A"]], 0))
    np.testing.assert_allclose(steps(own)["first"], np.mean([run[-1]["groups"]["sit"] for run in entries["A"]], 0))
    assert list(steps(walk)) == ["after sit", "after walk", "after run", "after 2"]
    for values, entry in zip(steps(walk).values(), entries["B"][0], strict=True):
        np.testing.assert_allclose(values, entry["groups"]["walk"])


def test_figures_whose_rows_were_not_run_are_left_out(tmp_path, rows, capsys):
    wanted = [figure(file="one.png", panels={"": {"a": "A", "c": "C"}}), figure(file="two.png")]
    assert write_figures(tmp_path, wanted, rows) == [tmp_path / "two.png"]
    assert capsys.readouterr().err == "Figure one.png is left out: not run: C.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["two.png"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "density"}, "`kind` of figure a.png to be stream_accuracy or activation_density but got density"),
        ({"panels": {"": {"a": "AA"}}}, r"rows of figure a.png to be among A, B but got AA\. Did you mean A\?"),
        ({"panels": {}}, "`panels` of figure a.png to give for each panel's title its lines, label: row, but got {}"),
        ({"panels": {"x": "A"}}, "`panels` of figure a.png to give"),
        ({"panles": {}}, "figure a.png to have experiences, file, .* but got panles"),
        ({"file": "../a.png"}, r"`file` of figures to be a name that ends in .png but got \.\./a\.png"),
        (
            {"experiences": True, "panels": {"": {"a": "A", "b": "B"}}},
            "one row in each panel of figure a.png, .* a, b",
        ),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(change, message):
    check_figures([figure()], ["A", "B"])
    with pytest.raises(ValueError, match=message):
        check_figures([figure(**change)], ["A", "B"])
    with pytest.raises(ValueError, match="Expected figure without `file` to have `file` but got kind"):
        check_figures([{"kind": "stream_accuracy"}], [])


def test_what_the_results_lack_is_named(tmp_path, rows):
    with pytest.raises(ValueError, match="`of` to be one of all, sit, walk, run, 2, ann, 2, as row A has them"):
        write_figures(tmp_path, [figure(of="bob")], rows)
    with pytest.raises(ValueError, match="`of` to be `group 2` or `owner 2`, as row A has both, but got 2"):
        write_figures(tmp_path, [figure(of=2)], rows)
    del rows["A"][1]["densities"]
    with pytest.raises(ValueError, match=r"`densities` in the results of row A but got none\. Add `ActivationDensity`"):
        write_figures(tmp_path, [figure()], rows)


def test_a_runs_own_figures(drawn):
    run = results()
    stream_accuracy_figure(run["record"])
    assert list(lines(drawn[0].axes[0])) == ["server"]
    density_figure(run["densities"], run["record"])
    shown = drawn[1].axes[:5]
    assert list(steps(shown[0])) == ["after sit", "after walk", "after run", "after 2"]
    assert [panel.get_title("left") for panel in shown] == ["all test samples", "sit", "walk", "run", "2"]
    for panel, name in zip(shown[1:], run["record"]["groups"], strict=True):
        for values, entry in zip(steps(panel).values(), run["densities"]["experiences"], strict=True):
            assert values.tolist() == entry["groups"][name]
    for entry in run["record"]["rounds"]:
        entry["correct"] = {"a": [4, 3, 2, 1], "b": [0, 1, 2, 3]}
        entry["experience"]["b"] = entry["experience"]["a"]
    run["record"]["tasks"]["b"] = run["record"]["tasks"]["a"]
    stream_accuracy_figure(run["record"])
    ours = lines(drawn[2].axes[0])["mean of the clients"].get_ydata()
    np.testing.assert_allclose(ours, [0.2, 0.2, 0.2, 0.2])
    run["record"]["rounds"] = []
    assert stream_accuracy_figure(run["record"]) is None and len(drawn) == 3


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
