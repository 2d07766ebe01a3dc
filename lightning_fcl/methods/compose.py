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
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.methods.declaration import Declaration, overrides
from lightning_fcl.methods.step import Step


def methods_of(trainer: L.Trainer) -> list[Declaration]:
    """The methods among a Trainer's callbacks, in order."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Declaration)]


def check_compatible(methods: Sequence[Declaration]) -> None:
    """Refuse methods that cannot work together."""
    for function, does in (
        ("task_weight", "weighs the task loss"),
        ("project", "changes the gradient"),
        ("predict", "predicts by a rule of its own"),
    ):
        names = [type(method).__name__ for method in methods if overrides(method, function)]
        if len(set(names) if function == "project" else names) > 1:
            raise ValueError(f"Expected at most one method that {does} but got {' and '.join(names)}. Remove one.")
    names = [type(method).__name__ for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Expected each method once but got `{name}` {names.count(name)} times. Remove the others."
            )


def compose(
    methods: Sequence[Declaration],
    memories: Sequence[Memory],
    steps: Sequence[Step],
    zero: Tensor,
    applies: Sequence[Tensor] | None = None,
) -> tuple[Tensor | float, Tensor]:
    """How methods go together, one client at a time and vectorised alike: factors multiply, penalties add up.

    ``applies`` tells whether the client uses each method, 1 or 0; None: it uses all.
    """
    scale: Tensor | float = 1.0
    extra = zero
    for i, (method, memory, step) in enumerate(zip(methods, memories, steps, strict=True)):
        weight, penalty = method.task_weight(memory), method.penalty(memory, step)
        if applies is None:
            scale, extra = scale * weight, extra + penalty
        else:
            scale, extra = scale * (1 + applies[i] * (weight - 1)), extra + torch.where(applies[i] > 0, penalty, 0.0)
    return scale, extra


def epochs_of(
    methods: Sequence[Declaration], memory: Callable[[str, str], Memory], usual: int
) -> int | Callable[[ClientRound], int]:
    """A client's passes over its data in a round, as the first method says that has a say."""
    saying = [method for method in methods if overrides(method, "local_epochs")]

    def of(client_round: ClientRound) -> int:
        said = (m.local_epochs(memory(client_round.client, m.section), client_round) for m in saying)
        return next((epochs for epochs in said if epochs is not None), usual)

    return of if saying else usual


def rehearsed_by(
    methods: Sequence[Declaration], memory: Callable[[str, str], Memory]
) -> Callable[[ClientRound], Any] | None:
    """A client's remembered samples, nested as its batches are; None where no method has any."""
    rehearsing = [method for method in methods if overrides(method, "rehearse")]

    def of(client_round: ClientRound) -> Any:
        mine = [method for method in rehearsing if method.applies_to(client_round)]
        remembered = [method.rehearse(memory(client_round.client, method.section)) for method in mine]
        parts = [samples for samples in remembered if samples is not None]
        return joined(parts) if parts else []

    return of if rehearsing else None


@contextmanager
def predicting(module: L.LightningModule) -> Iterator[None]:
    """Let a module predict by the rule of a method of its Trainer, if one has a rule, in place of its own output."""
    ruling = [method for method in methods_of(module.trainer) if overrides(method, "predict")]
    if not ruling:
        yield
        return
    method, federation = ruling[0], federation_of(module.trainer)
    server = federation.server.kept_for(method.section) if federation is not None else method.server_entries
    server = server or method.server_state(module)

    def rule(hooked: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return method.predict(server, module, args[0], output)

    handle = module.register_forward_hook(rule)
    try:
        yield
    finally:
        handle.remove()
