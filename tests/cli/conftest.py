"""What tests of commands share: small runs, without the pictures of reports, which take longer than the runs do."""

import pytest
import yaml

from lightning_fcl.evaluation.files import write_whole
from lightning_fcl.running.rows import recipes_folder


@pytest.fixture
def small_recipe():
    """What goes over the quickstart's recipe to make it small."""

    def make(rounds, clients, **data):
        strategy = {"init_args": {"local_epochs": 1}}
        scenario = {"init_args": {"experiences": 2, "rounds_per_experience": 1}}
        partition = {"class_path": "IID", "init_args": {"clients": clients}}
        return {
            "trainer": {"max_epochs": rounds, "enable_progress_bar": False, "strategy": strategy},
            "data": {"scenario": scenario, "partition": partition, **data},
        }

    return make


@pytest.fixture
def tiny(tmp_path, small_recipe):
    """The words that name a small recipe on the bundled digits."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(small_recipe(rounds=2, clients=3)))
    return ["--config", str(recipes_folder() / "quickstart.yaml"), "--config", str(path)]


def empty_page(folder, results):
    """An empty file in place of a run's page, which takes longer than its rounds."""
    return write_whole(folder / "report.html", "")


@pytest.fixture
def reports():
    """The runs of a test write their reports."""


@pytest.fixture(autouse=True)
def _no_reports(request, monkeypatch):
    if "reports" not in request.fixturenames:
        monkeypatch.setattr("lightning_fcl.evaluation.results.write_page", empty_page)
