"""The papers of a run: the attribute `citations` of each class in the recipe, and the papers of data and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fcl.data.datasets import list_datasets
from lightning_fcl.evaluation.bibliography import BibEntry, find_entries
from lightning_fcl.evaluation.hyperparameters import find_nodes, is_node
from lightning_fcl.evaluation.recorded_run import RecordedRun
from lightning_fcl.evaluation.run_sources import Sources
from lightning_fcl.federation.aggregation import BUILT_IN_REDUCTIONS
from lightning_fcl.federation.server_optimizer import ServerOptimizer
from lightning_fcl.io.safe_yaml import resolve_class
from lightning_fcl.methods.method import Method
from lightning_fcl.runs.paper_rows import row_citations
from lightning_fcl.simulation.strategy import FederatedStrategy


def find_sources(run: RecordedRun) -> Sources:
    """Return the papers of a run. The classes in its recipe are imported, but no object is created.

    Raises:
        InvalidValueError: If the attribute `citations` of a class is invalid.
    """
    classes, not_imported = _import_classes(run.config)
    # The papers of the strategy are cited only if the strategy averages.
    entries = {path: class_entries(kind) for path, kind in classes.items() if kind is not FederatedStrategy}
    strategy = (run.config.get("trainer") or {}).get("strategy")
    federation = strategy.get("init_args") or {} if is_node(strategy) else {}
    for name in _reduction_names(federation.get("reductions")):
        entries[name] = class_entries(type(BUILT_IN_REDUCTIONS[name]))
    recipe = run.results.get("recipe") or run.config.get("recipe") or {}
    return Sources(
        entries,
        [path for path, kind in classes.items() if isinstance(kind, type) and issubclass(kind, Method)],
        find_entries(_data_keys(run), "the dataset"),
        find_entries(row_citations(str(recipe.get("paper") or ""), run.row), "the recipe"),
        class_entries(FederatedStrategy) if _averages(run.config, federation, classes) else (),
        class_entries(ServerOptimizer) if federation.get("server_optimizer") else (),
        not_imported,
    )


def class_entries(kind: object) -> tuple[BibEntry, ...]:
    """Return the BibTeX entries of a class. Functions have none, and subclasses do not inherit them.

    Raises:
        InvalidValueError: If the attribute `citations` is invalid.
    """
    return find_entries(vars(kind).get("citations", ()), kind.__name__) if isinstance(kind, type) else ()


def _import_classes(config: Mapping[str, Any]) -> tuple[dict[str, object], list[str]]:
    """Return the class or function of each ``class_path`` in a recipe, and the paths that cannot be imported."""
    classes, not_imported = dict[str, object](), list[str]()
    for path in dict.fromkeys(str(node["class_path"]) for node in find_nodes(config)):
        try:
            classes[path] = resolve_class(path)
        except Exception:  # the import of a module of the user can raise any error
            not_imported.append(path)
    return classes, not_imported


def _reduction_names(reductions: object) -> list[str]:
    """Return the names of built-in reductions in the argument `reductions` of the strategy."""
    values = reductions.values() if isinstance(reductions, Mapping) else ()
    return [value for value in values if isinstance(value, str) and value in BUILT_IN_REDUCTIONS]


def _data_keys(run: RecordedRun) -> tuple[str, ...]:
    """Return the keys of the papers of a public dataset."""
    section = run.config.get("data") or {}
    section = section.get("init_args") or {} if is_node(section) else section
    data = section.get("data")
    name = data.get("name") if isinstance(data, Mapping) and not is_node(data) else data
    return next((source.citation_keys for source in list_datasets() if source.name == name), ())


def _averages(config: Mapping[str, Any], federation: Mapping[str, Any], classes: Mapping[str, object]) -> bool:
    """Return whether the server averages all uploads, as far as the recipe and the class of the module show."""
    model = config.get("model")
    module = classes.get(str(model["class_path"])) if isinstance(model, Mapping) and is_node(model) else None
    if module is None or not federation or any(federation.get(name) for name in ("reductions", "synchronization")):
        return False
    return not getattr(module, "reductions", None)
