"""Tests of the command `lightning-fcl leaderboard`."""

import math
import re
import shutil

import numpy as np
import pytest
import yaml

from lightning_fcl.cli.leaderboard_runs import read_runs
from lightning_fcl.cli.leaderboard_statistics import StatisticsPlan
from lightning_fcl.cli.main import main
from lightning_fcl.cli.search import Search
from lightning_fcl.cli.search_edges import further_points
from lightning_fcl.evaluation.comparison_results import compare_rows, read_comparison_results
from lightning_fcl.evaluation.results import read_results
from lightning_fcl.evaluation.sample_bits import encode_bits
from lightning_fcl.evaluation.sample_table import read_samples
from lightning_fcl.evaluation.table import Cell, Table, read_table
from lightning_fcl.runs.found_settings import FoundSettings, read_settings, write_settings
from lightning_fcl.runs.paper_rows import (
    expand_grids,
    list_cases,
    list_protocols,
    paper_folder,
    recipes_folder,
    slug,
)
from lightning_fcl.runs.rows_check import check_rows

RECIPES = recipes_folder()
MU, CLIENTS = "trainer.callbacks.FedProx.mu", "data.partition.init_args.num_clients"


@pytest.fixture
def boards(tmp_path, monkeypatch, small_recipe):
    """Create a leaderboard with two methods and two protocols, and return the folder. One method has a search."""
    folder = tmp_path / "recipes" / "leaderboard"
    folder.mkdir(parents=True)
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
    search = {"configs": [], "objective": "final_accuracy/server", "sampler": "grid", "eval_split": "test"}
    search |= {"space": {MU: [0.1, 1.0]}, "variants": {"two": {}, "three": {CLIENTS: 3}}}
    (folder / "search.yaml").write_text(yaml.safe_dump(search))
    write_settings(folder, "two", "with prox", FoundSettings({MU: 0.1}))
    rows = {
        "plain": {"configs": ["small.yaml"], "notes": {"logits": "all"}, "expected": {}},
        "with prox": {
            "configs": ["prox.yaml", "small.yaml"],
            "notes": {"logits": "all"},
            "search": "search.yaml",
            "expected": {},
        },
        "alone": {
            "configs": ["small.yaml"],
            "overrides": {"trainer.strategy.init_args.reductions": {"*": "local"}},
            "kind": "bound",
            "model": "clients",
            "expected": {},
        },
    }
    grids = [
        {
            "with": {"P1 two": {}, "P2 three": {"overrides": {CLIENTS: 3}}},
            "rows": ["plain"],
            "seeds": 2,
        },
        {"with": {"P1 two": {"settings": "two"}}, "rows": ["with prox"]},
        {"with": {"P4 bound": {}}, "rows": ["alone"]},
        {"with": {"P3 three": {"settings": "three", "overrides": {CLIENTS: 3}}}, "rows": ["with prox"]},
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
    leaderboard(out, "--seeds", "2", "--protocols", "P1,P2", "--finished-only")
    assert [*read_table(out / "table.json").rows] == ["P1 two plain", "P1 two with prox", "P2 three plain"]


@pytest.mark.seconds
def test_leaderboard_committed_runs_are_reused_until_their_recipe_changes(boards, tmp_path, capsys, monkeypatch):
    leaderboard(tmp_path / "first", "--protocols", "P1", "--seeds", "1", "--commit-runs")
    committed = read_table(boards / "table.json")
    assert "Committed 2 runs" in capsys.readouterr().out
    # A command on another machine trains only the missing runs, and adds them.
    leaderboard(tmp_path / "second", "--protocols", "P1,P2", "--methods", "plain", "--seeds", "1", "--commit-runs")
    captured = capsys.readouterr()
    assert "Reused 1 runs" in captured.err and "Committed 3 runs" in captured.out
    assert [path.name for path in (tmp_path / "second").glob("*/seed-0")] == ["seed-0"]
    assert [*read_table(tmp_path / "second" / "table.json").rows] == ["P1 two plain", "P2 three plain"]
    merged = read_table(boards / "table.json")
    assert {row: merged.rows[row] for row in committed.rows} == committed.rows and len(merged.rows) == 3
    monkeypatch.setattr("lightning_fcl.cli.jobs.run_job", lambda job: pytest.fail("trained again"))
    leaderboard(tmp_path / "third", "--seeds", "1", "--protocols", "P1,P2", "--finished-only")
    assert read_table(tmp_path / "third" / "table.json").rows == merged.rows
    monkeypatch.undo()
    monkeypatch.setattr("lightning_fcl.runs.paper_rows.recipes_folder", lambda: boards.parent)
    # The other row keeps its run if one recipe changes.
    write_settings(boards, "two", "with prox", FoundSettings({MU: 0.2}))
    leaderboard(tmp_path / "fourth", "--protocols", "P1", "--seeds", "1", "--commit-runs")
    assert "Reused 1 runs" in capsys.readouterr().err
    runs = read_runs(boards)
    assert runs.keys() == {("P1 two plain", 0), ("P1 two with prox", 0), ("P2 three plain", 0)}
    assert (
        read_results(tmp_path / "fourth" / "p1-two-with-prox" / "seed-0")["metrics"]["final_accuracy/server"]
        == (runs["P1 two with prox", 0]["metrics"]["last_accuracy"])
    )


def check_runs_error(boards, tmp_path, error_of, text):
    """Check the error for a `runs.json`, and that its hint is a fix that works."""
    (boards / "runs.json").write_text(text)
    message = error_of(["leaderboard", "--out", str(tmp_path), "--protocols", "P1"])
    assert "runs.json" in message
    assert "Delete the file, and run `lightning-fcl leaderboard --commit-runs`." in message
    (boards / "runs.json").unlink()
    leaderboard(tmp_path, "--protocols", "P1", "--methods", "plain", "--seeds", "1", "--commit-runs")
    assert read_runs(boards).keys() == {("P1 two plain", 0)}


@pytest.mark.seconds
def test_leaderboard_runs_with_other_keys_are_fixed_by_deleting_them(boards, tmp_path, error_of):
    check_runs_error(boards, tmp_path, error_of, '{"format": 1, "runs": [{"seed": 0}]}')


@pytest.mark.seconds
def test_leaderboard_runs_without_json_are_fixed_by_deleting_them(boards, tmp_path, error_of):
    check_runs_error(boards, tmp_path, error_of, "{")


@pytest.mark.seconds
def test_leaderboard_runs_of_another_format_are_fixed_by_deleting_them(boards, tmp_path, error_of):
    check_runs_error(boards, tmp_path, error_of, "[]")


@pytest.mark.seconds
def test_leaderboard_without_seeds_uses_seeds_of_grid_and_prints_settings(boards, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_fcl.cli.leaderboard._SEEDS", 1)
    leaderboard(tmp_path / "out", "--protocols", "P1")
    table = read_table(tmp_path / "out" / "table.json")
    assert table.command == "lightning-fcl leaderboard --protocols=P1"
    assert [cells["last_accuracy"].n for cells in table.rows.values()] == [2, 1]
    assert re.search(r"\| two +\| with prox \| +0 \| +0 \| mu=0.1 \| +- \|\n", capsys.readouterr().out)


@pytest.mark.seconds
def test_leaderboard_bound_of_clients_has_separate_table_and_clients_accuracy(boards, tmp_path, capsys):
    leaderboard(tmp_path, "--protocols", "P4", "--seeds", "1")
    assert "P4 bound: bounds\n\n| method" in capsys.readouterr().out
    (cells,) = read_table(tmp_path / "table.json").rows.values()
    metrics = read_results(tmp_path / "p4-bound-alone" / "seed-0")["metrics"]
    assert cells["last_accuracy"].mean == metrics["final_accuracy/clients"] != metrics["final_accuracy/server"]
    assert "incremental_accuracy" not in cells


def test_leaderboard_row_without_settings_raises_with_search_command(boards, tmp_path, error_of):
    message = error_of(["leaderboard", "--out", str(tmp_path), "--protocols", "P3"])
    assert "Expected settings of with prox for the case three" in message
    assert "`lightning-fcl leaderboard --search --cases three --methods 'with prox'`" in message


@pytest.mark.seconds
def test_leaderboard_search_extends_grid_resumes_and_keeps_other_entries(boards, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    other = FoundSettings({"x": 1}, num_settings=8, num_failed=1, score=0.25, edge=["x"], search="abc")
    write_settings(boards, "two", "other", other)
    leaderboard(out, "--search", "--cases", "tw")
    found = read_settings(boards)
    assert [*found] == ["two"] and found["two"]["other"] == other
    entry = found["two"]["with prox"]
    # The two values of the grid are both an end, so there are two further settings beyond the better value.
    mus = sorted({yaml_value(path) for path in (out / "searches" / "two" / "with-prox").glob("trial-*/seed-0")})
    assert mus in ([0.1, 1.0, 10.0, 100.0], [0.001, 0.01, 0.1, 1.0])
    scores = {
        yaml_value(path): read_results(path)["metrics"]["final_accuracy/server"]
        for path in (out / "searches" / "two" / "with-prox").glob("trial-*/seed-0")
    }
    best = entry.overrides[MU]
    assert entry.score == pytest.approx(max(scores.values()), abs=1e-6) and scores[best] == max(scores.values())
    assert (entry.num_settings, entry.num_failed) == (4, 0) and entry.edge == (
        ["mu"] if best in (mus[0], mus[-1]) else []
    )
    assert "| two  | with prox |        4 |" in capsys.readouterr().out
    monkeypatch.setattr(
        "lightning_fcl.cli.settings_search.run_settings_task", lambda task: pytest.fail("trained again")
    )
    leaderboard(tmp_path / "elsewhere", "--search", "--cases", "two")
    assert "Already finished: 1 of 1 searches." in capsys.readouterr().err and read_settings(boards) == found


@pytest.mark.seconds
def test_leaderboard_search_of_one_case_makes_its_protocol_runnable(boards, tmp_path):
    leaderboard(tmp_path / "out", "--search", "--cases", "three")
    leaderboard(tmp_path / "out", "--protocols", "P3", "--seeds", "1")
    assert [*read_table(tmp_path / "out" / "table.json").rows] == ["P3 three with prox"]


@pytest.mark.seconds
def test_leaderboard_search_counts_failed_settings_and_raises_if_all_fail(boards, tmp_path, error_of):
    search = yaml.safe_load((boards / "search.yaml").read_text())
    (boards / "search.yaml").write_text(yaml.safe_dump({**search, "space": {MU: [-1.0, 0.1]}}))
    leaderboard(tmp_path / "out", "--search", "--cases", "two")
    entry = read_settings(boards)["two"]["with prox"]
    assert (entry.num_settings, entry.num_failed, entry.overrides) == (2, 1, {MU: 0.1})
    (boards / "search.yaml").write_text(yaml.safe_dump({**search, "space": {MU: [-1.0, -2.0]}}))
    message = error_of(["leaderboard", "--search", "--cases", "two", "--workers", "1", "--out", str(tmp_path / "out")])
    assert "all settings of with prox (two) failed" in message and "`mu`" in message
    assert "Correct the cause, delete " in message
    (boards / "search.yaml").write_text(yaml.safe_dump(search))
    shutil.rmtree(tmp_path / "out" / "searches" / "two" / "with-prox")
    leaderboard(tmp_path / "out", "--search", "--cases", "two")
    assert read_settings(boards)["two"]["with prox"].num_failed == 0


def test_leaderboard_search_with_random_sampler_raises(boards, tmp_path, error_of):
    search = yaml.safe_load((boards / "search.yaml").read_text())
    (boards / "search.yaml").write_text(yaml.safe_dump({**search, "sampler": "random", "trials": 2}))
    message = error_of(["leaderboard", "--search", "--out", str(tmp_path)])
    assert "Expected `sampler: grid` in the search file of with prox, but got random. Write `sampler: grid`" in message


def yaml_value(folder):
    """Return the value of `mu` of a run."""
    callbacks = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["callbacks"]
    return next(one["init_args"]["mu"] for one in callbacks if one["class_path"].endswith("FedProx"))


def test_leaderboard_unknown_names_raise_with_hint(error_of):
    assert "Expected `protocols` to be among P4 TinyImageNet" in error_of(["leaderboard", "--protocols", "P9"])
    assert "Did you mean FedProx?" in error_of(["leaderboard", "--methods", "FedProxx"])
    assert "`seeds` to be at least 1 but got 0" in error_of(["leaderboard", "--seeds", "0"])
    assert "Expected `cases` to be among beta .5, beta .05" in error_of(["leaderboard", "--search", "--cases", "P4"])


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


def test_leaderboard_every_grid_row_has_settings_and_search_for_its_case():
    folder = paper_folder("leaderboard")
    content = yaml.safe_load((folder / "rows.yaml").read_text())
    entries = expand_grids(content, read_settings(folder))
    assert [name for name, entry in entries.items() if entry.lacking] == []
    for case, files in list_cases(content).items():
        for row, file in files.items():
            search = Search.read(folder / file, case=case, row=row)
            assert search.first_seed == 100 and search.eval_split == "validation"
            assert len([*search.grid()]) == (4 if case == "P1" else 8), (case, row)


def test_leaderboard_quadratic_penalties_are_stable_in_all_reachable_settings():
    folder = paper_folder("leaderboard")
    search = Search.read(folder / "search-quadratic.yaml", case="beta .5", row="EWC")
    grid = [*search.grid()]
    reachable = [point for best in grid for point in [*grid, *further_points(grid, best, search.limits)]]
    # SGD on `strength / 2 * (theta - center)^2` diverges if the learning rate times the strength is above 2.
    assert max(math.prod(point.values()) for point in reachable) < 2
    assert len({*map(str, reachable)}) > len(grid)


PLAN = {
    "comparisons": [{"protocol": "P1 two", "first": "with prox", "second": "plain", "question": "Does FedProx help?"}],
    "ranking": {"methods": ["plain", "with prox", "copy"], "protocols": ["P1 two", "P2 three"]},
}


def make_results(samples, with_bits=True):
    """Return results of runs, given the correctness of samples by protocol, method and seed."""
    return [
        {
            "seed": seed,
            "recipe": {"row": f"{protocol} {method}"},
            "record": {
                "totals": [40, 60],
                "rounds": [{"correct_samples": {"server": encode_bits(bits)}} if with_bits else {}],
            },
        }
        for (protocol, method), of in samples.items()
        for seed, bits in enumerate(of)
    ]


def test_statistics_plan_writes_comparisons_samples_and_ranking(tmp_path):
    generator = np.random.default_rng(0)
    protocols = {"P1 two": ["plain", "with prox", "copy"], "P2 three": ["plain", "with prox", "copy"]}
    samples = {
        (protocol, method): generator.random((5, 100)) < accuracy
        for protocol in protocols
        for method, accuracy in {"plain": 0.3, "with prox": 0.8, "copy": 0.5}.items()
    }
    rows = {
        f"{protocol} {method}": {"last_accuracy": Cell(dict(enumerate(bits.mean(1).tolist())))}
        for (protocol, method), bits in samples.items()
    }
    table = Table("leaderboard", "paper", "", {}, "", 0.0, rows)
    text = StatisticsPlan.read(PLAN, protocols).write(tmp_path, table, make_results(samples))
    assert "| Does FedProx help? | P1 two: with prox - plain |     5 |" in text and "| higher  |" in text
    assert "| with prox |         1.00 |" in text and "6 protocols" not in text and "2 protocols" in text
    assert {path.name for path in tmp_path.iterdir()} == {"samples.json", "comparisons.json", "ranking.png"}
    # Rows outside of the comparisons are not stored.
    stored = read_samples(tmp_path / "samples.json")
    assert {*stored} == {"P1 two plain", "P1 two with prox"}
    (result,) = read_comparison_results(tmp_path / "comparisons.json")
    difference = samples["P1 two", "with prox"].mean() - samples["P1 two", "plain"].mean()
    assert result.difference == pytest.approx(difference) and result.verdict == "higher"
    assert compare_rows(table, stored, [result.planned]) == (result,)


def test_statistics_plan_without_runs_or_entries_writes_nothing_or_no_claim(tmp_path):
    protocols = {"P1 two": ["plain", "with prox", "copy"], "P2 three": ["plain", "with prox", "copy"]}
    rows = {"P1 two plain": {"last_accuracy": Cell({0: 0.5})}, "P1 two with prox": {"last_accuracy": Cell({0: 0.6})}}
    table = Table("leaderboard", "paper", "", {}, "", 0.0, rows)
    samples = {("P1 two", method): np.ones((1, 100), dtype=bool) for method in ("plain", "with prox")}
    assert StatisticsPlan.read({}, protocols).write(tmp_path / "none", table, make_results(samples)) == ""
    assert not (tmp_path / "none").exists()
    text = StatisticsPlan.read(PLAN, protocols).write(tmp_path, table, make_results(samples, with_bits=False))
    assert "+0.100" in text and "no claim" in text and "Average ranks" not in text


def test_leaderboard_plan_of_package_is_valid():
    content = yaml.safe_load((paper_folder("leaderboard") / "rows.yaml").read_text())
    plan = StatisticsPlan.read(content, list_protocols(content))
    assert len(plan.comparisons) == 10 and plan.ranking is not None
    check_rows(paper_folder("leaderboard"), "smoke")
