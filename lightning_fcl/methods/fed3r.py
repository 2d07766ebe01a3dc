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
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import above, argument, at_least
from lightning_fcl.federation.aggregation import Rules, State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import EmbedsInputs, HasClasses, need_federation
from lightning_fcl.methods.episodic import labelled
from lightning_fcl.methods.functional import embeddings
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.prototypes import SumOfSome, no_sums
from lightning_fcl.models.ridge import accumulate, solve, square


@dataclass(eq=False)
class Fed3R(Method):
    """Every experience: the classifier begins as the ridge regression on all samples so far (Fanì et al. 2024).

    In the first round of an experience that a client takes part in, it also sends ``A = Y^T S`` and ``B = S^T S`` of
    that round's samples: S are their features by its own model, with a column of ones for the bias, Y their classes,
    one-hot. The server adds them to those of all earlier experiences and of the stream's base session, and after that
    round puts ``A (B + beta I)^-1 / temperature`` into the module's last layer: the solution on all samples in one
    place, however they are spread over clients and experiences, as long as the features stay. From then on the layer is
    trained as any other, by any method (the authors' Fed3R+FT, their ridge solution as a softmax classifier with a
    temperature). Nothing is stored of a sample, and a client sends the sums once for each experience.

    A client whose first round is not the experience's adds its sums when it comes, and the layer is solved for anew.
    Sums of an upload that does not arrive are sent again in the next round.

    Args:
        beta: Regulariser, at least 0.
        temperature: Ridge regression aims at 1 for the class of a sample and at 0 for others, which a softmax takes for
            little more than a tie: the solution is divided by it. Above 0.
        clients: Who uses it. See `Method`.

    Raises:
        ValueError: If an argument is out of range, the Trainer is no federation's, clients see earlier samples again
            (``history``), or the module has no last layer on features that it tells.
        TypeError: If the samples are no pairs.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> state = Fed3R(beta=1.0).server_state(Classifier(MLP([6, 5, 4]), num_classes=4))
        >>> {name: tuple(value.shape) for name, value in state.items()}
        {'A': (4, 6), 'B': (21,)}
    """

    needs_samples: ClassVar[bool] = True
    reductions: ClassVar[Rules] = {"A": SumOfSome(), "B": SumOfSome()}

    beta: float = argument(1.0, at_least, 0)
    temperature: float = argument(0.1, above, 0)
    _base: State = field(default_factory=dict, init=False, repr=False)  # sums of the base session
    _counted: float = field(default=0.0, init=False, repr=False)  # samples in the sums when the round began

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse where there is nobody to add up, or nothing to solve for."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        need_federation(trainer, "Fed3R", "no server adds up. Use the strategy, with one client if need be")
        last_layer(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin with the sums of the base session, if the stream has one."""
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
        """``A``, shape (classes, features + 1), and the upper triangle of ``B``, row by row, both in float64."""
        return {**_no_sums(module), **self._base}

    def contribute(self, memory: Memory, own: State, data: Batch, client_round: ClientRound) -> State:
        """The same of the client's samples, once in an experience."""
        if client_round.experience <= int(memory.get("experience", -1)):
            return {}
        return self._sums(self.module, own, data)

    def end_round(
        self, memory: Memory, own: State, data: Batch, client_round: ClientRound, generator: torch.Generator
    ) -> Memory:
        """Remember that the experience is in the sums, unless the upload got lost."""
        federation = self.federation
        if federation is not None and client_round.client in federation.server.record.missed:
            return memory
        return {"experience": torch.tensor(client_round.experience)}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the samples that are in the sums."""
        self._counted = self._samples

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Solve for the last layer if there are more by now."""
        federation = self.federation
        if federation is None or self._samples == self._counted:
            return
        sums, layer = federation.server.kept_for(self.section), last_layer(pl_module)
        weight = solve(sums["A"], square(sums["B"], sums["A"].shape[1]), self.beta) / self.temperature
        with torch.no_grad():
            layer.weight.copy_(weight[:, :-1])
            layer.bias.copy_(weight[:, -1])

    @property
    def _samples(self) -> float:
        """How many samples are in the sums: the square of the column of ones."""
        federation = self.federation
        return float(federation.server.kept_for(self.section)["B"][-1]) if federation is not None else 0.0

    @staticmethod
    def _sums(module: L.LightningModule, state: State, data: Batch) -> State:
        x, y = labelled(data)
        features, sums = embeddings(module, state, x), _no_sums(module)
        targets = F.one_hot(y.to(features.device), len(sums["A"]))
        accumulate(sums["A"], sums["B"], F.pad(features, (0, 1), value=1.0), targets)
        return sums


def _no_sums(module: L.LightningModule) -> State:
    a = no_sums(module).double()
    size = a.shape[1]
    return {"A": a, "B": a.new_zeros(size * (size + 1) // 2)}


def last_layer(module: L.LightningModule) -> nn.Linear:
    """The layer that makes a module's outputs of its features.

    Raises:
        ValueError: If there is none, with a bias, of as many inputs and outputs as the module has features and classes.

    Example:
        >>> from lightning_fcl import Classifier
        >>> from lightning_fcl.models import MLP
        >>> last_layer(Classifier(MLP([6, 5, 4]), num_classes=4))
        Linear(in_features=5, out_features=4, bias=True)
    """
    if isinstance(module, HasClasses) and isinstance(module, EmbedsInputs):
        shape = (module.num_classes, module.features)
        for layer in reversed([*module.modules()]):
            if isinstance(layer, nn.Linear) and layer.bias is not None and tuple(layer.weight.shape) == shape:
                return layer
    raise ValueError(
        f"Expected a module whose last layer is an `nn.Linear` with a bias, from its `features` to its `num_classes`, "
        f"but this `{type(module).__name__}` has none. Use a `Classifier` with such a network."
    )
