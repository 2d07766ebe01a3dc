"""Intrinsic plasticity: unsupervised adaptation of a reservoir's gain and bias to its inputs."""

from __future__ import annotations

import logging
from typing import ClassVar, Literal

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.protocols import find_federation
from lightning_fcl.methods.context import Client, Server
from lightning_fcl.methods.method import Method
from lightning_fcl.tasks.reservoir import ReservoirTask
from lightning_fcl.validation import at_least, check_arguments

log = logging.getLogger(__name__)


class IntrinsicPlasticity(Method):
    """Intrinsic plasticity: adapts a reservoir so that activations become Gaussian (Schrauwen et al., 2008).

    A unit with the net input ``net`` has the activation ``h = tanh(gain * net + bias)``. On each batch, gain and bias
    change by ``eta * dg`` and ``eta * db``, with ``db = (mu - h (2 sigma^2 + 1 - h^2 + mu h)) / sigma^2`` and
    ``dg = 1 / gain + db * net``. dg and db are summed over the time steps of a sequence after the washout, and averaged
    over the sequences of the batch. With ``normalize_grad``, dg and db are then normalized. Clients keep no state.

    In a federation this method is FedIP (De Caro et al.). In all rounds of an experience except the last, clients adapt
    gain and bias, and the server averages them. In the last round, clients upload the statistics of the readout. With
    several experiences this method is FedCLIP, with or without `Replay`. If one client has all data, the method is IP
    (one experience) or CLIP (several experiences).

    Args:
        sigma: Target standard deviation of the activations, above 0.
        mu: Target mean of the activations.
        eta: Step size, above 0.
        local_epochs: Number of passes over a client's data in each round except the last round of an experience, at
            least 1. The last round, which fits the readout, always has one pass.
        normalize_grad: Whether the update directions of gain and bias are each normalized to length 1, layer by layer.
            Without normalization, ``eta`` must be very small. For example, gains diverge with ``eta=0.01``.
        restart: Whether gain is reset to 1 and bias to 0 at the start of each experience. With ``"auto"``, they are
            reset if the scenario has ``history="seen"`` (joint training from scratch on all data so far).
        min_gain: Lower bound of the gains, above 0. Gains below the bound are clamped, and a warning is logged once.

    Raises:
        ValueError: If an argument is out of range, the module has no reservoir, or gain or bias become non-finite. Also
            if every experience has only one round, or clients enter experiences in different rounds.

    Example:
        >>> IntrinsicPlasticity(sigma=0.1, local_epochs=3).eta
        0.01
    """

    citations: ClassVar[tuple[str, ...]] = ("schrauwen2008ip", "decaro2023fedclip")

    @check_arguments
    def __init__(
        self,
        sigma: float = 0.1,
        mu: float = 0.0,
        eta: float = 0.01,
        local_epochs: int = 1,
        normalize_grad: bool = True,
        restart: bool | Literal["auto"] = "auto",
        min_gain: float = 1e-3,
    ) -> None:
        super().__init__()
        for name, value in (("sigma", sigma), ("eta", eta), ("min_gain", min_gain)):
            if not 0 < value < float("inf"):
                raise InvalidValueError(
                    f"Expected `{name}` to be above 0 and finite, but got {value}.", argument=name, value=value
                )
        if not abs(mu) < float("inf"):
            raise InvalidValueError(f"Expected `mu` to be finite, but got {mu}.", argument="mu", value=mu)
        at_least(1, local_epochs=local_epochs)
        self.sigma = sigma
        self.mu = mu
        self.eta = eta
        self.epochs = local_epochs
        self.normalize_grad = normalize_grad
        self.restart = restart
        self.min_gain = min_gain
        self._warned = False

    def local_epochs(self, client: Client) -> int | None:
        return 1 if client.client_round.is_last_round else self.epochs

    def prepare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(pl_module, ReservoirTask):
            raise InvalidValueError(
                "Expected a `ReservoirClassifier` or `ReservoirRegressor` for `IntrinsicPlasticity`, but got a "
                f"`{type(pl_module).__name__}`, which has no reservoir.",
                argument="module",
                value=type(pl_module).__name__,
            )
        pl_module.plasticity, stream = self, find_stream(trainer)
        if stream is not None and len(set(stream.plan.experiences.values())) > 1:
            raise InvalidValueError(
                "Expected clients that enter each experience in the same round for `IntrinsicPlasticity`, but in the "
                f'scenario "{stream.scenario}" the clients enter experiences in different rounds.',
                hint="Use another `scenario`.",
                argument="scenario",
                value=stream.scenario,
            )
        numbers = next(iter(stream.plan.experiences.values())) if stream is not None else ()
        adapts = len(set(numbers)) < len(numbers) if numbers else trainer.max_epochs != 1
        if not adapts:
            raise InvalidValueError(
                "Expected at least two rounds (epochs) per experience for `IntrinsicPlasticity`, but got one. The last "
                "round fits the readout, and no round is left to adapt the reservoir.",
                hint="Raise `max_epochs`. With a `FederatedStream`, also raise `rounds_per_experience` of its "
                "`scenario`.",
                argument="max_epochs",
            )

    def restore_module(self, module: L.LightningModule) -> None:
        if isinstance(module, ReservoirTask):
            module.is_adapting, module.plasticity = False, None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # `prepare` rejects other modules.
        assert isinstance(pl_module, ReservoirTask)
        stream, round_idx = find_stream(trainer), trainer.current_epoch
        first, last = round_idx == 0, round_idx + 1 == trainer.max_epochs
        if stream is not None:
            numbers = next(iter(stream.plan.experiences.values()))
            first = first or numbers[round_idx] != numbers[round_idx - 1]
            last = stream.client_round(stream.plan.clients[0], round_idx).is_last_round
        should_restart = (
            stream is not None and stream.plan.history == "seen" if self.restart == "auto" else self.restart
        )
        if should_restart and first:
            pl_module.reservoir.reset_plasticity()
        pl_module.is_adapting = not last

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, ReservoirTask)
        if not pl_module.is_adapting or find_federation(trainer) is not None:
            return
        reservoir = pl_module.reservoir
        directions = reservoir.plasticity_gradients(batch[0], self.mu, self.sigma)
        dg, db = (direction.mean(dim=0, keepdim=True) for direction in directions)
        gain, bias = self.step(reservoir.gain[None], reservoir.bias[None], dg, db, reservoir.num_layers)
        with torch.no_grad():
            reservoir.gain.copy_(gain[0])
            reservoir.bias.copy_(bias[0])

    def process_aggregate(self, server: Server) -> State:
        return {"reservoir.gain": server.state["reservoir.gain"].clamp(min=self.min_gain)}

    def step(self, gain: Tensor, bias: Tensor, dg: Tensor, db: Tensor, layers: int = 1) -> tuple[Tensor, Tensor]:
        """Return gain and bias of several clients after one step along their update directions.

        Args:
            gain: Gains, shape (clients, N_R). N_R is the number of reservoir units.
            bias: Biases, shape (clients, N_R).
            dg: Update direction of the gains, shape (clients, N_R).
            db: Update direction of the biases, shape (clients, N_R).
            layers: Number of reservoir layers.
        """
        if self.normalize_grad:
            dg, db = (F.normalize(d.view(len(d), layers, -1), dim=2).flatten(1) for d in (dg, db))
        gain, bias = gain + self.eta * dg, bias + self.eta * db
        if not (torch.isfinite(gain).all() and torch.isfinite(bias).all()):
            raise InvalidValueError(
                f"Expected gain and bias to stay finite, but got non-finite values with eta={self.eta}, "
                f"sigma={self.sigma}.",
                hint="Lower `eta`, raise `sigma`, or set `normalize_grad=True`.",
                argument="eta",
                value=self.eta,
            )
        low = gain < self.min_gain
        if low.any():
            gain = gain.clamp(min=self.min_gain)
            if not self._warned:
                log.warning(
                    "Clamped %d of the gains to `min_gain`=%g, because a unit with gain 0 has a constant activation. "
                    "Lower `eta` (%g) or raise `sigma` (%g).",
                    int(low.sum()),
                    self.min_gain,
                    self.eta,
                    self.sigma,
                )
            self._warned = True
        return gain, bias
