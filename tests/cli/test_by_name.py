"""Tests of commands that take the name of a recipe, class or dataset: ls, cp, validate, fit and test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_fcl import __version__
from lightning_fcl.cli.fit import flatten_recipe
from lightning_fcl.cli.list_command import KINDS
from lightning_fcl.cli.main import main
from lightning_fcl.runs.fit import resolve_recipe
from lightning_fcl.runs.paper_rows import find_recipe, list_recipes
from lightning_fcl.runs.recipe import Recipe

RECIPES = list_recipes()
OF_EACH_PAPER = [
    "quickstart",
    "quickstart-private",
    "analytic/stsa-e",
    "fedclip/wesad-75-fedclip-replay",
    "fedclip-hhar/25-fedip-sigma-0-1-over-5-rounds",
    "fedvit/gem-own-head",
    "flwf/flwf-2t-ft",
    "flwf-as-written/flwf-2t-ft",
    "frozen-lite0/ridge-classes-seen-before",
    "incfed/wesad-75-fedavg",
    "odfcl/odfcl-orl",
    "ucihar-reservoir/incfed",
]


@pytest.fixture
def change(tmp_path, small_recipe):
    """Write overrides that make the quickstart recipe small, and return the path of the file."""
    path = tmp_path / "change.yaml"
    path.write_text(yaml.safe_dump(small_recipe(rounds=2, clients=3)))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_ls_kind_prints_one_line_per_item(kind, capsys):
    main(["ls", kind, "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed and all(about and "\n" not in about for about in listed.values())
    main(["ls", kind])
    out = capsys.readouterr().out
    assert all(name in out for name in listed)


@pytest.mark.seconds
def test_ls_pattern_or_part_of_name_selects_items(capsys):
    main(["ls", "recipes", "flwf/*-ex", "--json"])
    assert all(name.startswith("flwf/") and name.endswith("-ex") for name in json.loads(capsys.readouterr().out))
    main(["ls", "methods", "fedvit", "--json"])
    assert list(json.loads(capsys.readouterr().out)) == ["FedViT"]


@pytest.mark.seconds
def test_ls_without_kind_counts_all_kinds(capsys):
    main(["ls", "--json"])
    assert json.loads(capsys.readouterr().out).keys() == KINDS.keys()


@pytest.mark.seconds
def test_ls_does_not_import_torch():
    code = (
        "import sys; from lightning_fcl.cli.main import main\n"
        "for kind in ('recipes', 'methods', 'models', 'scenarios', 'partitions'): main(['ls', kind])\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.seconds
def test_ls_into_closed_pipe_prints_no_error():
    code = f"{sys.executable} -m lightning_fcl ls recipes | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("quickstart") and done.stderr == ""


def test_version_option_prints_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"lightning-fcl {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "lightning_fcl", "--version"], capture_output=True, text=True)
    assert done.stdout == f"lightning-fcl {__version__}\n"


def check_flat(name, folder):
    """Check that the flattened file has the same content as the recipe, except for the output folder `out`."""
    text = flatten_recipe(RECIPES[name])
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    wanted = resolve_recipe(RECIPES[name].recipe)
    assert resolve_recipe(Recipe((folder / "recipe.yaml",))) | {"out": wanted["out"]} == wanted
    lines = [line for path in RECIPES[name].configs for line in path.read_text().splitlines() if line.startswith("#")]
    assert all(line in text for line in lines) and "+:" not in text


@pytest.mark.seconds
@pytest.mark.parametrize("name", OF_EACH_PAPER[:3])
def test_flatten_recipe_equals_merged_files(name, tmp_path):
    check_flat(name, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [*OF_EACH_PAPER[3:], *[*RECIPES][::15]])
def test_flatten_recipe_more_recipes_equal_merged_files(name, tmp_path):
    check_flat(name, tmp_path)


@pytest.mark.seconds
def test_cp_quickstart_resolves_to_same_recipe(tmp_path, monkeypatch, capsys, error_of):
    monkeypatch.chdir(tmp_path)
    main(["cp", "quickstart", "mine.yaml"])
    assert "lightning-fcl fit mine.yaml" in capsys.readouterr().out
    copied, recipe = (resolve_recipe(Recipe((Path(path),))) for path in ("mine.yaml", RECIPES["quickstart"].configs[0]))
    # In the copy, `out` is None, so `fit mine.yaml` writes to runs/mine.
    assert copied == recipe | {"out": None}
    assert "Expected a new file, but mine.yaml exists" in error_of(["cp", "flwf/flwf", "mine.yaml"])
    main(["cp", "flwf/flwf-2t-ft", "mine.yaml", "--force"])
    assert "  # Number of communication rounds.\n  max_epochs: 8" in (tmp_path / "mine.yaml").read_text()


def test_find_recipe_with_scale_adds_scale_file():
    assert find_recipe("fedvit/fedvit@small").configs[-1].name == "scale-small.yaml"
    assert find_recipe("fedvit/fedvit").configs[-1].name == "fedvit.yaml"


@pytest.mark.seconds
def test_fit_by_name_then_test_by_folder(tmp_path, monkeypatch, capsys, change):
    monkeypatch.chdir(tmp_path)
    main(["fit", "quickstart", change, "--trainer.max_epochs", "1"])
    out = capsys.readouterr().out
    assert "final accuracy:   0." in out and "lightning-fcl test runs/quickstart" in out
    main(["test", "runs/quickstart"])
    assert "test/accuracy" in capsys.readouterr().out


@pytest.mark.seconds
def test_validate_writes_no_files(tmp_path, monkeypatch, capsys, change):
    monkeypatch.chdir(tmp_path)
    main(["validate", "quickstart", change])
    out = capsys.readouterr().out
    assert "The recipe is valid." in out and "3 clients, 2 rounds, 2 experiences" in out and "FLwF2T, Replay" in out
    assert "training   3 of 3 clients per round" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["change.yaml"]
    main(["validate", "quickstart", change, "--trainer.fast_dev_run", "true"])
    main(["fit", "quickstart", change, "--trainer.fast_dev_run", "true", "--trainer.enable_progress_bar", "false"])
    assert not [path for path in tmp_path.glob("**/*") if path.suffix in (".ckpt", ".html", ".csv")]


def test_fit_help_class_prints_arguments(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help=FLwF2T"])
    out = capsys.readouterr().out
    assert "lightning_fcl.callbacks.FLwF2T(" in out and "temperature" in out and "SUPPRESS" not in out
