"""How the methods of a Trainer go together: one rule for one client at a time and for many side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_fcl.data.attached import callbacks_of
from lightning_fcl.data.batches import joined
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.client import Client
from lightning_fcl.methods.declaration import Declaration, Predicts, SetsEpochs, TrainsParts, overrides
from lightning_fcl.methods.step import Step


def methods_of(trainer: L.Trainer) -> list[Declaration]:
    """The methods among a Trainer's callbacks, in order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Declaration)]


def check_compatible(methods: Sequence[Declaration]) -> None:
    """Refuse methods that cannot work together."""
    for does, found in (
        ("weighs the task loss", [method for method in methods if overrides(method, "task_weight")]),
        ("changes the gradient", [method for method in methods if overrides(method, "project")]),
        ("predicts by a rule of its own", [method for method in methods if isinstance(method, Predicts)]),
        ("trains parts of the module in stages", [method for method in methods if isinstance(method, TrainsParts)]),
    ):
        names = [*dict.fromkeys(type(method).__name__ for method in found)]
        if len(names) > 1:
            raise ValueError(f"Expected at most one method that {does} but got {' and '.join(names)}. Remove one.")
    names = [type(method).__name__ for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Expected each method once but got `{name}` {names.count(name)} times. Remove the others."
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


ClientOf = Callable[[Declaration, ClientRound], Client]
"""A client as a method sees it before it trains in a round."""


def epochs_of(methods: Sequence[Declaration], client_of: ClientOf, usual: int) -> int | Callable[[ClientRound], int]:
    """A client's passes over its data in a round, as the first method says that has a say."""
    saying = [(method, method.local_epochs) for method in methods if isinstance(method, SetsEpochs)]

    def of(part: ClientRound) -> int:
        said = (local_epochs(client_of(method, part)) for method, local_epochs in saying)
        return next((epochs for epochs in said if epochs is not None), usual)

    return of if saying else usual


def rehearsed_by(methods: Sequence[Declaration], client_of: ClientOf) -> Callable[[ClientRound], Any] | None:
    """A client's remembered samples, nested as its batches are; None where no method has any."""
    rehearsing = [method for method in methods if overrides(method, "rehearse")]

    def of(part: ClientRound) -> Any:
        remembered = [method.rehearse(client_of(method, part)) for method in rehearsing if method.applies_to(part)]
        parts = [samples for samples in remembered if samples is not None]
        return joined(parts) if parts else []

    return of if rehearsing else None


@contextmanager
def predicting(module: L.LightningModule) -> Iterator[None]:
    """Let a module predict by the rule of a method of its Trainer, if one has a rule, in place of its own output."""
    ruling = [(method, method.predict) for method in methods_of(module.trainer) if isinstance(method, Predicts)]
    if not ruling:
        yield
        return
    (method, predict), federation = ruling[0], federation_of(module.trainer)
    server = federation.server.kept_for(method.section) if federation is not None else method.server_entries
    server = server or method.server_state(module)

    def rule(hooked: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return predict(server, module, args[0], output)

    handle = module.register_forward_hook(rule)
    try:
        yield
    finally:
        handle.remove()
