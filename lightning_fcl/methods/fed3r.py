"""Fed3R: a classifier by ridge regression on the sums of all samples so far, from which training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fcl.data.attached import stream_of
from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import Rules, State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import EmbedsInputs, HasClasses
from lightning_fcl.methods.client import Client, Server, section
from lightning_fcl.methods.declaration import Needs
from lightning_fcl.methods.episodic import finite_pairs
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.prototypes import SumOfSome, no_sums
from lightning_fcl.models.ridge import accumulate, solve, square


@dataclass(eq=False)
class Fed3R(Method):
    """Every experience: the classifier begins as the ridge regression on all samples so far (Fanì et al. 2024).

    In its first round of an experience a client also sends ``A = Y^T S`` and ``B = S^T S`` of that round's samples: S
    are their features by its own model, with a column of ones for the bias, Y their classes, one-hot. The server adds
    them to all earlier ones and those of the base session, and then puts ``A (B + beta I)^-1 / temperature`` into the
    module's last layer: the solution on all samples in one place, however they are spread, as long as the features
    stay. From then on the layer is trained as any other (the authors' Fed3R+FT). Sums that do not arrive are sent
    again.

    Args:
        beta: Regulariser, at least 0.
        temperature: Ridge regression aims at 1 for the class of a sample and at 0 for others, which a softmax takes for
            little more than a tie: the solution is divided by it. Above 0.

    Raises:
        ValueError: If the Trainer is no federation's, clients see earlier samples again (``history``), or the module
            has no last layer on features that it tells.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> state = Fed3R(beta=1.0).server_state(Classifier(MLP([6, 5, 4]), num_classes=4))
        >>> {name: tuple(value.shape) for name, value in state.items()}
        {'A': (4, 6), 'B': (21,)}
    """

    needs: ClassVar[Needs] = Needs(
        samples=True, federation="no server adds up. Use the strategy, with one client if need be"
    )
    reductions: ClassVar[Rules] = {"A": SumOfSome(), "B": SumOfSome()}

    beta: float = argument(1.0, at_least, 0)
    temperature: float = argument(0.1, above, 0)
    _base: State = field(default_factory=dict, init=False, repr=False)  # sums of the base session

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last_layer(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._base, stream = {}, stream_of(trainer)
        if stream is None or trainer.ckpt_path is not None:
            return
        if stream.plan.history != "round":
            raise ValueError(
                f'Expected a stream with `history="round"` for `Fed3R` but got "{stream.plan.history}": samples that '
                "come again would count twice. Leave `history` out."
            )
        if len(stream.plan.base):
            self._base = self._sums(pl_module, entries(pl_module), stream.take(stream.plan.base))

    def server_state(self, module: L.LightningModule) -> State:
        return {**_no_sums(module), **self._base}

    def contribute(self, client: Client, own: State, data: Batch) -> State:
        if client.part.experience <= int(client.memory.get("experience", -1)):
            return {}
        return self._sums(client.module, own, data)

    def end_round(self, client: Client, own: State, data: Batch) -> Memory:
        return client.memory if client.missed else {"experience": torch.tensor(client.part.experience)}

    def server_turn(self, server: Server) -> State:
        sums, (weight, bias) = server.kept, last_layer(server.module)
        if sums["B"][-1] == section(server.begun, self.section)["B"][-1]:  # the number of samples
            return {}
        found = solve(sums["A"], square(sums["B"], sums["A"].shape[1]), self.beta) / self.temperature
        return {weight: found[:, :-1], bias: found[:, -1]}

    @staticmethod
    def _sums(module: L.LightningModule, state: State, data: Batch) -> State:
        x, y = finite_pairs(data)
        features, sums = embeddings(module, state, x), _no_sums(module)
        targets = F.one_hot(y.to(features.device), len(sums["A"]))
        accumulate(sums["A"], sums["B"], F.pad(features, (0, 1), value=1.0), targets)
        return sums


def _no_sums(module: L.LightningModule) -> State:
    a = no_sums(module).double()
    size = a.shape[1]
    return {"A": a, "B": a.new_zeros(size * (size + 1) // 2)}


def last_layer(module: L.LightningModule) -> tuple[str, str]:
    """The names of weight and bias of the layer that makes a module's outputs of its features."""
    if isinstance(module, HasClasses) and isinstance(module, EmbedsInputs):
        shape = (module.num_classes, module.features)
        names = {id(value): name for name, value in entries(module).items()}
        for layer in reversed([*module.modules()]):
            if isinstance(layer, nn.Linear) and layer.bias is not None and tuple(layer.weight.shape) == shape:
                return names[id(layer.weight)], names[id(layer.bias)]
    raise ValueError(
        f"Expected a module whose last layer is an `nn.Linear` with a bias, from its `features` to its `num_classes`, "
        f"but this `{type(module).__name__}` has none. Use a `Classifier` with such a network."
    )
