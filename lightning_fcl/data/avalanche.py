"""The classes and functions of Avalanche that scenarios and replay buffers use.

Importing this module imports Avalanche. No other module imports Avalanche. Import this module inside the functions that
need it, not at the top of another module.

Avalanche imports `GPUtil`, `gdown`, `qpsolvers` and `wandb`. These packages load 1,100 modules, among them JAX and
packages under the GPL. Avalanche uses these packages only for its loggers, its downloads and its own GEM. The import
takes 2 to 4 s of processor time with these packages, and 0.4 s without them. Importing Avalanche would also write
``~/.avalanche/config.json``. This module skips the packages and prevents the file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from lightning_fcl.validation import require_package

__all__ = [
    "AvalancheDataset",
    "CLScenario",
    "DataAttribute",
    "ExemplarsBuffer",
    "TaskAwareSupervisedClassificationDataset",
    "nc_benchmark",
    "storage_policy",
]

_UNUSED = ("GPUtil", "gdown", "qpsolvers", "wandb")
_SETTINGS = "avalanche.benchmarks.datasets.dataset_utils"


@contextmanager
def _light_import() -> Iterator[None]:
    """Temporarily skip packages that are not needed here, and prevent Avalanche from writing a settings file.

    A skipped package is imported later, when Avalanche first uses one of its attributes.
    """
    specs = {name: find_spec(name) for name in _UNUSED if name not in sys.modules}
    placeholders = {name: _make_placeholder(spec) for name, spec in specs.items() if spec is not None}
    sys.modules |= placeholders
    try:
        _load_settings()
        yield
    finally:
        for name, placeholder in placeholders.items():
            if sys.modules.get(name) is placeholder:
                del sys.modules[name]


def _make_placeholder(spec: ModuleSpec) -> ModuleType:
    """Return a placeholder module that imports the real package when an attribute is read.

    The import works after the placeholder is removed from `sys.modules`. Before that, reading an attribute raises
    AttributeError. `LazyLoader` of the standard library is not suitable, because ``import wandb`` executes a lazy
    module that is in `sys.modules`.
    """
    placeholder = ModuleType(spec.name)
    placeholder.__spec__ = spec

    def get_attribute(name: str) -> object:
        if sys.modules.get(spec.name) is placeholder:
            raise AttributeError(f"module `{spec.name}` has no attribute `{name}` while Avalanche is being imported")
        return getattr(import_module(spec.name), name)

    vars(placeholder)["__getattr__"] = get_attribute
    return placeholder


def _load_settings() -> None:
    """Load the settings module of Avalanche with its default settings, unless the user has a settings file.

    When the settings module is imported, the module writes its defaults to the home directory, and fails if this is not
    possible. Therefore, a temporary home directory is used for this import. The rest of Avalanche is imported with the
    real home directory.
    """
    package = find_spec("avalanche") if "avalanche" not in sys.modules else None
    if package is None or package.origin is None or Path("~/.avalanche/config.json").expanduser().exists():
        return
    file = Path(package.origin).parent / "benchmarks" / "datasets" / "dataset_utils.py"
    spec = spec_from_file_location(_SETTINGS, file)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder
        try:
            spec.loader.exec_module(module)
        finally:
            del os.environ["HOME"]
            os.environ |= {} if home is None else {"HOME": home}
    vars(module)["AVALANCHE_CONFIG"]["dataset_location"] = str(Path("~/.avalanche/data").expanduser())
    sys.modules[_SETTINGS] = module


with _light_import(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    require_package("avalanche", "divides classes into experiences and provides the buffers of `Replay`")
    from avalanche.benchmarks import CLScenario, nc_benchmark
    from avalanche.benchmarks.utils import AvalancheDataset, DataAttribute, TaskAwareSupervisedClassificationDataset
    from avalanche.training import storage_policy
    from avalanche.training.storage_policy import ExemplarsBuffer
