"""Reservoir tasks: a random recurrent network and a readout that is solved, not descended to."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fcl.data.attached import stream_of, transfer_batch
from lightning_fcl.data.batches import Batch
from lightning_fcl.errors import at_least, one_of
from lightning_fcl.federation.protocol import federation_of
from lightning_fcl.models.esn import EchoStateNetwork
from lightning_fcl.models.readout import Features, ReservoirReadout, pooled
from lightning_fcl.models.ridge import RidgeReadout, accumulate
from lightning_fcl.tasks.reservoir_trainer import ReservoirTrainer, Share
from lightning_fcl.tasks.task import Task, one_local_epoch

if TYPE_CHECKING:
    from lightning_fcl.methods.plasticity import IntrinsicPlasticity
    from lightning_fcl.simulation.federation import Federation

log = logging.getLogger(__name__)


class ReservoirTask(Task):
    """An echo state network with a ridge readout: local training is one pass that adds up statistics.

    In a federation every round adds its clients' statistics to the server's (``share="statistics"``: IncFed, or FedRR;
    Bacciu et al. 2021), which solves for the readout: the same as one that sees all data at once. With
    ``share="weights"`` each client solves for its own readout and the server averages them (FedAvg). In a plain
    Trainer the last epoch of each fit adds its data, or each epoch (a round) of a `FederatedStream`.

    `lightning_fcl.callbacks.IntrinsicPlasticity` adapts the reservoir in the rounds before.

    What (A, B) reveals: of a client with fewer samples than the reservoir has units, the span of its states, and of one
    with a single sample that sample itself. Hence ``min_samples``; adding up under secure aggregation is the remedy.
    The arguments are those of `lightning_fcl.ReservoirClassifier`.
    """

    quantity: str  # what is logged in evaluation

    def __init__(
        self,
        reservoir: EchoStateNetwork,
        outputs: int,
        beta: float | list[float] = 1e-3,
        readout: Features = "steps",
        share: Share = "statistics",
        symmetric: bool = False,
        min_samples: int | None = None,
    ) -> None:
        super().__init__()
        one_of(get_args(Features), readout=readout)
        one_of(get_args(Share), share=share)
        at_least(1, outputs=outputs)
        self.betas = [beta] if isinstance(beta, int | float) else list(beta)
        if not self.betas:
            raise ValueError("Expected `beta` to be a number or several but got an empty list.")
        if len(self.betas) > 1 and share == "weights":
            raise ValueError(
                f'Expected one `beta` with `share="weights"`, as each client solves for itself, but got {self.betas}.'
            )
        self.automatic_optimization = False
        self.reservoir = reservoir
        self.readout = RidgeReadout(reservoir.features, outputs, self.betas[0], symmetric)
        for beta in self.betas[1:]:
            RidgeReadout(1, 1, beta)  # refuses what is no regulariser
        self.features = readout
        self.share = share
        self.min_samples = reservoir.features if min_samples is None else min_samples
        self.adapting = False
        self.plasticity: IntrinsicPlasticity | None = None
        self._warned: set[str] = set()
        self.val_metric, self.test_metric = self.metric(), self.metric()

    @property
    def reductions(self) -> dict[str, str]:
        """What travels in the round at hand: gain and bias while the reservoir is adapted, else the readout's part."""
        own = "sum" if self.share == "statistics" else "none"
        solved = "download" if self.share == "statistics" else "mean"
        return {
            "*": "fixed",
            "reservoir.gain": "mean" if self.adapting else "download" if self.plasticity else "fixed",
            "reservoir.bias": "mean" if self.adapting else "download" if self.plasticity else "fixed",
            **dict.fromkeys(("readout.A", "readout.B", "readout.n"), "fixed" if self.adapting else own),
            "readout.tag": "none" if own == "none" and not self.adapting else "fixed",
            "readout.weight": "fixed" if self.adapting else solved,
        }

    # What becomes of a batch.

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of sequences of shape (batch, time, features): (batch, steps, outputs), or (batch, outputs)."""
        outputs = torch.cat([self.readout(states) for states in self.pooled(x)])
        return outputs.transpose(0, 1) if self.features == "steps" else outputs[0]

    def pooled(self, x: Tensor) -> Iterator[Tensor]:
        """What the readout sees: blocks of states (steps, batch, N_R), or one tensor of shape (1, batch, N_R)."""
        return pooled(self.reservoir, x, self.features)

    def network(self) -> ReservoirReadout:
        """A plain network that predicts as this task does now."""
        network = ReservoirReadout(copy.deepcopy(self.reservoir), self.readout.out_features, self.features)
        network.weight.copy_(self.readout.weight)
        return network

    def targets(self, y: Tensor) -> Tensor:
        """What the readout should say: (batch, outputs), or (batch, time, outputs) for labels of every step."""
        raise NotImplementedError

    def pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What the readout sees and should say: (steps, batch, N_R) and (steps, batch, outputs), block after block."""
        targets = self.targets(y)
        per_step = targets.dim() == 3
        if per_step and self.features == "mean":
            raise ValueError('Expected a label for each sequence with `readout="mean"` but got one for each step.')
        if per_step and targets.shape[1] != x.shape[1]:
            raise ValueError(f"Expected a label for each of the {x.shape[1]} steps but got {targets.shape[1]}.")
        if per_step and self.features == "last":
            targets, per_step = targets[:, -1], False
        start = self.reservoir.washout
        for states in self.pooled(x):
            if per_step:
                yield states, targets[:, start : start + len(states)].transpose(0, 1)
            else:
                yield states, targets.expand(len(states), *targets.shape)
            start += len(states)

    def add(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor, sizes: Sequence[int]) -> list[int]:
        """Add sequences, so many of each client after the other, to the clients' A and B; the samples of each."""
        samples = 0
        for states, wanted in self.pairs(x, y):
            samples += len(states)
            parts = zip(*(torch.split(values, list(sizes), dim=1) for values in (states, wanted)), strict=True)
            for row, (mine, said) in enumerate(parts):
                if mine.numel():
                    accumulate(a[row], b[row], mine.flatten(0, 1), said.flatten(0, 1))
        return [samples * size for size in sizes]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        if self._counts():
            x, y = batch
            self.readout.n += self.add(self.readout.A[None], self.readout.B[None], x, y, [len(x)])[0]
        self.count_step()

    def count_step(self) -> None:
        """Move nothing, as no gradient is there: Lightning's checkpoints count optimizer steps."""
        self.optimizers().step()  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        one_local_epoch(self, " The passes of plasticity are `IntrinsicPlasticity(local_epochs=...)`.")
        if self.trainer.max_epochs == -1:
            raise ValueError(
                "Expected `max_epochs` to be a number but got -1: the readout learns in the last epoch of a fit."
            )
        if self.trainer.precision not in ("32-true", "64-true"):
            raise ValueError(
                f'Expected `precision` to be "32-true" or "64-true" for a reservoir but got "{self.trainer.precision}".'
            )

    def on_train_epoch_start(self) -> None:
        if self.adapting:
            return
        tag = self.reservoir.tag()
        if int(self.readout.tag) != tag:
            self.readout.reset(tag)

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int) -> None:
        trainer = self.trainer
        if trainer.is_last_batch and self._counts() and federation_of(trainer) is None:
            self.solve()

    def _counts(self) -> bool:
        """Whether the epoch's data are added: a stream's epochs are rounds, others see the same data again."""
        trainer = self.trainer
        last = trainer.current_epoch + 1 == trainer.max_epochs
        return not self.adapting and (last or stream_of(trainer) is not None)

    def on_after_aggregation(self) -> None:
        if not self.adapting and self.share == "statistics":
            self.solve()

    def solve(self) -> None:
        """Set the readout's weights from its statistics, with the only regulariser or the best one."""
        if len(self.betas) > 1:
            self._choose_beta()
        else:
            self.readout.solve()

    @torch.no_grad()
    def _choose_beta(self) -> None:
        trainer, stream = self.trainer, stream_of(self.trainer)
        loader: Any = trainer.val_dataloaders if stream is None else stream.val_dataloader()
        if not loader:
            raise ValueError(
                f"Expected validation samples to choose among the {len(self.betas)} values of `beta` but the stream "
                "has none. Set the stream's `validation`, or one `beta`."
            )
        solutions = self.readout.solutions(self.betas)
        right = torch.zeros(len(self.betas), dtype=torch.float64, device=self.device)
        for batch in loader:
            for states, wanted in self.pairs(*transfer_batch(trainer, batch)):
                outputs = states.double() @ solutions.flatten(0, 1).t()
                right += self.score(outputs.view(*outputs.shape[:-1], *solutions.shape[:2]), wanted)
        best = int(right.argmax())
        self.readout.beta = self.betas[best]
        self.readout.weight.copy_(solutions[best])

    def score(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """How good each readout is, the more the better: outputs (..., readouts, outputs), wanted (..., outputs)."""
        raise NotImplementedError

    def metric(self) -> Metric:
        raise NotImplementedError

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, f"val/{self.quantity}", self.val_metric)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, f"test/{self.quantity}", self.test_metric)

    def _evaluate(self, batch: Batch, name: str, metric: Metric) -> None:
        x, y = batch
        for states, wanted in self.pairs(x, y):
            metric.update(*self.to_predictions(self.readout(states), wanted))
        self.log(name, metric, batch_size=len(y))

    def to_predictions(self, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """What a metric compares: of outputs and targets, both of shape (steps, batch, outputs)."""
        raise NotImplementedError

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([self.reservoir.gain, self.reservoir.bias], lr=0.0)

    # What a federation asks for.

    def local_trainer(self, federation: Federation, shaping: Sequence[str]) -> ReservoirTrainer:
        name = type(self).__name__
        if federation.strategy.rules:
            raise ValueError(
                f"Expected no `reductions` with a `{name}`, which declares its own for each round, but got "
                f"{dict(federation.strategy.rules)}. What clients send is chosen by `share`."
            )
        if shaping:
            raise ValueError(
                f"Expected no `{shaping[0]}` with a `{name}`: it adds to a loss, and a reservoir is trained "
                "without one. Remove it."
            )
        if type(self).training_step is not ReservoirTask.training_step:
            raise ValueError(
                f"Expected `{name}` not to override `training_step`: in a federation clients run through the "
                "reservoir side by side. Override `pairs` or `targets` instead."
            )
        if federation.participation.may_miss:
            raise ValueError(
                f"Expected a `swarm` without `dropout` and `missing` for a `{name}`, whose clients begin each round "
                "with new sums, but got one with them. Leave them out."
            )
        size = federation.strategy.cohort_size
        return ReservoirTrainer(self, None if size == "auto" else size)

    @property
    def local_models(self) -> bool:
        """Whether a client's own state makes predictions: its statistics do not, before they are solved."""
        return self.share == "weights" and not self.adapting

    def fingerprint(self) -> dict[str, Any]:
        reservoir = self.reservoir
        plain = {"betas": self.betas, "readout": self.features, "share": self.share}
        return {**plain, "leaking_rate": reservoir.leaking_rate, "washout": reservoir.washout}

    def warn_of_few(self, client: str, samples: int) -> None:
        """Warn, once for each client, of statistics that may reveal their data."""
        if samples < self.min_samples and client not in self._warned:
            self._warned.add(client)
            what = f"of client {client} are of {samples} samples, below `min_samples`={self.min_samples}"
            log.warning("The statistics %s: they can reveal its data. Wait for more, or use secure aggregation.", what)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["beta"] = self.readout.beta

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if len(self.betas) > 1:
            self.readout.beta = checkpoint.get("beta", self.readout.beta)
