"""Tests of files for citation, issues, pull requests, CI and releases."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import lightning_fcl

ROOT = Path(lightning_fcl.__file__).parents[1]
FILES = [ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))]
FORMS = [path for path in FILES if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config"]
WORKFLOWS = [path for path in FILES if path.parent.name == "workflows"]


def read(path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_is_valid_yaml(path):
    assert isinstance(read(path), dict)


def test_forms_and_workflows_exist():
    assert [path.name for path in FORMS] == ["bug.yml", "wanted.yml"]
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert (ROOT / ".github/pull_request_template.md").is_file()


def test_citation_has_package_version():
    cited = read(ROOT / "CITATION.cff")
    assert cited["version"] == lightning_fcl.__version__
    assert cited["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_form_has_required_fields(path):
    form = read(path)
    assert form["name"] and form["description"]
    fields = [part["id"] for part in form["body"]]
    assert len(fields) == len(set(fields)) >= 3
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_bug_form_asks_for_version():
    assert "lightning-fcl --version" in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_existing_scripts_and_pinned_actions(path):
    jobs = read(path)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = {
        word
        for command in commands
        for word in shlex.split(command)
        if re.fullmatch(r"[\w./-]+\.(sh|py)|\.ci/run", word)
    }
    assert named and all((ROOT / name).is_file() for name in named)
    assert all(job.get("needs", "build") in {*jobs, "build"} for job in jobs.values())
    assert all(
        re.search(r"@(v\d+|release/v1)$", step["uses"])
        for job in jobs.values()
        for step in job["steps"]
        if "uses" in step
    )


def test_only_publish_job_has_id_token_permission():
    release = read(ROOT / ".github/workflows/release.yml")
    assert release["permissions"] == {"contents": "read"}
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in release["jobs"]["build"]
