"""Tests of lists of public names that are read from source files, and of imports without garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib import import_module

import pytest

import lightning_fcl
from lightning_fcl import callbacks, methods, models
from lightning_fcl.cli.fast_imports import fast_imports
from lightning_fcl.cli.listings import public_summaries
from lightning_fcl.data import partition, scenarios
from lightning_fcl.data.partition import Partition
from lightning_fcl.data.scenarios import Scenario


def imported_summaries(module, kind=object):
    """Return the first docstring line of each public class of a module that is a subclass of ``kind``, by name."""
    public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in public}
    return {
        name: value.__doc__.partition("\n")[0]
        for name, value in sorted(values.items())
        if isinstance(value, type)
        and issubclass(value, kind)
        and value is not kind
        and value.__module__.startswith("lightning_fcl")
    }


@pytest.mark.parametrize(
    ("module", "kind"), [(methods, methods.Method), (scenarios, Scenario), (partition, Partition), (models, object)]
)
def test_public_summaries_equal_imported_docstrings(module, kind):
    base = kind.__name__ if kind is not object else ""
    expected = imported_summaries(module, kind)
    found = public_summaries(module.__name__, base)
    assert len(expected) > 3
    assert {name: found[name] for name in expected} == expected
    functions = [name for name in found if not isinstance(getattr(module, name), type)]
    assert {*found} == {*expected, *functions} and (not base or functions == [])


@pytest.mark.parametrize("package", [lightning_fcl, callbacks])
def test_public_summaries_contain_all_own_names(package):
    found = public_summaries(package.__name__)
    own = [name for name in package.__all__ if getattr(package, name).__module__.startswith(package.__name__)]
    assert len(own) > 3 and {*own} <= {*found}
    assert all(found.values())


def test_public_summaries_import_no_listed_module():
    code = "import sys\nfrom lightning_fcl.cli.listings import public_summaries\n"
    code += "public_summaries('lightning_fcl.methods', 'Method'), public_summaries('lightning_fcl.data.scenarios')\n"
    code += "print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_fast_imports_restores_garbage_collection_state():
    with fast_imports():
        assert not gc.isenabled()
        import_module("lightning_fcl.cli.listings")
    assert gc.isenabled()
    gc.disable()
    try:
        with fast_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
