"""Tests of hints about files, commands and deployments: each row raises its error, and runs after the fix."""

import shlex
import shutil
from types import SimpleNamespace

import pytest
from fixes_files import NAME, SMALL
from fixes_tables import FILE_ROWS, FILE_SECONDS, FILE_TABLES

from lightning_fcl.cli.main import main
from lightning_fcl.zoo.registry import copy_to_registry, package_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, without_pages):
    """The folder of a run of one round."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with without_pages():
        main(shlex.split(f"fit quickstart {SMALL} --out {out}"))
    return out


@pytest.fixture
def lab(request, tmp_path, monkeypatch, serve_folder, full_disk, quiet, without_pages):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_FCL_TRACEBACK", "1")  # Commands raise errors instead of printing them.
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path / "cache"))
    for name in ("LIGHTNING_FCL_OFFLINE", "HF_HUB_OFFLINE", "LIGHTNING_FCL_ZOO", "LIGHTNING_FCL_MAX_BYTES"):
        monkeypatch.delenv(name, raising=False)

    def run(name="run"):
        """Copy the finished run unless the copy exists, and return the folder of the copy."""
        if not (tmp_path / name).exists():
            shutil.copytree(request.getfixturevalue("finished"), tmp_path / name)
        return tmp_path / name

    def checkpoint(name="run"):
        """Return the path of the first checkpoint in the copied run."""
        return min((run(name) / "checkpoints").glob("*.ckpt"))

    def entry(folder="zoo"):
        """Copy a published model to a separate zoo unless the copy exists, and return the folder of the copy."""
        if not (tmp_path / folder / NAME).exists():
            copy_to_registry(package_folder() / NAME, tmp_path / folder)
        return tmp_path / folder / NAME

    with without_pages():
        yield SimpleNamespace(
            folder=tmp_path,
            env=monkeypatch,
            serve=serve_folder,
            full_disk=full_disk,
            quiet=quiet,
            run=run,
            checkpoint=checkpoint,
            entry=entry,
        )


def test_file_row_names_are_unique():
    assert len(FILE_ROWS) == sum(len(table.ROWS) for table in FILE_TABLES)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=[pytest.mark.seconds] if row.call in FILE_SECONDS else [])
        for name, row in FILE_ROWS.items()
    ],
)
def test_fix_in_hint_about_files_works(lab, row):
    with pytest.raises(row.error) as caught:
        row.call(lab, **row.wrong)
    assert type(caught.value) is row.error
    assert caught.value.hint and row.hint in caught.value.hint
    assert str(caught.value).endswith(caught.value.hint)
    if row.argument is not None:
        assert caught.value.argument == row.argument
    if callable(row.fix):
        row.fix(lab)
        row.call(lab, **row.wrong)
    else:
        row.call(lab, **{**row.wrong, **row.fix})
