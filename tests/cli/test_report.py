"""Tests of `lightning-fcl report`, which writes reports of existing runs."""

import pytest

from lightning_fcl.cli.main import main
from lightning_fcl.evaluation.results import is_complete


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Train two small runs in one folder."""
    folder = tmp_path_factory.mktemp("runs")
    for name, words in {"one": ["--trainer.max_epochs", "1"], "two": ["--seed_everything", "1"]}.items():
        small = [
            "--trainer.max_epochs",
            "1",
            "--data.partition.num_clients",
            "3",
            "--trainer.enable_progress_bar",
            "false",
        ]
        main(["fit", "quickstart", *small, *words, "--out", str(folder / name)])
    return folder


@pytest.fixture(autouse=True)
def _pages(reports):
    """Write reports in all tests of this file."""


@pytest.mark.seconds
def test_report_single_run_rewrites_damaged_report(runs, capsys):
    page = runs / "one" / "report.html"
    page.write_text("damaged")
    assert not is_complete(runs / "one")
    main(["report", str(runs / "one")])
    assert capsys.readouterr().out == f"Wrote {page}\n"
    assert "FLwF-2T + replay" in page.read_text() and is_complete(runs / "one")


def test_report_two_runs_shows_folder_names(runs, tmp_path, capsys):
    main(["report", str(runs / "one"), str(runs / "two"), "--out", str(tmp_path / "new" / "both.html")])
    page = (tmp_path / "new" / "both.html").read_text()
    assert capsys.readouterr().out == f"Wrote {tmp_path}/new/both.html\n"
    assert ">one</th>" in page and ">two</th>" in page and "<h2>Clients</h2>" in page
    main(["report", str(runs)])
    assert (runs / "report.html").read_text() == page
