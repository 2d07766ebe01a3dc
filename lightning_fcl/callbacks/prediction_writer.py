"""Predictions of the final model on the test samples, as a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor

from lightning_fcl.callbacks.client_models import ClientSelection, check_selection, is_selected, iterate_client_models
from lightning_fcl.callbacks.continual_metrics import ContinualMetrics
from lightning_fcl.callbacks.evaluator import Evaluator, samples_of_split, to_predictions
from lightning_fcl.callbacks.step_evaluator import is_evaluated_by_step
from lightning_fcl.callbacks.weight_averaging import averaged_weights
from lightning_fcl.data.scenarios import IntArray, Plan
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import get_callbacks, require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.confusion import class_names
from lightning_fcl.evaluation.results import PREDICTIONS
from lightning_fcl.federation.protocols import HasMetrics, find_federation, get_ranks
from lightning_fcl.federation.ranks import gather_by_client
from lightning_fcl.io.atomic import atomic_path
from lightning_fcl.validation import check_clients, one_of, validate_fields, validated


@dataclass(frozen=True)
class _ModelPredictions:
    """Predictions of a model.

    Args:
        samples: Index of the sample in the test set, shape (n,).
        targets: Class of the sample, shape (n,).
        predictions: Predicted class of each of S predictions for the sample, shape (n, S).
        num_classes: Number of classes C that the model can predict.
        probabilities: Probability of each class, shape (n, S, C). None if they are not requested.
    """

    samples: IntArray
    targets: IntArray
    predictions: IntArray
    num_classes: int
    probabilities: NDArray[np.float32] | None


@dataclass(eq=False)
class PredictionWriter(Callback):
    """Callback that writes the predictions of the final model on the test samples to a CSV file.

    When the fit ends, the callback tests the server's model on all test samples. With `ServerWeightAveraging`, the
    average of the server's model is tested. The callback also tests each client whose model differs from the server's
    model, on the classes (or domains) that the client has learned. A client's model is the server's model with the
    client-local parameters. Methods can personalize this model further. `ContinualMetrics` with ``when="aggregated"``
    tests the same models on the same samples. The models predict the classes that ``classes`` of `ContinualMetrics`
    allows. Without `ContinualMetrics`, they predict the classes seen so far.

    The file has a line for each model and test sample, with these columns:

    - ``model``: ``server``, or the id of a client.
    - ``sample``: Index of the sample in the test set, from 0. ``stream.plan.test[sample]`` is its index in the data.
    - ``test_task``: First task of the model, from 0, that contains the class (or domain) of the sample. -1 if no task
      contains it.
    - ``step``: Index of the prediction, from 0, if the model makes several predictions for each sample. There is one
      line for each of them. Otherwise, this column is missing.
    - ``target``, ``prediction``: Name of the class.
    - ``probability CLASS``: With ``probabilities=True``, the softmax of the model's outputs, one column for each class.
      The probability of a class that the model cannot predict is 0.

    Args:
        file: Path of the file, relative to the run folder. Without a run folder, it is relative to the Trainer's
            ``default_root_dir``.
        clients: Clients whose models are tested in addition to the server's: ``"all"``, ``"none"``, or a list of ids.
        split: ``"test"`` for the stream's test samples, or ``"validation"`` for its validation samples.
        probabilities: Whether the file contains the probability of each class.

    Raises:
        ValueError: If the module is not measured by accuracy, the stream has no samples in ``split``, or ``clients``
            contains other names than the clients of the stream.

    Example:
        >>> PredictionWriter("test.csv", clients="none").file
        'test.csv'
    """

    file: str = PREDICTIONS
    clients: ClientSelection = "all"
    split: Literal["test", "validation"] = validated("test", one_of, ("test", "validation"))
    probabilities: bool = False

    def __post_init__(self) -> None:
        check_selection(self.clients)
        validate_fields(self)
        if not isinstance(self.clients, str):
            self.clients = [str(client) for client in self.clients]
        self.folder: Path | None = None
        """Folder of the run. None: the ``default_root_dir`` of the Trainer."""
        self._is_written = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise ValueError before the first round if the predictions cannot be written at the end."""
        self._is_written = False
        plan = require_stream(trainer).plan
        if not isinstance(self.clients, str):
            check_clients("`clients`", self.clients, plan.clients)
        self._check_module(trainer, pl_module)

    def _check_module(self, trainer: L.Trainer, module: L.LightningModule) -> IntArray:
        """Return the indices of the samples. Raise ValueError if there are none, or if the module has no classes."""
        stream = require_stream(trainer)
        samples = samples_of_split(stream, self.split, type(self).__name__)
        if isinstance(module, HasMetrics) or is_evaluated_by_step(module, stream, samples):
            raise InvalidValueError(
                f"Expected a module that predicts classes for `PredictionWriter`, but `{type(module).__name__}` is "
                "measured by other metrics than accuracy.",
                hint="Remove `PredictionWriter` from the callbacks, or `--predictions` from the command.",
                argument="module",
                value=type(module).__name__,
            )
        return samples

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        stream = require_stream(trainer)
        evaluator = Evaluator.from_stream(stream, self._check_module(trainer, pl_module), pl_module.device)
        if all(
            metrics.classes == "seen" for metrics in get_callbacks(trainer) if isinstance(metrics, ContinualMetrics)
        ):
            evaluator = evaluator.among_seen_classes(max(0, trainer.current_epoch - 1))
        path = Path(self.folder or trainer.default_root_dir, self.file)
        # Datasets and modules may draw random numbers. They must not change the random state.
        with isolate_rng(), averaged_weights(trainer, pl_module):
            lines = self._model_predictions(trainer, pl_module, evaluator)
            if not trainer.is_global_zero:
                # The other processes take part in the communication.
                for _ in lines:
                    pass
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
                self._write(file, stream, evaluator, lines)
        self._is_written = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A plain Trainer does not call `on_train_end` if a fit was resumed after its last epoch.
        if find_federation(trainer) is None and not self._is_written:
            self.on_train_end(trainer, pl_module)

    def _model_predictions(
        self, trainer: L.Trainer, module: L.LightningModule, evaluator: Evaluator
    ) -> Iterator[tuple[str, _ModelPredictions]]:
        """Yield the predictions of the server's model and of each client with another model."""
        yield "server", self._predict(module, evaluator, np.arange(len(evaluator.rows)))
        federation = find_federation(trainer)
        if federation is None or self.clients == "none":
            return
        plan, last_round = federation.stream.plan, max(0, trainer.current_epoch - 1)
        test_groups = plan.groups[evaluator.rows]

        def client_predictions() -> Iterator[tuple[str, _ModelPredictions]]:
            clients = [client for client in plan.clients if is_selected(client, self.clients)]
            for client, is_server_model in iterate_client_models(federation, module, clients):
                if not is_server_model:
                    learned = plan.tasks[client][: plan.experiences[client][last_round] + 1]
                    groups = sorted({group for task in learned for group in task})
                    samples = np.flatnonzero(np.isin(test_groups, groups))
                    yield client, self._predict(module, evaluator.subset(groups), samples)

        if get_ranks(trainer).num_ranks == 1:
            yield from client_predictions()
        else:
            yield from gather_by_client(get_ranks(trainer), dict(client_predictions()), plan.clients).items()

    def _write(
        self,
        file: TextIO,
        stream: FederatedStream,
        evaluator: Evaluator,
        lines: Iterator[tuple[str, _ModelPredictions]],
    ) -> None:
        """Write the lines of all models to a CSV file."""
        writer, groups, names = csv.writer(file, lineterminator="\n"), stream.plan.groups[evaluator.rows], list[str]()
        for model, result in lines:
            has_steps = result.predictions.shape[1] > 1
            if model == "server":
                names = class_names({"classes": stream.classes}, result.num_classes)
                header = ["model", "sample", "test_task", *(["step"] if has_steps else []), "target", "prediction"]
                columns = [f"probability {name}" for name in names[: result.num_classes]] if self.probabilities else []
                writer.writerow([*header, *columns])
            first_task = _first_tasks(stream.plan, model)
            for line, (sample, target) in enumerate(zip(result.samples.tolist(), result.targets.tolist(), strict=True)):
                task = first_task.get(int(groups[sample]), -1)
                for step, prediction in enumerate(result.predictions[line].tolist()):
                    cells = [model, sample, task, *([step] if has_steps else []), names[target], names[prediction]]
                    shares = [] if result.probabilities is None else result.probabilities[line, step].tolist()
                    writer.writerow([*cells, *(f"{share:.6g}" for share in shares)])

    def _predict(self, module: L.LightningModule, evaluator: Evaluator, samples: IntArray) -> _ModelPredictions:
        """Return the predictions of a model on the samples of an evaluator, which have some indices in the test set."""
        targets, predictions, probabilities = list[Tensor](), list[Tensor](), list[Tensor]()
        num_classes = 0
        for output, label, _ in evaluator.outputs(module):
            scores = output if output.dim() > 2 else output[:, None]
            num_classes = scores.shape[-1]
            targets.append(label.long().cpu())
            predictions.append(to_predictions(scores).cpu())
            if self.probabilities:
                probabilities.append(scores.float().softmax(dim=-1).cpu())
        return _ModelPredictions(
            samples,
            torch.cat(targets).numpy(),
            torch.cat(predictions).numpy(),
            num_classes,
            torch.cat(probabilities).numpy() if probabilities else None,
        )


def _first_tasks(plan: Plan, model: str) -> dict[int, int]:
    """Return the first task of a model, from 0, that contains each group. The server has the tasks of all clients."""
    tasks = plan.tasks.values() if model == "server" else [plan.tasks[model]]
    pairs = {(task, group) for parts in tasks for task, groups in enumerate(parts) for group in groups}
    return {group: task for task, group in sorted(pairs, reverse=True)}
