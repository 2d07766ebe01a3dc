"""Registration of a strategy with Lightning, before or after Lightning is imported.

Lightning looks up ``Trainer(strategy="federated")`` in a registry. The registry exists only after Lightning has been
imported, which takes seconds. Lightning has no entry point for strategies, and it reads its entry point for callbacks
after it has looked up the strategy.

``import lightning_fcl`` does not import Lightning. A script can create a Trainer directly after this import, without
using a name of the package. Therefore, a finder on ``sys.meta_path`` waits for the import of the module that creates
the registry. The finder is removed after that module has been imported. No finder is installed if that module has been
imported before.

The alternative is to put a lazy module ``lightning`` into ``sys.modules``. But other code can check ``sys.modules`` to
find out whether Lightning is imported, and would find the lazy module. Code that reads attributes of the lazy module
would import Lightning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

_STRATEGIES = "lightning.pytorch.strategies"


def register_strategy(name: str, make: Callable[[], Strategy], description: str) -> None:
    """Register a strategy with Lightning by name, now or as soon as Lightning is imported. Does not import Lightning.

    Args:
        name: Value of ``Trainer(strategy=...)``.
        make: Function that returns the strategy. A Trainer calls it.
        description: Description of the strategy in Lightning's registry.
    """

    def register() -> None:
        from lightning.pytorch.strategies import StrategyRegistry

        if name not in StrategyRegistry:
            StrategyRegistry.register(name, make, description=description)

    if _STRATEGIES in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _StrategiesFinder(register))


class _StrategiesFinder(MetaPathFinder):
    """A finder that calls a function after Lightning's strategies have been imported.

    Args:
        on_imported: The function to call.
    """

    def __init__(self, on_imported: Callable[[], None]) -> None:
        self._on_imported = on_imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._finish)
        return spec

    def _finish(self) -> None:
        with suppress(ValueError):  # other code may have restored an earlier `sys.meta_path`
            sys.meta_path.remove(self)
        self._on_imported()


class _CallingLoader(Loader):
    """A loader that restores the original loader of a module, runs the module, and then calls a function.

    Args:
        loader: Loader of the module.
        on_loaded: The function to call.
    """

    def __init__(self, loader: Loader, on_loaded: Callable[[], None]) -> None:
        self._loader = loader
        self._on_loaded = on_loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._on_loaded()
