"""What tests of commands share: runs without the pictures of reports, which take longer than small runs do."""

import pytest


@pytest.fixture
def reports():
    """The runs of a test write their reports."""


@pytest.fixture(autouse=True)
def _no_reports(request, monkeypatch):
    if "reports" not in request.fixturenames:
        monkeypatch.setattr("lightning_fcl.cli.run.write_report", lambda folder: folder / "report.md")
