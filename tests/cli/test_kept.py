"""Tests that committed runs are reused if their fingerprint matches. Otherwise, the runs are trained again."""

import json

import pytest
import yaml

from lightning_fcl.cli import jobs
from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.results import is_complete, read_results
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.runs import fit
from lightning_fcl.runs.paper_rows import recipes_folder

RECIPES = recipes_folder()


@pytest.fixture
def toy(tmp_path, monkeypatch, small_recipe):
    """Create the recipe folder of a paper with one row and one scale, and return the folder. The row trains quickly."""
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text((RECIPES / "quickstart.yaml").read_text())
    (folder / "scale-smoke.yaml").write_text(yaml.safe_dump(small_recipe(rounds=1, clients=2)))
    rows = {"a row": {"configs": [], "expected": {"final_accuracy/server": 0.5}}}
    (folder / "rows.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "rows": rows}))
    monkeypatch.setattr("lightning_fcl.runs.paper_rows.recipes_folder", lambda: folder.parent)
    return folder


def reproduce(out, *more, seeds=1):
    main(["reproduce", "toy", "--scale", "smoke", "--seeds", str(seeds), "--out", str(out), "--workers", "1", *more])


@pytest.mark.seconds
def test_reproduce_reuses_committed_run(toy, tmp_path, monkeypatch, capsys):
    reproduce(tmp_path / "first", "--commit-runs")
    kept = toy / "smoke" / "a-row" / "seed-0"
    assert f"Copied the run to {kept}" in capsys.readouterr().out
    assert {path.name for path in kept.iterdir()} == {"results.json", "fingerprint"}
    assert str(tmp_path) not in (kept / "results.json").read_text()
    assert read_results(kept)["command"] == "lightning-fcl reproduce toy --rows 'a row' --scale smoke --seeds 1"

    def never(*arguments):
        raise AssertionError(f"Expected no new run, but got a call with {arguments}.")

    monkeypatch.setattr(fit, "run_cli", never)
    reproduce(tmp_path / "second")
    assert f"Reused 1 of 1 runs from {toy / 'smoke'}" in capsys.readouterr().err
    assert is_complete(tmp_path / "second" / "a-row" / "seed-0")
    first, second = (read_table(tmp_path / name / "table.json") for name in ("first", "second"))
    assert first == second
    reproduce(tmp_path / "second", "--finished-only", seeds=3)
    said = capsys.readouterr().err
    assert "Reused" not in said and read_table(tmp_path / "second" / "table.json").rows == first.rows


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda kept: (kept / "fingerprint").unlink(), "the fingerprint differs"),
        (lambda kept: (kept / "results.json").write_text("{"), "results.json to contain JSON"),
        (
            lambda kept: (kept / "results.json").write_text(
                (kept / "results.json").read_text().replace('"seed": 0', "1", 1)
            ),
            "results.json to",
        ),
    ],
)
def test_reproduce_unusable_committed_run_trains_again(toy, tmp_path, monkeypatch, capsys, damage, said):
    reproduce(tmp_path / "first", "--commit-runs")
    damage(toy / "smoke" / "a-row" / "seed-0")
    ran = []
    true = jobs.run_job
    monkeypatch.setattr(jobs, "run_job", lambda job: ran.append(job.label) or true(job))
    capsys.readouterr()
    reproduce(tmp_path / "second")
    err = capsys.readouterr().err
    assert "Did not reuse a run for a row, seed 0: Expected " in err and said in err and "Reused" not in err
    assert ran == ["a row, seed 0"]
    first, second = (read_table(tmp_path / name / "table.json").rows for name in ("first", "second"))
    assert first == second


@pytest.mark.seconds
def test_reproduce_changed_recipe_ignores_committed_run(toy, tmp_path, capsys):
    reproduce(tmp_path / "first", "--commit-runs")
    scale = yaml.safe_load((toy / "scale-smoke.yaml").read_text())
    scale["trainer"]["max_epochs"] = 2
    (toy / "scale-smoke.yaml").write_text(yaml.safe_dump(scale))
    capsys.readouterr()
    reproduce(tmp_path / "second")
    assert "the fingerprint differs" in capsys.readouterr().err
    record = json.loads((tmp_path / "second" / "a-row" / "seed-0" / "results.json").read_text())["record"]
    assert len(record["rounds"]) == 2


@pytest.mark.seconds
def test_reproduce_run_of_first_tasks_resumes_with_more_tasks(toy, tmp_path, monkeypatch, capsys):
    scale = yaml.safe_load((toy / "scale-smoke.yaml").read_text())
    scale["trainer"]["max_epochs"] = None
    (toy / "scale-smoke.yaml").write_text(yaml.safe_dump(scale))
    reproduce(tmp_path / "whole", "--commit-runs")
    whole = read_results(tmp_path / "whole" / "a-row" / "seed-0")
    (toy / "smoke").rename(toy / "elsewhere")
    ran, plain = [], fit.run_cli
    monkeypatch.setattr(
        fit, "run_cli", lambda command, recipe, kind: ran.append(recipe.words) or plain(command, recipe, kind)
    )

    def results():
        found = read_results(tmp_path / "out" / "a-row" / "seed-0")
        return found, [{**entry, "seconds": 0, "processor_seconds": 0} for entry in found["record"]["rounds"]]

    rounds = [{**entry, "seconds": 0, "processor_seconds": 0} for entry in whole["record"]["rounds"]]
    reproduce(tmp_path / "out", "--tasks", "1", "--commit-runs")
    found, own = results()
    assert own == rounds[:1] and found["tasks"] == 1 and found["finished"] and len(rounds) == 2
    assert all(len(tasks) == 1 for tasks in found["record"]["tasks"].values()) and is_complete(
        tmp_path / "out/a-row/seed-0"
    )
    assert "--tasks 1" in read_results(toy / "smoke" / "a-row" / "seed-0")["command"]
    first = read_table(tmp_path / "out" / "table.json").rows
    reproduce(tmp_path / "out", "--tasks", "1")
    assert len(ran) == 1
    capsys.readouterr()
    reproduce(tmp_path / "out")
    assert "of all requested tasks in" in capsys.readouterr().err
    found, own = results()
    assert own == rounds and "--ckpt_path" in ran[1] and "tasks" not in found
    assert found["metrics"] == whole["metrics"]
    assert found["seconds"] > sum(entry["seconds"] for entry in found["record"]["rounds"]) - 0.1
    reproduce(tmp_path / "out", "--tasks", "1")  # The finished run includes the first task, so no run is trained again.
    assert len(ran) == 2
    again = read_table(tmp_path / "out" / "table.json").rows
    assert again["a row"]["final_accuracy/server"] == first["a row"]["final_accuracy/server"]
    reproduce(tmp_path / "third", "--tasks", "1")
    assert len(ran) == 2 and f"Reused 1 of 1 runs from {toy / 'smoke'}" in capsys.readouterr().err


def test_reproduce_finished_only_without_runs_raises(toy, tmp_path, capsys):
    with pytest.raises(SystemExit):
        reproduce(tmp_path / "out", "--finished-only")
    assert f"Expected finished runs in {tmp_path / 'out'} or {toy / 'smoke'}" in capsys.readouterr().err
