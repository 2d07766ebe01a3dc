"""Objects of a recipe: creating them, checking them without training, and loading the checkpoint of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fcl.callbacks import BaseSession, Pretrain
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import EMPTY
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import find_stream, get_callbacks
from lightning_fcl.errors import MissingValueError
from lightning_fcl.evaluation.summary import format_value
from lightning_fcl.federation.aggregation import check_state
from lightning_fcl.io.checkpoint import get_run_checkpoint, read_checkpoint, require_checkpoint_file
from lightning_fcl.methods.context import is_labelled
from lightning_fcl.methods.dry_run import first_indices
from lightning_fcl.methods.method import Method
from lightning_fcl.runs.federated_cli import FederatedCLI, add_default_metrics, as_list
from lightning_fcl.runs.fit import make_cli
from lightning_fcl.runs.lightning_errors import convert_errors
from lightning_fcl.runs.outcome import raise_no_round
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.simulation.checkpoint_content import check_states
from lightning_fcl.simulation.communication import CommunicationForecast, forecast_communication
from lightning_fcl.simulation.setup_checks import check_ranks
from lightning_fcl.simulation.strategy import FederatedStrategy
from lightning_fcl.tasks.base import Task
from lightning_fcl.tasks.classification import Classifier

log = logging.getLogger(__name__)


class LoadedRecipe(FederatedCLI):
    """The objects of a recipe: ``model``, ``datamodule``, ``strategy`` and ``callbacks``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for name in ("--ckpt_path", "--weights_only"):
            parser.add_argument(name)

    def instantiate_trainer(self, **kwargs: Any) -> None:  # type: ignore[override]
        strategy, callbacks = (self.config_init["trainer"][name] for name in ("strategy", "callbacks"))
        self.strategy = strategy if isinstance(strategy, FederatedStrategy) else FederatedStrategy()
        self.callbacks: list[Callback] = as_list(callbacks)

    def make_trainer(self) -> L.Trainer:
        """Return a Trainer without a logger and without the default checkpoint callback."""
        trainer_config = self.config_init["trainer"]
        saves = any(isinstance(callback, ModelCheckpoint) for callback in self.callbacks)
        quiet = {"logger": False, "enable_model_summary": False}
        if trainer_config["enable_checkpointing"] is not False:
            quiet["enable_checkpointing"] = saves
        strategy_name = trainer_config["strategy"] if isinstance(trainer_config["strategy"], str) else "federated"
        parts = {
            "strategy": self.strategy if strategy_name == "federated" else strategy_name,
            "callbacks": self.callbacks,
        }
        with convert_errors():
            self.datamodule.setup("fit")
            if (tasks := self.config["recipe"]["first_tasks"]) or trainer_config["max_epochs"] is None:
                parts["max_epochs"] = self.datamodule.plan.num_rounds_of_tasks(tasks)
            return L.Trainer(**{**vars(trainer_config), **parts, **quiet})


def load_recipe(recipe: Recipe) -> LoadedRecipe:
    """Create and return the objects that a recipe names."""
    if not recipe.files:
        raise MissingValueError(
            "Expected at least one recipe, but got none.",
            hint="Pass the name or the file of a recipe, such as quickstart.",
        )
    return make_cli(recipe.with_values({"seed_everything": False}).content(), LoadedRecipe, runs=False)


def load_trained_recipe(run: Path) -> LoadedRecipe:
    """Return the objects of a run's recipe. The model has the state of the newest checkpoint of the run."""
    checkpoint = load_newest_checkpoint(run)
    return load_into_recipe(load_recipe(Recipe((run / "config.yaml",))), checkpoint)


def load_newest_checkpoint(run: Path) -> dict[str, Any]:
    """Return the content of the newest checkpoint of a run. The file must contain only tensors and plain values."""
    return read_checkpoint(partial(torch.load, map_location="cpu", weights_only=True), get_run_checkpoint(run))


def load_into_recipe(recipe: LoadedRecipe, checkpoint: dict[str, Any]) -> LoadedRecipe:
    """Load the model state of a checkpoint into the objects of a recipe, and return the objects."""
    for callback in recipe.callbacks:
        if isinstance(callback, BaseSession):
            callback.freeze(recipe.model.model)
    check_state(recipe.model, checkpoint["state_dict"])
    recipe.model.load_state_dict(checkpoint["state_dict"])
    recipe.model.on_load_checkpoint(checkpoint)
    return recipe


def describe_recipe(recipe: Recipe) -> str:
    """Set up a fit of a recipe without training, and return a description of the recipe."""
    with _seeded(recipe):
        return _describe_objects(load_recipe(recipe))


@contextmanager
def _seeded(recipe: Recipe) -> Iterator[None]:
    """Temporarily set the seed of a recipe, so that the partition and the sampled clients are those of a fit."""
    seed, previous_seed = recipe.content().get("seed_everything", 0), os.environ.get("PL_GLOBAL_SEED")
    try:
        with suppress(TypeError, ValueError):  # The parser rejects a seed that is not a number.
            os.environ["PL_GLOBAL_SEED"] = str(int(seed))
        yield
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
        if previous_seed is not None:
            os.environ["PL_GLOBAL_SEED"] = previous_seed


def _describe_objects(parts: LoadedRecipe) -> str:
    """Set up a fit of the objects of a recipe without training, and return a description of the recipe."""
    trainer, task, stream = parts.make_trainer(), parts.model, parts.datamodule
    callbacks = get_callbacks(trainer)
    methods = [type(one).__name__ for one in callbacks if isinstance(one, Method)]
    # The check must not train, show progress or write files. Therefore a base session only runs its checks, and
    # `Pretrain` trains for 0 epochs.
    callbacks[:] = [one for one in callbacks if not isinstance(one, ProgressBar | OnExceptionCheckpoint)]
    callbacks[:] = [_Checks(one) if isinstance(one, BaseSession) else one for one in callbacks]
    for callback in callbacks:
        if isinstance(callback, Pretrain):
            callback.epochs = 0
    recipe_config = parts.config["recipe"]
    add_default_metrics(callbacks, recipe_config["eval_split"], recipe_config["first_tasks"])
    trainer_config = parts.config["trainer"]
    saves = trainer_config["enable_checkpointing"] is not False and not trainer_config["barebones"]
    enough = _Enough(_processes(trainer.strategy), saves)
    callbacks.insert(0, enough)
    if parts.config["ckpt_path"]:
        require_checkpoint_file(parts.config["ckpt_path"])
    if parts.config["trainer"]["logger"] is not False and not parts.config["trainer"]["barebones"]:
        trainer.logger = DummyLogger()
    with convert_errors():
        try:
            trainer.fit(task, datamodule=stream)
        except _WouldTrainError:
            shape = _outputs(task, stream, trainer)
        else:
            raise_no_round(trainer)
    plan, participation = stream.plan, parts.strategy.federation.participation
    numbers = sum(parameter.numel() for parameter in task.parameters())
    experiences = max(map(max, plan.experiences.values())) + 1
    batch = _samples(stream)
    sample = _shape_of(batch[0] if is_labelled(batch) else batch)
    lines = {
        "data": f"{len(plan.groups):,} samples of shape {sample}, {len(stream.classes)} classes",
        "federation": f"{len(plan.clients)} clients, {plan.num_rounds} rounds, {experiences} experiences",
        "training": participation.describe(len(plan.clients)),
        "model": f"{type(task).__name__} of {numbers:,} parameters" + (f", outputs of shape {shape}" if shape else ""),
        "methods": ", ".join(methods) or "none (fine-tuning)",
        **_describe_communication(enough.forecast, trainer.max_epochs or 0),
        **_describe_privacy(parts.strategy, enough.num_rounds),
    }
    if small_clients := _small_clients(stream):
        lines["min_size"] = small_clients
    return "\n".join(["The recipe is valid.", *(f"{name:11}{what}" for name, what in lines.items())])


def _describe_privacy(strategy: object, num_rounds: int) -> dict[str, str]:
    """Return lines on differential privacy, by title. Return {} without privacy."""
    if not isinstance(strategy, FederatedStrategy) or (account := strategy.federation.privacy) is None:
        return {}
    setting = strategy.server.pipeline.setting
    return account.describe(num_rounds, sum(setting.state[name].numel() for name in setting.changing))


class _WouldTrainError(Exception):
    """An exception that ends the setup of a fit at its first round, when all checks have passed."""


class _Enough(Callback):
    """A callback that ends a fit at the start of the first round, before the recipe's callbacks run in this round.

    Args:
        processes: Number of processes of the fit.
        saves: Whether the fit saves checkpoints.
    """

    def __init__(self, processes: int, saves: bool) -> None:
        self._processes, self._saves = processes, saves
        self.forecast: CommunicationForecast | None = None
        self.num_rounds = 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, FederatedStrategy):
            check_ranks(trainer.strategy.federation, self._processes)
        callbacks, self.num_rounds = get_callbacks(trainer), trainer.max_epochs or 0
        if self._saves:
            check_states(callbacks)
        # A base session would change the model, so that the sizes of uploads are not known before it.
        is_final = not any(isinstance(one, _Checks) for one in callbacks)
        if isinstance(trainer.strategy, FederatedStrategy) and is_final:
            with isolate_rng():
                self.forecast = forecast_communication(trainer.strategy.federation, trainer.max_epochs or 0)
        callbacks[:] = [one for one in callbacks if type(one).__module__.startswith("lightning_fcl.")]
        raise _WouldTrainError


class _Checks(Callback):
    """A callback in place of a base session. It runs the session's checks and does not train."""

    def __init__(self, session: BaseSession) -> None:
        self._session = session

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks = get_callbacks(trainer)
        self._session.check_stream(pl_module, callbacks[: callbacks.index(self)], find_stream(trainer))


def _describe_communication(forecast: CommunicationForecast | None, rounds: int) -> dict[str, str]:
    """Return lines on the bytes that clients transmit, by title. Return {} if the bytes are not known."""
    if forecast is None:
        return {}
    bound = "at least " if forecast.uncounted else ""
    lines = {}
    for way, size, total in (
        ("upload", forecast.upload, forecast.total_upload),
        ("download", forecast.download, forecast.total_download),
    ):
        if not size and bound:
            lines[way] = "known only during training"
            continue
        lines[way] = f"{bound}{format_value(size, 'B')} per client and round"
        if forecast.fixed:
            lines[way] += f", {bound}{format_value(total, 'B')} in {rounds} rounds"
    if forecast.uncounted:
        names = ", ".join(forecast.uncounted)
        lines["uncounted"] = f"tensors of {names}, because their size is known only during training"
    if forecast.changing:
        lines["condition"] = f"{', '.join(forecast.changing)} must not freeze or add parameters after the first round"
    return lines


def _processes(strategy: object) -> int:
    """Return the number of processes that a federated strategy would start, and change the strategy to use one process.

    For any other strategy, return 1.
    """
    if not isinstance(strategy, FederatedStrategy):
        return 1
    num_processes = strategy.expected
    strategy.parallel_devices, strategy.num_nodes, strategy._launcher = (strategy.parallel_devices or [])[:1], 1, None
    return num_processes


def _samples(stream: FederatedStream) -> Any:
    """Return a batch of at most two samples, or None if all splits are empty."""
    plan = stream.plan
    with isolate_rng():
        for split, rows in (("test", plan.test), ("validation", plan.validation), ("train", first_indices(stream))):
            if rows is not None and len(rows):
                return stream.samples.get(rows[:2], split)
    return None


@torch.no_grad()
def _outputs(task: L.LightningModule, stream: FederatedStream, trainer: L.Trainer) -> str:
    """Return the shape of a module's output for a sample as text.

    The text is empty if the batch has no labels, or if `forward` of a custom module does not accept a sample.
    """
    batch = trainer.precision_plugin.convert_input(_samples(stream))
    if not is_labelled(batch):
        return ""
    x, y = batch
    try:
        with trainer.precision_plugin.forward_context():
            outputs = task.eval()(x)
    except Exception as error:  # The steps of a custom module can prepare the input of `forward`.
        if isinstance(task, Task):
            raise
        log.debug("`forward` cannot process a sample.", exc_info=error)
        return ""
    if isinstance(task, Classifier) and not task.task_incremental:
        task.sample_loss(outputs, y)
    return _shape_of(outputs)


def _shape_of(value: object) -> str:
    """Return the shapes of the tensors of a batch or an output, without the batch dimension.

    Example:
        >>> _shape_of({"logits": torch.zeros(2, 10), "features": [torch.zeros(2, 4, 4)]})
        '{logits: (10,), features: [(4, 4)]}'
    """
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape[1:]))
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shape_of(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shape_of, value)) + "]"
    return type(value).__name__


def _small_clients(stream: FederatedStream) -> str:
    """Return a note on clients with fewer than `min_partition_size` samples in an experience, or an empty text."""
    plan, min_size = stream.plan, stream.partition.min_partition_size if isinstance(stream.partition, Dirichlet) else 1
    sizes: dict[tuple[str, int], int] = {}
    for client, numbers in plan.experiences.items():
        for experience in range(max(numbers) + 1 if min_size > 1 else 0):
            rounds = [r for r, number in enumerate(numbers) if number == experience]
            rows = np.unique(np.concatenate([EMPTY, *(plan.train[r].get(client, EMPTY) for r in rounds)]))
            if len(rows) < min_size:
                sizes[client, experience] = len(rows)
    if not sizes:
        return ""
    (client, experience), fewest = min(sizes.items(), key=itemgetter(1))
    number = len({client for client, _ in sizes})
    return (
        f"fewer than {min_size} samples in an experience: {number} of {len(plan.clients)} clients, such as client "
        f"{client} with {fewest} in experience {experience}. `min_partition_size` counts samples of the whole stream."
    )
