"""Statements that compare whole fits with independent loops in double precision, which follow the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fcl.conformance.fixtures import (
    CLASSES,
    SmallNet,
    assert_close,
    make_method,
    make_stream,
    statement,
    train,
)
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.federation.protocols import require_federation
from lightning_fcl.methods.method import Method
from lightning_fcl.tasks.classification import Classifier

RATE, _BATCH, NUM_CLIENTS = 0.1, 8, 3


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SmallNet().double()


_NETWORK = _network()


def unflatten(w: Tensor) -> dict[str, Tensor]:
    """Return the network's parameters by name from one vector."""
    parameters = dict(_NETWORK.named_parameters())
    pieces = torch.split(w, [value.numel() for value in parameters.values()])
    return {name: piece.view_as(value) for (name, value), piece in zip(parameters.items(), pieces, strict=True)}


def flatten_state(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[name].flatten() for name, _ in _NETWORK.named_parameters()])


def reference_logits(w: Tensor, x: Tensor) -> Tensor:
    outputs: Tensor = functional_call(_NETWORK, unflatten(w), (x,))
    return outputs


def reference_features(w: Tensor, x: Tensor) -> Tensor:
    parameters = unflatten(w)
    return torch.tanh(F.linear(x, parameters["body.0.weight"], parameters["body.0.bias"]))


def loss_gradient(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    w = w.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(w), w)
    return gradient


def task_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return loss_gradient(lambda value: F.cross_entropy(reference_logits(value, x), y), w)


@dataclass
class ReferenceRule:
    """FedAvg with uniform weights. Subclasses override the steps in which a method differs.

    The parameters of a model are one vector. ``memory`` contains the values that a client keeps, by name.
    """

    momentum: float
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def start_experience(self) -> None:
        """Prepare the first round of an experience."""

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of a client's step at the parameters ``w``."""
        return task_gradient(w, x, y)

    def after_step(self, memory: dict[str, Tensor], w_previous: Tensor, w: Tensor, x: Tensor, y: Tensor) -> None:
        """Update the client's memory after a step from ``w_previous`` to ``w``."""

    def upload(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, steps: int, x: Tensor) -> Tensor:
        """Return the parameters that the client uploads. May update the client's memory."""
        return w

    def end_round(self, memory: dict[str, Tensor], w: Tensor, x: Tensor, y: Tensor) -> None:
        """Update the client's memory after a round with the parameters ``w`` and all samples of the round."""

    def aggregate(self, w_server: Tensor, uploads: list[Tensor]) -> Tensor:
        """Return the new parameters of the server."""
        return torch.stack(uploads).mean(dim=0)

    def gradient_weight(self, steps: int) -> float:
        """Return ``||a||_1`` of ``steps`` steps with momentum."""
        return sum(sum(self.momentum**power for power in range(step + 1)) for step in range(steps))

    def run(self, stream: FederatedStream, participants: list[list[str]], rounds: int) -> Tensor:
        """Return the server's parameters after all rounds.

        Args:
            stream: The stream.
            participants: Names of the clients that take part in each round.
            rounds: Number of rounds per experience.
        """
        server = flatten_state(dict(_network().named_parameters())).detach()
        for round_idx, clients in enumerate(participants):
            if round_idx % rounds == 0:
                self.start_experience()
            uploads = []
            for client in clients:
                x, y = stream.get_samples(stream.plan.train[round_idx][client])
                x, w, velocity, steps = x.double(), server.clone(), torch.zeros_like(server), 0
                memory = self.memory.setdefault(client, {})
                for rows in torch.split(torch.arange(len(y)), _BATCH):
                    w_previous = w
                    velocity = self.momentum * velocity + self.gradient(memory, server, w, x[rows], y[rows])
                    w, steps = w - RATE * velocity, steps + 1
                    self.after_step(memory, w_previous, w, x[rows], y[rows])
                uploads.append(self.upload(memory, server, w, steps, x))
                self.end_round(memory, w, x, y)
            server = self.aggregate(server, uploads)
        return server


class Rounds(Callback):
    """Records the clients of each round, and the clients' states for a method after the last round."""

    def __init__(self, section: str) -> None:
        self._section = section
        self.participants: list[list[str]] = []
        self.states: dict[str, dict[str, Tensor]] = {}

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        server = require_federation(trainer, "a statement", "it has no clients").server
        self.participants.append([*server.record.accepted])
        self.states = {
            client: dict(server.client_store[client].get(self._section, {})) for client in server.client_store
        }


def register_reference_statement(
    claim: str,
    formula: str,
    rule: Callable[..., ReferenceRule],
    personal: Callable[[dict[str, Tensor]], Tensor] | None = None,
    rounds: int = 3,
    participation: float = 2,
    **arguments: Any,
) -> None:
    """Register the statement that a fit equals a loop in double precision.

    There are two tasks. Clients have different numbers of samples, and take different numbers of steps.

    Args:
        claim: Name of the method.
        formula: What the loop computes.
        rule: Class of the loop, created with the momentum and ``arguments``.
        personal: Function that returns a client's personal parameters from the client's state in the loop, to compare
            them with the state of the method.
        rounds: Number of rounds per task.
        participation: Number of the three clients that take part in each round, or 1.0 for all of them.
        **arguments: Arguments of the method and of the loop.
    """
    missing = "" if participation == 1.0 else "partial participation, "

    @statement(claim, f"{formula}, with {missing}unequal numbers of steps and momentum")
    def _(kind: type[Method]) -> None:
        for momentum in (0.0, 0.6):
            method = make_method(kind, **arguments)
            recorder, stream = Rounds(method.section_name), _make_unequal_stream(rounds)
            task = Classifier(_network(), CLASSES, partial(torch.optim.SGD, lr=RATE, momentum=momentum))
            train([method], stream, task, [recorder], participation=participation)
            loop = rule(momentum, **arguments)
            expected = loop.run(stream, recorder.participants, rounds)
            says = f"with momentum {momentum}"
            assert_close(dict(task.model.named_parameters()), unflatten(expected), says)
            if personal is not None:
                for client, memory in loop.memory.items():
                    states = recorder.states[client]
                    actual = {name.removeprefix("v.model."): v for name, v in states.items() if name.startswith("v.")}
                    assert_close(actual, unflatten(personal(memory)), f"{says}, the personal model of client {client}")


def _make_unequal_stream(rounds: int) -> FederatedStream:
    stream = make_stream(tasks=2, rounds=rounds, partition=Dirichlet(NUM_CLIENTS, 1.0), shuffle=False)
    stream.setup("fit")
    return stream
