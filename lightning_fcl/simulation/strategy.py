"""The strategy "federated" of a Lightning Trainer. Each epoch of the Trainer is one round of the federation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.callbacks.weight_averaging import averaged_weights
from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_loader import ClientLoader
from lightning_fcl.data.client_round import ClientRound, current_round
from lightning_fcl.data.trainer_access import find_stream, get_callbacks, require_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import ClientWeights, Reduction, State, check_state
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.compression import Compression
from lightning_fcl.federation.obstacles import Obstacle
from lightning_fcl.federation.pipeline import Pipeline
from lightning_fcl.federation.server import FederatedServer
from lightning_fcl.federation.server_optimizer import OptimizerFactory, get_settings
from lightning_fcl.federation.settings import FederationSettings
from lightning_fcl.federation.swarm import Swarm
from lightning_fcl.federation.synchronization import Participation, Poisson, Synchronization
from lightning_fcl.federation.uploads import UploadTransform
from lightning_fcl.io.checkpoint import check_weights_only, read_checkpoint
from lightning_fcl.local_training.gradient_accumulation import GradientAccumulation
from lightning_fcl.local_training.sequential import SequentialTrainer
from lightning_fcl.local_training.vectorized import StackedPrecision, flush_denormals
from lightning_fcl.privacy.differential_privacy import DifferentialPrivacy, PrivacyAccount
from lightning_fcl.privacy.ledger import LEDGER
from lightning_fcl.privacy.transforms import AddNoise, ClipUpdates
from lightning_fcl.simulation.checkpoint import (
    check_checkpoint,
    check_same_settings,
    check_version,
    federation_fingerprint,
)
from lightning_fcl.simulation.checkpoint_content import read_back, readable
from lightning_fcl.simulation.federation import Federation, require_started, warn_of_local_tensors
from lightning_fcl.simulation.fit import start_fit, take_over_steps
from lightning_fcl.simulation.hooks import FitHooks, common_batches
from lightning_fcl.simulation.multiprocess import RanksStrategy, StartMethod, check_same_federation
from lightning_fcl.simulation.private_rounds import check_private_settings
from lightning_fcl.simulation.round import Round
from lightning_fcl.simulation.round_progress import RoundProgress
from lightning_fcl.simulation.round_steps import start_synchronization
from lightning_fcl.simulation.setup_checks import (
    check_module,
    check_parts,
    check_ranks,
    check_settings,
    check_trainer,
)
from lightning_fcl.validation import check_arguments, one_of, warn_other_lightning


class FederatedStrategy(RanksStrategy):
    """A strategy that trains a federation. Each epoch of the Trainer is one round of the federation.

    In a round, the participating clients download the server state, train on their own data for ``local_epochs``
    epochs, and upload. The server aggregates each tensor by its reduction. After the last client, the new server state
    is loaded into the LightningModule. Validation and epoch-end hooks then use the server state.

    Before each client, state that is not in the module's `state_dict` is reset to its value at the start of the round.
    Examples are non-persistent buffers and attributes. A warning lists attributes that cannot be reset.

    Args:
        participation: Share or number of clients that are sampled for each round. A float is a share of all clients,
            and an int is a number of clients. At least one client is sampled. 1.0 is all clients and 1 is one client.
            `lightning_fcl.Poisson` samples each client independently.
            In asynchronous rounds, ``participation`` is the share or number of clients that train at the same time.
        local_epochs: Passes over a client's data per round.
        client_weights: Weight of a client in means: ``"samples"``, ``"trained_samples"``, ``"uniform"``, or a dict with
            a number for each client. ``"samples"`` is the client's number of samples in the round.
            ``"trained_samples"`` also counts the client's replay samples. ``"uniform"`` is 1. Samples that are left out
            by `drop_last` or `limit_train_batches` count as well. None: ``"uniform"`` with ``privacy``, otherwise
            ``"samples"``.
        reductions: Dict from patterns of state names to reductions, such as ``{"head.*": "local"}``, see
            `lightning_fcl.federation.reductions`. These reductions override the module's ``reductions`` attribute.
        server_optimizer: Function that creates a `torch.optim` optimizer. This optimizer updates the server state with
            the pseudo-gradient, which is the server state minus the aggregate.
        max_vectorized_clients: Maximum number of clients per vectorized step. ``"auto"`` chooses a number, 1 trains
            clients sequentially.
        client_store: Where client states are stored between rounds: ``"memory"`` or ``"disk"``.
        keep_optimizer_state: Whether a client's optimizer state is kept between rounds.
        swarm: Settings of swarm learning: one of the clients acts as the server, and clients may miss a
            synchronization. None: a central server.
        synchronization: Simulated clock: `lightning_fcl.federation.synchronization.Deadline` sets a deadline for each
            round, and `lightning_fcl.federation.fedbuff.FedBuff` makes rounds asynchronous. None: each round waits for
            all of its clients.
        compression: Compression of uploads with error feedback: `lightning_fcl.federation.compression.TopK` or
            `Quantize`. It applies to trainable parameters, whose reductions have to be ``compressible``, such as
            ``mean``.
        upload_transforms: Further transforms of uploads, see `lightning_fcl.federation.uploads.UploadTransform`. All
            transforms run in the order of `lightning_fcl.federation.uploads.Stage`.
        privacy: Settings of differential privacy, see `lightning_fcl.DifferentialPrivacy`. None: no privacy.
        on_empty_round: Action if all uploads of a round are dropped, for example because of non-finite values.
            ``"stop"`` ends the fit with an error, ``"warn"`` continues with the unchanged server state. The fit also
            continues if clients of the round are late or miss a synchronization.
        seed: Seed of client sampling and of each client's random numbers. None: the seed of
            `lightning.seed_everything`, or 0.
        start_method: How further processes are started if the Trainer has several ``devices``, as in Lightning's
            `DDPStrategy`. Each process trains different clients. The result does not depend on the number of processes.
        accelerator: As in Lightning's strategies.
        checkpoint_io: As in Lightning's strategies.
        precision_plugin: As in Lightning's strategies.

    Attributes:
        num_vectorized_clients: Maximum number of clients per vectorized step in the current fit. 1: clients train
            sequentially.
        sequential_reason: The obstacle to vectorized training. ``str(sequential_reason)`` is its text, and
            ``sequential_reason.reason`` is a `lightning_fcl.federation.obstacles.Reason`. None before a fit, if clients
            train vectorized, and if the module defines `configure_local_trainer`.

    Raises:
        ValueError: If an argument is out of range. `trainer.fit` also raises ValueError if a federation does not
            support a setting of the Trainer.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(strategy=FederatedStrategy(participation=0.5), logger=False, barebones=True)
        >>> trainer.strategy.participation
        0.5
    """

    strategy_name = "federated"
    citations: ClassVar[tuple[str, ...]] = ("mcmahan2017fedavg",)

    @check_arguments
    def __init__(
        self,
        # jsonargparse uses the first type that matches: 3 is an int, 0.3 is a float.
        participation: int | float | Poisson = 1.0,
        local_epochs: int = 1,
        client_weights: ClientWeights | None = None,
        reductions: dict[str, str | Reduction] | None = None,
        server_optimizer: OptimizerFactory | None = None,
        max_vectorized_clients: int | Literal["auto"] = "auto",
        client_store: Literal["memory", "disk"] = "memory",
        keep_optimizer_state: bool = False,
        swarm: Swarm | None = None,
        synchronization: Synchronization | None = None,
        compression: Compression | None = None,
        upload_transforms: Sequence[UploadTransform] = (),
        privacy: DifferentialPrivacy | None = None,
        on_empty_round: Literal["stop", "warn"] = "stop",
        seed: int | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, start_method)
        warn_other_lightning()
        transforms = [*([] if compression is None else [compression]), *upload_transforms]
        account = None
        if privacy is not None:
            check_private_settings(participation, client_weights, swarm, synchronization, upload_transforms)
            account = PrivacyAccount(privacy)
            private_transforms = [ClipUpdates(account), AddNoise(account)]
            transforms = sorted([*transforms, *private_transforms], key=lambda transform: transform.stage)
        if client_weights is None:
            client_weights = "samples" if privacy is None else "uniform"
        check_settings(local_epochs, max_vectorized_clients, swarm, synchronization, Pipeline(transforms))
        client_participation = Participation(participation, 0, swarm, synchronization)
        store = ClientStore(client_store)
        new_server = (
            synchronization.server(lambda: current_round(self.federation.module.trainer))
            if synchronization is not None
            else FederatedServer
        )
        server = new_server(store, client_weights, server_optimizer, transforms)
        one_of(("stop", "warn"), on_empty_round=on_empty_round)
        stops = on_empty_round == "stop"
        settings = FederationSettings(
            reductions or {}, local_epochs, max_vectorized_clients, keep_optimizer_state, stops, seed
        )
        self.federation = Federation(settings, server, client_participation, privacy=account)
        self.num_vectorized_clients = 1
        self.sequential_reason: Obstacle | None = None
        self.is_new_round: Callable[[Federation], Round] = Round
        self._hooks = FitHooks(self.federation)
        self._fits: list[Optimizer] = []  # the optimizers of the current fit
        self._flushes = False  # whether denormal numbers are set to 0 until the end of the fit
        self._has_read_back = False  # whether the first checkpoint of the fit was read back
        # Without `max_epochs`, Lightning warns that it trains for 1000 epochs. A fit ends at the last round instead.
        warnings.filterwarnings("ignore", "`max_epochs` was not set")

    @property
    def seed(self) -> int:
        """The seed of client sampling and of each client's random numbers."""
        return self.federation.seed

    @property
    def settings(self) -> FederationSettings:
        """The settings of the federation."""
        return self.federation.settings

    @property
    def current_round(self) -> RoundProgress | None:
        """The progress of the current round. None before a fit."""
        return self.federation.progress

    @property
    def server(self) -> FederatedServer:
        """The server."""
        return self.federation.server

    @property
    def participation(self) -> int | float | Poisson:
        """Clients per round: a share (float), a number (int), or `Poisson` sampling."""
        return self.federation.participation.fraction_or_count

    @property
    def current_client_round(self) -> ClientRound | None:
        """The client that currently trains. None between rounds and in vectorized training."""
        return self.current_round.client_round if self.current_round is not None else None

    def keep_ledger(self, folder: Path) -> None:
        """Keep the privacy ledger in a folder, unless the settings of ``privacy`` name its file."""
        if (account := self.federation.privacy) is not None and account.settings.ledger is None:
            account.settings.ledger = str(folder / LEDGER)

    def client_state_dict(self, client: str, server: State | None = None) -> State:
        """Return the state that a client predicts with, see `Federation.client_state_dict`."""
        return self.federation.client_state_dict(client, server)

    # Fit.

    def setup_environment(self) -> None:
        super().setup_environment()
        self.federation.ranks = self.ranks
        self.server.client_store.share_folder(self.ranks)

    def connect(self, model: L.LightningModule) -> None:
        """Add the callback that runs the rounds, before a checkpoint restores the states of callbacks."""
        super().connect(model)
        check_parts(model.trainer)
        self.federation.lightning_module = model
        if self._hooks not in get_callbacks(model.trainer):
            get_callbacks(model.trainer).insert(0, self._hooks)

    def setup(self, trainer: L.Trainer) -> None:
        if type(self.precision_plugin) is Precision:
            federation = self.federation
            self.precision_plugin = StackedPrecision(lambda: federation.local_trainer)
        super().setup(trainer)
        self._hooks.has_started, self._fits, self._has_read_back = False, [], False
        if trainer.state.fn == "fit":
            self._flushes = flush_denormals()
            check_trainer(trainer, self.federation)
            check_module(trainer.lightning_module)
            schedules = [get_settings(config.scheduler) for config in self.lr_scheduler_configs]
            self._hooks.settings = {"optimizer": [get_settings(o) for o in self.optimizers], "schedule": schedules}
            take_over_steps(self.federation, trainer)
        else:
            warn_of_local_tensors(self.federation)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Create the optimizers.

        In `configure_optimizers`, `trainer.estimated_stepping_batches` is the number of one client's steps in a round.
        """
        stream, max_steps = find_stream(trainer), trainer.max_steps
        if stream is not None:
            stream.count_batches = partial(common_batches, self.federation)
        super().setup_optimizers(trainer)
        trainer.fit_loop.epoch_loop.max_steps = max_steps
        if isinstance(trainer.train_dataloader, ClientLoader):
            trainer.fit_loop._combined_loader = None  # Lightning must create the loader again, now for a round.

    def teardown(self) -> None:
        """Tear down. If a fit was resumed after its last round, first call the hooks at the start and end of a fit.

        Lightning skips these hooks for such a fit. If a run was interrupted after its last checkpoint, the results that
        callbacks compute in ``on_train_end`` would then be missing.
        """
        if self.federation.lightning_module is None:  # This process only launched the processes that trained.
            super().teardown()
            return
        trainer = self.federation.module.trainer
        nothing_left = trainer.state.fn == "fit" and trainer.ckpt_path is not None and not self._hooks.has_started
        if nothing_left and not trainer.interrupted:
            trainer.fit_loop.on_run_start()
            trainer.fit_loop.on_run_end()
        if trainer.state.fn == "fit":
            self.federation.local_steps = GradientAccumulation()
            self.federation.limits.restore()
        if self._flushes:
            torch.set_flush_denormal(False)
            self._flushes = False
        if (stream := find_stream(trainer)) is not None:
            stream.count_batches, stream.min_batch_size = None, 1
        super().teardown()

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, ClientLoader):
            if not self.optimizers:  # `configure_optimizers` runs, and can read the number of steps.
                steps = math.ceil(len(dataloader) / self.federation.module.trainer.accumulate_grad_batches)
                # Lightning uses the minimum of this number and the number of steps of all rounds, which is not smaller.
                self.federation.module.trainer.fit_loop.epoch_loop.max_steps = steps
                return dataloader
            federation = self.federation
            if self._fits != self.optimizers:
                start_fit(federation, self.optimizers, super().training_step)
                self._fits = self.optimizers
                self.num_vectorized_clients = federation.local_trainer.num_vectorized_clients
                self.sequential_reason = federation.sequential_reason
                if self.is_new_round is Round:  # Nodes of a deployment report in each round whether they can train.
                    rounds = federation.module.trainer.max_epochs or 0
                    federation.participation.check_samples(federation.stream.plan, rounds)
                start_synchronization(federation)
                check_ranks(federation, self.ranks.num_ranks)
                check_same_federation(self.ranks, federation_fingerprint(federation))
            self._hooks.round = self.is_new_round(federation)
            return self._hooks.round
        if self.federation.module.trainer.training:
            raise InvalidValueError(
                "Expected a `FederatedStream` as the Trainer's `datamodule`, but got training data of type "
                f"`{type(dataloader).__name__}`.",
                hint="Create a stream from your data with `FederatedStream.from_arrays(x, y, client_ids=...)`.",
                argument="datamodule",
                value=type(dataloader).__name__,
            )
        return dataloader

    def training_step(self, batch: Batch, batch_idx: int | None = None, *args: Any) -> Any:
        """Compute the loss of the current client, or of all clients of a vectorized step.

        The module's `training_step` gets the client's ``batch_idx`` instead of the Trainer's.
        """
        federation = self.federation
        client_group = require_started(federation.current_round.client_group, "a batch")
        weight = client_group.weight.to(self.root_device) if client_group.weight is not None else None
        federation.module.trainer.accumulate_grad_batches = 1
        if client_group.last_batch:
            federation.local_steps.begin_last_batch()
        client_group.computed_steps.append(client_group.step)
        with federation.counters.client():
            return federation.local_trainer.training_step(
                batch, client_group.step if batch_idx is not None else None, weight
            )

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        federation, plugin = self.federation, self.precision_plugin
        local_trainer, counters, module = federation.local_trainer, federation.counters, federation.module
        drawing = local_trainer.keyed_rng() if isinstance(local_trainer, SequentialTrainer) else nullcontext()
        with drawing, counters.totals():
            loss = plugin.pre_backward(closure_loss, module)
            with counters.client():  # `backward` of the module and recomputed activations use the client's counters.
                plugin.backward(loss, module, optimizer, *args, **kwargs)
            return plugin.post_backward(loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take an optimizer step, or only accumulate the gradient. Clients without a batch do not change."""
        federation = self.federation
        with federation.counters.totals():
            progress, local_steps = federation.current_round, federation.local_steps
            client_group = require_started(progress.client_group, "a batch")
            federation.epoch_states.watch_metrics()
            active = client_group.active
            if local_steps.accumulate_grad_batches > 1:
                closure = local_steps.accumulate(optimizer, closure, active, client_group.last_batch)
                active = local_steps.is_active
                if not local_steps.is_complete:
                    return closure()
            step = partial(super().optimizer_step, optimizer, closure, model=model, **kwargs)
            result = federation.local_trainer.optimizer_step(step, active)
            if local_steps.is_manual is not None:
                return result
            (module_optimizer,) = federation.optimizers  # Automatic optimization has exactly one optimizer.
            local_steps.record_step(module_optimizer, optimizer)
            # Lightning steps schedulers with `interval="epoch"` before the last batch of the round ends.
            if client_group.last_batch and not progress.client_groups:
                local_steps.end_schedules(module_optimizer)
            return result

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.federation.ranks = self.ranks

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state. With `ServerWeightAveraging`, return the average of the server's model."""
        with averaged_weights(self.federation.module.trainer, self.federation.module) as is_average:
            state = super().lightning_module_state_dict()
            if is_average:
                state.update({name: value.clone() for name, value in state.items()})
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint that contains only tensors and plain values. Check the first checkpoint by reading it.

        If a hook saves a checkpoint while a client trains, the checkpoint still contains the counters of all clients.
        """
        trainer = self.federation.module.trainer
        with self.federation.counters.totals(), self._hooks.logger_steps.batches(trainer):
            checkpoint["global_step"] = trainer.global_step
            checkpoint["loops"]["fit_loop"] = trainer.fit_loop.state_dict()
            super().save_checkpoint(readable(checkpoint), filepath, storage_options)
        if not self._has_read_back and self.is_global_zero:
            read_back(self.checkpoint_io, filepath)
        self._has_read_back = True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        check_weights_only(weights_only)
        load = super().load_checkpoint
        checkpoint = read_checkpoint(lambda file: load(file.name, True), checkpoint_path)
        check_version(checkpoint, checkpoint_path)
        if self.federation.module.trainer.state.fn == "fit":
            fingerprint, rounds = (
                federation_fingerprint(self.federation),
                require_stream(self.federation.module.trainer).plan.num_rounds,
            )
            check_checkpoint(checkpoint, self._hooks.state_key, fingerprint, rounds, checkpoint_path)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        federation_state = checkpoint["callbacks"][self._hooks.state_key]
        check_same_settings(
            federation_state.get("settings", {}), self._hooks.settings, self.federation.module.trainer.ckpt_path
        )
        super().load_optimizer_state_dict(checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning converts the module only after loading. Loading would then round values to the old precision.
        self.precision_plugin.convert_module(self.federation.module)
        if strict:
            check_state(self.federation.module, checkpoint["state_dict"])
        super().load_model_state_dict(checkpoint, strict)
