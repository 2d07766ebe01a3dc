"""Tests of the reports of one run and of several runs.

A report shows the values of the record. It is one file that makes no network requests.
"""

import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.metadata import version

import numpy as np
import pytest
import vl_convert
from raising import raises

from lightning_fcl.errors import InvalidValueError, MissingFileError, MissingValueError
from lightning_fcl.evaluation.comparison import compare_page, find_runs, runs_by_name
from lightning_fcl.evaluation.curves import curves, matrices
from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.report import render_report
from lightning_fcl.evaluation.results import is_complete, read_results, write_files, write_results
from lightning_fcl.evaluation.summary import summary_metrics
from lightning_fcl.evaluation.table import Table

EXPECTED = {"general_accuracy/client1": 0.753, "F_2/client1": 0.212, "general_accuracy/other": 0.5}


def record(groups=6, tasks=2, rounds_per_task=3, seed=0):
    """Return a record. `client1` learns one group per task. `generalized` learns all groups and misses round 2."""
    rng = np.random.default_rng(seed)
    rounds = []
    for r in range(tasks * rounds_per_task):
        models = ["client1", "server"] if r == 2 else ["client1", "generalized", "server"]
        rounds.append(
            {
                "round": r,
                "experience": {
                    "client1": r // rounds_per_task,
                    "generalized": 0,
                    "server": r // rounds_per_task,
                },
                "correct": {model: rng.integers(101, size=groups).tolist() for model in models},
                "upload_bytes": {model: 1_500_000 for model in models if model != "server"},
                "download_bytes": {model: 2_000_000 for model in models if model != "server"},
                "dropped": {"generalized": "non-finite weights"} if r == 4 else {},
                "seconds": 0.1,
            }
        )
    everything = list(range(groups))
    return {
        "groups": [f"group|{g}" for g in everything],
        "totals": [100] * groups,
        "tasks": {
            "client1": [[t] for t in range(tasks)],
            "generalized": [everything],
            "server": [everything] * tasks,
        },
        "rounds": rounds,
    }


def results(row="FLwF-2T/FT", seed=0, expected=None, **shape):
    run = record(seed=seed, **shape)
    return {
        "recipe": {"paper": "flwf", "row": row} if row else None,
        "seed": seed,
        "metrics": summarize(run),
        "record": run,
        "expected": expected or {},
        "versions": {"lightning-fcl": "0.1.0", "torch": "2.13.0"},
        "machine": "a small computer",
        "seconds": 12.34,
        "command": "lightning-fcl fit --config flwf.yaml",
        "finished": True,
    }


class Reader(HTMLParser):
    """A parser of a page: reads tags with attributes, charts by caption, tables by section, and the visible text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.charts, self.seen, self.tables, self.style = [], {}, [], {}, ""
        self._in, self._title, self._caption = [""], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self._caption = attrs.get("aria-label", self._caption)
        if tag in ("script", "style", "h2", "summary"):
            self._in.append(f"{tag} {attrs.get('type', '')}".strip())
        elif tag == "tr":
            self.tables.setdefault(self._title, []).append([])
        elif tag in ("th", "td"):
            self.tables[self._title][-1].append(("", attrs.get("class", "")))

    def handle_endtag(self, tag):
        if tag in ("script", "style", "h2", "summary"):
            self._in.pop()

    def handle_data(self, text):
        inside = self._in[-1]
        if inside == "script application/json":
            self.charts[self._caption] = json.loads(text)
        elif inside == "style":
            self.style += text
        elif inside != "script":
            self.seen.append(text.strip())
            self._title = text if inside in ("h2", "summary") else self._title
            if text.strip() and self.tags[-1][0] in ("th", "td"):
                *_, (before, kind) = cells = self.tables[self._title][-1]
                cells[-1] = before + text, kind


def save(folder, content):
    folder.mkdir(exist_ok=True)
    write_results(folder, content)
    return folder


def test_report_has_settings_and_comparison_with_the_paper():
    content = results(expected=EXPECTED)
    reader = Reader(render_report(content))
    said = " ".join(reader.seen)
    for part in (
        "FLwF-2T/FT (flwf)",
        "seed\xa00",
        "12.3 s",
        "a small computer",
        "torch 2.13.0",
        "6 rounds, 2 clients",
    ):
        assert part in said
    ours = content["metrics"]["general_accuracy/client1"]
    lines = {line[0][0]: [text for text, _ in line[1:]] for line in reader.tables["Comparison with expected values"]}
    assert lines["A_gen client1"] == [f"{ours:.3f}", "0.753", f"{ours - 0.753:+.3f}"]
    assert lines["A_gen other"] == ["-", "0.500", "-"]
    head, server, *_ = reader.tables["All metrics"]
    assert server[0][0] == "server"
    assert server[head.index(("general_accuracy", ""))][0] == f"{content['metrics']['general_accuracy/server']:.3f}"
    _, problem = reader.tables["Communication"]
    assert [text for text, _ in problem] == ["5", "generalized", "non-finite weights"]


def test_report_of_one_task_has_no_comparison_with_the_paper():
    page = Reader(render_report(results(tasks=1)))
    assert "Comparison with expected values" not in page.seen and not any("A_2" in text for text in page.seen)


def test_read_results_damaged_file_raises(tmp_path):
    path = tmp_path / "results.json"
    with raises(MissingFileError, value=path):
        read_results(tmp_path)
    path.write_text('{"seed": 0,')
    with raises(InvalidValueError, value=path):
        read_results(tmp_path)
    for other in ('{"seed": 0}', "[1]"):
        path.write_text(other)
        with raises(InvalidValueError, "format"):
            read_results(tmp_path)
    write_results(tmp_path, {"seed": 0})
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with raises(InvalidValueError, value=path):
        read_results(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def assert_asks_no_host(page):
    reader = Reader(page)
    for tag, attrs in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "source")
        assert not {"src", "href", "srcset", "data", "action", "style", "onload", "onclick"} & {*attrs}, (tag, attrs)
    assert not re.search(r"url\(|@import", reader.style)
    policy = next(attrs["content"] for tag, attrs in reader.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';") and "http" not in policy
    for chart in reader.charts.values():
        assert '"url"' not in json.dumps(chart) and '"href"' not in json.dumps(chart)
    return reader


def rows_of(chart):
    return [row for data in chart["datasets"].values() for row in data]


def find(node, name):
    if isinstance(node, dict):
        yield from (node[name],) if name in node else ()
        for child in node.values():
            yield from find(child, name)
    elif isinstance(node, list):
        for child in node:
            yield from find(child, name)


def full(**shape):
    one = {"all": [0.5, 1.0, 0.5, 0.0], "groups": {key: [0.5] * 4 for key in "abcd"}, "owners": {}}
    content = results(expected=EXPECTED, **shape)
    content["densities"] = {"edges": [-1.0, -0.5, 0.0, 0.5, 1.0], "experiences": [{"experience": 0, **one}]}
    return content | {"parts": {"model": "MLP in Classifier", "data": "digits", "methods": "Replay"}}


@pytest.mark.seconds
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"groups": 10, "tasks": 5},
        {"groups": 30, "tasks": 25, "rounds_per_task": 2},
        {"groups": 2, "tasks": 2, "rounds_per_task": 1},
        {"groups": 1, "tasks": 1, "rounds_per_task": 1},
    ],
)
def test_report_is_one_file_with_valid_charts(tmp_path, shape):
    folder = save(tmp_path, full(**shape))
    (folder / "config.yaml").write_text("model: <script>alert(1)</script>\n")
    page = write_files(folder).read_text()
    assert len(page) < 2_000_000
    reader = assert_asks_no_host(page)
    assert reader.charts
    for chart in reader.charts.values():
        vl_convert.vegalite_to_vega(json.dumps(chart))
        assert rows_of(chart)
    assert "model: <script>alert(1)</script>" in reader.seen and "<script>alert" not in page
    assert "MLP in Classifier" in " ".join(reader.seen) and "copy" in reader.seen
    assert is_complete(folder)


def test_report_charts_have_values_of_the_record():
    content = results(groups=10, tasks=5)
    drawn = {caption.split(".")[0]: spec for caption, spec in Reader(render_report(content)).charts.items()}
    every = curves(content["record"])
    server = next(chart for name, chart in drawn.items() if name.startswith("Server: on the whole test set"))
    ours = {(row["line"], row["round"]): row["value"] for row in rows_of(server) if "line" in row}
    for round_idx, whole, learnt in zip(
        every["server"].rounds, every["server"].overall, every["server"].seen_classes, strict=True
    ):
        assert ours["server, whole test set", round_idx + 1] == pytest.approx(whole, abs=1e-4)
        assert ours["server, all experiences so far", round_idx + 1] == pytest.approx(learnt, abs=1e-4)
    rows = rows_of(drawn["Accuracy on each class or domain"])
    groups = {(row["model"], row["round"], row["group"]): row["value"] for row in rows}
    assert groups["client1", 3, "group|7"] == pytest.approx(every["client1"].accuracy[2, 7], abs=1e-4)
    cells = next(chart for name, chart in drawn.items() if name.startswith("Row: the task"))
    found = {(row["model"], row["after"], row["on"]): row["value"] for row in rows_of(cells)}
    np.testing.assert_allclose(
        [[found["client1", t, d] for d in range(1, 6)] for t in range(1, 6)],
        matrices(content["record"])["client1"],
        atol=1e-4,
    )
    ends = {row["client"]: row["value"] for row in rows_of(drawn["Final value of each client"])}
    expected = {model: every[model].seen_classes[-1] for model in ("client1", "generalized")}
    assert ends == pytest.approx(expected, abs=1e-4)


def test_summary_metrics_has_at_most_five_values():
    names = [one.name for one in summary_metrics(results(tasks=3))]
    assert names == ["final accuracy", "average accuracy", "forgetting", "worst client", "communication"]
    content = results(tasks=1)
    for entry in content["record"]["rounds"]:
        entry["upload_bytes"] = entry["download_bytes"] = {}
    content["metrics"] = summarize(content["record"])
    assert [one.name for one in summary_metrics(content)] == ["final accuracy", "worst client"]


@pytest.mark.seconds
def test_report_of_thousand_clients_names_the_worst():
    content = results(tasks=1, groups=3)
    rng = np.random.default_rng(0)
    for entry in content["record"]["rounds"]:
        for client in range(1000):
            entry["correct"][str(client)] = rng.integers(101, size=3).tolist()
            entry["experience"][str(client)] = 0
    content["record"]["tasks"] |= {str(client): [[0, 1, 2]] for client in range(1000)}
    page = render_report(content)
    assert len(page) < 2_000_000
    text = " ".join(Reader(page).seen)
    assert "1002 of 1002 clients were tested" in text
    every = {model: curve.seen_classes[-1] for model, curve in curves(content["record"]).items() if model != "server"}
    worst = min(every, key=every.get)
    assert f"client {worst} {every[worst]:.3f}" in re.sub(r"\s+", " ", text)


def test_report_with_measures_shows_the_measure():
    rounds = [
        {
            "round": r,
            "experience": {"server": 0, "a": 0, "b": 0},
            "values": {m: {"MSE": {"0": 40.0 - r}} for m in ("server", "a")} | {"b": {"MSE": {"0": None}}},
        }
        for r in range(3)
    ]
    record = {"groups": ["all"], "totals": [5], "tasks": {m: [[0]] for m in ("server", "a", "b")}, "rounds": rounds}
    for entry in rounds:
        entry["values"]["c"], entry["experience"]["c"] = {"MSE": {"0": 90.0}}, 0
    record["tasks"]["c"] = [[0]]
    record["measures"] = [{"name": "MSE", "higher_is_better": False}]
    page = Reader(render_report(results() | {"record": record, "metrics": summarize(record)}))
    numbers = " ".join(filter(None, page.seen[page.seen.index("38.000") : page.seen.index("MSE by round")]))
    assert numbers.startswith("38.000 final MSE") and "90.000 worst client" in numbers
    first, *_ = page.charts.values()
    spread = [(row["worst client"], row["worst"], row["best"]) for row in rows_of(first) if "worst" in row]
    assert spread == [("c", 90, 40), ("c", 90, 39), ("c", 90, 38)]
    for chart in page.charts.values():
        vl_convert.vegalite_to_vega(json.dumps(chart))
        assert "[0, 1]" not in json.dumps(list(find(chart, "domain")))


def test_report_of_stopped_run_without_rounds_has_warning(tmp_path):
    content = results() | {"finished": False}
    content["record"]["rounds"] = []
    content["metrics"] = summarize(content["record"])
    page = write_files(save(tmp_path, content)).read_text()
    assert "stopped before its end" in page and not Reader(page).charts and "0 rounds" in page
    # Without charts, the page does not contain the script that draws charts, so the page is small.
    assert len(page) < 50_000
    assert not is_complete(tmp_path)


def test_compare_page_has_means_over_seeds(tmp_path):
    for label, seeds in {"one": 3, "two": 2}.items():
        for seed in range(seeds):
            folder = tmp_path / label / f"seed-{seed}"
            folder.mkdir(parents=True)
            write_results(folder, results(row=f"Row {label} <b>", seed=seed))
    alone = tmp_path / "alone"
    alone.mkdir()
    write_results(alone, results(row=None))
    groups = runs_by_name(find_runs([tmp_path]))
    assert {label: len(runs) for label, runs in groups.items()} == {"alone": 1, "Row one <b>": 3, "Row two <b>": 2}
    page = compare_page(groups)
    reader = assert_asks_no_host(page)
    assert len(reader.charts) == 3 and "Row one <b>" in reader.seen
    finals = [run["metrics"]["final_accuracy/server"] for run in groups["Row one <b>"]]
    assert f"{np.mean(finals):.3f} ± {np.std(finals, ddof=1):.3f}" in reader.seen
    for chart in reader.charts.values():
        vl_convert.vegalite_to_vega(json.dumps(chart))
    rows = rows_of(next(iter(reader.charts.values())))
    curve = [row for row in rows if row["line"] == "Row one <b>" and row["round"] == 6]
    whole = next(row for row in curve if row["view"].startswith("server"))
    assert whole["value"] == pytest.approx(np.mean(finals), abs=1e-4) and whole["seeds"] == 3
    with raises(MissingValueError, "groups"):
        compare_page({})
    with raises(MissingFileError, value=tmp_path / "nothing"):
        find_runs([tmp_path / "nothing"])


def test_compare_page_many_rows_highlights_one():
    groups = {f"row {number}": [results(seed=number)] for number in range(12)}
    chart = next(iter(Reader(compare_page(groups)).charts.values()))
    assert "highlight " in list(find(chart, "name"))
    vl_convert.vegalite_to_vega(json.dumps(chart))


def test_compare_page_with_table_has_verdicts():
    runs = [results(seed=seed, expected={"general_accuracy/client1": 0.5, "F_2/client1": -3.0}) for seed in range(2)]
    page = Reader(
        compare_page({"FLwF-2T/FT": runs}, Table.from_results(runs, "flwf", "small", "lightning-fcl reproduce flwf"))
    )
    said = " ".join(filter(None, page.seen))
    assert "Our runs have the scale `small`. The expected values are for the full scale." in said
    assert "1 of 2 partly reproduced" in said and "0 within 2 standard deviations" in said and "1 outside" in said
    assert [kind for _, kind in page.tables["Comparison with expected values"][1]] == ["", "near", "outside"]


@pytest.mark.parametrize("content", [b"steal()", b"\xff\xfe", b"", b"draw('\xc3')"])
def test_library_invalid_cached_script_is_made_again(tmp_path, monkeypatch, content):
    from lightning_fcl.evaluation import charts

    script, made = "draw('</script></SCRIPT>')", []
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet: made.append(1) or script)
    digests = {version("vl-convert-python"): hashlib.sha256(script.encode()).hexdigest()}
    monkeypatch.setattr(charts, "_SCRIPTS", digests)
    library = charts._library.__wrapped__
    embedded = r"draw('<\/script><\/SCRIPT>')"
    assert library() == library() == embedded and len(made) == 1
    (kept,) = (tmp_path / "scripts").iterdir()
    kept.write_bytes(content)
    assert library() == embedded and len(made) == 2 and kept.read_text() == script
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", "/proc/nothing")
    assert library() == embedded and len(made) == 3


def test_library_of_an_unknown_version_is_not_cached(tmp_path, monkeypatch):
    from lightning_fcl.evaluation import charts

    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet: "draw()")
    monkeypatch.setattr(charts, "_SCRIPTS", {})
    assert charts._library.__wrapped__() == "draw()"
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_script_of_the_installed_version_has_the_known_digest():
    from lightning_fcl.evaluation import charts

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
    assert charts._SCRIPTS[version("vl-convert-python")] == hashlib.sha256(script.encode()).hexdigest()
