"""Calls of hooks within a client's round: a user's code sees the client's counters.

Lightning calls all hooks by three functions of one module. These functions are replaced once per process. For a Trainer
in which no client trains they do what Lightning's do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, Checkpoint, DeviceStatsMonitor, ProgressBar, ThroughputMonitor
from lightning.pytorch.trainer import call

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.data_module import TRANSFER_HOOKS
from lightning_fcl.local.trial import BATCH_HOOKS, STEP_HOOKS, is_users
from lightning_fcl.simulation.counters import TRAINING, ClientCounters

_BOOKKEEPING = (Checkpoint, DeviceStatsMonitor, ProgressBar, ThroughputMonitor)
_CALLBACK_HOOKS = {hook for hook in (*STEP_HOOKS, *BATCH_HOOKS) if hasattr(Callback, hook)}
_MODULE_HOOKS = {*STEP_HOOKS, *BATCH_HOOKS, *TRANSFER_HOOKS, "optimizer_zero_grad"}
_PLACES = {"on_train_batch_start": 1, "on_train_batch_end": 2, "optimizer_step": 1, "optimizer_zero_grad": 1}
"""Places of ``batch_idx`` among the arguments of hooks."""


def goes_by_client(callback: Callback, hook: str) -> bool:
    """Return whether a callback's hook sees the client's counters: it is a user's, and no bookkeeping of a Trainer."""
    return not isinstance(callback, _BOOKKEEPING) and is_users(getattr(callback, hook))


@cache
def replace_calls() -> None:
    """Replace Lightning's functions that call hooks, once per process."""
    module_hook, data_hook = call._call_lightning_module_hook, call._call_lightning_datamodule_hook
    call._call_callback_hooks = partial(_call_callbacks, call._call_callback_hooks)
    call._call_lightning_module_hook = partial(_call_module, module_hook, lambda trainer: trainer.lightning_module)
    call._call_lightning_datamodule_hook = partial(_call_module, data_hook, lambda trainer: trainer.datamodule)  # type: ignore[attr-defined]


def _call_callbacks(
    original: Callable[..., None], trainer: L.Trainer, hook_name: str, *args: Any, **kwargs: Any
) -> None:
    counters = TRAINING.get(trainer) if hook_name in _CALLBACK_HOOKS else None
    if counters is None or not any(goes_by_client(callback, hook_name) for callback in callbacks_of(trainer)):
        original(trainer, hook_name, *args, **kwargs)
        return
    module = trainer.lightning_module
    before, module._current_fx_name = module._current_fx_name, hook_name
    for callback in callbacks_of(trainer):
        own = goes_by_client(callback, hook_name)
        given = _of_client(counters, hook_name, args) if own else args
        profiled = trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook_name}")  # type: ignore[attr-defined]
        with profiled, counters.client() if own else counters.totals():
            getattr(callback, hook_name)(trainer, module, *given)
    module._current_fx_name = before


def _call_module(
    original: Callable[..., Any],
    owner: Callable[[L.Trainer], object],
    trainer: L.Trainer,
    hook_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    counters = TRAINING.get(trainer) if hook_name in _MODULE_HOOKS else None
    if counters is None or not is_users(getattr(owner(trainer), hook_name)):
        return original(trainer, hook_name, *args, **kwargs)
    if hook_name == "optimizer_step":
        _, _, optimizer, closure = args
        if not counters.steps:  # Lightning calls the hook when the optimizer steps, not when gradients accumulate
            return optimizer.step(closure=closure)
        args = (*args[:3], partial(_in_totals, counters, closure))
    with counters.client():
        return original(trainer, hook_name, *_of_client(counters, hook_name, args), **kwargs)


def _in_totals(counters: ClientCounters, closure: Callable[[], Any]) -> Any:
    with counters.totals():
        return closure()


def _of_client(counters: ClientCounters, hook_name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a hook's arguments with the number of the client's batch in place of the Trainer's."""
    place = _PLACES.get(hook_name)
    return args if place is None else (*args[:place], counters.batch_idx, *args[place + 1 :])
