"""The parts of a recipe on a node: module, callbacks, strategy, and the outline of the client's rounds and classes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_origin

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ProgressBar
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fcl.annotations import all_argument_types, dataclass_type, members
from lightning_fcl.data.samples import Samples
from lightning_fcl.data.scenarios import (
    EMPTY,
    ClassIncremental,
    DomainIncremental,
    IntArray,
    Plan,
    SamplePool,
    Scenario,
    Stationary,
)
from lightning_fcl.data.scenarios.base import History, with_history
from lightning_fcl.data.split import check_classes
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.tables import Table
from lightning_fcl.deployment.messages import RejectedMessageError
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.io.safe_yaml import read_yaml, resolve_class
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.rng import derive_seed
from lightning_fcl.simulation.strategy import FederatedStrategy

Groups = tuple[tuple[int, ...], ...]
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
"""Arguments of a Trainer that change the training of a client."""
_ELSEWHERE = ("batch_size", "shuffle", "drop_last", "num_workers", "seed")
"""Arguments of `FederatedStream` that a node's stream gets from a recipe."""
_BATCHES = {"batch_size": 32, "shuffle": True, "drop_last": False}
"""Values of arguments that the recipe does not set. These values override the settings of data loaders on a node."""
_SERVER = ("data", "ckpt_path", "weights_only", "out", "recipe")
"""Sections that the fingerprint of a recipe omits, except for some entries of ``data``."""


@dataclass(frozen=True)
class ClientOutline:
    """Description of a stream for one client, without samples. The server sends the description to the client's node.

    Args:
        client: Name of the client.
        classes: Names of all classes. Empty if targets are not classes.
        groups: Names of the groups that tasks consist of: classes or domains.
        groups_are_classes: Whether the groups are classes.
        experiences: The client's experience in each round.
        tasks: The group numbers of each of the client's experiences.
        task_classes: All classes of the task of each experience. Empty if the logits of all classes are used.
        common_tasks: The classes of each different task of all clients, see `Plan.common_tasks`.
        new_classes: The classes that are new to the whole federation in each round.
        old_classes: The classes of earlier experiences of the whole federation in each round.
        history: Rounds whose samples a round contains: ``"round"``, ``"seen"`` or ``"all"``, as in `Plan`.
        samples_per_round: Number of new samples in a round. None: all samples of the experience.
        is_partitioned: Whether the groups determine the samples of a round. Otherwise, the node's data needs
            ``rounds``.
        present: The current experiences of the federation's clients in each round.
        in_step: Whether all clients enter each experience in the same round.
    """

    client: str
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    groups_are_classes: bool
    experiences: tuple[int, ...]
    tasks: Groups
    task_classes: Groups
    common_tasks: Groups
    new_classes: Groups
    old_classes: Groups
    history: History = "round"
    samples_per_round: int | None = None
    is_partitioned: bool = True
    present: Groups = ()
    in_step: bool = True

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClientOutline:
        """Return the outline from a dict that was converted to JSON and back."""
        return cls(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class ClientPlan(Plan):
    """The plan of one client. Information about other clients comes from the server's outline."""

    outline: ClientOutline = field(kw_only=True)

    def class_split(self, round_idx: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.outline.new_classes[round_idx], self.outline.old_classes[round_idx]

    def current_experiences(self, round_idx: int) -> tuple[int, ...]:
        return self.outline.present[round_idx]

    @property
    def in_step(self) -> bool:
        return self.outline.in_step

    @property
    def common_tasks(self) -> Groups:
        return self.outline.common_tasks


Dealt = ClassIncremental | DomainIncremental
"""Scenarios in which classes or domains determine the samples of a round."""


def dealt_by(scenario: Scenario) -> Dealt | None:
    """Return the class- or domain-incremental scenario with the same samples as ``scenario``.

    Return None if ``scenario`` assigns single samples to rounds.
    """
    if isinstance(scenario, Stationary):
        return scenario.as_incremental
    return scenario if isinstance(scenario, Dealt) else None


def make_outline(stream: FederatedStream, client: str) -> ClientOutline:
    """Return the outline of a stream for one client."""
    plan, scenario = stream.plan, dealt_by(stream.scenario)
    per_round = None if scenario is None else scenario.samples_per_round
    class_splits = [plan.class_split(round_idx) for round_idx in range(plan.num_rounds)]
    domains = stream.samples.group
    names = stream.samples.classes
    if not plan.groups_are_classes and domains is not None:
        names = tuple(map(str, np.unique(domains)))
    return ClientOutline(
        client,
        stream.samples.classes,
        names,
        plan.groups_are_classes,
        plan.experiences[client],
        plan.tasks[client],
        plan.task_classes.get(client, ()),
        plan.common_tasks,
        tuple(new for new, _ in class_splits),
        tuple(old for _, old in class_splits),
        plan.history,
        per_round,
        scenario is not None,
        tuple(plan.current_experiences(round_idx) for round_idx in range(plan.num_rounds)),
        plan.in_step,
    )


def client_plan(outline: ClientOutline, groups: IntArray, rounds: NDArray[np.bool_] | None, seed: int) -> ClientPlan:
    """Return the plan of a client for the samples of its node.

    Args:
        outline: The server's outline of the client's rounds.
        groups: Class or domain number of each sample, shape (n,).
        rounds: Whether each sample belongs to each round, shape (n, rounds). None: the groups determine the samples.
        seed: Seed of the random choice of samples if the outline limits the samples per round.

    Raises:
        RejectedMessageError: If ``rounds`` is required but None, or has another number of rounds than the outline.
    """
    number = len(outline.experiences)
    if rounds is not None:
        if rounds.shape[1] != number:
            raise RejectedMessageError(
                f"Expected `rounds` of the data of client {outline.client} to have one column per round (number of "
                f"rounds: {number}), but the number of columns is {rounds.shape[1]}.",
                hint="Write the data again with `lightning-fcl deploy split` and this recipe.",
            )
        dealt = [np.flatnonzero(column) for column in rounds.T]
    elif not outline.is_partitioned:
        raise RejectedMessageError(
            f"Expected the array `rounds` in the data of client {outline.client}, because this scenario assigns single "
            "samples to rounds, but got none.",
            hint="Write the data with `lightning-fcl deploy split`.",
        )
    else:
        whole = [_rows(outline, groups, round_idx, seed) for round_idx in range(number)]
        rows_by_round = [{outline.client: rows} if len(rows) else {} for rows in whole]
        dealt = [current.get(outline.client, EMPTY) for current in with_history(rows_by_round, outline.history)]
    return ClientPlan(
        train=tuple({outline.client: rows} if len(rows) else {} for rows in dealt),
        experiences={outline.client: outline.experiences},
        tasks={outline.client: outline.tasks},
        groups=groups,
        test=EMPTY,
        groups_are_classes=outline.groups_are_classes,
        task_classes={outline.client: outline.task_classes} if outline.task_classes else {},
        history=outline.history,
        outline=outline,
    )


def _rows(outline: ClientOutline, groups: IntArray, round_idx: int, seed: int) -> IntArray:
    """Return the indices of a client's samples in a round, in ascending order of the indices."""
    experience = outline.experiences[round_idx]
    has_all_samples = len(outline.tasks) == 1 and not outline.classes
    group_indices = outline.tasks[experience] if experience < len(outline.tasks) else ()
    rows = np.arange(len(groups)) if has_all_samples else np.flatnonzero(np.isin(groups, group_indices))
    if outline.samples_per_round is None:
        return rows
    rng = np.random.default_rng(derive_seed(seed, outline.client, "rounds", experience))
    round_offset, size = round_idx - outline.experiences.index(experience), outline.samples_per_round
    round_rows = rng.permutation(rows)[round_offset * size : (round_offset + 1) * size]
    return np.sort(round_rows)


def server_plan(
    scenario: Dealt,
    samples: Samples,
    client_of_sample: NDArray[Any] | None,
    clients: Sequence[str],
    seed: int,
) -> Plan:
    """Return the plan of a server: the clients' tasks without samples, and the server's test and validation samples.

    Args:
        scenario: The scenario.
        samples: Samples of the server.
        client_of_sample: Split of each sample, shape (n,): ``"test"``, ``"validation"``, or another name for samples
            that the server does not use. None: all samples are test samples.
        clients: Names of the clients.
        seed: Seed of the plan.
    """
    sample_domains = np.zeros(len(samples), dtype=np.int64) if samples.group is None else samples.group
    domains, group = np.unique(sample_domains, return_inverse=True)
    check_classes(samples, scenario)
    number = max(len(samples.classes), len(domains), 1)
    group_indices = np.arange(number)
    y = np.concatenate([group_indices % max(len(samples.classes), 1), samples.labels])
    of_all = None if samples.group is None else np.concatenate([group_indices % len(domains), group])
    names = () if samples.group is None else tuple(map(str, domains))
    client_of_sample = np.full(len(samples), "test") if client_of_sample is None else client_of_sample
    test, validation = (np.flatnonzero(client_of_sample == name) + number for name in ("test", "validation"))
    pool = SamplePool(y, EMPTY, test, validation, dict.fromkeys(clients, group_indices), of_all, samples.classes, names)
    plan = replace(scenario, samples_per_round=None).plan(pool, seed)
    return replace(
        plan,
        train=tuple(dict.fromkeys(clients, EMPTY) for _ in plan.train),
        groups=plan.groups[number:],
        test=plan.test - number,
        validation=plan.validation - number,
    )


@dataclass(frozen=True)
class NodeRecipe:
    """The objects that a node needs to train: module, stream, strategy, callbacks and arguments of the Trainer."""

    module: L.LightningModule
    stream: FederatedStream
    strategy: FederatedStrategy
    callbacks: list[Callback]
    trainer: dict[str, Any]


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe that `lightning-fcl deploy flower` has written. The recipe includes all default values.

    Raises:
        InvalidValueError: If a required section is missing in the file.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or not {"model", "data", "trainer", "seed_everything"} <= content.keys():
        raise InvalidValueError(
            f"Expected {path} to be a recipe that `lightning-fcl deploy flower` has written, but a section is missing.",
            hint="Write the recipe again with `lightning-fcl deploy flower`.",
        )
    return content


def recipe_fingerprint(recipe: Mapping[str, Any]) -> str:
    """Return a fingerprint of the settings that nodes use. Different settings have different fingerprints."""
    trainer = {name: recipe["trainer"].get(name) for name in (*_TRAINER, "strategy", "callbacks")}
    data = {name: recipe["data"].get(name) for name in (*_ELSEWHERE, "classes")}
    data |= {"table": table_in(recipe["data"].get("data"))}
    settings = {name: value for name, value in recipe.items() if name not in (*_SERVER, "trainer")}
    text = json.dumps({**settings, "trainer": trainer, "data": data}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_in(data: Any) -> dict[str, Any]:
    """Return the arguments of the first `Table` in the data of a recipe, except ``path``. Empty without a table."""
    if isinstance(data, Mapping) and "class_path" in data:
        is_table = data["class_path"] == f"{Table.__module__}.{Table.__name__}"
        return {n: v for n, v in data.get("init_args", {}).items() if n != "path"} if is_table else {}
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
    return next(filter(None, map(table_in, parts)), {})


def make_stream(recipe: Mapping[str, Any]) -> FederatedStream:
    """Seed all random numbers with the recipe's seed. Return a node's stream, which has no data yet."""
    seed = recipe["seed_everything"]
    L.seed_everything(0 if seed is True else seed, workers=True, verbose=False)
    data_settings = {name: value for name in _ELSEWHERE if (value := recipe["data"].get(name)) is not None}
    return FederatedStream(**{**_BATCHES, **data_settings})


def build_node_recipe(recipe: Mapping[str, Any]) -> NodeRecipe:
    """Return new objects for the training on a node. `lightning-fcl fit` creates equal objects from the same recipe."""
    stream, trainer = make_stream(recipe), recipe["trainer"]
    module = _made(recipe["model"])
    callback_specs = trainer.get("callbacks") or []
    callbacks = [_made(one) for one in (callback_specs if isinstance(callback_specs, list) else [callback_specs])]
    strategy = trainer.get("strategy")
    federated_strategy = _made(strategy) if isinstance(strategy, Mapping) else FederatedStrategy()
    if not isinstance(federated_strategy, FederatedStrategy) or not isinstance(module, L.LightningModule):
        raise InvalidValueError(
            "Expected a `FederatedStrategy` and a LightningModule, but got a "
            f"`{type(federated_strategy).__name__}` and a `{type(module).__name__}`."
        )
    arguments = {name: trainer[name] for name in _TRAINER if trainer.get(name) is not None}
    return NodeRecipe(module, stream, federated_strategy, [one for one in callbacks if runs_on_nodes(one)], arguments)


def runs_on_nodes(callback: Callback) -> bool:
    """Return whether a callback runs on nodes.

    Methods run on nodes. Checkpoints, early stopping, progress bars and the callbacks of `lightning_fcl.callbacks` do
    not run on nodes. All other callbacks run on nodes.
    """
    if isinstance(callback, MethodBase):
        return True
    watches = isinstance(callback, Checkpoint | EarlyStopping | ProgressBar)
    return not watches and not type(callback).__module__.startswith("lightning_fcl.callbacks.")


def _made(spec: Any, hint: Any = None) -> Any:
    """Return the object that a value of a recipe describes, including all nested objects.

    For optimizers and schedulers, return a `partial`, because they need objects that do not exist yet.

    Args:
        spec: The value.
        hint: Type annotation of the argument that gets the object.
    """
    if isinstance(spec, Mapping) and "class_path" in spec:
        kind = resolve_class(spec["class_path"])
        arguments = _arguments(kind, spec.get("init_args") or {})
        if isinstance(kind, type) and issubclass(kind, Optimizer | LRScheduler):
            return partial(kind, **arguments)
        return kind(**arguments)
    if isinstance(spec, Mapping):
        if kind := dataclass_type(hint):
            return kind(**_arguments(kind, spec))
        return {name: _made(value) for name, value in spec.items()}
    if isinstance(spec, list):
        values: Sequence[Any] = [_made(value) for value in spec]
        return tuple(values) if any((get_origin(one) or one) is tuple for one in members(hint)) else values
    return spec


def _arguments(kind: Any, init_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class. Descriptions of objects in the recipe are replaced by the objects."""
    types = all_argument_types(kind)
    return {name: _made(value, types.get(name)) for name, value in init_args.items()}
