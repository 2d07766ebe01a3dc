"""Reservoir tasks: a random recurrent network with a readout that is computed in closed form."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanSquaredError, Metric, R2Score

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ReductionRules, State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.local_trainer import LocalResult
from lightning_fcl.federation.protocols import FederationProtocol
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.readout import Features, ReservoirReadout, pool_states
from lightning_fcl.tasks.ridge_base import RidgeTask, RidgeTrainer, UploadKind, stack_client_rows
from lightning_fcl.tasks.ridge_statistics import OneHot, ReadoutTargets, RealTargets
from lightning_fcl.validation import one_of


class PlasticityRule(Protocol):
    """A rule that adapts gain and bias of a reservoir. See `lightning_fcl.callbacks.IntrinsicPlasticity`."""

    mu: float
    sigma: float

    def step(self, gain: Tensor, bias: Tensor, dg: Tensor, db: Tensor, layers: int = 1) -> tuple[Tensor, Tensor]: ...


class ReservoirTask(RidgeTask):
    """An echo state network with a ridge readout. See `lightning_fcl.tasks.ridge_base.RidgeTask` for its training.

    `lightning_fcl.callbacks.IntrinsicPlasticity` adapts the reservoir in rounds before the training of the readout.
    ``targets`` encodes the targets of the readout: `OneHot` or `RealTargets`. The other arguments are described in
    `lightning_fcl.ReservoirClassifier`.
    """

    def __init__(
        self,
        reservoir: EchoStateNetwork,
        targets: ReadoutTargets,
        beta: float | list[float],
        readout: Features,
        upload: UploadKind,
        symmetric: bool,
        min_samples: int | None,
    ) -> None:
        one_of(get_args(Features), readout=readout)
        one_of(get_args(UploadKind), upload=upload)
        super().__init__(reservoir.features, targets, beta, upload, symmetric, min_samples)
        self.reservoir = reservoir
        self.features = readout
        self.is_adapting = False
        self.plasticity: PlasticityRule | None = None

    @property
    def reductions(self) -> ReductionRules:
        """Reductions of the current round: for gain and bias while the reservoir adapts, otherwise for the readout."""
        adapted = "download_only" if self.plasticity else "constant"
        if self.is_adapting:
            return {"*": "constant", "reservoir.gain": "mean", "reservoir.bias": "mean"}
        return {**super().reductions, "reservoir.gain": adapted, "reservoir.bias": adapted}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for sequences of shape (batch, time, features).

        The shape is (batch, steps, outputs) with ``readout="steps"``, and otherwise (batch, outputs).
        """
        outputs = torch.cat([self.readout(states) for states in self.readout_inputs(x)])
        return outputs.transpose(0, 1) if self.features == "steps" else outputs[0]

    def readout_inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the inputs of the readout in blocks of shape (steps, batch, N_R), where N_R is the size of a state.

        For ``readout="last"`` and ``readout="mean"``, yield a single block with one step.
        """
        return pool_states(self.reservoir, x, self.features)

    def to_network(self) -> ReservoirReadout:
        """Return a plain network that makes the same predictions as the task with its current weights."""
        network = ReservoirReadout(copy.deepcopy(self.reservoir), self.readout.out_features, self.features)
        network.weight.copy_(self.readout.weight)
        return network

    def readout_pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of the readout in blocks of steps.

        The inputs have the shape (steps, batch, N_R), where N_R is the size of a reservoir state. The targets have the
        shape (steps, batch, outputs).
        """
        targets = self.targets.encode(y)
        per_step = targets.dim() == 3
        if per_step and self.features == "mean":
            raise InvalidValueError(
                'Expected a target for each sequence with `readout="mean"`, but got a target for each step.',
                hint='Use `readout="steps"`.',
                argument="readout",
                value=self.features,
            )
        if per_step and targets.shape[1] != x.shape[1]:
            raise InvalidValueError(
                f"Expected the number of targets of a sequence to be its number of steps, {x.shape[1]}, but got "
                f"{targets.shape[1]}.",
                hint="Pass one target for each step, or one target for each sequence.",
                argument="y",
                value=targets.shape[1],
            )
        if per_step and self.features == "last":
            targets, per_step = targets[:, -1], False
        start = self.reservoir.washout
        for states in self.readout_inputs(x):
            if per_step:
                yield states, targets[:, start : start + len(states)].transpose(0, 1)
            else:
                yield states, targets.expand(len(states), *targets.shape)
            start += len(states)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.trainer.precision not in ("32-true", "64-true"):
            raise InvalidValueError(
                'Expected `precision` to be "32-true" or "64-true" for a reservoir, but got '
                f'"{self.trainer.precision}".',
                hint='Use `precision="32-true"`.',
                argument="precision",
            )

    def on_train_epoch_start(self) -> None:
        if self.is_adapting:
            return
        tag = self.reservoir.weights_hash()
        if int(self.readout.tag) != tag:
            self.readout.reset(tag)

    def should_accumulate(self) -> bool:
        return not self.is_adapting and super().should_accumulate()

    def on_after_aggregation(self) -> None:
        if not self.is_adapting:
            super().on_after_aggregation()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([self.reservoir.gain, self.reservoir.bias], lr=0.0)

    def configure_local_trainer(self, federation: FederationProtocol, shaping: Sequence[str]) -> ReservoirTrainer:
        super().configure_local_trainer(federation, shaping)
        if federation.participation.may_miss_sync:
            raise InvalidValueError(
                f"Expected a `swarm` without `missed_sync_prob` and `missed_rounds` for a `{type(self).__name__}`, "
                "because clients start each round with new sums.",
                hint="Remove `missed_sync_prob` and `missed_rounds` from the swarm.",
                argument="swarm",
            )
        return ReservoirTrainer(self, federation.settings.max_vectorized_clients)

    @property
    def client_state_predicts(self) -> bool:
        return super().client_state_predicts and not self.is_adapting

    def fingerprint(self) -> dict[str, Any]:
        reservoir = self.reservoir
        plain = {"leaking_rate": reservoir.leaking_rate, "washout": reservoir.washout}
        return {**super().fingerprint(), "readout": self.features, **plain}


class ReservoirTrainer(RidgeTrainer):
    """A `RidgeTrainer` that adapts reservoirs in the rounds before the training of their readouts."""

    module: ReservoirTask
    _gain: Tensor
    _bias: Tensor

    def start(
        self,
        clients: Sequence[ClientRound],
        states: Sequence[State],
        method_states: Sequence[Sequence[StateSection]],
        optimizer_states: Sequence[StateSection],
    ) -> None:
        if not self.module.is_adapting:
            super().start(clients, states, method_states, optimizer_states)
            return
        self.client_rounds, self.memories = clients, method_states
        self._gain, self._bias = (
            torch.stack([state[f"reservoir.{name}"] for state in states]) for name in ("gain", "bias")
        )

    def training_step(self, batch: Batch, batch_idx: int | None, weight: Tensor | None) -> None:
        if not self.module.is_adapting:
            super().training_step(batch, batch_idx, weight)
            return
        # Batches are stacked, so they have weights.
        assert weight is not None
        self.module.add_global_step()
        rule, reservoir, real = self.module.plasticity, self.module.reservoir, weight > 0
        if rule is None:
            return
        owner = real.nonzero()[:, 0]
        rows = reservoir.plasticity_gradients(batch[0][real], rule.mu, rule.sigma, self._gain[owner], self._bias[owner])
        gain, bias = self._gain[: len(real)], self._bias[: len(real)]
        dg, db = (torch.zeros_like(gain).index_add_(0, owner, row) / real.sum(dim=1, keepdim=True) for row in rows)
        gain[:], bias[:] = rule.step(gain, bias, dg, db, reservoir.num_layers)

    def finish(self) -> LocalResult:
        if not self.module.is_adapting:
            return super().finish()
        states = stack_client_rows(self.module, len(self.client_rounds))
        return LocalResult({**states, "reservoir.gain": self._gain, "reservoir.bias": self._bias}, self.memories)


class ReservoirClassifier(ReservoirTask):
    """Classification of sequences with an echo state network and a ridge readout. See `RidgeTask` for its training.

    Targets are one-hot. The class with the largest output is predicted.

    Args:
        reservoir: Network whose states are the inputs of the readout.
        num_classes: Number of classes.
        beta: Regularization of the readout. A list selects the value with the best predictions on the validation
            samples after each round.
        readout: States that the readout uses: of each step (``"steps"``), of the last step of a sequence (``"last"``),
            or their mean over a sequence (``"mean"``).
        upload: Upload of a client: its ``"statistics"``, or its own solution (``"weights"``).
        targets: One-hot targets as ``"0/1"`` (as in the papers) or ``"-1/1"``.
        symmetric: Whether only the upper triangle of the statistic B is stored and uploaded. `RidgeTask` defines B.
        min_samples: Number of samples below which a client's statistics cause a warning. With ``readout="steps"``, each
            time step after the washout counts as a sample. Default: the size of the reservoir's state.

    Raises:
        ValueError: If an argument is out of range, or if a label in a batch is out of range.

    Example:
        >>> task = ReservoirClassifier(EchoStateNetwork(3, units=20, seed=0), num_classes=2, readout="last")
        >>> task(torch.zeros(5, 10, 3)).shape
        torch.Size([5, 2])
    """

    citations: ClassVar[tuple[str, ...]] = ("bacciu2021incfed",)

    def __init__(
        self,
        reservoir: EchoStateNetwork,
        num_classes: int,
        beta: float | list[float] = 1e-3,
        readout: Features = "steps",
        upload: UploadKind = "statistics",
        targets: Literal["0/1", "-1/1"] = "0/1",
        symmetric: bool = False,
        min_samples: int | None = None,
    ) -> None:
        one_of(("0/1", "-1/1"), targets=targets)
        labels = OneHot(num_classes, signed=targets == "-1/1")
        super().__init__(reservoir, labels, beta, readout, upload, symmetric, min_samples)
        self.num_classes = num_classes
        self.output_kind = targets


class ReservoirRegressor(ReservoirTask):
    """Regression from sequences with an echo state network and a ridge readout. See `RidgeTask` for its training.

    Targets have the shape (batch, outputs), or (batch, time, outputs) with a target for every step.

    Args:
        reservoir: Network whose states are the inputs of the readout.
        num_outputs: Number of values in a target.
        beta: Regularization of the readout. `ReservoirClassifier` describes this argument and the remaining arguments.

    Example:
        >>> task = ReservoirRegressor(EchoStateNetwork(1, units=20, seed=0), num_outputs=1)
        >>> task(torch.zeros(5, 10, 1)).shape
        torch.Size([5, 10, 1])
    """

    citations: ClassVar[tuple[str, ...]] = ("bacciu2021incfed",)

    def __init__(
        self,
        reservoir: EchoStateNetwork,
        num_outputs: int,
        beta: float | list[float] = 1e-3,
        readout: Features = "steps",
        upload: UploadKind = "statistics",
        symmetric: bool = False,
        min_samples: int | None = None,
    ) -> None:
        super().__init__(reservoir, RealTargets(num_outputs), beta, readout, upload, symmetric, min_samples)

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Return the mean squared error and the coefficient of determination, which `ContinualMetrics` computes."""
        return {"MSE": MeanSquaredError(), "R2": R2Score()}
