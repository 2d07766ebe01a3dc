"""Fixture for ``recipes/make_pages.py``, which is not part of the package."""

import importlib

import pytest

from lightning_fcl.runs.paper_rows import recipes_folder


@pytest.fixture
def make_pages(monkeypatch):
    monkeypatch.syspath_prepend(recipes_folder())
    return importlib.import_module("make_pages")
