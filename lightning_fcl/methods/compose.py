"""How the methods of a Trainer go together, one client at a time and side by side, and what they need around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import reductions_of
from lightning_fcl.federation.protocol import ListensToClients, ListensToRounds, federation_of, need_federation
from lightning_fcl.methods.client import Client, Step
from lightning_fcl.methods.declaration import Declaration, matches, overrides, overriding
from lightning_fcl.methods.functional import states_loss, trainable
from lightning_fcl.methods.replay_samples import ClientOf


def methods_of(trainer: L.Trainer) -> list[Declaration]:
    """The methods among a Trainer's callbacks, in order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Declaration)]


def check_compatible(methods: Sequence[Declaration]) -> None:
    """Refuse methods that cannot work together."""
    for does, function in (
        ("weighs the task loss", "task_weight"),
        ("changes the gradient", "project"),
        ("predicts by a rule of its own", "predict"),
        ("trains parts of the module in stages", "trains"),
    ):
        names = [*dict.fromkeys(type(method).__name__ for method in overriding(methods, function))]
        if len(names) > 1:
            raise InvalidValueError(
                f"Expected at most one method that {does} but got {' and '.join(names)}.",
                hint="Remove one.",
                argument="callbacks",
                value=names,
            )
    names = [type(method).__name__ for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError(
                f"Expected each method once but got `{name}` {names.count(name)} times.",
                hint=f"Keep one `{name}`, and remove the others.",
                argument="callbacks",
                value=name,
            )


def check_needs(method: Declaration, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Refuse, before a fit, what a method cannot work with."""
    name, needs = type(method).__name__, method.needs
    if str(trainer.precision).startswith("16") and trainer.scaler is not None:
        raise InvalidValueError(
            f'Expected a Trainer without loss scaling for `{name}` but got `precision="{trainer.precision}"`.',
            hint='Use "bf16-mixed" or "32-true".',
            argument="precision",
            value=trainer.precision,
        )
    if needs.loss:
        states_loss(module, f" for `{name}`")
    federation = need_federation(trainer, name, needs.federation) if needs.federation else None
    if federation is None:
        if federation_of(trainer) is None:
            _check_one_client(method, trainer)
        return
    weights = federation.server.client_weights
    if needs.uniform and weights != "uniform" and len(federation.stream.plan.clients) > 1:
        raise InvalidValueError(
            f'Expected `client_weights="uniform"` for `{name}`, in whose correction all clients count alike, but got '
            f"{weights!r}.",
            hint='Use `FederatedStrategy(client_weights="uniform")`.',
            argument="client_weights",
            value=weights,
        )
    if not needs.head:
        return
    head: str = vars(method)["head"]
    learning = trainable(module)
    chosen = sorted(name for name in learning if matches(name, head))
    if not chosen or len(chosen) == len(learning):
        raise InvalidValueError(
            f"Expected `head` to match some of the trainable parameters but `{head}` matches {len(chosen)} of "
            f"{len(learning)}: {', '.join(sorted(learning)[:3])}, ...",
            hint=f'Use a pattern of the last layer, such as `head="{[*learning][-1].rpartition(".")[0]}.*"`.',
            argument="head",
        )
    reductions = reductions_of(module, federation.settings.rules)
    for name in chosen:
        if not reductions[name].own:
            raise InvalidValueError(
                f'Expected the head to stay with the clients but {name} has the reduction "{reductions[name].name}".',
                hint=f'Give the strategy `reductions={{"{head}": "none"}}`.',
                argument="reductions",
                value=name,
            )


def _check_one_client(method: Declaration, trainer: L.Trainer) -> None:
    """Raise ValueError if a method has functions that a plain Trainer, a federation of one client, does not call."""
    functions = [name for name in ("personalize",) if overrides(method, name)]
    functions += ["on_client_end"] if isinstance(method, ListensToClients) else []
    functions += ["on_round_end"] if isinstance(method, ListensToRounds) else []
    if trainer.world_size > 1:  # each process has a client with a share of the data
        functions += [name for name in ("upload", "server_turn") if overrides(method, name)]
    if functions:
        name, of = type(method).__name__, f" in {trainer.world_size} processes" if trainer.world_size > 1 else ""
        raise InvalidValueError(
            f'Expected a Trainer with `strategy="federated"` for `{name}.{functions[0]}` but got a plain one{of}.',
            hint=f'Use `strategy="federated"`, or remove `{name}`.',
            argument="strategy",
            value=name,
        )


def compose(
    methods: Sequence[Declaration],
    clients: Sequence[Client],
    steps: Sequence[Step],
    zero: Tensor,
    applies: Sequence[Tensor] | None = None,
) -> tuple[Tensor | float, Tensor]:
    """How methods go together, one client at a time and vectorised alike: factors multiply, penalties add up.

    ``applies`` tells whether the client uses each method, 1 or 0; None: it uses all.
    """
    scale: Tensor | float = 1.0
    extra = zero
    for i, (method, client, step) in enumerate(zip(methods, clients, steps, strict=True)):
        weight, penalty = method.task_weight(client), method.penalty(client, step)
        if applies is None:
            scale, extra = scale * weight, extra + penalty
        else:
            scale, extra = scale * (1 + applies[i] * (weight - 1)), extra + torch.where(applies[i] > 0, penalty, 0.0)
    return scale, extra


def epochs_of(methods: Sequence[Declaration], client_of: ClientOf, usual: int) -> int | Callable[[ClientRound], int]:
    """A client's passes over its data in a round, as the first method says that has a say."""
    saying = overriding(methods, "local_epochs")

    def local_epochs_in(part: ClientRound) -> int:
        said = (method.local_epochs(client_of(method, part)) for method in saying)
        return next((epochs for epochs in said if epochs is not None), usual)

    return local_epochs_in if saying else usual


@contextmanager
def predicting(module: L.LightningModule) -> Iterator[None]:
    """Let a module predict by the rule of a method of its Trainer, if one has a rule, in place of its own output."""
    ruling, federation = overriding(methods_of(module.trainer), "predict"), federation_of(module.trainer)
    if not ruling:
        yield
        return
    method = ruling[0]
    holder = federation or method.local
    server = (holder.server.kept_for(method.section) if holder is not None else {}) or method.server_state(module)

    def rule(hooked: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return method.predict(server, module, args[0], output)

    handle = module.register_forward_hook(rule)
    try:
        yield
    finally:
        handle.remove()
