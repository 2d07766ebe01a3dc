"""What keeps `import lightning_fcl` light: names that are imported when they are asked for, and where old ones went."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType

# Modules of 0.1 and where they are now, all below `lightning_fcl`; what is not named keeps its place in its package.
MOVED = {
    "aggregation": "federation.aggregation",
    "callbacks.apfl": "methods.apfl",
    "callbacks.bcn": "methods.bcn",
    "callbacks.distillation": "methods.distillation",
    "callbacks.dytox": "methods.dytox",
    "callbacks.fedknow": "methods.fedknow",
    "callbacks.fedprox": "methods.fedprox",
    "callbacks.fedrep": "methods.fedrep",
    "callbacks.fedvit": "methods.fedvit",
    "callbacks.fedweit": "methods.fedweit",
    "callbacks.functional": "methods.functional",
    "callbacks.gem": "methods.gem",
    "callbacks.importance": "methods.importance",
    "callbacks.lvt": "methods.lvt",
    "callbacks.mean_output": "methods.mean_output",
    "callbacks.method": "methods.method",
    "callbacks.plasticity": "methods.plasticity",
    "callbacks.replay": "methods.replay",
    "callbacks.unlearning": "methods.unlearning",
    "clients": "federation.client_store",
    "cohort": "simulation.vectorized",
    "compression": "federation.compression",
    "datasets": "data.datasets",
    "device.quantization": "models.quantization",
    "figures": "evaluation.figures",
    "gram": "methods.gram",
    "limits": "simulation.limits",
    "main": "cli.main",
    "metrics": "evaluation.metrics",
    "panels": "evaluation.panels",
    "partition": "data.partition",
    "plots": "evaluation.plots",
    "projection": "methods.projection",
    "report": "evaluation.report",
    "reproduce": "cli.reproduce",
    "rounds": "simulation.round",
    "scenarios": "data.scenarios",
    "search": "cli.search",
    "strategy": "simulation.strategy",
    "stream": "data.stream",
    "swarm": "federation.swarm",
    "traffic": "evaluation.communication",
    "tune": "cli.tune",
}

# What Avalanche imports, for seconds, and uses in what is not used here: its loggers, its GEM, its downloads.
WITH_AVALANCHE = ("GPUtil", "gdown", "qpsolvers", "wandb")


class MovedModules(MetaPathFinder):
    """Tells where a module of 0.1 is now, when someone imports it by its old name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing is found here: the last finder that is asked.

        Raises:
            ModuleNotFoundError: With the new name, if the module has moved.
        """
        package, _, module = name.partition(".")
        if package == __package__ and module in MOVED:
            new = f"{package}.{MOVED[module]}"
            raise ModuleNotFoundError(f"`{name}` is now `{new}`: import from there, or write that in the recipe.")
        return None


def lazy_names(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package that imports its public names when they are asked for.

    The names are those that its file imports as themselves for type checkers, as in
    ``if TYPE_CHECKING: from lightning_fcl.models.mlp import MLP as MLP``, or with ``*`` from another such package.

    Args:
        package: Name of the package, which is being imported.

    Example:
        >>> names, getattribute, _ = lazy_names("lightning_fcl.models")
        >>> "MLP" in names, getattribute("MLP").__name__
        (True, 'MLP')
    """
    homes = _homes(package)

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
    """The module of each public name of a package."""
    homes: dict[str, str] = {}
    for node in ast.walk(ast.parse(_file(package).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.names[0].name == "*":
                homes |= _homes(node.module)
            homes |= {alias.name: node.module for alias in node.names if alias.asname == alias.name}
    return homes


def _file(module: str) -> Path:
    """The file of a module of ours, which is not imported for it."""
    path = Path(__file__).parent.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _defined(file: Path) -> list[ast.ClassDef | ast.FunctionDef]:
    """The classes and functions that a file defines."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def summaries(package: str, kind: str = "") -> dict[str, str]:
    """What the public classes and functions of a package are, each in the first line of its docstring.

    Nothing of the package's modules is imported: they are read.

    Args:
        package: A package with `lazy_names`, or another whose public names are imported as themselves, or a module.
        kind: Name of the class from which those wanted derive; all others are left out.

    Example:
        >>> summaries("lightning_fcl.models")["MLP"]
        'Linear layers with ReLU between them, on flattened inputs.'
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


class _PutOff(MetaPathFinder):
    """Finds packages as ever, but has them run when something of them is asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package, if it is one of those."""
        spec = PathFinder.find_spec(name, path, target) if name in self.names else None
        if spec and spec.loader:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def put_off(*names: str) -> Iterator[None]:
    """Packages that are imported meanwhile run when they are used first, then or later.

    Args:
        names: Names of the packages. Those that are imported already stay as they are.

    Example:
        >>> with put_off("this"):  # which prints a poem
        ...     import this
        >>> "this" in sys.modules
        True
    """
    finder = _PutOff(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def register_strategy() -> None:
    """Let ``Trainer(strategy="federated")`` find `FederatedStrategy`; it is imported when a Trainer asks for it."""
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    def federated() -> Strategy:
        strategy: Strategy = importlib.import_module("lightning_fcl.simulation.strategy").FederatedStrategy()
        return strategy

    if "federated" not in StrategyRegistry:
        StrategyRegistry.register("federated", federated, description="Rounds of many clients in one Trainer")


def import_names(*packages: str) -> None:
    """Import every public name of packages: a recipe's short class names are those of classes that are imported.

    Args:
        packages: Names of packages that have `lazy_names`.
    """
    for package in map(importlib.import_module, packages):
        for name in package.__all__:
            getattr(package, name)
