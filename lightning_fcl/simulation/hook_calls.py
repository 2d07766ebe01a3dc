"""Calls of hooks while a client trains: a user's hooks read the client's counters.

Lightning calls the hooks of callbacks, the module and the data module through three functions of its module `call`. If
a Trainer has hooks that a user wrote, these functions are replaced while clients train. For other Trainers, the
replacements only call Lightning's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, ProgressBar, ThroughputMonitor
from lightning.pytorch.trainer import call

from lightning_fcl.data.datamodule_adapter import TRANSFER_HOOKS
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.local_training.vmap_check import BATCH_HOOKS, STEP_HOOKS, is_users
from lightning_fcl.simulation.counters import ClientCounters, Users

TRAINING: dict[L.Trainer, ClientCounters] = {}
"""The Trainers that currently train clients and call a user's hooks, with the counters of their clients."""

_BOOKKEEPING = (Checkpoint, DeviceStatsMonitor, ProgressBar, ThroughputMonitor)
_HOOKS = (*STEP_HOOKS, *BATCH_HOOKS, *TRANSFER_HOOKS, "optimizer_zero_grad")
_PLACES = {"on_train_batch_start": 1, "on_train_batch_end": 2, "optimizer_step": 1, "optimizer_zero_grad": 1}
"""Position of ``batch_idx`` among the arguments of each hook."""

_NOBODY: Set[int] = frozenset()
_lock = Lock()
_originals: list[Any] = []  # Lightning's functions, while they are replaced


def find_users(trainer: L.Trainer) -> Users:
    """Return the ids of the objects with a user-defined hook, for each hook that runs during a client's training.

    Bookkeeping callbacks, such as progress bars, are left out.
    """
    owners: list[object] = [one for one in get_callbacks(trainer) if not isinstance(one, _BOOKKEEPING)]
    owners += [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    users_by_hook = {
        hook: frozenset(id(one) for one in owners if hasattr(one, hook) and is_users(getattr(one, hook)))
        for hook in _HOOKS
    }
    return {hook: users for hook, users in users_by_hook.items() if users}


def enter(trainer: L.Trainer, counters: ClientCounters) -> None:
    """Show a client's counters to users' hooks until `leave` is called."""
    if not counters.users:
        return
    with _lock:
        TRAINING[trainer] = counters
        if not _originals:
            callbacks, data = call._call_callback_hooks, call._call_lightning_datamodule_hook
            module: Callable[..., Any] = call._call_lightning_module_hook
            _originals[:] = [callbacks, module, data]
            call._call_callback_hooks = partial(_call_callbacks, callbacks)
            call._call_lightning_module_hook = partial(_call_module, module, lambda trainer: trainer.lightning_module)
            call._call_lightning_datamodule_hook = partial(_call_module, data, lambda trainer: trainer.datamodule)  # type: ignore[attr-defined]


def leave(trainer: L.Trainer) -> None:
    """Show the Trainer's counters to users' hooks again."""
    with _lock:
        if TRAINING.pop(trainer, None) is not None and not TRAINING:
            call._call_callback_hooks, call._call_lightning_module_hook, call._call_lightning_datamodule_hook = (
                _originals
            )
            _originals.clear()


def _call_callbacks(
    original: Callable[..., None], trainer: L.Trainer, hook_name: str, *args: Any, **kwargs: Any
) -> None:
    counters = TRAINING.get(trainer)
    users = _NOBODY if counters is None else counters.users.get(hook_name, _NOBODY)
    if counters is None or not users:
        original(trainer, hook_name, *args, **kwargs)
        return
    module, client_args = trainer.lightning_module, _with_client_batch_idx(counters, hook_name, args)
    previous_name, module._current_fx_name = module._current_fx_name, hook_name
    callbacks, ends_batch = get_callbacks(trainer), hook_name == "on_train_batch_end"
    if ends_batch:  # Users' hooks run first: they may change the client's model before the client uploads it.
        callbacks = sorted(callbacks, key=lambda callback: id(callback) not in users)
        counters.end_batch()
    number_of_users = sum(id(callback) in users for callback in callbacks)
    for position, callback in enumerate(callbacks):
        is_user = id(callback) in users
        if ends_batch and position == number_of_users:  # The module's hook runs after the users' callbacks.
            call._call_lightning_module_hook(trainer, hook_name, *args)
        profiled = trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook_name}")  # type: ignore[attr-defined]
        with profiled, counters.client() if is_user else counters.totals():
            getattr(callback, hook_name)(trainer, module, *(client_args if is_user else args))
    module._current_fx_name = previous_name
    if ends_batch:
        skip_batch_end(module)


def skip_batch_end(module: L.LightningModule) -> None:
    """Skip the next call of the module's `on_train_batch_end`."""
    previous_hook = vars(module).get("on_train_batch_end")

    def skip(*_: Any) -> None:
        del vars(module)["on_train_batch_end"]
        if previous_hook is not None:
            vars(module)["on_train_batch_end"] = previous_hook

    vars(module)["on_train_batch_end"] = skip


@contextmanager
def without_batch_hooks(module: L.LightningModule) -> Iterator[None]:
    """Temporarily skip all callbacks except `FitHooks`, and skip the module's `on_train_batch_end`.

    If a process has no clients in a round, the only batch of the process is empty and is not a batch of a client.
    """
    trainer, callbacks = module.trainer, get_callbacks(module.trainer)
    trainer.callbacks = callbacks[:1]  # type: ignore[attr-defined]  # Only `FitHooks`, which continues the round.
    skip_batch_end(module)
    try:
        yield
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]


def _call_module(
    original: Callable[..., Any],
    owner: Callable[[L.Trainer], object],
    trainer: L.Trainer,
    hook_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    counters = TRAINING.get(trainer)
    if counters is None or id(owner(trainer)) not in counters.users.get(hook_name, _NOBODY):
        return original(trainer, hook_name, *args, **kwargs)
    if hook_name == "optimizer_step":
        _, _, optimizer, closure = args
        if not counters.steps:  # While gradients accumulate, Lightning does not call the hook.
            return optimizer.step(closure=closure)
        args = (*args[:3], partial(_in_totals, counters, closure))
    with counters.client():
        return original(trainer, hook_name, *_with_client_batch_idx(counters, hook_name, args), **kwargs)


def _in_totals(counters: ClientCounters, closure: Callable[[], Any]) -> Any:
    with counters.totals():
        return closure()


def _with_client_batch_idx(counters: ClientCounters, hook_name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a hook's arguments with the client's ``batch_idx`` instead of the Trainer's."""
    position = _PLACES.get(hook_name)
    return args if position is None else (*args[:position], counters.batch_idx, *args[position + 1 :])
