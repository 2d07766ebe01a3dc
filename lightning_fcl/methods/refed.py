"""Re-Fed: clients remember the samples that a personal model, drawn to the shared one, has most to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import states_loss
from lightning_fcl.methods.importance import gradients_of_samples, over_samples, squared_norms
from lightning_fcl.methods.method import Method


@dataclass(eq=False)
class ReFed(Method):
    """Every batch: joins remembered samples, those of greatest gradients (Re-Fed, Li et al. 2024, CVPR).

    When an experience ends, a client takes `sample_importance` of its samples of the last round and of those that it
    remembers, and keeps the ``max_size`` that matter most. For this a personal model ``v`` takes steps on them, each
    drawn to the model that the client received; ``v`` begins where that is, goes on where the last experience left it,
    and stays with the client, which sends what FedAvg sends.

    In the paper this comes when the next experience begins, with the server's model after the last round. A client that
    was not drawn for the last round chooses by that model, too. The defaults are this library's.

    Args:
        max_size: Samples that a client keeps, of all experiences together, at least 1.
        iterations: Steps of ``v``, at least 1.
        learning_rate: Size of its steps, above 0.
        strength: Weight of the pull, q(lambda) in the paper, at least 0; with 0, ``v`` learns from the client's samples
            alone.

    Raises:
        ValueError: If an argument is out of range, the module does not state its loss apart, or ``v`` diverges.
        TypeError: If the samples are no pairs.

    Example:
        >>> ReFed(max_size=100).strength
        0.5
    """

    needs: ClassVar[Needs] = Needs(samples=True, loss=True)
    ends_undrawn: ClassVar[bool] = True

    max_size: int = argument(200, at_least, 1)
    iterations: int = argument(5, at_least, 1)
    learning_rate: float = argument(0.01, above, 0)
    strength: float = argument(0.5, at_least, 0)

    def rehearse(self, client: Client) -> tuple[Tensor, Tensor] | None:
        return (client.memory["x"], client.memory["y"]) if "x" in client.memory else None

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        if not client.part.last_round:
            return client.memory
        x, y = finite_pairs(data)
        old = self.rehearse(client) or (x[:0], y[:0])
        x, y = (torch.cat([past.to(new.device), new]) for past, new in zip(old, (x, y), strict=True))
        if not len(y):
            return client.memory
        before = {name: value.to(own[name].device) for name, value in section(client.memory, "v").items()}
        importance, v = sample_importance(
            client.module, client.server, before, x, y, self.iterations, self.learning_rate, self.strength
        )
        if not torch.isfinite(importance).all():
            raise ValueError(
                f"Expected `learning_rate` to keep the personal model of client {client.part.client} finite but got "
                f"{self.learning_rate}. Lower it."
            )
        kept = importance.argsort(descending=True, stable=True)[: self.max_size].sort().values.to(y.device)
        return {"x": x[kept], "y": y[kept], **remember(v, "v")}


def sample_importance(
    module: L.LightningModule,
    received: Mapping[str, Tensor],
    personal: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    iterations: int,
    learning_rate: float,
    strength: float,
) -> tuple[Tensor, State]:
    """How much samples matter to a personal model v, ``sum_s ||g_s||^2 / s``, shape (n,), and where v ends.

    g_s is the gradient of a sample's loss at v in iteration s = 1, 2, ...; then v takes the step ``v - learning_rate *
    (mean g_s + strength * (v - w))``, of which w is the received state. The module is in evaluation mode, and what v
    has no entry for is that of w.

    Args:
        personal: Where v begins, by name; an entry that it has not begins at w.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> task = Classifier(MLP([2, 2]), num_classes=2)
        >>> w = {name: torch.zeros_like(value) for name, value in task.state_dict().items()}
        >>> x, y = Tensor([[0, 0], [1, 1]]), torch.tensor([0, 1])
        >>> sample_importance(task, w, {}, x, y, iterations=1, learning_rate=0.1, strength=0.5)[0]
        tensor([0.5000, 1.5000])
    """
    loss = states_loss(module).sample_loss
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    w = {name: received[name].detach() for name in module.state_dict()}
    v = {name: {**w, **personal}[name] for name in names}
    importance = w[names[0]].new_zeros(len(y))
    for iteration in range(1, iterations + 1):
        squares, total = [], {name: torch.zeros_like(value) for name, value in v.items()}
        for gradients in gradients_of_samples(module, lambda output, y: loss(output, y).sum(), {**w, **v}, x, y, names):
            squares.append(torch.stack([squared_norms(of) for of in gradients.values()]).sum(dim=0))
            total = {name: total[name] + over_samples(lambda value: value, gradients[name]) for name in names}
        importance = importance + torch.cat(squares) / iteration
        v = {n: p - learning_rate * (total[n] / len(y) + strength * (p - w[n])) for n, p in v.items()}
    return importance, v
