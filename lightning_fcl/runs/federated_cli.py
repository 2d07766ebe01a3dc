"""LightningCLI for federated training, with the results of a run in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as L
import yaml
from jsonargparse import ArgumentError, Namespace, set_loader
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fcl.callbacks import ContinualMetrics, FederatedProgressBar, PredictionWriter
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import InvalidValueError, LightningFCLError, UnknownNameError
from lightning_fcl.evaluation.results import ENVIRONMENT, LAST, find_run_folder, write_files, write_results
from lightning_fcl.io.atomic import run_lock, write_atomic
from lightning_fcl.io.checkpoint import check_weights_only, newest_checkpoint, resolve_checkpoint
from lightning_fcl.io.safe_yaml import load_yaml
from lightning_fcl.runs.diagnosis import MODE, check_class_paths, explain_parser_error
from lightning_fcl.runs.environment import make_environment
from lightning_fcl.runs.lightning_errors import convert_errors
from lightning_fcl.runs.logger_runs import finish_wandb_runs, prepare_logger_runs
from lightning_fcl.runs.outcome import make_results
from lightning_fcl.runs.recipe import Recipe, take_settings
from lightning_fcl.runs.recipe_info import RecipeInfo
from lightning_fcl.runs.run_callbacks import PrintParticipation, SaveConfig, StopAfterRound
from lightning_fcl.runs.run_estimate import PrintEstimate
from lightning_fcl.runs.secret_values import with_variables
from lightning_fcl.simulation.checkpoint_io import AtomicCheckpointIO
from lightning_fcl.simulation.strategy import FederatedStrategy
from lightning_fcl.validation import did_you_mean

Entry = TypeVar("Entry", bound=Callback | Mapping[str, Any])  # an entry of `callbacks`


class FederatedCLI(LightningCLI):
    """A LightningCLI that trains a federation and writes the results of a run to one folder, ``--out``.

    On the command line, errors of this library are printed without a traceback. Set the environment variable
    ``LIGHTNING_FCL_TRACEBACK=1`` to see the traceback. `docs/custom-cli.md` contains an example project.

    Args:
        model_class: LightningModule to train. By default, the recipe names the class with ``class_path``.
        datamodule_class: `FederatedStream` or a subclass.
        program: Command before ``fit`` in printed commands, such as ``lightning-fcl``. By default, the running script.
        kwargs: Arguments of LightningCLI. They override the defaults of this class.
    """

    program_name = ""

    def __init__(
        self,
        model_class: type[L.LightningModule] = L.LightningModule,
        datamodule_class: type[L.LightningDataModule] = FederatedStream,
        program: str = "",
        **kwargs: Any,
    ) -> None:
        self.program_name = program or self.program_name
        _import_public_classes()
        args = sys.argv[1:] if kwargs.get("args") is None else kwargs["args"]
        first = args.get("subcommand") if isinstance(args, Mapping) else next(iter(args), None)
        # Build only the parser of this command. Building the parsers of all commands would double the time to start.
        if commands := {name: skip for name, skip in self.subcommands().items() if name == first}:
            self.subcommands = lambda: commands  # type: ignore[method-assign]
        cli_arguments = {
            "subclass_mode_model": model_class is L.LightningModule,
            "seed_everything_default": 0,
            "auto_configure_optimizers": False,
            "save_config_callback": SaveConfig,
            "save_config_kwargs": {"overwrite": True},
            "trainer_defaults": {"strategy": {"class_path": "lightning_fcl.FederatedStrategy"}},
            **kwargs,
        }
        try:
            with convert_errors():
                super().__init__(model_class, datamodule_class, **cli_arguments)
        except LightningFCLError as error:
            if cli_arguments.get("args") is not None or os.environ.get("LIGHTNING_FCL_TRACEBACK"):
                raise
            self.parser.exit(2, f"error: {error}\n(Set LIGHTNING_FCL_TRACEBACK=1 to see the traceback.)\n")

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create a parser that raises errors instead of exiting, and rejects abbreviated option names.

        The parser limits the size and depth of YAML.
        """
        return super().init_parser(**{"exit_on_error": False, "allow_abbrev": False, "parser_mode": MODE} | kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the argument ``--out`` and the section ``recipe``."""
        parser.add_argument(
            "--out", type=str | None, help="set the run folder (default: folder of the resumed run, or runs/fit)"
        )
        parser.add_class_arguments(RecipeInfo, "recipe")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse arguments.

        Raises:
            LightningFCLError: If the parser rejects an argument.
        """
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise self._explain(error, parser, args) from error

    def _explain(self, error: ArgumentError, parser: LightningArgumentParser, args: ArgsType) -> LightningFCLError:
        """Return an error that names the argument that the parser rejects."""
        command, words, content = None, list[str](), dict(args) if isinstance(args, Mapping) else {}
        if isinstance(args, Mapping):
            command = content.get("subcommand")
            content = content.get(str(command), content)
        else:
            words = sys.argv[1:] if args is None else list(args)
            command = next((word for word in words[:1] if word in self.subcommands()), None)
        if command:
            parser = self._parser(command)
        if not isinstance(args, Mapping):
            flags = [
                option
                for action in parser._actions
                if action.nargs in (0, "?", "*")
                for option in action.option_strings
            ]
            content = Recipe(tuple(take_settings(words, flags)[1])).content()
        trainer_class = self.trainer_class if isinstance(self.trainer_class, type) else L.Trainer
        owners: dict[str, Callable[..., Any]] = {"trainer": trainer_class, "recipe": RecipeInfo}
        bases: dict[str, Callable[..., Any]] = {}
        # If there are default configuration files, the model is not checked, because these files may name it.
        if not (self.subclass_mode_model and parser.default_config_files):
            (bases if self.subclass_mode_model else owners)["model"] = self._model_class
        (bases if self.subclass_mode_data else owners)["data"] = self._datamodule_class
        keys = [str(key) for key in parser.get_defaults(skip_validation=True).keys()]  # noqa: SIM118 # dotted names
        if "trainer.max_epochs" not in keys:  # The words contain no known command.
            command_name = words[0] if words else "none"
            return UnknownNameError(
                f"Expected one of the commands {', '.join(self.subcommands())}, but got {command_name}.",
                hint=did_you_mean(command_name, self.subcommands()),
                value=command_name,
            )
        return explain_parser_error(error, keys, owners, bases, content)

    def _parse_ckpt_path(self) -> None:
        """Do nothing. In LightningCLI, this step overrides the model's arguments by hyperparameters of a checkpoint."""

    def before_instantiate_classes(self) -> None:
        """Check the configuration, and replace the URL of a checkpoint by a downloaded, verified file.

        Raises:
            InvalidValueError: If the section ``data``, ``recipe`` or ``trainer`` is not a mapping, a ``class_path``
                names neither a class nor a function with a return annotation, or ``weights_only`` is false.
        """
        config = self.config[self.config["subcommand"]] if self.config.get("subcommand") else self.config
        for name in ("data", "recipe", "trainer"):
            if not isinstance(config[name], Namespace):
                raise InvalidValueError(
                    f"Expected `{name}` to be a mapping of arguments, but got {config[name]!r}.",
                    argument=name,
                    value=config[name],
                )
        files = [Path(file.relative) for file in config.get("config") or []]
        config["recipe"]["name"] = config["recipe"]["name"] or next((file.stem for file in files), "")
        check_class_paths(config)
        if self.config.get("subcommand") and config["ckpt_path"]:
            check_weights_only(config["weights_only"])
            config["ckpt_path"], config["weights_only"] = str(resolve_checkpoint(config["ckpt_path"])), True

    def instantiate_classes(self) -> None:
        """Create the objects of the recipe. If a class raises an error, raise this error instead of a parser error."""
        class_errors: list[Exception] = []

        def make(class_type: type, *args: Any, **kwargs: Any) -> object:
            try:
                instance: object = class_type(*args, **with_variables(kwargs, (class_type.__name__,)))
            except Exception as error:
                class_errors.append(error)
                raise
            class_errors.clear()
            return instance

        self.parser.add_instantiator(make, object)
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause = class_errors[-1] if class_errors else error.__cause__  # the error of a class or a function
            if type(error) is ValueError and isinstance(cause, Exception):
                raise cause from None  # The parser's error would list all types that it tried.
            raise

    @property
    def output_folder(self) -> Path:
        """Folder of the run: `out`, otherwise the folder of the run whose recipe is read, otherwise `runs/fit`."""
        config = self.config.get(self.config.get("subcommand") or "", self.config)
        if config["out"] is None:
            runs = [run for file in config.get("config") or [] if (run := find_run_folder(Path(file.relative)))]
            return runs[-1] if runs else Path("runs/fit")
        return Path(config["out"])

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Create the Trainer. For ``fit``, add metrics, a progress bar, checkpoints and a logger if they are missing.

        A progress bar, checkpoints or a logger are not added if the recipe disables them. The default checkpoint
        callback saves a checkpoint after every round.
        """
        # Without a command (`run=False`), the caller configures and runs the Trainer.
        if not self.config.get("subcommand"):
            return super().instantiate_trainer(**kwargs)
        config = self.config_init[self.config_init.subcommand]["trainer"]
        callbacks = as_list(config["callbacks"])

        def lacks(kind: type[Callback]) -> bool:
            return not any(isinstance(callback, kind) for callback in callbacks)

        if self.config.subcommand == "fit":
            last = self.output_folder / LAST
            recipe = self.config["fit"]["recipe"]
            add_default_metrics(callbacks, recipe["eval_split"], recipe["first_tasks"])
            switches = (config[name] is not False for name in ("enable_progress_bar", "enable_checkpointing"))
            shows, saves = (given and not config["barebones"] for given in switches)
            if shows and lacks(ProgressBar):
                callbacks.append(FederatedProgressBar())
            if saves and lacks(ModelCheckpoint):
                saving = {"save_on_train_epoch_end": True, "enable_version_counter": False}
                callbacks.append(ModelCheckpoint(last.parent, last.stem, **saving))  # type: ignore[arg-type]
            self._ending = StopAfterRound(last if saves else None)
            callbacks.append(self._ending)
            if config["logger"] is None and not config["barebones"]:
                kwargs["logger"] = TensorBoardLogger(str(self.output_folder), None, "")
            if config["default_root_dir"] is None:
                # Custom checkpoint callbacks write to this folder if there is no logger.
                kwargs["default_root_dir"] = str(self.output_folder)
            if config["max_epochs"] is None:
                kwargs["max_epochs"] = -1  # `fit` replaces this value by the number of rounds of the stream.
            if config["enable_model_summary"] is None:
                kwargs["enable_model_summary"] = False
        else:  # Commands other than `fit` write no files by default.
            kwargs |= {"logger": False} if config["logger"] is None else {}
            kwargs |= {"enable_checkpointing": False} if lacks(ModelCheckpoint) else {}
        trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        if self.config.subcommand == "fit" and type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO(self.output_folder)
        for callback in get_callbacks(trainer):
            if isinstance(callback, SaveConfig | PredictionWriter):
                callback.folder = self.output_folder
        if self.config.subcommand == "fit" and isinstance(trainer.strategy, FederatedStrategy):
            trainer.strategy.keep_ledger(self.output_folder)
        if self.config.subcommand == "fit":
            name = self.config["fit"]["recipe"]["name"] or self.output_folder.name
            prepare_logger_runs(trainer, self.output_folder, name, bool(self.config["fit"]["ckpt_path"]))
        return trainer

    @property
    def should_write_results(self) -> bool:
        """Whether this process writes the results of the run: rank 0, except under ``fast_dev_run``."""
        return self.trainer.is_global_zero and not self.trainer.fast_dev_run  # type: ignore[attr-defined]

    def fit(self, model: L.LightningModule, **arguments: Any) -> None:
        """Train, and write ``results.json`` and the report.

        If the recipe sets ``first_tasks`` or no ``max_epochs``, the stream determines the number of rounds.
        """
        config, first = self.config["fit"], self.trainer.is_global_zero
        lock = run_lock(self.output_folder) if first else contextlib.nullcontext()
        with lock, contextlib.closing(self._ending), finish_wandb_runs(self.trainer):
            tasks, trainer_config = config["recipe"]["first_tasks"], config["trainer"]
            if not trainer_config["fast_dev_run"] and (tasks or trainer_config["max_epochs"] is None):
                self.datamodule.trainer = self.trainer
                self.datamodule.setup("fit")
                self.trainer.fit_loop.max_epochs = self.datamodule.plan.num_rounds_of_tasks(tasks)
            self.trainer.fit(model, **arguments)
            if self.should_write_results:
                program = self.program_name or shlex.join(["python", sys.argv[0]])
                command = f"{program} fit {shlex.join(['--config', str(self.output_folder / 'config.yaml')])}"
                write_results(self.output_folder, make_results(self.trainer, self.datamodule, config, command))
                environment = make_environment(self.datamodule, self.output_folder)
                write_atomic(self.output_folder / ENVIRONMENT, json.dumps(environment, indent=1) + "\n")
                write_files(self.output_folder)
            num_finished_rounds, rounds = self.trainer.current_epoch, self.trainer.max_epochs or 0
            self._ending.check(
                self.program_name,
                self.output_folder,
                num_finished_rounds,
                rounds,
                newest_checkpoint(self.output_folder / "checkpoints"),
            )


class FitCLI(FederatedCLI):
    """The command ``lightning-fcl fit``, which prints the number of clients per round and an estimate of its length."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        get_callbacks(trainer).extend([PrintParticipation(), PrintEstimate(self.output_folder)])
        return trainer


def add_default_metrics(
    callbacks: list[Callback], eval_split: Literal["test", "validation"], first_tasks: int | None
) -> None:
    """Add `ContinualMetrics` if it is missing. Its final metrics are those of the first tasks.

    With ``eval_split="validation"``, each `ContinualMetrics` and `PredictionWriter` uses validation samples.
    """
    if not any(isinstance(callback, ContinualMetrics) for callback in callbacks):
        callbacks.append(ContinualMetrics())
    for callback in callbacks:
        if isinstance(callback, ContinualMetrics):
            callback.first_tasks = first_tasks
        if isinstance(callback, ContinualMetrics | PredictionWriter) and eval_split == "validation":
            callback.split = "validation"


def as_list(callbacks: Entry | list[Entry] | None) -> list[Entry]:
    return list(callbacks) if isinstance(callbacks, list) else [callbacks] if callbacks else []


def _import_public_classes() -> None:
    """Import the public classes, because the parser finds a class by its short name only if the class is imported."""
    for package in map(import_module, ("lightning_fcl", "lightning_fcl.callbacks", "lightning_fcl.models")):
        for name in dir(package):
            getattr(package, name)


set_loader(MODE, load_yaml, (yaml.YAMLError,))
