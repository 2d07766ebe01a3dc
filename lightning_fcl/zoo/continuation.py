"""Published networks go on learning where they stopped: what the server held is published, what clients keep is not."""

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
"""How many clients a sum must come from, in each class, for it to be published."""

_TENSOR = "tensor"
_PLAIN = "checkpoint"


@dataclass
class Continuation:
    """A published network, ready to go on learning. The recipe's data are wanted for its ``trainer`` and ``stream``.

    Args:
        module: The task, with the published server's state.
        checkpoint: Where the round, and all that the server held, are kept for `fit`.
        entry: What is said of it.
    """

    module: L.LightningModule
    checkpoint: Path
    entry: ModelEntry
    _parts: LoadedRecipe = field(repr=False)
    _folder: TemporaryFolder = field(repr=False)

    @cached_property
    def trainer(self) -> L.Trainer:
        """A Trainer for as many rounds as the stream has. It writes nothing: add a logger or callbacks."""
        return self._parts.make_trainer()

    @cached_property
    def stream(self) -> FederatedStream:
        """The recipe's stream, set up."""
        self._parts.datamodule.setup("fit")
        stream: FederatedStream = self._parts.datamodule
        return stream

    @property
    def round(self) -> int:
        """The round that comes next, from 0."""
        return int(self.entry.recipe["rounds_done"])

    def fit(self) -> None:
        """Go on with the recipe's next round, to its last."""
        self.trainer.fit(self.module, datamodule=self.stream, ckpt_path=str(self.checkpoint))


def continue_from(name: str | Path, clients: str | Path | None = None, classes: int | None = None) -> Continuation:
    """Go on learning where a published network stopped.

    With what the clients have kept, `Continuation.fit` comes to the same bits as a run that was never stopped; without
    it, they begin anew from the published state: to the same bits where the recipe's methods keep nothing on clients.
    For clients, classes or data of one's own, fit ``trainer`` or another on another stream: the module has the
    server's state, the sums of a readout among them, so that what is added to them counts beside what they have.

    Args:
        name: As `lightning_fcl.zoo.load` takes it.
        clients: A checkpoint of the clients' own federation, of the same recipe and round, from which only what clients
            keep is taken; None: they begin anew.
        classes: So many classes of one's own are to be learnt beside those of the entry: their labels come behind
            these. Of a readout that is solved for; None: no more.

    Raises:
        ValueError: If the entry cannot be continued, or with no more classes, its recipe is not of this package, or the
            clients' checkpoint is of another run.
        FileNotFoundError: If a file is missing.
    """
    folder = resolve_folder(name, to_continue=True)
    entry, files = read_folder(folder), read_files(folder)
    if CONTINUE not in files:
        raise InvalidValueError(
            f"Expected a network that can go on learning but {entry.full_name} cannot: "
            f"{entry.recipe.get('ends', 'nothing to go on from was published')}."
        )
    if classes is not None:
        at_least(1, classes=classes)
        if entry.output_kind not in ("0/1", "-1/1"):
            raise InvalidValueError(
                f"Expected no `classes` for {entry.full_name}, whose outputs are {entry.output_kind}, but got "
                f"{classes}: "
                "only a readout that is solved for learns more than it was made for.",
                hint="Leave `classes` out, or make a new head with `create_model(..., num_classes=...)`.",
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
                f"Expected `clients` of the published recipe, seed and data but {clients} is of others.",
                hint="Leave `clients` out.",
                argument="clients",
            )
        federation_state["clients"] = dict(client_state["clients"])
    state, overrides = checkpoint["state_dict"], list[Setting]()
    if classes is not None:  # its readout may have had more outputs than its data have classes
        overrides.append(Setting("model.num_classes", max(len(state["readout.weight"]), len(entry.classes) + classes)))
    parts = recipe_parts(entry.recipe, entry.full_name, overrides)
    state |= packaged_state(parts.model)
    if classes is not None:
        for name, value in parts.model.state_dict().items():
            if (published_value := state[name]).shape != value.shape:  # zeros, as for classes that nobody has seen yet
                state[name] = torch.zeros_like(value)
                state[name][tuple(map(slice, published_value.shape))] = published_value
    module = load_into_recipe(parts, checkpoint).model
    temporary = TemporaryFolder("continue")
    path = temporary.path / "continue.ckpt"
    torch.save(checkpoint, path)
    return Continuation(module, path, entry, parts, temporary)


def make_continuation(checkpoint: Mapping[str, Any], recipe_parts: LoadedRecipe, first: bool) -> dict[str, Any] | str:
    """What may be published of a checkpoint, to go on from; or why nothing may.

    Args:
        first: Whether nothing was published by that name before: the difference of two sums may be a single client's.
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
                f"fewer than {MIN_CLIENTS} clients have samples of some class, so sums are published as their solution"
            )
        if not first:
            return "sums were published by this name before, and a difference of two may be a single client's"
    callbacks = {name: value for name, value in checkpoint["callbacks"].items() if name in methods}
    packaged = packaged_state(recipe_parts.model)
    state = {name: value for name, value in checkpoint["state_dict"].items() if name not in packaged}
    return {**checkpoint, "state_dict": state, "callbacks": {key: {**federation_state, "clients": {}}, **callbacks}}


def continuation_bytes(content: Mapping[str, Any]) -> bytes:
    """The file of a continuation: its tensors, and all else as JSON."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_apart(content, tensors))
    return save(tensors, {_PLAIN: plain})


def read_continuation(path: Path) -> dict[str, Any]:
    try:
        with safe_open(regular_file(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is no mapping
            content = _joined(json.loads(file.metadata()[_PLAIN]), tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected {path} to hold what a server goes on from but got: {error}.", hint=REDOWNLOAD_HINT
        ) from error
    return dict(content)


def _federation(checkpoint: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a checkpoint has of the federation, and under which key."""
    return next((str(key), kept) for key, kept in checkpoint["callbacks"].items() if "between_rounds" in kept)


def _apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain values with numbers in place of tensors, which are put apart; what JSON has no word for is written out."""
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
    """The reverse of `_apart`."""
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
