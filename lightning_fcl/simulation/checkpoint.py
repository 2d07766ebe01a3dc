"""Checks of a checkpoint before a federation resumes from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from lightning_fcl.callbacks.weight_averaging import find_weight_averaging
from lightning_fcl.data.trainer_access import require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import rules_fingerprint
from lightning_fcl.federation.protocols import HasFingerprint
from lightning_fcl.methods.compose import get_methods
from lightning_fcl.simulation.federation import Federation
from lightning_fcl.validation import differing_values, format_code_names

FORMAT = 1
"""Format version of the federation's state in a checkpoint."""

CHECKPOINT_FIELDS = {
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
"""Fields that Lightning saves in a checkpoint in addition to the module's state, with their types."""

RNG_VERSION = 2
"""Version of the random draws: sample order, participation, replay samples and dropout."""

_LABELS = {"data": "hash of the training data", "task.share": "task.upload", "swarm.dropout": "swarm.missed_sync_prob"}
"""Names in messages for keys of the fingerprint that differ from the names of the settings."""


def federation_fingerprint(federation: Federation) -> dict[str, Any]:
    """Return the settings that a checkpoint must match so that the federation can resume from it."""
    module, server, swarm = federation.module, federation.server, federation.participation.swarm
    codec = server.pipeline.codec
    # During a fit the federation accumulates gradients itself, and the Trainer's `accumulate_grad_batches` is 1.
    stream, batches_per_step = (
        require_stream(module.trainer),
        federation.local_steps.accumulate_grad_batches,
    )
    synchronization, batching = federation.participation.synchronization, federation.limits.batch_plan(stream)
    averaging = find_weight_averaging(module.trainer)
    return {
        "model": type(module).__name__,
        "task": module.fingerprint() if isinstance(module, HasFingerprint) else {},
        "methods": {method.section_name: method.fingerprint() for method in get_methods(module.trainer)},
        "data": stream.plan.fingerprint,
        "batches": {"size": batching.batch_size, "shuffle": batching.shuffle, "drop_last": batching.drop_last},
        "local_epochs": federation.settings.local_epochs,
        "limit_train_batches": repr(federation.limits.batches),  # `repr` distinguishes 1 (a number) from 1.0 (a share)
        "accumulate_grad_batches": batches_per_step if batches_per_step > 1 else module.trainer.accumulate_grad_batches,
        "participation": federation.participation.fingerprint(),
        "client_weights": server.client_weights,
        "reductions": rules_fingerprint(federation.settings.rules),
        "server_optimizer": server.optimizer_settings,
        "keep_optimizer_state": federation.settings.keep_optimizer_state,
        "swarm": swarm.fingerprint() if swarm else None,
        "synchronization": synchronization.fingerprint() if synchronization else None,
        "compression": codec.fingerprint() if codec is not None else None,
        "upload_transforms": [one.fingerprint() for one in server.pipeline.transforms if one is not codec],
        "weight_averaging": averaging.fingerprint() if averaging is not None else None,
        "seed": federation.seed,
        "version of draws": RNG_VERSION,
    }


def check_checkpoint(
    checkpoint: Mapping[str, Any], federation: str, fingerprint: Mapping[str, Any], rounds: int, path: object
) -> None:
    """Raise ValueError if a federation cannot resume from a checkpoint.

    Args:
        checkpoint: The checkpoint.
        federation: The key of the federation's state among the callback states of the checkpoint.
        fingerprint: The `federation_fingerprint` of the federation that resumes.
        rounds: The number of rounds of the stream.
        path: The path of the checkpoint.
    """
    if "optimizer_states" not in checkpoint:
        raise InvalidValueError(
            f"Expected a full checkpoint, but {path} contains only weights.",
            hint="Save the checkpoint with `save_weights_only=False`.",
            argument="ckpt_path",
            value=path,
            code="weights-only",
        )
    _check_contents(checkpoint, path)
    federation_state = checkpoint["callbacks"].get(federation)
    if federation_state is None:
        raise InvalidValueError(
            f"Expected the checkpoint of a federation, but {path} was written by another strategy.",
            argument="ckpt_path",
            value=path,
            code="other-strategy",
        )
    if (actual_format := federation_state.get("format", 0)) != FORMAT:
        raise InvalidValueError(
            f"Expected the checkpoint of a federation in format {FORMAT}, but {path} has format {actual_format}. It "
            "was written by another version of lightning-fcl.",
            hint="Resume with that version of lightning-fcl, or start without `ckpt_path`.",
        )
    progress, epoch = checkpoint["loops"]["fit_loop"].get("epoch_progress"), checkpoint["epoch"]
    counts = progress.get("current") if isinstance(progress, dict) else None
    counts = [*counts.values()] if isinstance(counts, dict) else []
    if not 0 <= epoch <= rounds or not counts or any(count not in (epoch, epoch + 1) for count in counts):
        raise InvalidValueError(
            f"Expected `epoch` of the checkpoint {path} to be between 0 and {rounds}, and to match the epoch counters, "
            f"but got {epoch}. The epoch counters are: {format_code_names(counts) or 'missing'}.",
            hint="Resume from another checkpoint.",
            argument="epoch",
            value=epoch,
        )
    if not federation_state["between_rounds"]:
        raise InvalidValueError(
            f"Expected a checkpoint that was saved between rounds, but {path} was saved during a round.",
            hint="Use a checkpoint that was saved at the end of a round, for example by "
            "`ModelCheckpoint(every_n_epochs=1)`.",
            argument="ckpt_path",
            value=path,
            code="within-round",
        )
    saved_fingerprint = {"version of draws": 1, **federation_state.get("fingerprint", {})}
    other = {
        name: (saved_fingerprint[name], fingerprint[name])
        for name in saved_fingerprint.keys() & fingerprint.keys()
        if saved_fingerprint[name] != fingerprint[name]
    }
    if other:
        differences = "; ".join(
            f"{_LABELS.get(setting, setting)} was {before}, is {now}"
            for name, (saved, current) in sorted(other.items())
            for setting, before, now in differing_values(saved, current, name)
        )
        raise InvalidValueError(
            f"Expected a checkpoint with the settings of this run, but {path} has different settings: {differences}.",
            hint="Resume with the settings of the checkpoint, or start without `ckpt_path`.",
            argument=min(other),
            value=other[min(other)][0],
            code="other-recipe",
        )


def check_version(checkpoint: Mapping[str, Any], path: object) -> None:
    """Raise ValueError if a checkpoint was not saved by Lightning 2.

    Without this check, Lightning would migrate an older checkpoint.
    """
    version = checkpoint.get("pytorch-lightning_version")
    if not isinstance(version, str) or not re.fullmatch(r"2\.\d+\.\d+[\w.+-]*", version):
        raise InvalidValueError(
            f"Expected `pytorch-lightning_version` of the checkpoint {path} to be a version 2.x, but got "
            f"{version!r:.100}.",
            hint="Save the checkpoint again with `lightning` 2.",
        )


def check_same_settings(saved_settings: Mapping[str, Any], current_settings: Mapping[str, Any], path: object) -> None:
    """Raise ValueError if the settings of optimizers or schedulers differ from the settings in a checkpoint.

    Without this check, Lightning silently uses the hyperparameters of the checkpoint instead of the current values.

    Args:
        saved_settings: Lists of settings in the checkpoint, by "optimizer" and "schedule". Each item is the result of
            `get_settings`.
        current_settings: The settings of the current run, in the same form.
        path: The path of the checkpoint.
    """
    for kind, kind_settings in current_settings.items():
        pairs = list(zip_longest(saved_settings.get(kind, []), kind_settings, fillvalue={"class": "none"}))
        other = [
            f"{name} of the {kind} was {old[name]}, is {new[name]}"
            for old, new in pairs
            for name in (old.keys() & new.keys() if old["class"] == new["class"] else ["class"])
            if old[name] != new[name]
        ]
        if other:
            raise InvalidValueError(
                f"Expected a checkpoint with the settings of this run, but {path} has different settings: "
                f"{'; '.join(sorted(other))}.",
                hint="Resume with the settings of the checkpoint, or start without `ckpt_path`.",
                argument=kind,
                value=min(other),
                code="other-recipe",
            )


def _check_contents(checkpoint: Mapping[str, Any], path: object) -> None:
    """Raise ValueError if a checkpoint lacks a required state, or if a field has the wrong type.

    Without this check, training would silently start from the beginning.
    """
    for name, kind in CHECKPOINT_FIELDS.items():
        if not isinstance(checkpoint.get(name), kind):
            raise InvalidValueError(
                f"Expected `{name}` of the checkpoint {path} to be of type {kind.__name__}, but got "
                f"{checkpoint.get(name)!r}.",
                hint="Resume from another checkpoint.",
                argument=name,
            )
    states = {"the training loop": checkpoint["loops"].get("fit_loop"), **checkpoint["callbacks"]}
    for name, state in states.items():
        if not isinstance(state, dict) or not state:
            raise InvalidValueError(
                f"Expected the checkpoint {path} to contain the state of {name}, but got {state!r}.",
                hint="Resume from another checkpoint.",
            )
