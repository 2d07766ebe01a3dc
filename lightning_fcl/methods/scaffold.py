"""SCAFFOLD: local steps corrected by what a client's gradients lack of all clients'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.data.attached import need_stream
from lightning_fcl.data.batches import Batch
from lightning_fcl.federation.aggregation import Rules, State
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.optimizer_state import settings_of
from lightning_fcl.federation.protocol import need_federation
from lightning_fcl.federation.reductions import Changes
from lightning_fcl.methods.averaging import averaged_parameters, gradient_weight, need_uniform_weights
from lightning_fcl.methods.client import Client, remember, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.importance import summed
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.step import Step


@dataclass(eq=False)
class SCAFFOLD(Method):
    """Every step: adds to a client's gradient what it lacks of all clients' (Karimireddy et al. 2020, Algorithm 1).

    ``y <- y - lr * (g(y) - c_i + c)`` (equation 3), with control variates c of the server and c_i of the client, which
    begin at 0. After its K steps a client keeps ``c_i - c + (x - y) / (K * lr)`` as its c_i (equation 4, option II; x
    is the model that it has received), and sends its change, divided by the number of the stream's clients, beside the
    model; the server adds it to c (equation 5). So both ways carry twice what FedAvg's do. A client that is not drawn
    keeps its c_i. With momentum K is the `gradient_weight` of the steps; parameters that stay with the clients have no
    variates. The paper's global step size is that of ``server_optimizer``.

    In later experiences a client begins anew: its c_i is 0, and of c it takes what has come since its first download in
    the experience, which it keeps beside c_i. The paper has one task. Without this, c would hold on to the gradients of
    clients without samples of the experience, which nobody takes back, and all others would drift by them.

    Raises:
        ValueError: If there is no federation of uniform ``client_weights``, or no SGD at one learning rate in a round.

    Example:
        >>> SCAFFOLD().vectorizable
        True
    """

    needs: ClassVar[Needs] = Needs(federation="a single client's gradients lack nothing. Remove `SCAFFOLD`")
    reductions: ClassVar[Rules] = {"c.*": Changes(), "clients": "download"}

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        need_uniform_weights(trainer, "SCAFFOLD")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        settings = settings_of(trainer.optimizers[0])
        scheduled = need_federation(trainer, "SCAFFOLD", "").scheduled
        alike = all(len({*settings.get(name, ())}) <= 1 for name in ("lr", "momentum", "nesterov"))
        if settings["class"] != "SGD" or any(settings["dampening"]) or scheduled or not alike:
            raise ValueError(
                "Expected SGD without dampening, at one rate in a round, for `SCAFFOLD`, which reads gradients off its "
                f"moves, but got {settings}{', scheduled by step' * scheduled}. Use SGD, and schedules by round."
            )

    def server_state(self, module: L.LightningModule) -> State:
        nothing = {name: torch.zeros_like(value) for name, value in averaged_parameters(module).items()}
        return {**remember(nothing, "c"), "clients": torch.tensor(float(len(need_stream(module.trainer).plan.clients)))}

    def on_download(self, client: Client) -> Memory:
        experience = client.part.experience
        if client.memory and client.memory["experience"] == experience:
            return client.memory
        c = section(client.shared, "c")
        nothing = {name: torch.zeros_like(value) for name, value in c.items()}
        begun = c if experience else nothing
        return {"experience": torch.tensor(experience), **remember(nothing, "c"), **remember(begun, "begun")}

    def penalty(self, client: Client, step: Step) -> Tensor | float:
        lacking = {name: value for name, value in self._lacking(client).items() if name in step.params}
        return summed([(value * step.params[name]).sum() for name, value in lacking.items()], step.params)

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        number = client.shared["clients"]
        return {name: (c - client.memory[name]) / number for name, c in self._variates(client, own).items()}

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        return client.memory if client.missed else {**client.memory, **self._variates(client, own)}

    def _lacking(self, client: Client) -> State:
        """What a client's gradients lack of all clients': c - c_i."""
        own, begun = section(client.memory, "c"), section(client.memory, "begun")
        return {name: value - begun[name] - own[name] for name, value in section(client.shared, "c").items()}

    def _variates(self, client: Client, own: State) -> Memory:
        """The client's variates after its training."""
        group = client.module.trainer.optimizers[0].param_groups[0]
        distance, start = group["lr"] * gradient_weight(group, client.steps), client.server
        lacking = self._lacking(client).items()
        return remember({name: (start[name] - own[name]) / distance - value for name, value in lacking}, "c")
