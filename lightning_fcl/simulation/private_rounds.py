"""Checks of a federation with differential privacy, and the start of its account."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fcl.data.scenarios.base import EMPTY, Plan
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import InvalidStateError, InvalidValueError
from lightning_fcl.federation.aggregation import (
    ClientWeights,
    State,
    frozen_parameters,
    get_reduction,
    get_reductions,
    state_tensors,
)
from lightning_fcl.federation.protocols import RoundEndListener
from lightning_fcl.federation.server_optimizer import get_settings
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.federation.synchronization import Poisson, Synchronization
from lightning_fcl.federation.uploads import Stage, UploadTransform
from lightning_fcl.methods.base import MethodBase
from lightning_fcl.methods.functional import trainable_parameters
from lightning_fcl.methods.method_round import server_entries
from lightning_fcl.privacy.differential_privacy import AdaptiveClip, PrivacyAccount
from lightning_fcl.privacy.transforms import PrivateTransform
from lightning_fcl.rng import global_seed
from lightning_fcl.simulation.checkpoint import federation_fingerprint
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.tasks.ridge_base import RidgeTask

log = logging.getLogger(__name__)


def check_private_settings(
    participation: int | float | Poisson,
    client_weights: ClientWeights | None,
    swarm: Swarm | None,
    synchronization: Synchronization | None,
    transforms: Sequence[UploadTransform] = (),
) -> None:
    """Raise InvalidValueError if differential privacy does not support a setting of the strategy."""
    is_full = isinstance(participation, float) and participation == 1.0
    if not is_full and not isinstance(participation, Poisson):
        raise InvalidValueError(
            f"Expected `participation` to be 1.0 or `Poisson(...)` with `privacy`, but got {participation}.",
            hint="Sample each client independently, for example with `participation=Poisson(0.3)`.",
            argument="participation",
            value=participation,
        )
    if client_weights not in (None, "uniform"):
        raise InvalidValueError(
            'Expected `client_weights="uniform"` with `privacy`, because other weights depend on the data, or give '
            f"some clients more than `clip` in the sum, but got {client_weights!r:.100}.",
            hint="Remove `client_weights`.",
            argument="client_weights",
            value=client_weights,
        )
    for transform in transforms:
        if transform.stage not in (Stage.COMPRESSION, Stage.COUNT):
            raise InvalidValueError(
                "Expected `upload_transforms` of the stages compression and count with `privacy`, because other "
                f"transforms could change clipped updates, but got a `{type(transform).__name__}` of the stage "
                f"{transform.stage.name.lower()}.",
                hint=f"Remove `{type(transform).__name__}`.",
                argument="upload_transforms",
                value=type(transform).__name__,
            )
    for name, setting in (("swarm", swarm), ("synchronization", synchronization)):
        if setting is not None:
            raise InvalidValueError(
                f"Expected no `{name}` with `privacy`, because the clients of a round must be sampled independently of "
                f"their data and speed, but got a `{type(setting).__name__}`.",
                hint=f"Remove `{name}`.",
                argument=name,
                value=setting,
            )


def start_privacy(federation: Federation, account: PrivacyAccount) -> None:
    """Check that everything that clients upload is covered, calibrate the noise, and limit the number of rounds.

    Raises:
        InvalidValueError: If an upload or a callback is not covered by the guarantee.
        InvalidStateError: If the budget does not allow the first round.
    """
    module, plan, sampling = federation.module, federation.stream.plan, federation.participation.fraction_or_count
    prob = sampling.prob if isinstance(sampling, Poisson) else 1.0
    if isinstance(module, RidgeTask):
        _start_private_sums(federation, module, account)
    check_covered(federation, account)
    if account.settings.unit == "client":
        account.start(len(plan.clients), prob, plan.num_rounds)
    else:
        num_samples = len(np.unique(np.concatenate([rows for clients in plan.train for rows in clients.values()])))
        account.start(len(plan.clients), prob, plan.num_rounds, num_samples, count_uses(plan))
    account.open_ledger(_settings_hash(federation), federation.ranks.rank == 0)
    loop, rounds = federation.module.trainer.fit_loop, account.rounds_in_budget(plan.num_rounds)
    if rounds == 0:
        raise InvalidStateError(
            f"Expected a privacy budget for at least one round, but the releases in {account.ledger.path} already have "
            f"epsilon {account.epsilon():.3g} of {account.settings.epsilon:g}.",
            hint="Increase `epsilon` or `noise_multiplier`, or use another file as `ledger` if the data is other data.",
            argument="epsilon",
            value=account.settings.epsilon,
        )
    if loop.max_epochs is not None and rounds < loop.max_epochs:
        log.warning("The privacy budget allows %d of %d rounds. The fit ends after them.", rounds, loop.max_epochs)
        loop.max_epochs = rounds


def count_uses(plan: Plan) -> int:
    """Return the maximum number of rounds that can use the same training sample.

    This is the larger of two numbers: the maximum over the samples that the clients have, and the maximum number of
    rounds of an experience.

    Raises:
        InvalidValueError: If a sample can be in several experiences, or several clients have the same sample.
    """
    if plan.history != "round":
        raise InvalidValueError(
            f'Expected a scenario with `history="round"` with `unit="sample"`, but got "{plan.history}". A sample '
            "is then also used in later experiences.",
            hint="Leave `history` out of the scenario's arguments.",
            argument="history",
            value=plan.history,
        )
    rows_by_round = [np.concatenate([*clients.values(), EMPTY]) for clients in plan.train]
    if any(len(rows) != len(np.unique(rows)) for rows in rows_by_round):
        raise InvalidValueError(
            'Expected each sample to belong to one client with `unit="sample"`, but several clients have the same '
            "sample.",
            hint='Use a partition that divides the samples, or use `unit="client"`.',
            argument="unit",
            value="sample",
        )
    most_uses = int(np.bincount(np.concatenate(rows_by_round)).max())
    return max(most_uses, *(max(Counter(numbers).values()) for numbers in plan.experiences.values()))


def _start_private_sums(federation: Federation, task: RidgeTask, account: PrivacyAccount) -> None:
    """Let a ridge regression use an account. Raise InvalidValueError if its sums cannot be released."""
    obstacle = task.private_sums_obstacle
    if isinstance(account.settings.clip, AdaptiveClip):
        obstacle = "its regularizer needs a fixed noise. Use a number as `clip`"
    if len(federation.stream.plan.base_samples):
        obstacle = "its sums start with the samples of a base session, which get no noise. Remove the base session"
    if obstacle:
        raise InvalidValueError(
            f"Expected a ridge regression whose sums can be released with `privacy`, but got a "
            f"`{type(task).__name__}`: {obstacle}.",
            argument="privacy",
            value=type(task).__name__,
        )
    task.privacy = account
    for transform in federation.server.pipeline.transforms:
        if isinstance(transform, PrivateTransform):
            transform.find_scales = task.private_scales


def check_covered(federation: Federation, account: PrivacyAccount) -> None:
    """Raise InvalidValueError if clients upload an entry that is not covered, or a callback uses validation samples."""
    module, settings = federation.module, account.settings
    reductions = get_reductions(module, federation.settings.rules)
    covered = {*trainable_parameters(module), *frozen_parameters(module, reductions)}
    if isinstance(module, RidgeTask):
        covered |= {*module.statistics.names}
    elif settings.unit == "sample":
        raise InvalidValueError(
            f'Expected a `RidgeClassifier` with `unit="sample"`, but got a `{type(module).__name__}`. The gradients of '
            "single samples are not clipped.",
            hint='Use `unit="client"`, or a `RidgeClassifier` with `unit_norm=True`.',
            argument="unit",
            value=settings.unit,
        )
    if settings.unit == "sample" and federation.methods:
        names = [type(method).__name__ for method in federation.methods]
        raise InvalidValueError(
            f'Expected no methods with `unit="sample"`, because a method can use a sample in several releases, but got '
            f"{', '.join(names)}.",
            hint='Remove the methods, or use `unit="client"`.',
            argument="callbacks",
            value=names,
        )
    for name in state_tensors(module):
        if name not in covered and reductions[name].is_uploaded:
            raise InvalidValueError(
                f"Expected clients to upload only parameters with `privacy`, but they also upload the buffer `{name}`. "
                "With noise, a buffer can get an invalid value, such as a negative variance.",
                hint="Replace batch normalization by group normalization, or keep the buffer on the clients with "
                f'`reductions={{"{name}": "local"}}` of the strategy. Use `"constant"` if the buffer never changes.',
                argument="reductions",
                value=name,
            )
    for method in federation.methods:
        _check_method(federation, method)
    for callback in get_callbacks(module.trainer):
        monitor = vars(callback).get("monitor")
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and monitor:
            raise InvalidValueError(
                f"Expected no `{type(callback).__name__}` with a monitored metric with `privacy`, because its decision "
                f"uses the data of clients without noise, but it monitors `{monitor}`.",
                hint="Remove the callback, or remove `monitor`.",
                argument="monitor",
                value=monitor,
            )
    for config in module.trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            raise InvalidValueError(
                "Expected no `ReduceLROnPlateau` with `privacy`, because its decision uses the data of clients without "
                f"noise, but it monitors `{config.monitor}`.",
                hint="Use another scheduler.",
                argument="monitor",
                value=config.monitor,
            )


def _check_method(federation: Federation, method: MethodBase) -> None:
    name = type(method).__name__
    if isinstance(method, RoundEndListener):
        raise InvalidValueError(
            f"Expected methods that do not read client states at the end of a round with `privacy`, but got `{name}`.",
            hint=f"Remove `{name}`, or remove `privacy`.",
            argument="callbacks",
            value=name,
        )
    section = method.section_name
    for entry, (_, reduction) in server_entries([method], federation.module).items():
        short = entry.removeprefix(f"{section}.")
        is_private = any(fnmatchcase(short, pattern) for pattern in method.private_entries)
        if get_reduction(entry, reduction).is_uploaded and not is_private:
            raise InvalidValueError(
                f"Expected methods whose uploads are covered by `privacy`, but clients upload `{entry}` for `{name}`, "
                "which does not support noise.",
                hint=f"Remove `{name}`, or remove `privacy`.",
                argument="callbacks",
                value=name,
            )


def _settings_hash(federation: Federation) -> str:
    """Return a hash of the settings and the initial state, which define the bits of each release."""
    trainer = federation.module.trainer
    content = {
        "settings": federation_fingerprint(federation),
        "optimizers": [get_settings(optimizer) for optimizer in federation.optimizers],
        "schedules": [get_settings(config.scheduler) for config in trainer.lr_scheduler_configs],
        "gradient_clip": (trainer.gradient_clip_val, trainer.gradient_clip_algorithm),
        "precision": trainer.precision,
        "seed": global_seed(),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    state: State = state_tensors(federation.module)
    for name, value in state.items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
