"""Tests of the command `lightning-fcl leaderboard`."""

import pytest
import yaml

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.table import read_table
from lightning_fcl.runs.paper_rows import expand_grids, list_protocols, paper_folder, recipes_folder, slug

RECIPES = recipes_folder()


@pytest.fixture
def boards(tmp_path, monkeypatch, small_recipe):
    """Create a leaderboard with two methods and two protocols, and return the folder. One method has a search."""
    folder = tmp_path / "recipes" / "leaderboard"
    (folder / "best").mkdir(parents=True)
    small = small_recipe(rounds=2, clients=2)
    quick = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    quick["trainer"]["callbacks"] = {
        "class_path": "lightning_fcl.callbacks.ContinualMetrics",
        "init_args": {"when": "aggregated"},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(quick))
    (folder / "small.yaml").write_text(yaml.safe_dump(small))
    prox = {"class_path": "lightning_fcl.callbacks.FedProx", "init_args": {"mu": 0.1}}
    (folder / "prox.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [prox]}}))
    space = {"trainer.callbacks.FedProx.mu": [0.1, 1.0]}
    search = {"configs": [], "objective": "final_accuracy/server", "sampler": "grid", "space": space}
    search["eval_split"] = "test"
    (folder / "search.yaml").write_text(yaml.safe_dump(search))
    (folder / "best" / "with-prox.yaml").write_text("{}")
    rows = {
        "plain": {"configs": ["small.yaml"], "notes": {"logits": "all"}, "expected": {}},
        "with prox": {
            "configs": ["prox.yaml", "small.yaml"],
            "notes": {"logits": "all"},
            "search": "search.yaml",
            "expected": {},
        },
    }
    grids = [
        {
            "with": {"P1 two": {}, "P2 three": {"overrides": {"data.partition.init_args.num_clients": 3}}},
            "rows": ["plain"],
        },
        {"with": {"P1 two": {"configs": ["best/{row}.yaml"]}}, "rows": ["with prox"]},
    ]
    (folder / "rows.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "rows": rows, "grids": grids}))
    monkeypatch.setattr("lightning_fcl.runs.paper_rows.recipes_folder", lambda: folder.parent)
    return folder


def leaderboard(out, *more):
    main(["leaderboard", "--out", str(out), "--workers", "1", *more])


@pytest.mark.seconds
def test_leaderboard_writes_tables_and_skips_finished_runs(boards, tmp_path, capsys):
    out = tmp_path / "out"
    leaderboard(out, "--seeds", "2", "--protocols", "P1")
    said = capsys.readouterr().out
    assert "P1 two\n\n| method" in said and "P2 three" not in said and "| with prox |" in said
    assert {path.name for path in out.glob("*.png")} == {"p1-two.png"}
    table = read_table(out / "table.json")
    assert [*table.rows] == ["P1 two plain", "P1 two with prox"] and table.seeds == [0, 1]
    assert table.command == "lightning-fcl leaderboard --protocols=P1 --seeds 2"
    leaderboard(out, "--seeds", "2", "--methods", "plain")
    captured = capsys.readouterr()
    assert "Already finished: 2 of 4 runs." in captured.err and "P2 three\n\n| method" in captured.out
    assert (
        read_table(out / "table.json").rows["P1 two plain"]["last_accuracy"]
        == table.rows["P1 two plain"]["last_accuracy"]
    )
    leaderboard(out, "--seeds", "2", "--finished-only")
    assert [*read_table(out / "table.json").rows] == ["P1 two plain", "P1 two with prox", "P2 three plain"]


@pytest.mark.seconds
def test_leaderboard_search_writes_best_settings_per_method(boards, tmp_path):
    leaderboard(tmp_path / "out", "--search")
    found = tmp_path / "out" / "searches" / "best"
    assert [path.name for path in found.iterdir()] == ["with-prox.yaml"]
    callbacks = yaml.safe_load((found / "with-prox.yaml").read_text())["trainer"]["callbacks"]
    assert callbacks[-1]["init_args"]["mu"] in (0.1, 1.0)


def test_leaderboard_unknown_names_raise_with_hint(error_of):
    assert "Expected `protocols` to be among P4 TinyImageNet" in error_of(["leaderboard", "--protocols", "P9"])
    assert "Did you mean FedProx?" in error_of(["leaderboard", "--methods", "FedProxx"])
    assert "`seeds` to be at least 1 but got 0" in error_of(["leaderboard", "--seeds", "0"])


def test_leaderboard_rows_have_files_and_notes():
    folder = paper_folder("leaderboard")
    content = yaml.safe_load((folder / "rows.yaml").read_text())
    entries = expand_grids(content)
    for name, entry in entries.items():
        assert all((folder / config).is_file() for config in entry.configs), name
        assert entry.search is None or (folder / entry.search).is_file()
        assert {*entry.notes} == {"logits", "leaves"}
    protocols = list_protocols(content)
    assert len({method for methods in protocols.values() for method in methods}) >= 20
    assert len({slug(name) for name in entries}) == len(entries)
