"""Classification and regression with any network that maps a batch to logits or to numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric, MetricCollection, R2Score
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.protocols import FederatedModule, HasMetrics
from lightning_fcl.federation.server_optimizer import OptimizerFactory
from lightning_fcl.models.small import HARCNN
from lightning_fcl.tasks.base import NetworkTask, require_embedding_body
from lightning_fcl.validation import at_least


@runtime_checkable
class OutputsByTask(FederatedModule, Protocol):
    """A network with separate parts for each task."""

    def outputs_by_task(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logits of samples, shape (batch, num_classes). The label of a sample selects its task."""


class Classifier(NetworkTask):
    """Classification with a network that is trained by cross-entropy. Training can be vectorized over clients.

    A subclass can override `sample_loss`, for example to weight the classes. It can also define
    ``configure_metrics()``, which returns new torchmetrics metrics of ``(logits, labels)`` by name. `ContinualMetrics`
    then evaluates these metrics instead of the accuracy, and validation and tests log them in addition to the accuracy.

    Args:
        model: Network that maps inputs of shape (batch, ...) to logits of shape (batch, num_classes).
        num_classes: Number of classes.
        optimizer: Function that creates a client's optimizer from the parameters. Default: SGD with a learning rate of
            0.01.
        task_incremental: Whether the logits of a sample are restricted to the classes of its task, in training and in
            evaluation (Zuo et al. 2024, FedViT). The stream must define the classes of each task, as
            ``scenario="fedvit"`` does.

    Raises:
        ValueError: With ``task_incremental``, if the stream does not define the classes of the tasks, or if a task has
            only one class. Also if the number of the network's outputs differs from ``num_classes``.

    Example:
        >>> task = Classifier(nn.Linear(4, 3), num_classes=3)
        >>> task(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    output_kind: ClassVar[str] = "logits"
    """Kind of the network's outputs."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        optimizer: OptimizerFactory | None = None,
        task_incremental: bool = False,
    ) -> None:
        super().__init__(model, optimizer)
        self.num_classes = num_classes
        self.task_incremental = task_incremental
        # Whether two classes belong to the same task, shape (num_classes, num_classes).
        self._blocks: Tensor | None = None
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        if isinstance(self, HasMetrics):
            self.val_measures = MetricCollection(dict(self.configure_metrics()))
            self.test_measures = MetricCollection(dict(self.configure_metrics()))

    def outputs_by_task(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logits of samples in evaluation, shape (batch, num_classes). A sample's label selects its task.

        A network with separate parts for each task defines ``outputs_by_task(x, y)`` and sets
        ``lightning_fcl_protocols = True``.
        """
        logits: Tensor = self.model.outputs_by_task(x, y) if isinstance(self.model, OutputsByTask) else self(x)
        return logits

    def setup(self, stage: str) -> None:
        if not self.task_incremental or stage == "predict":
            return
        stream = find_stream(self.trainer)
        blocks = stream.plan.task_classes if stream is not None else {}
        if not blocks and self._blocks is not None and stage != "fit":
            return
        if stream is None or not blocks:
            raise InvalidValueError(
                'Expected a `FederatedStream` that defines the classes of each task, as `scenario="fedvit"` does, for '
                "`task_incremental=True`, but "
                f"{'the Trainer has no stream' if stream is None else 'the stream does not define these classes'}.",
                hint="Use `scenario=FedViTScenario(...)`, or leave `task_incremental` out.",
                argument="task_incremental",
            )
        single_classes = [block[0] for parts in blocks.values() for block in parts if len(block) < 2]
        if single_classes:
            raise InvalidValueError(
                "Expected tasks of at least two classes for `task_incremental=True`, but class "
                f"{single_classes[0]} is the only class of its task.",
                hint="Decrease `num_tasks` of `FedViTScenario`, so that each task has at least two classes.",
                argument="num_tasks",
                value=single_classes,
            )
        block_mask = torch.eye(max(self.num_classes, stream.num_classes), dtype=torch.bool)
        for block in {block for parts in blocks.values() for block in parts}:
            rows = torch.tensor(block)
            block_mask[rows[:, None], rows] = True
        self._blocks = block_mask

    def mask_logits(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the logits, with -inf for classes outside of a sample's task if `setup` has read the tasks."""
        if self._blocks is None:
            return output
        return output.masked_fill(~self._blocks.to(output.device)[y], -torch.inf)

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of every sample, shape (batch,)."""
        if output.shape[-1] != self.num_classes:
            raise InvalidValueError(
                f"Expected the number of outputs of `model` to be `num_classes`={self.num_classes} but got "
                f"{output.shape[-1]}.",
                hint=f"Set the network's number of outputs to {self.num_classes}, or use "
                f"`num_classes={output.shape[-1]}`.",
                argument="num_classes",
                value=output.shape[-1],
            )
        return F.cross_entropy(self.mask_logits(output, y), y, reduction="none")

    def embed(self, x: Tensor) -> Tensor:
        """Return the features of samples from the network's ``embed``, shape (batch, features)."""
        return require_embedding_body(self.model).embed(x)

    @property
    def features(self) -> int:
        """Number of features of the network."""
        return require_embedding_body(self.model).features

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        metric = self.val_accuracy if stage == "val" else self.test_accuracy
        x, y = batch
        output = self.outputs_by_task(x, y)
        # The loss comes before the metric, because the loss raises a clear error if the number of outputs is wrong.
        loss = self.sample_loss(output, y).mean()
        metric(self.mask_logits(output, y), y)
        self.log(f"{stage}/loss", loss, batch_size=len(y))
        self.log(f"{stage}/accuracy", metric, batch_size=len(y))
        if isinstance(self, HasMetrics):
            measures = self.val_measures if stage == "val" else self.test_measures
            measures.update(self.mask_logits(output, y), y)
            self.log_dict({f"{stage}/{name}": one for name, one in measures.items()}, batch_size=len(y))


class RandomClassifier(Classifier):
    """A baseline that does not learn: each class is equally likely for each sample.

    Args:
        num_classes: Number of classes.

    Example:
        >>> RandomClassifier(num_classes=3)(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Identity(), num_classes)
        self.automatic_optimization = False
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Return random logits from torch's global generator, shape (batch, num_classes)."""
        return torch.rand(len(x), self.num_classes, device=x.device)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """Do nothing, because this baseline does not learn."""

    def configure_optimizers(self) -> None:  # type: ignore[override]
        """Return None, because this baseline needs no optimizer."""


class MajorityClassifier(Classifier):
    """A baseline that predicts the most frequent class of its training samples.

    With ``task_incremental=True``, the prediction is the most frequent class among the classes of the sample's task. If
    you set the reduction of ``class_counts`` to ``"local"``, each client uses the counts of its own training samples.

    Args:
        num_classes: Number of classes.
        task_incremental: Whether predictions are restricted to the classes of a sample's task. See `Classifier`.

    Example:
        >>> guessing = MajorityClassifier(num_classes=3)
        >>> guessing.training_step((torch.zeros(3, 4), torch.tensor([2, 0, 2])), 0)
        >>> guessing(torch.zeros(2, 4)).argmax(dim=1)
        tensor([2, 2])
    """

    def __init__(self, num_classes: int, task_incremental: bool = False) -> None:
        super().__init__(nn.Identity(), num_classes, task_incremental=task_incremental)
        self.automatic_optimization = False
        self.class_counts: Tensor
        self.register_buffer("class_counts", torch.zeros(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the number of training samples of each class as logits, shape (batch, num_classes)."""
        return self.class_counts.expand(len(x), -1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """Count the classes of a batch."""
        self.class_counts += torch.bincount(batch[1], minlength=self.num_classes)

    def configure_optimizers(self) -> None:  # type: ignore[override]
        """Return None, because this baseline needs no optimizer."""


class HARClassifier(Classifier):
    """The network and the optimizer of Usmanova et al. 2021, section 3.6: HAR-CNN, SGD with a learning rate of 0.01.

    Args:
        notation: Layers, as in the paper's Table 1. See `HARCNN`.
        dropout: Dropout probability after the dense layers.
        optimizer: Function that creates a client's optimizer from the parameters. Default: SGD with a learning rate of
            0.01.
        init: Initial weights as in PyTorch (``"torch"``) or as in Keras (``"keras"``).
        model: A network that replaces HAR-CNN, such as a pretrained network.
    """

    citations: ClassVar[tuple[str, ...]] = ("usmanova2021flwf",)

    def __init__(
        self,
        notation: str = "196-16C_4M_1024D",
        dropout: float = 0.5,
        optimizer: OptimizerFactory | None = None,
        init: Literal["torch", "keras"] = "torch",
        model: nn.Module | None = None,
    ) -> None:
        network = HARCNN(notation, dropout=dropout, init=init) if model is None else model
        super().__init__(network, 6, optimizer)


class Regressor(NetworkTask):
    """Regression with a network that is trained by the mean squared error. Training can be vectorized over clients.

    `ContinualMetrics` evaluates the metrics of ``configure_metrics()``: mean squared error and coefficient of
    determination. A subclass can override `sample_loss` and ``configure_metrics``.

    Args:
        model: Network that maps inputs of shape (batch, ...) to numbers of shape (batch, outputs).
        num_outputs: Number of values in a sample's target.
        optimizer: Function that creates a client's optimizer from the parameters. Default: SGD with a learning rate of
            0.01.

    Raises:
        ValueError: If `num_outputs` is below 1, or if outputs or targets of a batch have the wrong shape.

    Example:
        >>> import torch
        >>> task = Regressor(nn.Linear(4, 2), num_outputs=2)
        >>> task.sample_loss(torch.zeros(3, 2), torch.tensor([[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]]))
        tensor([1., 2., 0.])
    """

    def __init__(self, model: nn.Module, num_outputs: int = 1, optimizer: OptimizerFactory | None = None) -> None:
        super().__init__(model, optimizer)
        at_least(1, num_outputs=num_outputs)
        self.num_outputs = num_outputs
        self.val_measures = MetricCollection(dict(self.configure_metrics()))
        self.test_measures = MetricCollection(dict(self.configure_metrics()))

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Return the mean squared error and the coefficient of determination, each averaged over the outputs."""
        return {"MSE": MeanSquaredError(), "R2": R2Score()}

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the squared error of every sample, averaged over its outputs, shape (batch,)."""
        return F.mse_loss(output, self._matching_targets(output, y), reduction="none").mean(dim=1)

    def _matching_targets(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the targets with the shape (batch, outputs) and the type of the output.

        The targets of a single output may have the shape (batch,).
        """
        y = y[:, None] if y.dim() == 1 else y
        shape = (len(y), self.num_outputs)
        if output.shape != shape or y.shape != shape:
            raise InvalidValueError(
                f"Expected outputs and targets of shape (batch, {self.num_outputs}), but got {tuple(output.shape)} and "
                f"{tuple(y.shape)}.",
                hint="Set `num_outputs` to the size of the target and of the network's last layer.",
                argument="num_outputs",
                value=tuple(y.shape),
            )
        return y.to(output.dtype)

    def evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        measures = self.val_measures if stage == "val" else self.test_measures
        x, y = batch
        output = self(x)
        self.log(f"{stage}/loss", self.sample_loss(output, y).mean(), batch_size=len(y))
        measures.update(output, self._matching_targets(output, y))
        self.log_dict({f"{stage}/{name}": one for name, one in measures.items()}, batch_size=len(y))
