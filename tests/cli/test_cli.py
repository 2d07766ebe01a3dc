import json
import multiprocessing
import re
import subprocess
import sys

import pytest
import torch
import yaml
from raising import raises

from lightning_fcl import __version__
from lightning_fcl.cli.jobs import Job, run_jobs
from lightning_fcl.cli.main import COMMANDS, main
from lightning_fcl.cli.search import Search, validate_space
from lightning_fcl.data.datasets import ArrayDataset, load_dataset
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.io.checkpoint import newest_checkpoint
from lightning_fcl.runs.federated_cli import FederatedCLI
from lightning_fcl.runs.fit import resolve_recipe, run_cli
from lightning_fcl.runs.loaded_recipe import load_recipe
from lightning_fcl.runs.paper_rows import RowEntry, expand_grids, list_cases, paper_rows, recipes_folder
from lightning_fcl.runs.recipe import Recipe, Setting

RECIPES = recipes_folder()


HELPS = """
import contextlib, io, json, resource, sys
from lightning_fcl.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main(words)
    used = resource.getrusage(resource.RUSAGE_SELF)
    loaded = sorted({"torch", "lightning"} & set(sys.modules))
    print(json.dumps([shown.getvalue(), used.ru_utime + used.ru_stime, loaded]))
"""


@pytest.fixture(scope="module")
def helps():
    """Return a dict by command. A value is a list of the help text, the CPU seconds so far, and the large imports.

    CPU seconds are counted from the start of the process. Large imports are torch and lightning.
    """
    every = [["--help"], *([name, "--help"] for name in COMMANDS)]
    words = [sys.executable, "-c", HELPS, json.dumps(every)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(map(" ".join, every), map(json.loads, lines), strict=True))


@pytest.mark.seconds
@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_does_not_import_torch_or_lightning(helps, words):
    shown, seconds, loaded = helps[" ".join(words)]
    assert "usage: lightning-fcl" in shown and loaded == []
    if words == ["--help"]:
        assert all(f"\n  {name} " in shown for name in COMMANDS)
        # The limit applies to the processor time of one process. The load of other processes hardly changes this
        # time.
        assert seconds < 0.3


def test_main_without_command_prints_help(capsys):
    main([])
    assert "usage: lightning-fcl" in capsys.readouterr().out


@pytest.mark.seconds
def test_fit_writes_all_files_of_run_folder(tiny, tmp_path, reports):
    out = tmp_path / "out"
    main(["fit", *tiny, "--data.data", "{name: digits}", "--out", str(out)])
    results = json.loads((out / "results.json").read_text())
    assert results["recipe"] is not None
    assert len(results["record"]["rounds"]) == 2
    assert results["metrics"]["upload_bytes/total"] == 2 * 3 * 4 * (64 * 64 + 64 + 64 * 10 + 10)
    lines = (out / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4
    page = (out / "report.html").read_text()
    assert "<h1>FLwF-2T + replay" in page
    assert "MLP in Classifier" in page and "digits, ClassIncremental, IID" in page and "FLwF2T, Replay" in page
    assert (out / "config.yaml").read_text().splitlines()[1] in page
    assert list(out.glob("events.out.tfevents.*"))
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["data"]["partition"]["init_args"]["num_clients"] == 3
    # Training with the written config.yaml gives the same result.
    main(["fit", "--config", str(out / "config.yaml"), "--out", str(tmp_path / "again")])
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    assert again["metrics"] == results["metrics"]


@pytest.mark.parametrize("given", [2, 0.34, 1.0])
def test_participation_keeps_int_or_float_type(tiny, given):
    parts = load_recipe(Recipe.from_words([*tiny, "--trainer.strategy.init_args.participation", str(given)]))
    found = parts.strategy.participation
    assert found == given and type(found) is type(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": {"partition": {"class_path": "Dirichlet", "init_args": {"alhpa": 1}}}},
            "got `alhpa`. Did you mean alpha?",
        ),
        ({"data": {"split": {"test": 0.0}}}, "Set `split=Split(test=0.2)` of the stream"),
        ({"trainer": {"val_check_interval": "x"}}, "that Lightning accepts, but got: Invalid time format"),
        (
            {"data": {"scenario": {"init_args": {"num_experiences": 0.001}}}},
            "`num_experiences` to be a whole number or a list of whole numbers, but got 0.001. Leave it out",
        ),
    ],
)
def test_fit_invalid_recipe_prints_one_message(tiny, tmp_path, error_of, change, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(change))
    out = tmp_path / "out"
    error = error_of(["fit", *tiny, "--config", str(path), "--out", str(out)])
    assert message in error
    assert "Traceback" not in error
    assert not (out / "results.json").exists()


def test_fit_invalid_callback_argument_prints_plain_error(tiny, tmp_path, error_of):
    path = tmp_path / "wrong.yaml"
    method = {"class_path": "lightning_fcl.callbacks.FedProx", "init_args": {"mu": -1.0}}
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [method]}}))
    error = error_of(["fit", *tiny, "--config", str(path)])
    assert error.startswith("Expected `mu` to be at least 0 but got -1.0. Use 0 or more. (")


@pytest.mark.seconds
@pytest.mark.parametrize("length", [3000, 0])
def test_damaged_checkpoint_error_suggests_earlier_one(tiny, tmp_path, error_of, length):
    out = tmp_path / "out"
    main(["fit", *tiny, "--out", str(out)])
    (first,) = (out / "checkpoints").glob("*.ckpt")
    last = first.with_name("later.ckpt")
    last.write_bytes(first.read_bytes())
    assert newest_checkpoint(out / "checkpoints") == last
    last.write_bytes(last.read_bytes()[:length])
    for command in ("fit", "test"):
        error = error_of([command, *tiny, "--out", str(out), "--ckpt_path", str(last)])
        assert f"Expected an undamaged checkpoint of tensors and plain values at {last}" in error
        assert f"Use {first}, the newest undamaged checkpoint there." in error
    assert newest_checkpoint(out / "checkpoints") == first


@pytest.mark.seconds
def test_checkpoint_hyperparameters_are_not_instantiated(tiny, tmp_path):
    """LightningCLI creates each class that the hyperparameters of a checkpoint name. `FederatedCLI` does not."""
    out, marker = tmp_path / "out", tmp_path / "marker"
    main(["fit", *tiny, "--out", str(out)])
    (path,) = (out / "checkpoints").glob("*.ckpt")
    checkpoint, touch = torch.load(path, weights_only=True), f"touch {marker}"
    for named in (
        {"optimizer": {"class_path": "os.system", "init_args": {"command": touch}}},
        {"_class_path": "os.system", "command": touch},
        {"_instantiator": "os.system", "command": touch},
    ):
        torch.save({**checkpoint, "hyper_parameters": named}, path)
        main(["test", *tiny, "--ckpt_path", str(path)])
        assert not marker.exists()
    main(["fit", *tiny, "--out", str(tmp_path / "again"), "--ckpt_path", str(path)])
    assert not marker.exists()


@pytest.mark.seconds
def test_fit_own_model_checkpoint_replaces_default(tiny, tmp_path):
    own = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(tmp_path / "own")}}
    for number, callbacks in enumerate([own, [own]]):
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
        main(["fit", *tiny, "--config", str(path), "--out", str(tmp_path / f"out-{number}")])
        assert list((tmp_path / "own").glob("*.ckpt"))
        assert not (tmp_path / f"out-{number}" / "checkpoints").exists()


def test_missing_dataset_error_names_download_command(tmp_path, error_of, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path))
    words = ["fit", "--config", str(RECIPES / "flwf/base.yaml"), "--out", str(tmp_path / "out")]
    assert "lightning-fcl data download ucihar" in error_of(words)


@pytest.mark.parametrize(
    ("paper", "number"),
    [
        ("flwf", 13),
        ("flwf-as-written", 8),
        ("incfed", 32),
        ("fedclip", 81),
        ("fedclip-hhar", 24),
        ("frozen-lite0", 1),
        ("odfcl", 28),
        ("fedvit", 171),
        ("analytic", 6),
    ],
)
def test_every_recipe_file_belongs_to_a_row(paper, number):
    rows = paper_rows(RECIPES / paper, None)
    assert len(rows) == number
    used = {path.resolve() for row in rows.values() for path in row.configs}
    assert all(path.is_file() for path in used)
    others = [
        path for path in (RECIPES / paper).glob("*.yaml") if not path.stem.startswith(("rows", "scale-", "search-"))
    ]
    assert {path.resolve() for path in others} <= used


@pytest.mark.parametrize("paper", ["flwf", "flwf-as-written"])
def test_single_file_recipe_contains_its_command(paper):
    for row, recipe in paper_rows(RECIPES / paper, None).items():
        text = recipe.configs[-1].read_text()
        assert f"--config recipes/{paper}/{recipe.configs[-1].name}" in text
        assert yaml.safe_load(text)["recipe"]["row"] == row


@pytest.mark.seconds
@pytest.mark.parametrize("search", sorted(RECIPES.glob("*/search*.yaml")), ids=lambda path: path.stem)
def test_every_search_file_is_valid(search):
    content = yaml.safe_load(search.read_text())
    # If a row uses this search, the files in `configs` of the search are merged into the recipe of the row.
    row = "GEM own head no margin" if "scale" in content else None
    rows = yaml.safe_load((search.parent / "rows.yaml").read_text())
    for name, entry in expand_grids({"rows": rows["rows"]}).items():
        row = name if entry.search == search.name else row
    for files in list_cases(rows).values():
        row = next((name for name, file in files.items() if file == search.name), row)
    for case in content.get("variants", [None]):
        validate_space(Search.read(search, case=case, row=row))


@pytest.mark.seconds
@pytest.mark.data
def test_reproduce_writes_table_and_resumes(data_folder, tmp_path, capsys):
    words = ["reproduce", "flwf", "--rows", "FCL-FT,FLwF-2T/FT + ex", "--scale", "smoke", "--seeds", "2"]
    words += ["--out", str(tmp_path), "--workers", "1"]
    main(words)
    table = read_table(tmp_path / "table.json")
    assert (table.paper, table.scale, table.seeds) == ("flwf", "smoke", [0, 1])
    assert table.command == f"lightning-fcl reproduce flwf --rows '{words[3]}' --scale smoke --seeds 2"
    assert set(table.rows) == {"FCL-FT", "FLwF-2T/FT + ex"}
    names = {
        "general_accuracy/client1",
        "general_accuracy/generalized",
        "general_accuracy/server",
        "personal_accuracy/client1",
        "A_2/client1",
        "F_2/client1",
    }
    assert set(table.rows["FCL-FT"]) == names
    assert table.rows["FCL-FT"]["A_2/client1"].n == 2
    assert table.rows["FCL-FT"]["A_2/client1"].paper == 0.5
    capsys.readouterr()
    stamp = (tmp_path / "fcl-ft" / "seed-0" / "results.json").stat().st_mtime_ns
    # Simulate an interrupted run.
    (tmp_path / "fcl-ft" / "seed-1" / "results.json").unlink()
    main(words)
    assert "Already finished: 3 of 4 runs." in capsys.readouterr().err
    assert (tmp_path / "fcl-ft" / "seed-0" / "results.json").stat().st_mtime_ns == stamp
    assert read_table(tmp_path / "table.json").rows == table.rows


RESERVOIR = """
model:
  class_path: lightning_fcl.ReservoirClassifier
  init_args:
    reservoir:
      class_path: lightning_fcl.models.EchoStateNetwork
      init_args: {in_features: 8, units: 5, seed: 0}
    num_classes: 10
    readout: last
trainer:
  strategy: {class_path: lightning_fcl.FederatedStrategy}
  callbacks:
    - {class_path: lightning_fcl.callbacks.ActivationDensity}
  enable_progress_bar: false
  enable_checkpointing: false
  logger: false
data:
  data: rows
  scenario: {class_path: ClassIncremental, init_args: {num_experiences: 2}}
  partition: {class_path: IID, init_args: {num_clients: 2}}
recipe: {paper: toy, row: one}
"""
FIGURES = """
base: base.yaml
rows: {one: one.yaml, two: two.yaml}
figures:
  - {file: accuracy.png, kind: stream_accuracy, title: Accuracy, panels: {all: {one: one}}}
  - {file: density.png, kind: activation_density, panels: {all: {one: one}}, experiences: true}
  - {file: both.png, kind: activation_density, panels: {all: {one: one, two: two}}}
"""


@pytest.mark.seconds
def test_reproduce_writes_figures_of_paper(tmp_path, monkeypatch, capsys, reports):
    digits = load_dataset("digits")
    rows = ArrayDataset(digits.x[:300].reshape(300, 8, 8), digits.y[:300], None, digits.classes, None, None)
    monkeypatch.setattr("lightning_fcl.data.samples.load_dataset", lambda name, root: rows)
    monkeypatch.setattr("lightning_fcl.runs.paper_rows.recipes_folder", lambda: tmp_path)
    folder, out = tmp_path / "toy", tmp_path / "out"
    folder.mkdir()
    (folder / "base.yaml").write_text(RESERVOIR)
    (folder / "one.yaml").write_text("recipe: {expected_metrics: {stream_accuracy/server: 1.0}}")
    (folder / "two.yaml").write_text("data: {batch_size: 8}")
    (folder / "rows.yaml").write_text(FIGURES)
    main(["reproduce", "toy", "--rows", "one", "--seeds", "2", "--workers", "1", "--out", str(out)])
    said = capsys.readouterr()
    assert f"Figures: {out}/accuracy.png, {out}/density.png" in said.out
    assert "Skipped figure both.png, because these rows were not run: two." in said.err
    assert {path.name for path in out.glob("*.png")} == {"accuracy.png", "density.png"}
    results = json.loads((out / "one" / "seed-1" / "results.json").read_text())
    assert len(results["densities"]["experiences"]) == 2 and len(results["densities"]["experiences"][0]["all"]) == 100
    assert (out / "one" / "seed-1" / "report.html").exists()


def test_data_ls_and_verify_report_datasets(capsys, error_of, tmp_path, monkeypatch):
    main(["data", "ls"])
    assert "ucihar" in capsys.readouterr().out
    main(["data", "verify", "digits"])
    assert "1797" in capsys.readouterr().out
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path))
    names = "cifar10, cifar100, core50, fc100, hhar, lfw, miniimagenet, orl, tinyimagenet, ucihar, wesad"
    assert f"cannot be used: {names}" in error_of(["data", "verify"])


@pytest.mark.seconds
def test_fit_without_max_epochs_trains_all_rounds(tiny, tmp_path):
    path = tmp_path / "open.yaml"
    path.write_text(
        yaml.safe_dump({"trainer": {"max_epochs": None}, "data": {"scenario": {"rounds_per_experience": 2}}})
    )
    words = [*tiny, "--config", str(path), "--out", str(tmp_path / "out")]
    cli = run_cli("fit", Recipe.from_words(words), FederatedCLI)
    rounds = json.loads((tmp_path / "out" / "results.json").read_text())["record"]["rounds"]
    assert [entry["round"] for entry in rounds] == list(range(cli.datamodule.plan.num_rounds))


@pytest.mark.seconds
def test_row_with_overrides_and_expected_is_reproduced(tmp_path, capsys, monkeypatch, small_recipe):
    """Rows of a paper can share files, override arguments, and contain the paper's numbers."""
    folder = tmp_path / "recipes" / "mine"
    folder.mkdir(parents=True)
    base = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "small.yaml").write_text(yaml.safe_dump(small_recipe(rounds=2, clients=3)))
    rows = {
        f"{clients} clients": {
            "configs": ["small.yaml"],
            "overrides": {"data.partition.num_clients": clients, "trainer.max_epochs": 1},
            "expected": {"final_accuracy/server": 0.25 * clients},
        }
        for clients in (2, 3)
    }
    (folder / "rows.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "rows": rows}))
    monkeypatch.setattr("lightning_fcl.runs.paper_rows.recipes_folder", lambda: folder.parent)
    main(["reproduce", "mine", "--out", str(tmp_path / "out"), "--workers", "1"])
    table = read_table(tmp_path / "out" / "table.json")
    assert table.versions["lightning-fcl"] == __version__ and re.search(r", \d+ cores, \d+ threads?", table.machine)
    assert [table.rows[row]["final_accuracy/server"].paper for row in rows] == [0.5, 0.75]
    for clients in (2, 3):
        record = json.loads((tmp_path / "out" / f"{clients}-clients" / "seed-0" / "results.json").read_text())["record"]
        assert len(record["rounds"]) == 1
        assert len(record["tasks"]) == clients + 1


@pytest.mark.seconds
def test_run_jobs_error_cancels_queued_jobs(tmp_path, monkeypatch):
    fork = multiprocessing.get_context("fork")  # A forked process does not import torch and Lightning again.
    monkeypatch.setattr("lightning_fcl.cli.jobs.multiprocessing.get_context", lambda method=None: fork)
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("data: {clients: none at all}\n")
    jobs = [Job(f"run {number}", Recipe((recipe,)), 0, tmp_path / f"run-{number}") for number in range(12)]
    with raises(UnknownNameError, "data.clients"):
        run_jobs(jobs, workers=2)
    assert len(list(tmp_path.glob("run-*"))) < 8


@pytest.mark.seconds
def test_fit_without_logger_writes_only_to_out(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "silent.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"logger": False}}))
    main(["fit", *tiny, "--config", str(path), "--out", str(tmp_path / "out")])
    assert {entry.name for entry in tmp_path.iterdir()} == {"silent.yaml", "tiny.yaml", "out"}
    assert (tmp_path / "out" / "config.yaml").is_file()


ODFCL = paper_rows(RECIPES / "odfcl", None)
# These rows combine the files of tested rows, or differ from a tested row only in the learning rate or the number of
# nodes. `make recipes` runs all rows if the data sets are available.
ALIKE = r"naive at|swarm of [125]$|fine-tuning: |ODFCL: |joint training: base|ridge: ORL"
TRIED = [row for row in ODFCL if not re.search(ALIKE, row)]
# Except for the row ODFCL, the tests of these rows are slow.
SLOW_ROW = {
    row: [pytest.mark.slow] if re.search("swarm|ridge", row) else [pytest.mark.slow, pytest.mark.long] for row in TRIED
}


@pytest.fixture
def short(tmp_path):
    """Return a function that writes a short copy of a recipe, and returns the arguments that load the copy.

    The base session of the copy has one epoch, and is cached in the folder of the test.
    """

    def copy(path):
        recipe = yaml.safe_load(path.read_text())
        for callback in recipe.get("trainer", {}).get("callbacks", []):
            if callback["class_path"].endswith("BaseSession"):
                arguments = callback["init_args"]
                assert arguments["cache_dir"] == "runs/base-sessions"
                epochs = min(1, arguments.get("pretrain_epochs", 1))
                arguments.update(epochs=1, pretrain_epochs=epochs, cache_dir=str(tmp_path / "base-sessions"))
        (tmp_path / path.name).write_text(yaml.safe_dump(recipe, sort_keys=False))
        return ["--config", str(tmp_path / path.name)]

    return copy


@pytest.mark.seconds
@pytest.mark.data
@pytest.mark.parametrize("row", [row if row == "ODFCL" else pytest.param(row, marks=SLOW_ROW[row]) for row in TRIED])
def test_odfcl_rows_smoke_scale_communicate_expected_bytes(data_folder, short, tmp_path, row):
    recipe, smallest = ODFCL[row], RECIPES / "odfcl" / "scale-smoke.yaml"
    words = [word for path in (*recipe.configs, smallest) for word in short(path)]
    main(
        [
            "fit",
            *words,
            *Recipe(recipe.settings).words,
            "--trainer.enable_progress_bar",
            "false",
            "--out",
            str(tmp_path / "out"),
        ]
    )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    record, settings = results["record"], {setting.name: setting.value for setting in recipe.settings}
    nodes = int(settings.get("data.scenario.init_args.num_nodes", 3))
    assert len(record["groups"]) == 10 and record["totals"] == [3] * 10
    assert record["tasks"]["server"] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    # The initial model has no correct prediction on the six classes of later sessions.
    assert sum(record["start"][4:]) == 0
    rounds = int(settings.get("data.scenario.init_args.rounds_per_session", 2))
    expected = [dict.fromkeys([*(f"node{n + 1}" for n in range(nodes)), "server"], e) for e in (1, 2)]
    assert [entry["experience"] for entry in record["rounds"]] == [e for e in expected for _ in range(rounds)]
    up, down = (32_328, 6_400) if "ODFCL-ridge" in row else (24_040, 24_040)
    sums, counts = {"ODFCL from ridge regression": (33_048, 0), "balanced softmax": (40, 40)}.get(row, (0, 0))
    for number, entry in enumerate(record["rounds"]):
        # Ridge statistics and class counts are uploaded only in the first round of a session.
        once = sums if number % rounds == 0 else 0
        for way, size in (("upload_bytes", up + once), ("download_bytes", down + counts)):
            assert {c: n for c, n in entry[way].items() if c != entry["master"]} == {
                c: size for c in entry[way] if c != entry["master"]
            }
            assert entry["missed_sync"] or len(entry[way]) == nodes or "missed" in row
    assert {f"stream_accuracy_{i}/server" for i in range(3)} <= results["metrics"].keys()
    assert len(list((tmp_path / "base-sessions").glob("*.safetensors"))) == 1


def test_expand_grids_combines_rows_and_changes():
    grid = {"rows": ["A"], "with": {"more": {"configs": ["b.yaml"], "overrides": {"y": 2}}}, "scales": ["paper"]}
    content = {"rows": {"A": {"configs": ["a.yaml"], "overrides": {"x": 1}}}, "grids": [grid]}
    assert expand_grids(content)["more A"] == RowEntry(
        ["a.yaml", "b.yaml"], overrides={"x": 1, "y": 2}, expected={}, scales=["paper"]
    )
    with raises(InvalidValueError, "rows", value="B"):
        expand_grids({**content, "grids": [{**grid, "rows": ["B"]}]})
    with raises(InvalidValueError, "rows", value="less A"):
        expand_grids({**content, "grids": [{**grid, "expected": {"less A": {}}}]})


def test_paper_rows_at_scale_excludes_other_rows(tmp_path):
    rows = {"A": "a.yaml", "B": {"configs": ["b.yaml"], "scales": ["paper"]}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "rows": rows}))
    assert list(paper_rows(tmp_path, None)) == ["A", "B"] and list(paper_rows(tmp_path, None, "small")) == ["A"]
    rows["A"] = {"configs": ["a.yaml"], "overrides": {"x": 1}, "scale_overrides": {"small": {"x": 2, "y": [3]}}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "rows": rows}))
    assert paper_rows(tmp_path, None)["A"].settings == (Setting("x", "1"),)
    assert paper_rows(tmp_path, None, "small")["A"].settings == (Setting("x", "2"), Setting("y", "[3]"))
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "scale"):
        paper_rows(tmp_path, ["B"], "small")


def telling_rows():
    """Return a test parameter for each row of fedvit with a file or setting that no earlier row has.

    Earlier rows are the rows above at the same scale, and all rows of larger scales.
    """
    seen, found = set(), []
    for scale in ("paper", "medium", "small", "smoke"):
        for name, row in paper_rows(RECIPES / "fedvit", None, scale).items():
            scaling = () if scale == "paper" else (RECIPES / "fedvit" / f"scale-{scale}.yaml",)
            parts = {*row.configs, *scaling, *row.settings}
            if not parts <= seen:
                recipe = Recipe((*row.configs, *scaling, *row.settings))
                found.append(pytest.param(recipe, id=f"{name} at {scale}"))
            seen |= parts
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recipe", telling_rows())
def test_every_fedvit_row_is_valid(recipe):
    assert resolve_recipe(recipe)["data"]["scenario"]["class_path"].endswith("FedViTScenario")
