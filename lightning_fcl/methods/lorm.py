"""LoRM: one factor of low rank at a time comes together by least squares, and at last the tasks do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch

from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.methods.client import Client, Server
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.layer_inputs import layer_inputs
from lightning_fcl.methods.prototypes import SumOfSome
from lightning_fcl.methods.regmean import RegMean, answers, regmean
from lightning_fcl.methods.step import Pattern
from lightning_fcl.models.lora import AdaptedLinear


@dataclass(eq=False)
class LoRM(RegMean):
    """Every round: `RegMean` of one factor of a `LoRA` network, the other one resting (Salami et al. 2025).

    B learns in the first round of an experience and every second one, A being the same for all, and A in those between;
    the head learns in all. As a factor's inputs are what it sees, ``A x`` for B, its closed form is ``(sum_k B_k A G_k
    A^T) (A (sum_k G_k) A^T)^+`` for B and that of `RegMean` for A, the authors' two. They take ``alpha=0`` for the
    body, 0.5 for the head; here it is one for both.

    In the last round of an experience a client also sends ``G_k`` of the inputs of each layer that has an addition, by
    its own model. With G_t, their sum, and W_t, the layer with its addition as the server has it then, the layer
    becomes ``(sum_t W_t G_t) (sum_t G_t)^+`` over all experiences t so far, which is the same form of their additions,
    and B is zero again. The authors' tasks all begin from the body as it was; here a task goes on from what those
    before have come to, whose layers travel to clients in each round from then on, as they are no longer those of the
    body that everybody has.

    Example:
        >>> LoRM(alpha=0.5).vectorizable
        False
    """

    vectorizable: ClassVar[bool] = False
    reductions: ClassVar[Rules] = {
        **RegMean.reductions,
        "task.*": SumOfSome(),
        "tasks.*": "fixed",
        "turn": "download",
    }

    def server_state(self, module: L.LightningModule) -> State:
        state = super().server_state(module) | {"turn": torch.tensor(0)}
        for name, layer in _adapted(module).items():
            weight = layer.layer.weight.detach().double()
            gram, given = self._no_gram(weight), torch.zeros_like(weight)
            state |= {f"task.{name}": gram, f"tasks.gram.{name}": gram, f"tasks.answers.{name}": given}
        return state

    def trains(self, client: Client) -> Pattern | None:
        return "!*.a.weight" if int(client.shared["turn"]) % 2 == 0 else "!*.b.weight"

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        sent = super().contribute(client, own, data)
        if client.part.last_round:
            names = {f"{name}.a": f"task.{name}" for name in _adapted(client.module)}
            for name, rows in layer_inputs(client.module, names, own, finite_pairs(data)[0]):
                gram = self._gram(rows)
                sent[names[name]] += gram.lerp(gram.diagonal().diag(), 1 - self.alpha) if self.alpha else gram
        return sent

    def server_turn(self, server: Server) -> State:
        tasks = {name: value for name, value in server.kept.items() if name.startswith(("task.", "tasks."))}
        turn = server.kept["turn"] + 1
        found = super().server_turn(server)
        now = {**server.state, **found}
        for name, layer in _adapted(server.module).items():
            if not (gram := tasks[f"task.{name}"]).any():
                continue
            a, b, body = (now[f"{name}.{part}.weight"] for part in ("a", "b", "layer"))
            weight = body.double() + layer.scale * b.double() @ a.double()
            tasks[f"tasks.gram.{name}"] = grams = tasks[f"tasks.gram.{name}"] + gram
            tasks[f"tasks.answers.{name}"] = given = tasks[f"tasks.answers.{name}"] + answers(weight, gram)
            tasks[f"task.{name}"], turn = torch.zeros_like(gram), torch.zeros_like(turn)
            found[f"{name}.layer.weight"] = regmean(weight, given, grams).to(body)
            found[f"{name}.b.weight"] = torch.zeros_like(b)
        server.kept.update({**tasks, "turn": turn})
        return found


def _adapted(module: L.LightningModule) -> dict[str, AdaptedLinear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, AdaptedLinear)}
