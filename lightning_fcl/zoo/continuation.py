"""Continuation of the training of published networks. The server's state is published. Client states are not."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import get_reduction, get_reductions
from lightning_fcl.federation.reductions import Sum
from lightning_fcl.io.atomic import TemporaryFolder
from lightning_fcl.io.checkpoint import read_checkpoint
from lightning_fcl.io.checksums import check_digest
from lightning_fcl.io.reading import REDOWNLOAD_HINT, regular_file
from lightning_fcl.methods.method import Method
from lightning_fcl.models.backbone import packaged_state
from lightning_fcl.runs.loaded_recipe import LoadedRecipe, load_into_recipe
from lightning_fcl.runs.recipe import Setting
from lightning_fcl.validation import at_least
from lightning_fcl.zoo.model_entry import CONTINUE, ModelEntry, read_files, read_folder
from lightning_fcl.zoo.registry import resolve_folder
from lightning_fcl.zoo.verifying import recipe_parts

MIN_CLIENTS = 3
"""Statistics (sums) are published only if each class has samples of at least this number of clients."""

_TENSOR = "tensor"
_PLAIN = "checkpoint"


@dataclass
class Continuation:
    """A published network that can continue learning.

    The attributes ``trainer`` and ``stream`` need the data of the recipe.

    Args:
        module: The task with the published state of the server.
        checkpoint: Checkpoint file that `fit` resumes from. It contains the round and the whole server state.
        entry: Description of the published network.
    """

    module: L.LightningModule
    checkpoint: Path
    entry: ModelEntry
    _parts: LoadedRecipe = field(repr=False)
    _folder: TemporaryFolder = field(repr=False)

    @cached_property
    def trainer(self) -> L.Trainer:
        """A Trainer for all rounds of the recipe, without a logger.

        The Trainer saves checkpoints only if the recipe has a `ModelCheckpoint`, or if you add one.
        """
        return self._parts.make_trainer()

    @cached_property
    def stream(self) -> FederatedStream:
        """The recipe's stream after ``setup("fit")``."""
        self._parts.datamodule.setup("fit")
        stream: FederatedStream = self._parts.datamodule
        return stream

    @property
    def round(self) -> int:
        """Index of the next round, from 0."""
        return int(self.entry.recipe["rounds_done"])

    def fit(self) -> None:
        """Train from the recipe's next round to its last round."""
        self.trainer.fit(self.module, datamodule=self.stream, ckpt_path=str(self.checkpoint))


def continue_from(name: str | Path, clients: str | Path | None = None, classes: int | None = None) -> Continuation:
    """Return a `Continuation` that continues learning from the state of a published network.

    With the client states in ``clients``, the result of `Continuation.fit` is bitwise identical to the result of an
    uninterrupted run. Without ``clients``, the result is bitwise identical only if the methods of the recipe keep no
    client state.

    To continue with your own clients, classes or data, fit the module on another stream, with ``trainer`` or with your
    own Trainer. The module has the server's state, including the statistics of a readout. New samples are added to
    these statistics.

    Args:
        name: Name or folder, as in `lightning_fcl.zoo.load`.
        clients: Checkpoint of a federation with the same recipe, seed, data and round. Only the client states of this
            checkpoint are loaded. None: clients start without state.
        classes: Number of new classes to learn in addition to the classes of the entry. The new labels follow the
            labels of the entry. Only readouts that are solved by least squares support new classes. None: no new
            classes.

    Raises:
        ValueError: If the entry cannot be continued, or does not support new classes. If the recipe of the entry is
            not in this package. If the checkpoint in ``clients`` is of a different run.
        FileNotFoundError: If a file is missing.
    """
    folder = resolve_folder(name, to_continue=True)
    entry, files = read_folder(folder), read_files(folder)
    if CONTINUE not in files:
        raise InvalidValueError(
            f"Expected a network that can continue learning, but {entry.full_name} cannot: "
            f"{entry.recipe.get('ends', 'no state to continue from was published')}."
        )
    if classes is not None:
        at_least(1, classes=classes)
        if entry.output_kind not in ("0/1", "-1/1"):
            raise InvalidValueError(
                f"Expected no `classes` for {entry.full_name}, whose outputs are {entry.output_kind}, but got "
                f"{classes}. Only a readout that is solved by least squares can learn new classes.",
                hint="Leave `classes` out, or create a new head with `create_model(..., num_classes=...)`.",
                argument="classes",
                value=classes,
            )
    check_digest(folder / CONTINUE, files[CONTINUE])
    checkpoint = read_continuation(folder / CONTINUE)
    _, federation_state = _federation(checkpoint)
    if clients is not None:
        _, client_state = _federation(
            read_checkpoint(partial(torch.load, map_location="cpu", weights_only=True), clients)
        )
        client_fingerprint = client_state["fingerprint"]
        if any(client_fingerprint.get(name, value) != value for name, value in federation_state["fingerprint"].items()):
            raise InvalidValueError(
                f"Expected `clients` to be a checkpoint of the published recipe, seed and data, but {clients} differs.",
                hint="Leave `clients` out.",
                argument="clients",
            )
        federation_state["clients"] = dict(client_state["clients"])
    state, overrides = checkpoint["state_dict"], list[Setting]()
    # A readout may have more outputs than its data have classes.
    if classes is not None:
        overrides.append(Setting("model.num_classes", max(len(state["readout.weight"]), len(entry.classes) + classes)))
    parts = recipe_parts(entry.recipe, entry.full_name, overrides)
    state |= packaged_state(parts.model)
    if classes is not None:
        for name, value in parts.model.state_dict().items():
            # New outputs start with zeros, like outputs of classes without samples.
            if (published_value := state[name]).shape != value.shape:
                state[name] = torch.zeros_like(value)
                state[name][tuple(map(slice, published_value.shape))] = published_value
    module = load_into_recipe(parts, checkpoint).model
    temporary = TemporaryFolder("continue")
    path = temporary.path / "continue.ckpt"
    torch.save(checkpoint, path)
    return Continuation(module, path, entry, parts, temporary)


def make_continuation(checkpoint: Mapping[str, Any], recipe_parts: LoadedRecipe, first: bool) -> dict[str, Any] | str:
    """Return a checkpoint that may be published to continue from, or the reason why it must not be published.

    Client states are removed. If the state contains sums of statistics, each class must have samples of at least
    `MIN_CLIENTS` clients.

    Args:
        checkpoint: The checkpoint of the run.
        recipe_parts: The parts of the recipe of the run.
        first: Whether no version of this name exists. Sums are published only once per name, because the difference of
            two sums may be the statistics of a single client.
    """
    key, federation_state = _federation(checkpoint)
    methods = {method.state_key: method for method in recipe_parts.callbacks if isinstance(method, Method)}
    reductions = [*get_reductions(recipe_parts.model, recipe_parts.strategy.settings.rules).values()]
    reductions += [get_reduction(name, rule) for method in methods.values() for name, rule in method.reductions.items()]
    if any(isinstance(reduction, Sum) for reduction in reductions):
        stream, owners = recipe_parts.datamodule, defaultdict(set)
        for samples in stream.plan.train[: int(checkpoint["epoch"]) + 1]:
            for client, rows in samples.items():
                for label in set(stream.samples.labels[rows].tolist()):
                    owners[label].add(client)
        if min(map(len, owners.values()), default=0) < MIN_CLIENTS:
            return (
                f"a class has samples of fewer than {MIN_CLIENTS} clients. Therefore the files contain only the "
                "solution of the ridge regression, and not the sums of statistics"
            )
        if not first:
            return "sums of this name are already published, and the difference may be data of a single client"
    callbacks = {name: value for name, value in checkpoint["callbacks"].items() if name in methods}
    packaged = packaged_state(recipe_parts.model)
    state = {name: value for name, value in checkpoint["state_dict"].items() if name not in packaged}
    return {**checkpoint, "state_dict": state, "callbacks": {key: {**federation_state, "clients": {}}, **callbacks}}


def continuation_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a safetensors file with a continuation. The metadata contain other values as JSON."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_apart(content, tensors))
    return save(tensors, {_PLAIN: plain})


def read_continuation(path: Path) -> dict[str, Any]:
    try:
        with safe_open(regular_file(path), "pt") as file:
            # `file` is not a mapping, so it cannot be iterated.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            content = _joined(json.loads(file.metadata()[_PLAIN]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected {path} to contain the state to continue from, but got: {error}.", hint=REDOWNLOAD_HINT
        ) from error
    return dict(content)


def _federation(checkpoint: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key and the state of the federation among the callback states of a checkpoint."""
    return next((str(key), kept) for key, kept in checkpoint["callbacks"].items() if "between_rounds" in kept)


def _apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a copy of a value that JSON can store.

    Tensors are copied to ``tensors``, and are replaced in the result by their names in ``tensors``. Mappings and tuples
    are encoded as dictionaries with one entry, because JSON supports neither tuples nor all types of keys.
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {"of": [[_apart(key, tensors), _apart(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_apart(item, tensors) for item in value]}
    return [_apart(item, tensors) for item in value] if isinstance(value, list) else value


def _joined(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_apart` has encoded. ``tensors`` contains the tensors that `_apart` has copied."""
    if isinstance(value, list):
        return [_joined(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == "tuple":
        return tuple(_joined(item, tensors) for item in content)
    return {_joined(key, tensors): _joined(item, tensors) for key, item in content}
