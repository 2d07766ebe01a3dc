import re

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_fcl.evaluation.metrics import summarize
from lightning_fcl.evaluation.report import compare_plot, write_report
from lightning_fcl.evaluation.results import read_results, write_results

EXPECTED = {"A_gen/client1": 0.753, "F_2/client1": 0.212, "A_gen/other": 0.5}


def record(groups=6, tasks=2, rounds_per_task=3, seed=0):
    """client1 learns one group after the other, generalized all of them; it misses the third round."""
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


def save(folder, content):
    folder.mkdir(exist_ok=True)
    write_results(folder, content)
    return folder


def evenly(text):
    """Without the spaces that make columns even."""
    return re.sub(" +", " ", text)


def assert_is_plot(path):
    image = matplotlib.image.imread(path)
    assert 900 <= image.shape[1] <= 1400
    assert image[..., :3].std() > 0.05


def test_report_tells_what_ran_and_compares_with_the_paper(tmp_path):
    content = results(expected=EXPECTED)
    path = write_report(save(tmp_path, content))
    text = evenly(path.read_text())
    assert path == tmp_path / "report.md"
    for part in ("# FLwF-2T/FT (flwf)", "Seed: 0", "12.3 s", "a small computer", "torch 2.13.0", "6 rounds, 2 clients"):
        assert part in text
    ours = content["metrics"]["A_gen/client1"]
    assert f"| A_gen client1 | {ours:.3f} | 0.753 | {ours - 0.753:+.3f} |" in text
    assert "| A_gen other | - | 0.500 | - |" in text
    assert f"| server | {content['metrics']['A_gen/server']:.3f} |" in text
    assert "upload: 16.500 MB, download: 22.000 MB" in text
    assert "- round 5, generalized: non-finite weights" in text
    assert {file.name for file in tmp_path.iterdir()} == {
        "results.json", "report.md", "accuracy.png", "matrices.png", "stream_accuracy.png", "traffic.png",
    }  # fmt: skip
    for name in ("accuracy", "matrices", "stream_accuracy", "traffic"):
        assert f"({name}.png)" in text
        assert_is_plot(tmp_path / f"{name}.png")


@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 10, "tasks": 5},
        {"groups": 30, "tasks": 25, "rounds_per_task": 2},
        {"groups": 2, "tasks": 2, "rounds_per_task": 1},
    ],
)
def test_plots_of_other_shapes(tmp_path, shape):
    write_report(save(tmp_path, results(row=None, **shape)))
    for name in ("accuracy", "matrices", "stream_accuracy", "traffic"):
        assert_is_plot(tmp_path / f"{name}.png")


def test_report_of_one_task_without_traffic_has_only_the_accuracy_plot(tmp_path):
    content = results(tasks=1)
    for entry in content["record"]["rounds"]:
        entry["upload_bytes"] = entry["download_bytes"] = {}
    text = write_report(save(tmp_path, content)).read_text()
    assert "accuracy.png" in text and "matrices.png" not in text and "traffic.png" not in text
    assert "Against the paper" not in text and "Dropped" not in text


def test_report_shows_the_densities_of_activations(tmp_path):
    one = {"all": [0.5, 1.0, 0.5, 0.0], "groups": {key: [0.5] * 4 for key in "abcd"}, "owners": {}}
    content = results(tasks=1)
    entries = [{"experience": 0, **one}]
    content["densities"] = {"edges": [-1.0, -0.5, 0.0, 0.5, 1.0], "experiences": entries}
    text = write_report(save(tmp_path, content)).read_text()
    assert "(densities.png)" in text and "stream_accuracy.png" not in text
    assert_is_plot(tmp_path / "densities.png")
    content["densities"]["experiences"] = []  # stopped before an experience had ended
    assert "densities.png" not in write_report(save(tmp_path, content)).read_text()


def test_report_with_a_client_that_finishes_early(tmp_path):
    content = results(tasks=3)
    for entry in content["record"]["rounds"][3:]:
        entry["experience"]["generalized"] = 1
        entry["correct"].pop("generalized")
    content["metrics"] = summarize(content["record"])
    write_report(save(tmp_path, content))
    assert_is_plot(tmp_path / "accuracy.png")


def test_report_of_a_run_without_rounds(tmp_path):
    content = results()
    content["record"]["rounds"] = []
    content["metrics"] = summarize(content["record"])
    assert "0 rounds" in write_report(save(tmp_path, content)).read_text()


def test_broken_results_are_named(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(FileNotFoundError, match=f"in {path} but found no such file"):
        write_report(tmp_path)
    path.write_text('{"seed": 0,')
    with pytest.raises(ValueError, match=f"Expected {path} to hold JSON but got: Expecting"):
        write_report(tmp_path)
    for other in ('{"seed": 0}', "[1]"):
        path.write_text(other)
        with pytest.raises(ValueError, match=f"Expected {path} to be of format 1 but it is of none: it is damaged, or"):
            write_report(tmp_path)
    write_results(tmp_path, {"seed": 0})
    with pytest.raises(ValueError, match=f"Expected {path} to have the entries recipe, metrics"):
        read_results(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_failing_plot_leaves_the_old_one(tmp_path, monkeypatch):
    write_report(save(tmp_path, results()))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def half(self, path):
        path.write_bytes(b"half a picture")
        raise OSError("disk full")

    monkeypatch.setattr(FigureCanvasAgg, "print_png", half)
    save(tmp_path, results())
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_compare_plot(tmp_path):
    runs = {"fine-tuning": results(seed=0), "replay": results(seed=1), "short": results(tasks=1)}
    path = compare_plot(tmp_path / "new", runs)
    assert path == tmp_path / "new" / "compare.png"
    assert_is_plot(path)
    with pytest.raises(ValueError, match="at least one run"):
        compare_plot(tmp_path, {})
    for entry in runs["replay"]["record"]["rounds"]:
        del entry["correct"]["server"]
    with pytest.raises(ValueError, match="record of the server in `results_by_label` but replay has none"):
        compare_plot(tmp_path, runs)
