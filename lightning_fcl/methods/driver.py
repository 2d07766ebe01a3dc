"""The Lightning callback that runs all methods of a Trainer in sequential training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fcl.data.batching import Batch
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.data.trainer_access import find_stream
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import State
from lightning_fcl.federation.client_store import StateSection
from lightning_fcl.federation.compression import DIVERGENCE_HINT
from lightning_fcl.federation.protocols import FederationProtocol, find_federation
from lightning_fcl.methods.base import MethodBase, changes_loss, make_client, overrides_hook
from lightning_fcl.methods.batch_check import check_batch, check_samples
from lightning_fcl.methods.compose import check_compatible, check_needs, compose, get_methods, prediction_override
from lightning_fcl.methods.context import Client, Step, is_labelled, without_call
from lightning_fcl.methods.dry_run import describe_non_logits, find_logits_obstacle, first_indices
from lightning_fcl.methods.epoch_rounds import EpochRounds
from lightning_fcl.methods.frozen_layers import Freezer, FrozenLayers
from lightning_fcl.methods.functional import (
    make_embed_fn,
    make_gradient_fn,
    make_loss_fn,
    make_output_fn,
    make_teacher_fn,
    optimized_parameters,
    trainable_parameters,
)
from lightning_fcl.methods.hook_results import check_projection
from lightning_fcl.methods.local_federation import LocalFederation
from lightning_fcl.methods.projection import flatten, unflatten
from lightning_fcl.methods.replay_samples import DrawnSamples, join_batch, joins_batches
from lightning_fcl.rng import make_client_keys

log = logging.getLogger(__name__)


class MethodDriver(Callback):
    """Callback that runs the methods' hooks in sequential training, in which one client trains at a time.

    In the Trainer's list of callbacks, this callback comes after the last method.

    In a federation, the sequential trainer calls `start_clients` for each client of a round. A plain Trainer is a
    federation of one client, see `EpochRounds`. In this case, this callback calls `start_clients` in each epoch.
    """

    def __init__(self, methods: Sequence[MethodBase]) -> None:
        self.methods = list(methods)
        # Whether the loss with the methods' terms was finite in every step of the client's round.
        self.has_finite_loss = torch.tensor(True)
        self._federation: FederationProtocol | None = None
        self._freezer = Freezer()
        self._frozen_layers = FrozenLayers()
        self._rule = ExitStack()
        # The rounds of the current fit in a plain Trainer. Otherwise None.
        self._epochs: EpochRounds | None = None
        self._local = LocalFederation()
        self._hook: RemovableHandle | None = None
        self._call: tuple[Any, Tensor] | None = None
        # For each method, the `Client` object of the client that currently trains.
        self._clients: list[Client] = []

    # Start and end of a fit.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._module = pl_module
        self.methods, self._federation = get_methods(trainer), find_federation(trainer)
        if stage != "fit":
            return
        check_compatible(self.methods)
        for method in self.methods:
            check_needs(method, trainer, pl_module)
            check_samples(method, trainer)
        if self._federation is None:
            self._set_local()
            self._epochs = EpochRounds(pl_module, self.methods, self._local)

    def _set_local(self) -> None:
        """Make all methods share one `LocalFederation`. Copy the state of methods that trained in another Trainer."""
        first = next((method.local for method in self.methods if method.local is not None), None)
        self._local = first or self._local
        for method in self.methods:
            if method.local is not None and method.local is not self._local:
                self._local.adopt(method.local, method.section_name)
            method.local = self._local

    def state_dict(self) -> dict[str, Any]:
        return {} if self._federation is not None else self._local.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._federation is None:
            self._local.load_state_dict(state_dict)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream, needing = find_stream(trainer), [method for method in self.methods if method.needs.logits]
        if stream is None or not needing:
            return
        if (first := first_indices(stream)) is None:
            return
        # Reading a sample may draw random numbers in the dataset's own code.
        with isolate_rng():
            pairs = is_labelled(stream.get_samples(first[:1]))
        if pairs and (reason := find_logits_obstacle(pl_module, stream, first)):
            _refuse_output(needing[0], pl_module, reason)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._clients = []
        for method in self.methods:
            method.client = None
        if self._epochs is not None:
            self._epochs.close()
        self._epochs = None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epochs is not None:
            self._local.end_fit()
        self._leave(pl_module)

    def _leave(self, pl_module: L.LightningModule) -> None:
        self.release(pl_module)
        self._rule.close()
        for method in self.methods:
            method.restore_module(pl_module)

    def release(self, pl_module: L.LightningModule) -> None:
        """Remove everything that training added to the module: the forward hook and the freezing of parts."""
        self._freezer.train_only(pl_module, None)
        self._freezer = Freezer()
        self._frozen_layers.wake()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._leave(pl_module)

    # Evaluation.

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rule.enter_context(prediction_override(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rule.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # Local training of a client in a round.

    def rest_frozen(self, module: nn.Module) -> None:
        """Put frozen layers into evaluation mode for local training, if a method needs the clients' features."""
        if any(method.needs.features for method in self.methods):
            self._frozen_layers.rest(module)

    def start_clients(
        self, client_round: ClientRound, received_state: State, memories: Sequence[StateSection], seed: int
    ) -> None:
        """Start a client's local training. The client's state must be in the module.

        Args:
            client_round: The client's `ClientRound`.
            received_state: The state that the client received.
            memories: The client's state for each method.
            seed: Seed of the random draws of replay samples.
        """
        module = self._module
        method_memories = zip(self.methods, memories, strict=True)
        self._clients = [
            make_client(method, module, memory, received_state, client_round) for method, memory in method_memories
        ]
        # The key "recall" must not change, because it is part of the seed of existing runs.
        self._drawn = DrawnSamples(
            self.methods,
            [self._clients],
            lambda name: make_client_keys(seed, [client_round.client_id], client_round.round_idx, "recall", name),
        )
        self.has_finite_loss = torch.tensor(True)
        for method, client in zip(self.methods, self._clients, strict=True):
            method.client = client
            method.start_client(client)

    @property
    def memories(self) -> list[StateSection]:
        """The state of the client that currently trains, for each method."""
        return [client.method_state for client in self._clients]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epochs is not None:
            self.rest_frozen(pl_module)
            self.start_clients(*self._epochs.begin(trainer.current_epoch), self._epochs.stream.seed)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        for method in () if _side_by_side(self._federation) else self.methods:
            check_batch(method, batch, stored=find_stream(trainer) is None)
        epoch = self._federation.current_round.local_epoch if self._federation is not None else 0
        if self._epochs is not None:
            epoch = self._epochs.local_epoch(batch_idx)
            self._epochs.add(batch)
        for client in self._clients:
            client.batch, client.local_epoch = batch, epoch
        for method, client in self._active():
            method.begin_step(client)
            if find_stream(trainer) is None and joins_batches(method):
                join_batch(method, client, batch_idx)
        parts = [method.trainable_patterns(client) for method, client in self._active()]
        self._freezer.train_only(pl_module, next((part for part in parts if part is not None), None))
        if self._hook is None:
            self._hook = pl_module.register_forward_hook(self._watch)
        self._call = None

    def _active(self) -> list[tuple[MethodBase, Client]]:
        """Return the methods that the current client uses, each with its `Client` object."""
        method_clients = zip(self.methods, self._clients, strict=True) if self._clients else ()
        return [(method, client) for method, client in method_clients if client.is_active]

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled() and args:
            self._call = (args[0], output)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if _side_by_side(self._federation):
            # In vectorized training, the vectorized trainer adds the methods' terms.
            return
        active = self._active()
        if not any(changes_loss(method, client) for method, client in active):
            return
        methods, clients = [method for method, _ in active], [client for _, client in active]
        call, self._call = self._call, None
        x, output = call or (None, loss)
        # `on_train_start` checks the output only for labelled batches of a `FederatedStream`.
        for method in methods if call else ():
            if method.needs.logits and (reason := describe_non_logits(output)):
                _refuse_output(method, pl_module, reason)
        step = step_of(pl_module, clients[0].received_state, x, output)
        step.y = clients[0].batch[1] if is_labelled(clients[0].batch) else None
        steps = [self._drawn.step(method, step) for method in methods]
        # If the training step did not call the module, penalties that read only parameters still work.
        if call is None:
            reason = without_call(pl_module)
            steps = [
                step.without_batch(reason % type(method).__name__) for method, step in zip(methods, steps, strict=True)
            ]
        zero = torch.zeros((), device=loss.device)
        weight, extra = compose(methods, clients, steps, zero)
        loss.add_((weight - 1.0) * loss.clone() + extra / trainer.accumulate_grad_batches)
        self.has_finite_loss = self.has_finite_loss.to(loss.device) & loss.detach().isfinite()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        for client in self._clients:
            client.num_steps += 1
        for method, client in self._active():
            if not overrides_hook(method, "project_gradient"):
                continue
            params = optimized_parameters(optimizer, pl_module)
            gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
            gradient = flatten(gradients) if gradients else None
            if gradient is None or not torch.isfinite(gradient.sum()):
                # A non-finite gradient cannot be projected and is not changed.
                continue
            projected = method.project_gradient(client, gradient, make_gradient_fn(pl_module, params))
            if projected is not gradient:
                check_projection(method, projected, gradient)
                for name, value in unflatten(projected, gradients).items():
                    gradients[name].copy_(value)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        federation = self._federation
        if federation is not None and (
            federation.current_round.client_round is None or federation.current_round.last_batch
        ):
            self._freezer.train_only(pl_module, None)
        if self._epochs is not None and (trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches):
            # End the epoch before the validation that follows the last batch.
            self._end_epoch(trainer, pl_module, self._epochs)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A fit that stops within an epoch has no last batch.
        if self._epochs is not None:
            self._end_epoch(trainer, pl_module, self._epochs)

    def _end_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule, epochs: EpochRounds) -> None:
        self._freezer.train_only(pl_module, None)
        if not self.has_finite_loss:
            log.warning(
                "Epoch %d: the loss with the methods' terms was non-finite. %s", trainer.current_epoch, DIVERGENCE_HINT
            )
            self.has_finite_loss = torch.tensor(True)
        epochs.end(self.memories, self._clients[0].num_steps if self._clients else 0)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epochs is not None:
            self._epochs.finish()


def step_of(module: L.LightningModule, server: State, x: Any, output: Tensor) -> Step:
    """Return a `Step` of the client whose state is in the module. The step has no targets."""
    return Step(
        trainable_parameters(module),
        server,
        x,
        output,
        make_teacher_fn(module),
        make_output_fn(module),
        make_embed_fn(module),
        make_loss_fn(module),
    )


def _side_by_side(federation: FederationProtocol | None) -> bool:
    """Return whether several clients train in one vectorized step. If True, the vectorized trainer runs the methods."""
    return federation is not None and federation.current_round.client_round is None


def _refuse_output(method: MethodBase, module: L.LightningModule, reason: str) -> NoReturn:
    raise InvalidValueError(
        f"Expected logits of shape (batch, classes) with at least 2 classes for `{type(method).__name__}`, which "
        f"compares classes, but {reason}.",
        hint=f"Use class labels as targets and return one logit per class from `{type(module).__name__}.forward`, or "
        f"remove `{type(method).__name__}`.",
        argument="forward",
        value=type(module).__name__,
    )
