"""Composition of a Trainer's methods: compatibility checks, and the total loss of several methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.trainer_access import get_callbacks
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import get_reductions
from lightning_fcl.federation.protocols import ClientEndListener, RoundEndListener, find_federation, require_federation
from lightning_fcl.methods.base import MethodBase, matches, methods_overriding, overrides_hook
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.functional import require_sample_loss, trainable_parameters
from lightning_fcl.methods.hook_results import check_hooks, check_penalty
from lightning_fcl.methods.replay_samples import ClientOf


def get_methods(trainer: L.Trainer) -> list[MethodBase]:
    """Return the methods among a Trainer's callbacks, in order."""
    return [callback for callback in get_callbacks(trainer) if isinstance(callback, MethodBase)]


def check_compatible(methods: Sequence[MethodBase]) -> None:
    """Raise ValueError if methods cannot be combined."""
    for does, function in (
        ("scales the task loss", "task_weight"),
        ("changes the gradient", "project_gradient"),
        ("has a prediction rule", "rescore"),
        ("trains parts of the module in stages", "trainable_patterns"),
    ):
        names = [*dict.fromkeys(type(method).__name__ for method in methods_overriding(methods, function))]
        if len(names) > 1:
            raise InvalidValueError(
                f"Expected at most one method that {does}, but got {' and '.join(names)}.",
                hint="Use only one of these methods.",
                argument="callbacks",
                value=names,
            )
    names = [type(method).__name__ for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(
                f"Expected each method once, but got `{name}` {names.count(name)} times.",
                hint=f"Keep one `{name}`, and remove the others.",
                argument="callbacks",
                value=name,
            )


def check_needs(method: MethodBase, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise ValueError if a Trainer or module does not meet the needs of a method. Called before a fit.

    Batches and the module's output are checked later.
    """
    name, needs = type(method).__name__, method.needs
    check_hooks(method)
    if str(trainer.precision).startswith("16") and trainer.scaler is not None:
        raise InvalidValueError(
            f'Expected a Trainer without loss scaling for `{name}`, but got `precision="{trainer.precision}"`.',
            hint='Use "bf16-mixed" or "32-true".',
            argument="precision",
            value=trainer.precision,
        )
    if needs.sample_loss:
        require_sample_loss(module, f" for `{name}`")
    federation = require_federation(trainer, name, needs.federation_reason) if needs.federation_reason else None
    if federation is None:
        if find_federation(trainer) is None:
            _check_one_client(method, trainer)
        return
    weights = federation.server.client_weights
    if needs.uniform_weights and weights != "uniform" and len(federation.stream.plan.clients) > 1:
        raise InvalidValueError(
            f'Expected `client_weights="uniform"` for `{name}`, whose correction weights all clients equally, but got '
            f"{weights!r}.",
            hint='Use `FederatedStrategy(client_weights="uniform")`.',
            argument="client_weights",
            value=weights,
        )
    if not needs.local_head:
        return
    head: str = vars(method)["head_pattern"]
    learning = trainable_parameters(module)
    head_names = sorted(name for name in learning if matches(name, head))
    if not learning:
        raise InvalidValueError(
            f"Expected trainable parameters for `{name}`, but the module has none.",
        )
    if not head_names or len(head_names) == len(learning):
        last = f"{[*learning][-1].rpartition('.')[0]}.*"
        has_other_layers = 0 < sum(matches(name, last) for name in learning) < len(learning)
        raise InvalidValueError(
            f"Expected `head_pattern` to match some but not all trainable parameters, but `{head}` matches "
            f"{len(head_names)} of {len(learning)}. The trainable parameters include "
            f"{', '.join(sorted(learning)[:3])}.",
            hint=f'Use a pattern of the last layer, such as `head_pattern="{last}"`.'
            if has_other_layers
            else "Use a module with at least two layers of trainable parameters, and a pattern of the last layer.",
            argument="head_pattern",
        )
    reductions = get_reductions(module, federation.settings.rules)
    for name in head_names:
        if not reductions[name].is_local:
            raise InvalidValueError(
                f'Expected a client-local head, but {name} has the reduction "{reductions[name].name}".',
                hint=f'Give the strategy `reductions={{"{head}": "local"}}`.',
                argument="reductions",
                value=name,
            )


def _check_one_client(method: MethodBase, trainer: L.Trainer) -> None:
    """Raise ValueError if a method overrides hooks that a plain Trainer does not support."""
    functions = [name for name in ("personalize",) if overrides_hook(method, name)]
    functions += ["on_client_end"] if isinstance(method, ClientEndListener) else []
    functions += ["on_round_end"] if isinstance(method, RoundEndListener) else []
    # With several processes, each process has a client with a share of the data.
    if trainer.world_size > 1:
        functions += [name for name in ("transform_upload", "process_aggregate") if overrides_hook(method, name)]
    if functions:
        name, suffix = type(method).__name__, f" in {trainer.world_size} processes" if trainer.world_size > 1 else ""
        raise InvalidValueError(
            f'Expected a Trainer with `strategy="federated"` for `{name}.{functions[0]}`, but got a plain Trainer'
            f"{suffix}.",
            hint=f'Use `strategy="federated"`, or remove `{name}`.',
            argument="strategy",
            value=name,
        )


def compose(
    methods: Sequence[MethodBase],
    clients: Sequence[Client],
    steps: Sequence[Step],
    zero: Tensor,
    applies: Sequence[Tensor] | None = None,
) -> tuple[Tensor | float, Tensor]:
    """Return the total factor of the task loss and the total penalty of several methods.

    Factors are multiplied, and penalties are added. Sequential and vectorized training both use this function.

    Args:
        methods: The methods.
        clients: The `Client` object of each method.
        steps: The `Step` object of each method.
        zero: A zero on the device of the loss. The penalties are added to it.
        applies: For each method, 1 if the client uses the method and 0 otherwise. None: the client uses all methods.

    Returns:
        The factor of the task loss, and the sum of ``zero`` and the penalties.
    """
    scale: Tensor | float = 1.0
    extra = zero
    for i, (method, client, step) in enumerate(zip(methods, clients, steps, strict=True)):
        weight, penalty = method.task_weight(client), method.penalty(client, step)
        check_penalty(method, penalty)
        if applies is None:
            scale, extra = scale * weight, extra + penalty
        else:
            scale, extra = scale * (1 + applies[i] * (weight - 1)), extra + torch.where(applies[i] > 0, penalty, 0.0)
    return scale, extra


def local_epochs_fn(
    methods: Sequence[MethodBase], client_of: ClientOf, default_epochs: int
) -> int | Callable[[ClientRound], int]:
    """Return the number of local epochs, or a function that computes the number from a `ClientRound`.

    If no method overrides `MethodBase.local_epochs`, ``default_epochs`` is returned. Otherwise, the returned function
    uses the first method that defines a number for the client. If no method does, it returns ``default_epochs``.
    """
    saying = methods_overriding(methods, "local_epochs")

    def local_epochs_in(client_round: ClientRound) -> int:
        method_epochs = (method.local_epochs(client_of(method, client_round)) for method in saying)
        return next((epochs for epochs in method_epochs if epochs is not None), default_epochs)

    return local_epochs_in if saying else default_epochs


@contextmanager
def prediction_override(module: L.LightningModule) -> Iterator[None]:
    """Temporarily replace a module's output by the class scores of a method's prediction rule (`MethodBase.rescore`).

    The output does not change if no method of the Trainer has a prediction rule.
    """
    ruling, federation = methods_overriding(get_methods(module.trainer), "rescore"), find_federation(module.trainer)
    if not ruling:
        yield
        return
    method = ruling[0]
    holder = federation or method.local
    server = (holder.server.get_section(method.section_name) if holder is not None else {}) or method.init_server_state(
        module
    )

    def rule(hooked: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return method.rescore(server, module, args[0], output)

    handle = module.register_forward_hook(rule)
    try:
        yield
    finally:
        handle.remove()
