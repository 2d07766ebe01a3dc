"""Tests of `read_run` and `read_runs`: tables of a trained run against its record, and of runs that have not ended."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from raising import raises

from lightning_fcl.cli.main import main
from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingFileError
from lightning_fcl.evaluation import read_run, read_runs
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.runs.paper_rows import recipes_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_recipe, without_pages):
    """Return the folder of a run with two experiences."""
    folder = tmp_path_factory.mktemp("run_data")
    content = small_recipe(rounds=4, clients=3, rounds_per_experience=2)
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    files = ["--config", str(recipes_folder() / "quickstart.yaml"), "--config", str(folder / "small.yaml")]
    with without_pages():
        out = ["--out", str(folder / "runs" / "mine" / "seed-3")]
        main(["fit", *files, *out, "--seed_everything", "3", "--predictions"])
    return folder / "runs" / "mine" / "seed-3"


@pytest.mark.seconds
def test_read_run_tables_equal_record(trained):
    run, results = read_run(trained), read_results(trained)
    record = results["record"]
    assert (run.seed, run.finished, run.metrics) == (3, True, results["metrics"])
    totals = np.array(record["totals"])
    for entry in record["rounds"]:
        of_round = run.rounds[run.rounds["round"] == entry["round"]].set_index("model")
        assert {*of_round.index} == {*entry["correct"]}
        whole = sum(entry["correct"]["server"]) / totals.sum()
        assert of_round.loc["server", "accuracy"] == pytest.approx(whole)
        for client, nbytes in entry["upload_bytes"].items():
            sent = run.communication.set_index(["round", "client"]).loc[(entry["round"], client)]
            assert sent["upload_bytes"] == nbytes
    assert run.communication["download_bytes"].sum() == results["metrics"]["download_bytes/total"]
    assert run.timings["seconds"].tolist() == [entry["seconds"] for entry in record["rounds"]]
    assert run.timings["simulated_seconds"].isna().all()


@pytest.mark.seconds
def test_read_run_accuracy_matrix_gives_forgetting(trained):
    run = read_run(trained)
    for model, part in run.accuracy_matrix.groupby("model"):
        matrix = part.pivot_table(index="after_task", columns="test_task", values="accuracy").to_numpy()
        best, last = matrix[:-1].max(axis=0), matrix[-1]
        assert (best - last)[:-1].mean() == pytest.approx(run.metrics[f"forgetting/{model}"])
        assert last.mean() == pytest.approx(run.metrics[f"average_accuracy/{model}"])


@pytest.mark.seconds
def test_read_run_confusion_equals_predictions_of_final_model(trained):
    run, predictions = read_run(trained), pd.read_csv(trained / "predictions.csv", dtype=str)
    confusion, last_round = run.confusion, run.rounds["round"].max()
    assert [*confusion.columns] == ["model", "after_experience", "target", "prediction", "count"]
    assert {*confusion["model"]} == {"server", "0", "1", "2"} and {*confusion["after_experience"]} == {0, 1}
    final = confusion[confusion["after_experience"] == 1]
    for model, part in final.groupby("model"):
        tested = run.rounds[(run.rounds["model"] == model) & (run.rounds["round"] == last_round)]
        correct = part.loc[part["target"] == part["prediction"], "count"].sum()
        assert correct / part["count"].sum() == pytest.approx(tested["accuracy"].item())
    of_server = predictions[predictions["model"] == "server"]
    counts = of_server.groupby(["target", "prediction"]).size().to_dict()
    server = final[final["model"] == "server"]
    assert server.set_index(["target", "prediction"])["count"].to_dict() == counts
    assert (of_server["target"] == of_server["prediction"]).mean() == pytest.approx(
        run.metrics["final_accuracy/server"]
    )


@pytest.mark.seconds
def test_read_run_clients_have_personal_accuracy_and_spread(trained):
    run = read_run(trained)
    seen = run.rounds[run.rounds["model"] != "server"].groupby("model")["accuracy_seen"]
    clients = run.clients.set_index("client")
    assert clients["accuracy_mean"].to_dict() == pytest.approx(seen.mean().to_dict())
    assert clients["accuracy_std"].to_dict() == pytest.approx(seen.std().to_dict(), nan_ok=True)
    assert clients["accuracy"].to_dict() == seen.last().to_dict()
    means = {client: run.metrics[f"personal_accuracy/{client}"] for client in clients.index}
    assert clients["accuracy_mean"].to_dict() == pytest.approx(means)


@pytest.mark.seconds
def test_read_run_settings_are_the_recipe(trained):
    settings = read_run(trained).settings.set_index("name")["value"]
    assert settings["seed_everything"] == 3 and settings["data.partition.init_args.num_clients"] == 3
    assert settings["trainer.callbacks.0.class_path"].endswith("FLwF2T") and settings.index.is_unique


@pytest.mark.seconds
def test_read_run_without_results_has_the_finished_rounds(trained, tmp_path):
    whole = read_run(trained)
    for name in ("config.yaml", "record.jsonl"):
        shutil.copy(trained / name, tmp_path / name)
    lines = (tmp_path / "record.jsonl").read_bytes().splitlines(keepends=True)
    rounds = [index for index, line in enumerate(lines) if b'"round"' in line]
    # The process was killed while it wrote the last round.
    kept = b"".join(lines[: rounds[-1]])
    (tmp_path / "record.jsonl").write_bytes(kept + lines[rounds[-1]][:20])
    run = read_run(tmp_path)
    assert not run.finished and run.seed == 3
    pd.testing.assert_frame_equal(run.rounds, whole.rounds[whole.rounds["round"] < 3].reset_index(drop=True))
    frame = read_runs(tmp_path)
    assert frame[["run", "seed", "finished", "rounds"]].to_numpy().tolist() == [[".", 3, False, 3]]
    (tmp_path / "record.jsonl").write_bytes(b"")
    with raises(InvalidValueError, value=tmp_path / "record.jsonl"):
        read_run(tmp_path)


@pytest.mark.seconds
def test_read_runs_has_method_seed_and_options(trained, tmp_path):
    folder = tmp_path / "all"
    shutil.copytree(trained, folder / "a" / "seed-3")
    results = json.loads((trained / "results.json").read_text())
    results["searched"] = {"model.lr": 0.5}
    from lightning_fcl.evaluation.results import write_results

    (folder / "b").mkdir()
    write_results(folder / "b", {name: value for name, value in results.items() if name not in ("format", "checksum")})
    frame = read_runs(folder).set_index("run")
    assert frame["seed"].to_dict() == {"a/seed-3": 3, "b": 3} and {*frame["method"]} == {read_run(trained).method}
    assert np.isnan(frame.loc["a/seed-3", "model.lr"]) and frame.loc["b", "model.lr"] == 0.5
    assert frame["final_accuracy/server"].nunique() == 1 and not any(name.endswith("/0") for name in frame.columns)


@pytest.mark.seconds
def test_read_run_damaged_or_missing_files_raise(trained, tmp_path):
    with raises(MissingFileError, value=tmp_path):
        read_run(tmp_path)
    with raises(MissingFileError, value=tmp_path):
        read_runs(tmp_path)
    for name in ("results.json", "record.jsonl"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b'{"round": 0\n' + (trained / name).read_bytes()[:200] + b"\n")
        with pytest.raises(ValueError, match=str(folder / name)) as error:
            read_run(folder)
        assert isinstance(error.value, DamagedFileError | InvalidValueError)


def test_import_of_evaluation_does_not_import_pandas():
    code = "import sys, lightning_fcl.evaluation as e; e.read_run; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
