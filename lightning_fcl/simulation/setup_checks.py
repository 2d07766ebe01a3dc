"""Checks that raise an error for settings that a federation does not support."""

from __future__ import annotations

import itertools
import logging
from typing import Literal

import lightning.pytorch as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS

from lightning_fcl.data.datamodule_adapter import client_modules
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.data.trainer_access import find_stream, get_callbacks
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from lightning_fcl.federation.aggregation import state_tensors
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.protocols import HasNumClasses, HasSampleLoss
from lightning_fcl.federation.server_optimizer import check_optimizer
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.federation.synchronization import Synchronization
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.validation import at_least, check_lightning_namespace, did_you_mean, format_code_names, warn_of_one

_MIXES_CLIENTS = "it would average the models of different clients after every step"


def _average(decay: float | None) -> str:
    return (
        f"Use `ServerWeightAveraging(decay={decay})` of `lightning_fcl.callbacks`, which averages the server's model "
        "after each round."
    )


# Callbacks that mix clients or stop within a round, with the reason and the fix. Subclasses come before base classes.
_REFUSED: dict[type[L.Callback], tuple[str, str]] = {
    GradientAccumulationScheduler: (
        "it would accumulate gradients of different clients",
        "Set `accumulate_grad_batches` of the Trainer, which applies to each client in each round.",
    ),
    StochasticWeightAveraging: (
        _MIXES_CLIENTS,
        f"{_average(None)} For the learning rates, return the scheduler `SWALR` from `configure_optimizers`.",
    ),
    EMAWeightAveraging: (_MIXES_CLIENTS, _average(0.9)),
    WeightAveraging: (_MIXES_CLIENTS, _average(None)),
    LearningRateFinder: (
        "it would stop within a round",
        "Compare learning rates over whole rounds, with `lightning-fcl tune`.",
    ),
    BatchSizeFinder: (
        "it would stop within a round, and results depend on the batch size of the clients",
        "Set `batch_size` of the stream.",
    ),
    ModelPruning: (
        "its masks would be averaged like weights",
        "Prune the model after the fit, with `torch.nn.utils.prune`.",
    ),
    SpikeDetection: (
        "it would compare the loss of a client with the losses of other clients",
        "Remove the callback: uploads with non-finite values are dropped anyway. To limit the effect of outliers, use "
        '`FederatedStrategy(reductions={"*": "median"})`.',
    ),
}
log = logging.getLogger(__name__)


def check_settings(
    local_epochs: int,
    max_vectorized_clients: int | Literal["auto"],
    swarm: Swarm | None,
    synchronization: Synchronization | None,
    pipeline: Pipeline,
) -> None:
    """Raise ValueError if settings of a strategy are out of range or cannot be combined."""
    at_least(1, local_epochs=local_epochs)
    if max_vectorized_clients != "auto" and max_vectorized_clients < 1:
        raise InvalidValueError(
            f'Expected `max_vectorized_clients` to be "auto" or at least 1, but got {max_vectorized_clients}.',
            argument="max_vectorized_clients",
            value=max_vectorized_clients,
        )
    if pipeline.transforms and swarm is not None and (swarm.missed_sync_prob or swarm.missed_rounds):
        names = ", ".join(type(transform).__name__ for transform in pipeline.transforms)
        missed = {"missed_sync_prob": swarm.missed_sync_prob, "missed_rounds": swarm.missed_rounds}
        settings = " and ".join(f"`{name}={value}`" for name, value in missed.items() if value)
        raise InvalidValueError(
            f"Expected a `swarm` without `missed_sync_prob` and `missed_rounds` together with {names}, but got "
            f"{settings}. A client that missed a synchronization does not start from a server state, so its "
            "update is undefined.",
            hint=f"Remove `missed_sync_prob` and `missed_rounds` from the swarm, or remove {names}.",
            argument="swarm",
            value=swarm,
        )
    if synchronization is not None:
        synchronization.check(pipeline)


def check_trainer(trainer: L.Trainer, federation: Federation) -> None:
    """Raise ValueError if a federation does not support a Trainer's settings, optimizers or schedulers."""
    at_least(1, accumulate_grad_batches=trainer.accumulate_grad_batches)
    for callback in get_callbacks(trainer):
        for kind, (reason, hint) in _REFUSED.items():
            if isinstance(callback, kind):
                raise InvalidValueError(
                    f"Expected no `{type(callback).__name__}` among the callbacks: {reason}.",
                    hint=hint,
                    argument="callbacks",
                    value=type(callback).__name__,
                )
        save_intervals = {
            name: vars(callback).get(f"_{name}") for name in ("every_n_train_steps", "train_time_interval")
        }
        if isinstance(callback, ModelCheckpoint) and any(save_intervals.values()):
            settings = " and ".join(f"`{name}={value}`" for name, value in save_intervals.items() if value)
            raise InvalidValueError(
                f"Expected a `ModelCheckpoint` with `every_n_epochs` (rounds), but got {settings}, which would save "
                "a checkpoint within a round, before the server has aggregated the uploads.",
                hint="Use `every_n_epochs=1` instead.",
                argument=next(name for name, value in save_intervals.items() if value),
            )
    for config in trainer.lr_scheduler_configs:
        stream = find_stream(trainer)
        asks = config.reduce_on_plateau and config.strict and str(config.monitor).startswith("val")
        if asks and stream is not None and not len(stream.plan.validation):
            raise InvalidValueError(
                f"Expected validation samples for `ReduceLROnPlateau`, which monitors `{config.monitor}`, but the "
                "stream has no validation samples.",
                hint="Pass `split=Split(validation=0.1)` to the stream, or monitor a metric that training logs.",
                argument="validation",
            )
    if not trainer.optimizers:
        raise InvalidValueError(
            "Expected an optimizer, but `configure_optimizers` returned none.",
            hint="Return an optimizer of the trainable parameters.",
        )
    for optimizer in trainer.optimizers:
        check_optimizer(optimizer)
    check_reloads(trainer)
    by_step = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
    if any(config.reduce_on_plateau for config in by_step):
        raise InvalidValueError(
            'Expected `ReduceLROnPlateau` with `interval="epoch"` (a round), but got "step". No metric is available '
            "after a single step of a client.",
            hint='Set `"interval": "epoch"` in `configure_optimizers`.',
            argument="interval",
            value="step",
        )
    if trainer.accumulate_grad_batches > 1 and any(isinstance(own, LBFGS) for own in trainer.optimizers):
        raise InvalidValueError(
            f"Expected `accumulate_grad_batches=1` for `LBFGS`, but got {trainer.accumulate_grad_batches}. `LBFGS` "
            "computes gradients several times per step, when earlier batches are no longer available.",
            hint="Increase `batch_size` instead.",
            argument="accumulate_grad_batches",
            value=trainer.accumulate_grad_batches,
        )
    if by_step and not trainer.lightning_module.automatic_optimization:
        raise InvalidValueError(
            'Expected schedulers with `interval="epoch"` (a round) for a module with manual optimization, but got '
            '"step". The federation does not control the optimizer steps of such a module.',
            hint="Return the schedulers without `interval`, and call `self.lr_schedulers().step()` in `training_step`.",
            argument="interval",
            value="step",
        )
    limit = federation.limits.batches
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        overfits = federation.limits.in_order
        name = "overfit_batches" if overfits else "limit_train_batches"
        warn_of_one(name, limit, "1 batch per client and round", "all batches")
        warn_of_one("limit_val_batches", 1.0 if overfits else trainer.limit_val_batches, "1 batch", "all batches")
    scheduled = federation.participation.synchronization is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]
    if scheduled and repr(limit) != "1.0":
        raise InvalidValueError(
            f"Expected `limit_train_batches=1.0` and no `overfit_batches` together with `synchronization`, but got "
            f"{limit}. The simulated clock counts all samples of a client.",
            hint="Remove the limit, or remove `synchronization`.",
        )
    if (trainer.max_steps, trainer.min_steps) != (-1, None):
        raise InvalidValueError(
            f"Expected `max_steps=-1` and `min_steps=None`, but got {trainer.max_steps} and {trainer.min_steps}. A "
            "federation counts rounds, not steps.",
            hint="Use `max_epochs` and `min_epochs`.",
            argument="max_steps" if trainer.max_steps != -1 else "min_steps",
        )
    every_n_epochs, interval = trainer.check_val_every_n_epoch, vars(trainer).get("val_check_interval", "a time")
    if every_n_epochs is None or interval not in (1.0, None) or type(interval) is int:
        raise InvalidValueError(
            "Expected `val_check_interval=1.0` and an integer `check_val_every_n_epoch` (rounds), but got "
            f"{interval} and {every_n_epochs}. Within a round there is no server state to validate.",
            hint="Use `check_val_every_n_epoch`.",
            argument="check_val_every_n_epoch" if every_n_epochs is None else "val_check_interval",
            value=every_n_epochs if every_n_epochs is None else interval,
        )
    at_least(1, check_val_every_n_epoch=every_n_epochs)


def check_reloads(trainer: L.Trainer) -> None:
    """Raise ValueError if the Trainer is set to reload the loaders of a client's data module.

    A federation creates the loaders once, because all rounds are planned before the first round.
    """
    stream, every_n_epochs = find_stream(trainer), trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    modules = client_modules(stream.data) if stream is not None and every_n_epochs else []
    if modules:
        raise InvalidValueError(
            f"Expected `reload_dataloaders_every_n_epochs=0` for the data of `{type(modules[0]).__name__}`, but got "
            f"{every_n_epochs}. The loaders are created once, because all rounds are planned before the first round.",
            hint="Remove the argument. If samples change between rounds, pass their `group` to "
            "`FederatedStream.from_arrays`, with `scenario=DomainIncremental()`.",
            argument="reload_dataloaders_every_n_epochs",
            value=every_n_epochs,
        )


def check_parts(trainer: L.Trainer) -> None:
    """Raise TypeError if a callback or the data module is a class, or comes from the package `pytorch_lightning`."""
    callbacks, data = get_callbacks(trainer), trainer.datamodule  # type: ignore[attr-defined]
    for name, component in [*(("callbacks", one) for one in callbacks), ("datamodule", data)]:
        if isinstance(component, type):
            # After the error, Lightning calls `on_exception` of all callbacks. The call would fail for a class, so all
            # classes are removed.
            callbacks[:] = [one for one in callbacks if not isinstance(one, type)]
            trainer.datamodule = None if isinstance(data, type) else data  # type: ignore[attr-defined]
            raise InvalidTypeError(
                f"Expected `{name}` to be {'objects' if name == 'callbacks' else 'an object'}, but got the class "
                f"`{component.__name__}`.",
                hint=f"Use `{component.__name__}(...)`.",
                argument=name,
            )
    check_lightning_namespace(data, *callbacks)


def check_module(module: L.LightningModule) -> None:
    """Raise ValueError if a module reads batches itself, or if clients cannot download and upload its state."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise InvalidValueError(
            "Expected a `training_step` that takes a batch, but it takes `dataloader_iter`, which would read batches "
            "of several clients.",
            hint="Use the arguments `batch` and `batch_idx`.",
            argument="dataloader_iter",
        )
    live = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    lazy = [name for name, value in live.items() if is_lazy(value)]
    if lazy:
        raise InvalidValueError(
            f"Expected a module with initialized layers, but the shape of {format_code_names(lazy)} is unknown.",
            hint="Set the number of inputs of the layer, or run the module on a batch in `configure_model`.",
            argument=lazy[0],
        )
    try:
        state, live_ids = state_tensors(module), set(map(id, live.values()))
    except TypeError as error:
        raise InvalidValueError(
            f"Expected `state_dict` to accept `keep_vars`, as in PyTorch, but got: {error}.",
            hint="Accept `*args, **kwargs`, and pass them to `super().state_dict`.",
            argument="keep_vars",
        ) from error
    copied_names = [name for name, value in state.items() if id(value) not in live_ids]
    trainable_names = [name for name, value in module.named_parameters() if value.requires_grad and name not in state]
    if copied_names or trainable_names:
        expected_content = (
            f"the module's own tensors, but it contains other tensors for {format_code_names(copied_names)}"
            if copied_names
            else f"all trainable parameters, but it does not contain {format_code_names(trainable_names)}"
        )
        raise InvalidValueError(
            f"Expected `state_dict(keep_vars=True)` to contain {expected_content}. Clients upload the `state_dict`.",
            hint="Return the module's own tensors by their names, and freeze parameters that are not returned.",
            argument=(copied_names or trainable_names)[0],
        )


def check_stream(trainer: L.Trainer, stream: FederatedStream) -> None:
    """Raise ValueError if the module has fewer classes than the stream."""
    module = trainer.lightning_module
    if (
        isinstance(module, HasSampleLoss)
        and isinstance(module, HasNumClasses)
        and module.num_classes < stream.num_classes
    ):
        raise InvalidValueError(
            f"Expected the task's `num_classes` to be at least {stream.num_classes}, the number of classes of the "
            f"stream, but got {module.num_classes}. Some classes have no output.",
            hint="Increase `num_classes` of the task and of the network.",
            argument="num_classes",
            value=module.num_classes,
        )


def check_optimizers(federation: Federation) -> None:
    """Raise ValueError before a round if a hook has replaced the optimizers of `configure_optimizers`."""
    if federation.module.trainer.optimizers != federation.optimizers:
        raise InvalidValueError(
            "Expected the optimizers of `configure_optimizers` during the whole fit, but a hook has replaced them.",
            hint='Assign the new parameters to the existing optimizer: `self.optimizers().param_groups[0]["params"] = '
            "[*self.parameters()]`.",
            argument="optimizers",
        )


def check_ranks(federation: Federation, ranks: int) -> None:
    """Raise ValueError if each round has fewer client groups than processes. Some processes would then never train.

    A client group is the set of clients that train in one vectorized step, or one client in sequential training.
    """
    size, plan = federation.local_trainer.num_vectorized_clients, federation.stream.plan
    if ranks == 1:
        return
    rounds = range(federation.module.trainer.max_epochs or 0)
    max_client_groups = max(
        (-(-len(federation.participation.sample_on_time_clients(plan, round_idx)[0]) // size) for round_idx in rounds),
        default=ranks,
    )
    if ranks > max_client_groups:
        raise InvalidValueError(
            f"Expected the number of processes (`devices` times `num_nodes`) to be at most {max_client_groups}, the "
            f"largest number of client groups in a round, but got {ranks}. Each group has at most {size} "
            f"client{'s' if size > 1 else ''}.",
            hint="Set fewer `devices`"
            + (
                f", or set `max_vectorized_clients` below {size}, which changes results only by rounding."
                if size > 1
                else "."
            ),
            argument="devices",
            value=ranks,
        )


def check_monitors(trainer: L.Trainer) -> None:
    """Raise ValueError if a checkpoint callback monitors a metric that is not logged.

    The check is skipped before the first metric is logged, and if there is a validation loader. Without this check,
    Lightning would only warn, and would save no checkpoint.
    """
    logged = trainer.callback_metrics
    for callback in trainer.checkpoint_callbacks if logged and not trainer.val_dataloaders else ():
        monitor = getattr(callback, "monitor", None)
        if monitor and monitor not in logged:
            hint = did_you_mean(monitor, logged) or f"Use one of {', '.join(logged)}."
            raise UnknownNameError(
                f"Expected `monitor` to be a logged metric, but got {monitor}.",
                hint=hint,
                argument="monitor",
                value=monitor,
            )
