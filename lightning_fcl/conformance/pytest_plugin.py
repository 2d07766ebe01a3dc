"""Pytest plugin: ``@pytest.mark.conformance(kind=MyMethod)`` runs a test once for each statement about ``MyMethod``.

The argument ``statement`` of the test is the statement. If a statement cannot be checked on the class, its test is
skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance(kind): run the test once for each statement about a method")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("conformance")
    if mark is None or "statement" not in metafunc.fixturenames:
        return
    from lightning_fcl.conformance.suite import get_statements

    metafunc.parametrize("statement", get_statements(mark.kwargs["kind"]), ids=str)
