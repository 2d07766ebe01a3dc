"""Fixtures for tests of commands. By default, runs write empty reports, because drawing charts is slow."""

from contextlib import nullcontext

import pytest
import yaml

from lightning_fcl.runs.paper_rows import recipes_folder


@pytest.fixture
def tiny(tmp_path, small_recipe):
    """Return the arguments of a small recipe on the bundled digits."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(small_recipe(rounds=2, clients=3)))
    return ["--config", str(recipes_folder() / "quickstart.yaml"), "--config", str(path)]


@pytest.fixture
def reports():
    """Let the runs of a test write reports. Without this fixture, runs write empty reports."""


@pytest.fixture(autouse=True)
def _no_reports(request, without_pages):
    with nullcontext() if "reports" in request.fixturenames else without_pages():
        yield
