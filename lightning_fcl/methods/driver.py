"""The one Lightning callback that runs all methods of a Trainer, one client at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fcl.data.attached import need_stream, stream_of
from lightning_fcl.data.batches import Batch
from lightning_fcl.data.client_round import ClientRound, SampleHistory
from lightning_fcl.data.plain_tensors import plain_samples
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.aggregation import Aggregator, State, entries
from lightning_fcl.federation.client_store import Memory
from lightning_fcl.federation.protocol import RunsFederation, federation_of
from lightning_fcl.federation.wire import DIVERGED
from lightning_fcl.methods.batch_check import check_batch, check_samples
from lightning_fcl.methods.client import Client, Step, is_labelled, without_call
from lightning_fcl.methods.compose import check_compatible, check_needs, compose, methods_of, predicting
from lightning_fcl.methods.declaration import Declaration, overrides, shapes_loss
from lightning_fcl.methods.experience import declared, lasting, noted, receive
from lightning_fcl.methods.frozen_layers import Freezer, FrozenLayers
from lightning_fcl.methods.functional import (
    features_of,
    gradient_of,
    loss_of,
    output_of,
    stepped_by,
    teacher_of,
    trainable,
)
from lightning_fcl.methods.projection import flatten, unflatten
from lightning_fcl.methods.replay_samples import DrawnSamples, join_batch, joins_batches
from lightning_fcl.methods.trial import first_rows, why_no_logits, why_not_logits
from lightning_fcl.randomness import keys_of

log = logging.getLogger(__name__)


class MethodDriver(Callback):
    """Runs the functions that methods declare, where one client trains at a time; it stands behind the last of them.

    In a federation, the rounds call `begin`; in a plain Trainer, where an epoch is a round, the driver does so itself.
    """

    def __init__(self, methods: Sequence[Declaration]) -> None:
        self.methods = list(methods)
        self.finite = torch.tensor(True)  # whether the methods' loss was, in every step of the client's round
        self._federation: RunsFederation | None = None
        self._freezer = Freezer()
        self._frozen_layers = FrozenLayers()
        self._rule = ExitStack()
        self._seen: list[tuple[Any, Tensor]] = []  # the batches of a plain Trainer's epoch
        self._unfinished: list[tuple[Declaration, Client]] = []  # of an epoch that may have been the last
        self._results: dict[str, Memory] = {}  # of methods that accumulate, for the experience so far
        self._hook: RemovableHandle | None = None
        self._call: tuple[Any, Tensor] | None = None
        self._clients: list[Client] = []  # the client that trains now, as each method sees it

    # The fit.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.methods, self._federation = methods_of(trainer), federation_of(trainer)
        if stage != "fit":
            return
        check_compatible(self.methods)
        for method in self.methods:
            check_needs(method, trainer, pl_module)
            check_samples(method, trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream, needing = stream_of(trainer), [method for method in self.methods if method.needs.logits]
        if stream is None or not needing:
            return
        if (first := first_rows(stream)) is None:
            return
        with isolate_rng():  # a data set's own code may draw
            pairs = is_labelled(stream.take(first[:1]))
        if pairs and (why := why_no_logits(pl_module, stream, first)):
            _refuse_output(needing[0], pl_module, why)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._clients = []
        for method in self.methods:
            method.client = None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.release(pl_module)
        self._rule.close()
        for method in self.methods:
            method.leave(pl_module)

    def release(self, pl_module: L.LightningModule) -> None:
        """Remove what training has put into the module: a hook, and the parts that are frozen."""
        self._freezer.train(pl_module, None)
        self._freezer = Freezer()
        self._frozen_layers.wake()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    # Evaluation.

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rule.enter_context(predicting(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rule.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # A client's round.

    def rest_frozen(self, module: nn.Module) -> None:
        """Keep the statistics of frozen layers, before local training, if the server uses clients' features."""
        if any(method.needs.features for method in self.methods):
            self._frozen_layers.rest(module)

    def begin(self, clients: Sequence[Client], drawn: DrawnSamples) -> None:
        """Another client trains now, as each method sees it, its state in the module."""
        self._clients, self._drawn, self.finite = [*clients], drawn, torch.tensor(True)
        for method, client in zip(self.methods, clients, strict=True):
            method.client = client
            method.begin(client)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._federation is not None:
            return
        self.rest_frozen(pl_module)
        self._seen = []
        server = {name: value.detach().clone() for name, value in entries(pl_module).items()}
        clients, stream = [], stream_of(trainer)
        for method in self.methods:
            at = self._client_round(trainer, method)
            client = Client(method.memory, server, at, pl_module, section=method.section)
            if stream is not None:
                client.set_history(partial(stream.sample_history, at.client, at.round, range(at.round)))
            kept = method.server_entries
            if client.enters_experience:
                kept = lasting(method, kept)
            first = method.server_state(pl_module).items()
            method.server_entries = {n: kept[n] if n in kept else value.clone() for n, value in first}
            server |= {f"{method.section}.{name}": value for name, value in method.server_entries.items()}
            clients.append(client)
        for method, client in zip(self.methods, clients, strict=True):
            method.memory = client.memory = receive(method, client)
        drawn = DrawnSamples(self.methods, [clients], lambda name: keys_of(trainer.current_epoch, ["local"], name))
        self.begin(clients, drawn)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        for method in () if _side_by_side(self._federation) else self.methods:
            check_batch(method, batch, stored=self._federation is None)
        epoch = self._federation.round.local_epoch if self._federation is not None else 0
        for client in self._clients:
            client.batch, client.local_epoch = batch, epoch
        if self._federation is None and is_labelled(batch):
            # Only some methods look at the samples again.
            keeps = any(method.needs.samples for method in self.methods)
            self._seen.append((plain_samples(batch[0]) if keeps else None, plain_samples(batch[1])))
        for method, client in self._active():
            method.begin_step(client)
            if self._federation is None and joins_batches(method):
                join_batch(method, client, batch_idx)
        parts = [method.trains(client) for method, client in self._active()]
        self._freezer.train(pl_module, next((part for part in parts if part is not None), None))
        if self._hook is None:
            self._hook = pl_module.register_forward_hook(self._watch)
        self._call = None

    def _active(self) -> list[tuple[Declaration, Client]]:
        """The methods that the client uses that trains now, and it as they see it."""
        each = zip(self.methods, self._clients, strict=True) if self._clients else ()
        return [(method, client) for method, client in each if client.active]

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled() and args:
            self._call = (args[0], output)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if _side_by_side(self._federation):
            return  # their trainer does so
        active = self._active()
        if not any(shapes_loss(method, client) for method, client in active):
            return
        methods, clients = [method for method, _ in active], [client for _, client in active]
        called, self._call = self._call, None
        x, output = called or (None, loss)
        for method in methods if called else ():  # batches that are no pairs tell no earlier what the output is
            if method.needs.logits and (why := why_not_logits(output)):
                _refuse_output(method, pl_module, why)
        step = step_of(pl_module, clients[0].server, x, output)
        step.y = clients[0].batch[1] if is_labelled(clients[0].batch) else None
        steps = [self._drawn.step(method, step) for method in methods]
        if called is None:  # most penalties on parameters do not ask for it
            why = without_call(pl_module)
            steps = [
                step.without_batch(why % type(method).__name__) for method, step in zip(methods, steps, strict=True)
            ]
        zero = torch.zeros((), device=loss.device)
        weight, extra = compose(methods, clients, steps, zero)
        loss.add_((weight - 1.0) * loss.clone() + extra / trainer.accumulate_grad_batches)
        self.finite = self.finite.to(loss.device) & loss.detach().isfinite()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        for client in self._clients:
            client.steps += 1
        for method, client in self._active():
            if not overrides(method, "project"):
                continue
            params = stepped_by(optimizer, pl_module)
            gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
            gradient = flatten(gradients) if gradients else None
            if gradient is None or not torch.isfinite(gradient.sum()):
                continue  # a client that diverges is the federation's to refuse
            projected = method.project(client, gradient, gradient_of(pl_module, params))
            if projected is not gradient:
                for name, value in unflatten(projected, gradients).items():
                    gradients[name].copy_(value)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        federation = self._federation
        if federation is not None and (federation.round.client_round is None or federation.round.last_batch):
            self._freezer.train(pl_module, None)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._federation is not None:
            return
        if not self.finite:
            log.warning("Epoch %d: the loss with the methods' part was not finite. %s", trainer.current_epoch, DIVERGED)
        self._unfinished = []
        for method, began in zip(self.methods, self._clients, strict=True):
            at, data = self._client_round(trainer, method), self._data(method)
            client = Client(began.memory, began.server, at, pl_module, section=method.section)
            client.steps = began.steps
            if stream_of(trainer) is not None:
                client.set_history(partial(self._history, trainer))
            if client.history is not None and len(at.labels):  # in the order of the batches, as the samples are
                client.part = replace(at, labels=torch.from_numpy(need_stream(trainer).y[client.history.numbers]))
            if method.server_entries and overrides(method, "contribute"):
                sums = Aggregator(declared(method, method.server_entries))
                sent = method.contribute(client, entries(pl_module), data)
                sums.add_all({name: value[None] for name, value in sent.items()}, weights=[1.0], numbers=[0])
                method.server_entries = sums.result(method.server_entries)
            memory = noted(method, client, method.end_round(client, entries(pl_module), data))
            client.memory = method.memory = memory
            self._end_experience(trainer, method, client)

    def _end_experience(self, trainer: L.Trainer, method: Declaration, client: Client) -> None:
        """Take the method's result if the experience ends, or if the next epoch has other samples."""
        if not overrides(method, "end_experience"):
            return
        history, section, stream = client.history, method.section, stream_of(trainer)
        last, each = client.part.last_round, method.accumulates and history is not None and stream is not None
        if not last:
            self._unfinished.append((method, client))
            now, name = client.part.round, client.part.client
            if not each or (stream is not None and stream.has_same_samples(name, now, now + 1)):
                return
        result = self._result(method, client)
        if last:
            method.memory = result
            self._results.pop(section, None)
        else:
            self._results[section] = result

    def _result(self, method: Declaration, client: Client) -> Memory:
        data, history = self._data(method), client.history
        if method.accumulates and history is not None:
            covers = history.covers_experience
            client.result = {} if covers else self._results.get(method.section, {})
            data = client.selected(data, history.new_in_experience if covers else history.new)
        return noted(method, client, method.end_experience(client, entries(client.module), data))

    def _history(self, trainer: L.Trainer) -> SampleHistory:
        """Return the numbers of the epoch's samples, in the order of its batches."""
        stream = need_stream(trainer)
        client, epoch = stream.plan.clients[0], trainer.current_epoch
        history = stream.sample_history(client, epoch, range(epoch))
        order = np.concatenate(stream.batch_rows(client, epoch))[: sum(len(y) for _, y in self._seen)]
        return replace(history, numbers=order)

    def _data(self, method: Declaration) -> list[Tensor] | None:
        return [torch.cat(column) for column in zip(*self._seen, strict=True)] if method.needs.samples else None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for method, client in self._unfinished:
            client.part = replace(client.part, last_round=True)
            known = self._results.pop(method.section, None)
            method.memory = self._result(method, client) if known is None else known
        self._unfinished = []

    def _client_round(self, trainer: L.Trainer, method: Declaration) -> ClientRound:
        stream = stream_of(trainer)
        if stream is not None:
            return stream.client_round(stream.plan.clients[0], trainer.current_epoch)
        labels = torch.cat([y for _, y in self._seen]).cpu() if self._seen else torch.empty(0, dtype=torch.long)
        last = trainer.current_epoch + 1 == trainer.max_epochs
        return ClientRound("local", trainer.current_epoch, method.fits, labels, last_round=last, samples=len(labels))


def step_of(module: L.LightningModule, server: State, x: Any, output: Tensor) -> Step:
    """Return a step of the client whose state is in a module, without its targets."""
    return Step(
        trainable(module),
        server,
        x,
        output,
        teacher_of(module),
        output_of(module),
        features_of(module),
        loss_of(module),
    )


def _side_by_side(federation: RunsFederation | None) -> bool:
    """Whether several clients train, whose trainer runs the methods."""
    return federation is not None and federation.round.client_round is None


def _refuse_output(method: Declaration, module: L.LightningModule, why: str) -> NoReturn:
    raise InvalidValueError(
        f"Expected logits of shape (batch, classes), two or more, for `{type(method).__name__}`, which compares "
        f"classes by them, but {why}.",
        hint=f"Let `{type(module).__name__}.forward` give one for each class, or leave `{type(method).__name__}` out.",
        argument="forward",
        value=type(module).__name__,
    )
