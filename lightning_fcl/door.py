"""What keeps `import lightning_fcl` light: names that are imported when they are asked for."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

# What Avalanche imports, for seconds, and uses in what is not used here: its loggers, its GEM, its downloads.
_UNUSED = ("GPUtil", "gdown", "qpsolvers", "wandb")
_WRITES = "avalanche.benchmarks.datasets.dataset_utils"  # it writes ~/.avalanche/config.json


def lazy_names(
    package: str, but: Collection[str] = ()
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package that imports its public names when they are asked for.

    The names are those that its file imports as themselves for type checkers, or with ``*`` from another such package,
    ``but`` some.
    """
    homes = {name: home for name, home in _homes(package).items() if name not in but}

    def getattribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        value = getattr(importlib.import_module(homes[name]), name)
        if "lightning.pytorch" in sys.modules:
            register_strategy()
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return sorted(homes), getattribute, names


def _homes(package: str) -> dict[str, str]:
    homes: dict[str, str] = {}
    for node in ast.walk(ast.parse(_file(package).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.names[0].name == "*":
                homes |= _homes(node.module)
            homes |= {alias.name: node.module for alias in node.names if alias.asname == alias.name}
    return homes


def _file(module: str) -> Path:
    path = Path(__file__).parent.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _defined(file: Path) -> list[ast.ClassDef | ast.FunctionDef]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def summaries(package: str, kind: str = "") -> dict[str, str]:
    """The first docstring lines of a package's public classes and functions, read, not imported.

    With ``kind``, the name of a class, only of those that derive from it.
    """
    file, homes = _file(package), _homes(package)
    public = {*homes} or {node.name for node in _defined(file)}
    files = {*map(_file, homes.values()), *(file.parent.glob("*.py") if file.name == "__init__.py" else [file])}
    nodes = {node.name: node for path in sorted(files) for node in _defined(path)}

    def derives(name: str) -> bool:
        node = nodes.get(name)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)] if isinstance(node, ast.ClassDef) else []
        return kind in bases or any(derives(base) for base in bases)

    return {
        name: (ast.get_docstring(nodes[name]) or "").partition("\n")[0]
        for name in sorted(public)
        if name in nodes and not name.startswith("_") and (not kind or derives(name))
    }


@contextmanager
def many_imports() -> Iterator[None]:
    """Import many modules without looking for garbage among what stays: that takes a second of seven for Lightning."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _finding(find_spec: Callable[..., ModuleSpec | None]) -> Iterator[None]:
    """Temporarily let a function find modules before Python's own finders."""
    finder = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def put_off(*names: str) -> Iterator[None]:
    """Packages of these names that are imported meanwhile run when they are used first, then or later."""

    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in names else None
        if spec and spec.loader:
            spec.loader = LazyLoader(spec.loader)
        return spec

    with _finding(find_spec):
        yield


class _SettingsOfAvalanche(Loader):
    """A loader of Avalanche's settings that writes no file to the home directory."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        home = os.environ.get("HOME")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HOME"] = folder
            try:
                self._loader.exec_module(module)
            finally:
                del os.environ["HOME"]
                os.environ |= {} if home is None else {"HOME": home}
        vars(module)["AVALANCHE_CONFIG"]["dataset_location"] = str(Path("~/.avalanche/data").expanduser())


@contextmanager
def import_avalanche() -> Iterator[None]:
    """Import Avalanche without the packages that are not used here, and without its files in the home directory."""

    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        known = name != _WRITES or Path("~/.avalanche/config.json").expanduser().exists()
        spec = None if known else PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = _SettingsOfAvalanche(spec.loader)
        return spec

    with _finding(find_spec), put_off(*_UNUSED):
        yield


def register_strategy() -> None:
    """Let ``Trainer(strategy="federated")`` find `FederatedStrategy`; it is imported when a Trainer asks for it."""
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    def federated() -> Strategy:
        strategy: Strategy = importlib.import_module("lightning_fcl.simulation.strategy").FederatedStrategy()
        return strategy

    if "federated" not in StrategyRegistry:
        StrategyRegistry.register("federated", federated, description="Rounds of many clients in one Trainer")
