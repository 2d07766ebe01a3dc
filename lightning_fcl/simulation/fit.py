"""The start of a fit of a federation."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_fcl.data.reading_check import prepare_reading
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.local_trainer import HasLocalTrainer
from lightning_fcl.federation.placement import Placement
from lightning_fcl.federation.synchronization import Poisson
from lightning_fcl.local_training.gradient_accumulation import GradientAccumulation
from lightning_fcl.local_training.single_sample import has_single_samples, why_not_single_sample
from lightning_fcl.methods.base import methods_overriding
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.methods.dry_run import first_indices
from lightning_fcl.simulation.epoch_states import EpochStates
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.simulation.private_rounds import start_privacy
from lightning_fcl.simulation.setup_checks import check_stream
from lightning_fcl.simulation.trainer_choice import choose_trainer
from lightning_fcl.tasks.ridge_base import RidgeTask
from lightning_fcl.validation import format_names, warn_of_one

log = logging.getLogger(__name__)


def start_fit(federation: Federation, optimizers: list[Optimizer], step: Callable[..., Any]) -> None:
    """Prepare a fit before the first round: check the stream, and choose the local trainer of the clients.

    Args:
        federation: The federation.
        optimizers: The module's optimizers.
        step: The `training_step` of Lightning's strategy.
    """
    trainer, stream, server, ranks = (
        federation.module.trainer,
        federation.stream,
        federation.server,
        federation.ranks,
    )
    federation.optimizers, federation.methods = optimizers, get_methods(trainer)
    federation.isolation = None
    federation.participation.seed, federation.epoch_states = federation.seed, EpochStates(ranks)
    check_stream(trainer, stream)
    if (rows := first_indices(stream)) is not None:
        prepare_reading(stream.samples, rows, stream.seed, warn=ranks.rank == 0)
    method_clients = [client for m in federation.methods if not isinstance(m.clients, str) for client in m.clients]
    server.check_clients(stream.plan.clients, [*method_clients, *federation.participation.explicit_clients])
    federation.participation.check_rounds(stream.plan.num_rounds)
    announce_participation(federation)
    server.client_store.store_as_uint8(stream.samples.pixel_encoding)
    server.seed = federation.seed
    server.senders = [method.section_name for method in methods_overriding(federation.methods, "message")]
    server.client_index = {client: number for number, client in enumerate(stream.plan.clients)}
    federation.local_trainer, federation.sequential_reason = choose_trainer(federation, step)
    choose_min_batch_size(federation, optimizers)
    if federation.placement is None or federation.placement.ranks is not ranks:
        federation.placement = Placement(ranks, stream.plan.clients, server.client_store)
    if isinstance(federation.module, RidgeTask):
        federation.module.privacy = None  # An earlier fit may have used differential privacy.
    if federation.privacy is not None:
        start_privacy(federation, federation.privacy)


def choose_min_batch_size(federation: Federation, optimizers: Sequence[Optimizer]) -> None:
    """Set the minimum batch size to 2 if some batches have one sample and the module cannot train on one sample.

    Otherwise the minimum is 1. With a minimum of 2, a last batch of one sample is merged into the batch before it, and
    a client with one sample in a round is skipped.

    Args:
        federation: The federation.
        optimizers: The module's optimizers. Empty while `configure_optimizers` runs.

    Raises:
        ValueError: If the module cannot train on one sample and the stream's ``batch_size`` is 1.
    """
    module, stream = federation.module, federation.stream
    needs_check = has_single_samples(stream) and not isinstance(module, HasLocalTrainer)
    reason = why_not_single_sample(module, optimizers, stream) if needs_check else None
    stream.min_batch_size = federation.participation.min_samples = 1 if reason is None else 2
    if reason is None:
        return
    if stream.batch_size == 1:
        raise InvalidValueError(
            f"Expected `batch_size` to be at least 2, but got 1. `{type(module).__name__}` cannot train on a batch of "
            f"one sample ({reason}).",
            hint="Use `batch_size=2` or more.",
            argument="batch_size",
        )
    rounds = stream.plan.different_rounds
    single = [c for c in stream.plan.clients if any(len(current.get(c, ())) == 1 for current in rounds)]
    if single and federation.ranks.rank == 0:
        log.warning(
            "`%s` cannot train on a batch of one sample (%s). These clients skip every round in which they have only "
            "one sample: %s.",
            type(module).__name__,
            reason,
            format_names(single),
        )


def announce_participation(federation: Federation) -> None:
    """Log the number of clients per round. Warn if `participation` is the integer 1, which is not the share 1.0."""
    clients, participation = len(federation.stream.plan.clients), federation.participation
    description = participation.describe(clients)
    rank_zero_info(f"Federation: {description}")
    if clients > 1 and not isinstance(participation.fraction_or_count, Poisson):
        warn_of_one("participation", participation.fraction_or_count, description, "all clients")


def take_over_steps(federation: Federation, trainer: L.Trainer) -> None:
    """Let the federation apply gradient accumulation and schedulers with ``interval="step"`` to each client."""
    schedules, module, counters = trainer.strategy.lr_scheduler_configs, federation.module, federation.counters
    by_step = [config for config in schedules if config.interval == "step"]
    by_round = [config for config in schedules if config.interval != "step"]
    counters.schedules, trainer.strategy.lr_scheduler_configs = schedules, by_round

    def step(scheduler: Any) -> None:
        with counters.after_step():
            module.lr_scheduler_step(scheduler, None)

    by_hand = None if module.automatic_optimization else by_round
    federation.local_steps = GradientAccumulation(trainer.accumulate_grad_batches, by_step, step, by_hand)
    trainer.accumulate_grad_batches = 1
    # Each round has a new train loader. Rounds may be short and differ in length, so Lightning's warnings do not apply.
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
    messages = ("The number of training batches", "You're resuming from a checkpoint that ended before")
    # A round without clients in this process has one empty batch.
    for message in (*messages, "train_dataloader yielded None"):
        warnings.filterwarnings("ignore", message)
