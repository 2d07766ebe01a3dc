"""A recipe's parts made on a node, which has no parser of recipes: `lightning-fcl deploy` has written every default."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ProgressBar
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.hub.documents import read_yaml, resolve_maker
from lightning_fcl.methods.declaration import Declaration
from lightning_fcl.simulation.strategy import FederatedStrategy

_TRAINER = (
    "accelerator",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "detect_anomaly",
)
"""What of a Trainer's arguments a client's training depends on."""

_ELSEWHERE = ("batch_size", "shuffle", "drop_last", "num_workers", "seed")
"""What a node takes of a recipe's stream."""

_BATCHES = {"batch_size": 32, "shuffle": True, "drop_last": False}
"""What it takes where the recipe leaves it open, whatever the node's own data say: all nodes train alike."""

_SERVER = ("data", "ckpt_path", "weights_only", "out", "recipe")


@dataclass(frozen=True)
class NodeParts:
    """What a node trains with."""

    module: L.LightningModule
    stream: FederatedStream
    strategy: FederatedStrategy
    callbacks: list[Callback]
    trainer: dict[str, Any]


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe as `lightning-fcl deploy` has written it: with every default."""
    content = read_yaml(path)
    if not isinstance(content, dict) or not {"model", "data", "trainer", "seed_everything"} <= content.keys():
        raise ValueError(
            f"Expected {path} to be a recipe that `lightning-fcl deploy` has written but it is not. Deploy it again."
        )
    return content


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """A short name of what nodes do with a recipe: another one has another name."""
    trainer = {name: recipe["trainer"].get(name) for name in (*_TRAINER, "strategy", "callbacks")}
    data = {name: recipe["data"].get(name) for name in _ELSEWHERE}
    of = {name: value for name, value in recipe.items() if name not in (*_SERVER, "trainer")}
    text = json.dumps({**of, "trainer": trainer, "data": data}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(recipe: Mapping[str, Any]) -> NodeParts:
    """Make what a node trains with, from the recipe's seed, as `lightning-fcl fit` makes it."""
    seed, trainer = recipe["seed_everything"], recipe["trainer"]
    L.seed_everything(0 if seed is True else seed, workers=True, verbose=False)
    own = {name: value for name in _ELSEWHERE if (value := recipe["data"].get(name)) is not None}
    stream = FederatedStream(**{**_BATCHES, **own})
    module = _made(recipe["model"])
    given = trainer.get("callbacks") or []
    callbacks = [_made(one) for one in (given if isinstance(given, list) else [given])]
    strategy = trainer.get("strategy")
    made = _made(strategy) if isinstance(strategy, Mapping) else FederatedStrategy()
    if not isinstance(made, FederatedStrategy) or not isinstance(module, L.LightningModule):
        raise ValueError(f"Expected a `FederatedStrategy` and a LightningModule but got {made} and {module}.")
    arguments = {name: trainer[name] for name in _TRAINER if trainer.get(name) is not None}
    return NodeParts(module, stream, made, [one for one in callbacks if acts_on_nodes(one)], arguments)


def acts_on_nodes(callback: Callback) -> bool:
    """Whether a callback acts while a client trains: a method does, what watches or prepares a federation does not."""
    if isinstance(callback, Declaration):
        return True
    watches = isinstance(callback, Checkpoint | EarlyStopping | ProgressBar)
    return not watches and not type(callback).__module__.startswith("lightning_fcl.callbacks.")


def _made(spec: Any, hint: Any = None) -> Any:
    """What a part of a recipe stands for, and all that is in it."""
    if isinstance(spec, Mapping) and "class_path" in spec:
        kind = resolve_maker(spec["class_path"])
        arguments = _arguments(kind, spec.get("init_args") or {})
        if isinstance(kind, type) and issubclass(kind, Optimizer | LRScheduler):
            return partial(kind, **arguments)  # whose parameters come later
        return kind(**arguments)
    if isinstance(spec, Mapping):
        kinds = [one for one in (hint, *get_args(hint)) if isinstance(one, type) and is_dataclass(one)]
        if kinds:
            return kinds[0](**_arguments(kinds[0], spec))
        return {name: _made(value) for name, value in spec.items()}
    if isinstance(spec, list):
        made: Sequence[Any] = [_made(value) for value in spec]
        return tuple(made) if any((get_origin(one) or one) is tuple for one in (hint, *get_args(hint))) else made
    return spec


def _arguments(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(vars(kind).get("__init__", kind) if isinstance(kind, type) else kind)
    except (NameError, TypeError):  # of names that only type checkers import
        hints = {}
    return {name: _made(value, hints.get(name)) for name, value in given.items()}
