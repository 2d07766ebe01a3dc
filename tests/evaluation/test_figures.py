"""Tests of the figures of a paper: the drawn points equal results that are computed by hand."""

import re

import numpy as np
import pytest
import vl_convert
from raising import raises

from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.evaluation import charts
from lightning_fcl.evaluation.paper_figures import write_figures
from lightning_fcl.evaluation.summary import BANDWIDTHS, experience_labels, experience_names

EDGES = [-1.0, -0.5, 0.0, 0.5, 1.0]


def results(seed=0, experiences=4, owners=("ann", "2"), names=("sit", "walk", "run", "2")):
    """Return a run with two rounds in each class-incremental experience.

    The server is tested in the second round of each experience.
    """
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
    """Collect the specifications of figures instead of writing PNG files. Each specification is compiled to Vega."""
    figures = []

    def keep(path, spec):
        vl_convert.vegalite_to_vega(spec)
        figures.append(spec)
        return path

    monkeypatch.setattr(charts, "write_png", keep)
    return figures


def lines(spec, panel="", data="rows", of="value"):
    """Return a dict that maps the name of each line in a panel to the points of the line."""
    found = {}
    for row in spec["datasets"][data]:
        if row["panel"] == panel:
            found.setdefault(row["line"], []).append(row[of])
    return found


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def find(spec, key):
    """Yield all values under a key, at any depth."""
    for name, value in spec.items() if isinstance(spec, dict) else enumerate(spec):
        if name == key:
            yield value
        if isinstance(value, dict | list):
            yield from find(value, key)


def seen(spec):
    """Return the text that a figure contains."""
    texts = re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", vl_convert.vegalite_to_svg(spec, config=charts._PNG))
    return " ".join(texts)


def figure(**entries):
    return {"file": "a.png", "kind": "activation_density", "title": "Title", "panels": {"": {"a": "A"}}, **entries}


def test_write_figures_stream_accuracy_has_mean_and_std_over_seeds(tmp_path, rows, drawn):
    shown = {"both": {"first": "A", "second": "B"}, "one": {"second": "B"}}
    write_figures(tmp_path, [figure(kind="stream_accuracy", panels=shown)], rows)
    expected = []
    for run in rows["A"]:
        after = [entry["correct"]["server"] for entry in run["record"]["rounds"] if entry["correct"]]
        expected.append([sum(correct[: e + 1]) / (10 * (e + 1)) for e, correct in enumerate(after)])
    mean, std = np.mean(expected, axis=0), np.std(expected, axis=0, ddof=1)
    close(lines(drawn[0], "both")["first"], mean)
    points = [row for row in drawn[0]["datasets"]["rows"] if row["panel"] == "both"]
    close(
        [[row["low"], row["high"]] for row in points if row["line"] == "first"], np.stack([mean - std, mean + std], 1)
    )
    # A row with a single seed has no band.
    assert not any("low" in row for row in points if row["line"] == "second")
    assert [row["experience"] for row in points if row["line"] == "first"] == ["sit", "walk", "run", "2"]
    assert lines(drawn[0], "one").keys() == {"second"}
    assert drawn[0]["title"] == "Title"
    text = seen(drawn[0])
    assert all(word in text for word in ("Title", "both", "one", "first", "second", "sit", "walk", "stream accuracy"))


def test_write_figures_writes_nonempty_png(tmp_path, rows):
    (path,) = write_figures(tmp_path, [figure(kind="stream_accuracy")], rows)
    assert path.read_bytes().startswith(b"\x89PNG") and 10_000 < path.stat().st_size < 200_000


def test_write_figures_different_experiences_uses_numbers(tmp_path, rows, drawn):
    rows["B"] = [results(7, experiences=2, names=("run", "walk", "sit", "2"))]
    shown = {"": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(kind="stream_accuracy", panels=shown)], rows)
    assert lines(drawn[0], of="experience") == {"first": ["1", "2", "3", "4"], "second": ["1", "2"]}


def test_write_figures_density_is_mean_of_last_experience(tmp_path, rows, drawn):
    shown = {"": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(panels=shown)], rows)
    for label, row in (("first", "A"), ("second", "B")):
        last = [run["densities"]["experiences"][-1]["all"] for run in rows[row]]
        close(lines(drawn[0])[label], np.mean(last, axis=0))
    assert lines(drawn[0], of="activation")["first"] == [-0.75, -0.25, 0.25, 0.75]


def test_write_figures_experiences_shows_each_experience(tmp_path, rows, drawn):
    write_figures(tmp_path, [figure(experiences=True, panels={"B": {"B": "B"}})], rows)
    found = lines(drawn[0], "B")
    assert list(found) == ["after sit", "after walk", "after run", "after 2"]
    for number, values in enumerate(found.values()):
        close(values, rows["B"][0]["densities"]["experiences"][number]["all"])


def test_write_figures_missing_row_skips_figure(tmp_path, rows, drawn, capsys):
    wanted = [figure(file="one.png", panels={"": {"a": "A", "c": "C"}}), figure(file="two.png")]
    assert write_figures(tmp_path, wanted, rows) == [tmp_path / "two.png"]
    assert capsys.readouterr().err == "Skipped figure one.png, because these rows were not run: C.\n"


def test_write_figures_missing_row_skips_only_its_panel(tmp_path, rows, drawn, capsys):
    shown = {"run": {"a": "A", "b": "B"}, "not run": {"a": "A", "c": "C"}}
    for kind in ("stream_accuracy", "activation_density"):
        assert write_figures(tmp_path, [figure(kind=kind, panels=shown)], rows) == [tmp_path / "a.png"]
        assert capsys.readouterr().err == "Skipped panels of figure a.png, because these rows were not run: C.\n"
        assert {row["panel"] for row in drawn[-1]["datasets"]["rows"]} == {"run"}


def test_write_figures_without_densities_raises(tmp_path, rows):
    del rows["A"][1]["densities"]
    with raises(MissingValueError, "densities"):
        write_figures(tmp_path, [figure()], rows)


def test_experience_names_long_or_equal_returns_numbers():
    record = {"groups": ["a", "b", "c" * 30], "tasks": {"server": [[0], [1]]}}
    assert experience_names(record) == ["a", "b"]
    other = {**record, "tasks": {"server": [[1], [0]]}}
    assert experience_labels([record, record]) == ["after a", "after b"]
    assert experience_labels([record, other]) == ["after experience 1", "after experience 2"]
    for tasks in ([[0], [0]], [[0], [2]]):
        assert experience_names({**record, "tasks": {"server": tasks}}) == ["1", "2"]


def study(seed=0, tasks=3, scale=1.0, clients="ab"):
    """Return a run with two rounds per task. Each client has its own order of tasks.

    Clients are tested after each task. The server is tested after each round.
    """
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
    """Return the average accuracy after each task, and the forgetting after each task except the first.

    Both results are means over clients.
    """
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


def test_write_figures_average_accuracy_and_forgetting_equal_reference(tmp_path, drawn):
    rows = {"A": [study(seed) for seed in range(3)], "B": [study(9)]}
    shown = {"x": {"first": "A", "second": "B"}}
    write_figures(tmp_path, [figure(kind="average_accuracy", panels=shown)], rows)
    for label, row in (("first", "A"), ("second", "B")):
        accuracy, lost = (np.mean(part, axis=0) for part in zip(*map(by_hand, rows[row]), strict=True))
        for data, values, x in (("accuracy", accuracy, [1, 2, 3]), ("forgetting", lost, [2, 3])):
            assert lines(drawn[0], "x", data, of="round")[label] == x
            close(lines(drawn[0], "x", data)[label], values)
    third, point = [by_hand(run)[0][2] for run in rows["A"]], drawn[0]["datasets"]["accuracy"][2]
    close([point["low"], point["high"]], np.mean(third) + np.array([-1, 1]) * np.std(third, ddof=1))
    several = {"x": {"first": "A"}, "y": {"second": "B"}, "z": {"first": "A"}}
    write_figures(tmp_path, [figure(kind="average_accuracy", panels=several)], rows)
    close(lines(drawn[1], "y", "forgetting")["second"], by_hand(rows["B"][0])[1])
    assert "average accuracy, mean over clients" in seen(drawn[1])
    for run in rows["B"]:
        for entry in run["record"]["rounds"]:
            entry["correct"] = {"server": [0] * 6}
    with raises(InvalidValueError, "results", value="B"):
        write_figures(tmp_path, [figure(kind="average_accuracy", panels=shown)], rows)


def test_write_figures_communication_equals_sums_by_hand(tmp_path, drawn):
    rows = {"A": [study(0), study(1, scale=3.0)], "B": [study(2)], "C": [study(3)]}
    shown = {"all": {"first": "A", "second": "B", "third": "C"}, "one": {"third": "C"}}
    write_figures(tmp_path, [figure(kind="communication", panels=shown)], rows)
    # Rounds alternate between one and two training clients. In round r, a client sends 1000 + 100 r bytes and receives
    # 3000 bytes. In the run with scale 3, both numbers are 3 times as large.
    up, down = sum((1 + r % 2) * (1000 + 100 * r) for r in range(6)), 9 * 3000
    bars = drawn[0]["datasets"]["volumes all"]
    expected = [[0, 2 * up], [2 * up, 2 * up + 2 * down], *2 * [[0, up], [up, up + down]]]
    close([[bar["begin"], bar["end"]] for bar in bars], np.array(expected) / 1e6)
    assert [bar["row"] for bar in bars[::2]] == ["first", "second", "third"]
    seconds = sum(1000 + 100 * r + 3000 for r in range(6)) / np.array(BANDWIDTHS)
    times = lines(drawn[0], "all", "times all")
    assert list(times) == ["first", "second, third"] and list(lines(drawn[0], "one", "times one")) == ["third"]
    close(times["first"], 2 * seconds)
    close(times["second, third"], seconds)
    assert [scale["type"] for scale in find(drawn[0]["vconcat"][0]["hconcat"][1], "scale") if "type" in scale][:2] == [
        "log"
    ] * 2
    write_figures(tmp_path, [figure(kind="volume_by_round", panels={"all": shown["all"]})], rows)
    by_round = np.array([(1 + r % 2) * (4000 + 100 * r) for r in range(6)]) / 1e6
    close(lines(drawn[1], "all")["first"], 2 * by_round)
    close(lines(drawn[1], "all")["second, third"], by_round)


@pytest.mark.parametrize("kind", ["average_accuracy", "communication", "volume_by_round", "stream_accuracy"])
@pytest.mark.parametrize("number", [1, 16])
def test_write_figures_many_rows_have_names_and_distinct_styles(tmp_path, drawn, kind, number):
    rows = {f"method number {n}": [study(n, scale=1 + n)] for n in range(number)}
    write_figures(tmp_path, [figure(kind=kind, panels={"data": {row: row for row in rows}})], rows)
    text = seen(drawn[0])
    assert all(re.search(rf"\b{row}\b", text) for row in rows)
    looks = {tuple(map(str, look)) for look in zip(*ranges(drawn[0]), strict=True)}
    # No two lines have the same style.
    assert len(looks) == number


def ranges(spec):
    """Return the colors and the marker shapes of the lines."""
    scales = [scale for scale in find(spec, "scale") if scale is not None]
    found = [scale["range"] for scale in scales if len(scale.get("range", [])) and "domain" in scale]
    colours = next(one for one in found if str(one[0]).startswith("#"))
    return colours, next(one for one in found if one[0] == "circle")
