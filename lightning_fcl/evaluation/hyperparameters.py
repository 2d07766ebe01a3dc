"""Hyperparameters in the recipe of a run, by class, as papers list them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

# Arguments of the Trainer that can change results. All other arguments of the Trainer are left out.
_TRAINER = (
    *("max_epochs", "min_epochs", "max_steps", "max_time", "precision", "gradient_clip_val", "gradient_clip_algorithm"),
    *("accumulate_grad_batches", "limit_train_batches", "overfit_batches"),
)
# Arguments that do not change results.
_OPERATIONAL = {
    *("client_store", "start_method", "max_vectorized_clients", "accelerator", "checkpoint_io", "precision_plugin"),
    *("num_workers", "foreach", "fused", "capturable", "differentiable"),
}
_OPERATIONAL_CALLBACKS = {
    *("DeviceStatsMonitor", "FederatedProgressBar", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary"),
    *("OnExceptionCheckpoint", "RichModelSummary", "RichProgressBar", "TQDMProgressBar"),
}
# Values of the Trainer that set no limit.
_UNLIMITED: dict[str, object] = {"max_steps": -1, "overfit_batches": 0.0, "accumulate_grad_batches": 1}


class Hyperparameter(NamedTuple):
    """A hyperparameter of a run.

    Args:
        owner: Name of the class that has the argument. If the object is itself an argument, the name of this argument
            follows in parentheses, as in ``SGD (optimizer)``.
        name: Name of the argument. Arguments in a plain mapping have dotted names.
        value: Value as text. For an object, the name of its class.
        path: Path of the argument in the recipe, different for each hyperparameter of a run.
    """

    owner: str
    name: str
    value: str
    path: str


def list_hyperparameters(config: Mapping[str, Any]) -> list[Hyperparameter]:
    """Return the hyperparameters in a recipe with all defaults. Arguments that are null are left out.

    The list contains the arguments of the strategy, of callbacks, of the model and of the data. It also contains the
    arguments of the Trainer that can change results. Of an absolute path, only the last part is included.

    Example:
        >>> list_hyperparameters({"data": {"batch_size": 16, "split": None}})
        [Hyperparameter(owner='data', name='batch_size', value='16', path='data.batch_size')]
    """
    trainer = config.get("trainer") or {}
    limits = {name: trainer.get(name) for name in _TRAINER if trainer.get(name) != _UNLIMITED.get(name)}
    callbacks = [node for node in as_nodes(trainer.get("callbacks")) if class_name(node) not in _OPERATIONAL_CALLBACKS]
    result = [*_arguments("Trainer", limits, "trainer"), *_object_arguments(trainer.get("strategy"), "strategy")]
    result += _object_arguments(callbacks, "callbacks")
    for section in ("model", "data"):
        content = config.get(section)
        result += (
            _object_arguments(content, section) if is_node(content) else _arguments(section, content or {}, section)
        )
    return result


def is_node(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value of a recipe specifies an object by its ``class_path``."""
    return isinstance(value, Mapping) and isinstance(value.get("class_path"), str)


def as_nodes(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a value of a recipe that is an object, a list of objects, or null."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, Mapping) and is_node(entry)]


def class_name(node: Mapping[str, Any]) -> str:
    """Return the name of the class of an object in a recipe, without its module."""
    return str(node["class_path"]).rpartition(".")[2]


def find_nodes(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield each object in a value of a recipe, at any depth, the outer objects first."""
    if isinstance(value, Mapping):
        if is_node(value):
            yield value
        for entry in value.values():
            yield from find_nodes(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from find_nodes(entry)


def plain_arguments(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of an object in a recipe that are not objects and neither null nor false, as text."""
    arguments = node.get("init_args") or {}
    return {
        name: to_text(value)
        for name, value in arguments.items()
        if value is not None and value is not False and name not in _OPERATIONAL and not any(find_nodes(value))
    }


def to_text(value: object) -> str:
    """Return a value of a recipe as text."""
    if isinstance(value, str):
        return Path(value).name if Path(value).is_absolute() else value
    return json.dumps(value, ensure_ascii=False, default=str)


def _object_arguments(value: object, path: str, argument: str = "") -> Iterator[Hyperparameter]:
    """Yield the arguments of the objects in a value of a recipe.

    Args:
        value: An object, a list of objects, or another value, which has no arguments.
        path: Path of the value in the recipe.
        argument: Name of the argument that has this value. Empty at the top of the recipe.
    """
    counts: dict[str, int] = {}
    for node in as_nodes(value):
        name = class_name(node)
        counts[name] = number = counts.get(name, 0) + 1
        # The path contains the class, so that a list with other objects before this object has the same path.
        node_path = f"{path}.{name}" + (f".{number}" if number > 1 else "")
        owner = f"{name} ({argument})" if argument else name
        yield from _arguments(owner, node.get("init_args") or {}, node_path)


def _arguments(owner: str, arguments: Mapping[str, Any], path: str, prefix: str = "") -> Iterator[Hyperparameter]:
    """Yield the arguments of an object, followed by the arguments of the objects in these arguments."""
    inner: list[tuple[object, str]] = []
    for name, value in arguments.items():
        if value is None or name in _OPERATIONAL:
            continue
        full_name = prefix + name
        nodes = as_nodes(value)
        if nodes and (is_node(value) or len(nodes) == len(value)):
            class_names = ", ".join(class_name(node) for node in nodes)
            yield Hyperparameter(owner, full_name, class_names, f"{path}.{full_name}")
            inner.append((value, full_name))
        elif isinstance(value, Mapping) and value:
            yield from _arguments(owner, value, path, f"{full_name}.")
        elif value != [] and value != {}:
            yield Hyperparameter(owner, full_name, to_text(value), f"{path}.{full_name}")
    for value, full_name in inner:
        yield from _object_arguments(value, f"{path}.{full_name}", full_name)
