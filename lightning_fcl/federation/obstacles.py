"""Reasons why clients train sequentially and not vectorized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_fcl.library_errors import LibraryError, first_line, match_error


class Reason(Enum):
    """A reason for sequential training. Each value is a message with a placeholder (``{}``) for each detail."""

    # Settings.
    COHORT_SIZE = "`max_vectorized_clients` is 1"
    PARAMETERS = "the module has more than {:,} parameters"
    KEEP_OPTIMIZER = "`keep_optimizer_state` is True, so each client has its own optimizer state"
    PRECISION = "the precision is {}"
    OPTIMIZERS = "the module has several optimizers"
    OPTIMIZER = "`{}` does not update each element independently of the other elements"
    FINETUNING = "`{}` adds parameters to the optimizer during training"
    OVERRIDES = "{}"
    MANUAL = "`{}` uses manual optimization. Automatic optimization can be vectorized"
    HOOKED = "`{}` of `{}` has hooks, which would receive the values of several clients"
    NO_SAMPLES = "no client has samples"

    # Methods.
    METHOD_PROJECTS = "`{}` changes the gradient of one client at a time"
    METHOD_TRAINS = "`{}` trains one client at a time"
    METHOD_PAIRS = "`{}` needs samples and targets, but the batches are not pairs"
    METHOD_FAILS = "`{}` cannot be vectorized ({})"
    METHOD_PADDING = (
        "`{}` computes statistics of a batch without `step.mean` or `step.sample_weight`, and padding changes "
        "the statistics"
    )
    METHOD_DIFFERS = "`{}` gives a different result when it is vectorized"
    METHOD_STATE = "`penalty` or `task_weight` of `{}` changes {}, which all clients of a step share"

    # Random numbers.
    RANDOM = "a layer, a loss or a method draws random numbers"
    OTHER_RANDOM = (
        "the module draws random numbers with NumPy or Python. `torch.nn.functional.dropout` can be vectorized"
    )

    # Obstacles to training on padded batches.
    NO_SAMPLE_LOSS = "`{}` does not define `sample_loss`, unlike `Classifier`"
    NOT_TENSORS = "the batches are not pairs of tensors"
    OTHER_SAMPLES = "`{}` of a sample depends on the other samples of the batch"
    FORWARD_STATE = "`forward` or `sample_loss` changes attributes or buffers of the module"
    NOT_REPEATABLE = "the step gives a different result each time, or depends on the client's number of batches"
    LOSS_LOGS = "`sample_loss` or `forward` logs, and padding would be logged as well"

    # Obstacles to vectorizing the module's own training step.
    FAILS = "vectorizing the step fails ({})"
    READS_VALUE = (
        "the step reads the value of a tensor (`.item()`, `float()`). Compute with the tensor and log the tensor"
    )
    BRANCHES = "the step branches on the value of a tensor. Use `torch.where`"
    METRIC = (
        "the step updates a metric of torchmetrics that is not a part of the module, or reads a metric's value. Make "
        "the metric an attribute of the module, and log the metric object"
    )
    LOG_VALUE = "the step logs `{}`, which is not a number or has a custom `reduce_fx`"
    LOGGER = "the step uses the logger. Use `self.log`"
    NO_LOSS = "the step returns no loss for some batches. Return a loss of zero"
    BATCH_CONTENT = "the batches contain a `{}`, and only tensors can be stacked"
    SHAPES = "the batches of two clients have different shapes"
    CHANGES_OPTIMIZER = "the step changes the optimizer. Use a scheduler, or an epoch hook of the module"
    WRITES_PARAMETER = "the step writes to {}, a parameter that the optimizer trains"
    STATE = "the step changes {}, which would affect the next client. Use a registered buffer, and write to it in place"
    OUTSIDE = "the step changes {} outside the module"
    NEW_BUFFER = "the step replaces the buffer `{}`. Write to it in place"
    STEP_LOSS = "the vectorized step has a different loss"
    STEP_GRADIENTS = "the vectorized step has different gradients"
    STEP_LOGS = "the vectorized step logs different values"


@dataclass(frozen=True)
class Obstacle:
    """An obstacle to vectorized training.

    Args:
        reason: The reason.
        details: Names and values that replace the placeholders of the message.

    Example:
        >>> str(Obstacle(Reason.METHOD_TRAINS, ("SI",)))
        '`SI` trains one client at a time'
    """

    reason: Reason
    details: Sequence[object] = ()

    def __str__(self) -> str:
        return self.reason.value.format(*self.details)


class ObstacleError(ValueError):
    """An error for an obstacle that was found by a check of vectorized training."""

    def __init__(self, reason: Reason, *details: object) -> None:
        self.obstacle = Obstacle(reason, details)
        super().__init__(str(self.obstacle))


_KNOWN = {
    LibraryError.VMAP_RANDOM: Reason.RANDOM,
    LibraryError.VMAP_ITEM: Reason.READS_VALUE,
    LibraryError.VMAP_BRANCH: Reason.BRANCHES,
}


def obstacle_of(error: Exception) -> Obstacle:
    """Return the `Obstacle` that caused an error of a vectorized step."""
    if isinstance(error, ObstacleError):
        return error.obstacle
    known_reason = next((reason for kind, reason in _KNOWN.items() if match_error(error, kind)), None)
    return Obstacle(Reason.FAILS, (first_line(error),)) if known_reason is None else Obstacle(known_reason)
