"""Tests of hints in error messages: each row raises its error, and runs without an error after the fix."""

from types import SimpleNamespace

import pytest
from fixes_tables import ROWS, SECONDS, TABLES


@pytest.fixture
def lab(fit, make_stream, make_task, quiet, tmp_path):
    return SimpleNamespace(quiet=quiet, fit=fit, stream=make_stream, task=make_task, folder=tmp_path)


def test_row_names_are_unique():
    assert len(ROWS) == sum(len(table.ROWS) for table in TABLES)
    assert set(ROWS) >= SECONDS


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name, marks=[pytest.mark.seconds] if name in SECONDS else []) for name, row in ROWS.items()],
)
def test_fix_in_hint_works(lab, row):
    with pytest.raises(row.error) as caught:
        row.call(lab, **row.wrong)
    assert type(caught.value) is row.error
    assert caught.value.hint and row.hint in caught.value.hint
    assert str(caught.value).endswith(caught.value.hint)
    row.call(lab, **({**row.wrong, **row.fix} if row.fix is not None else {}))
