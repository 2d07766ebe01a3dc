"""Statements about every method, and about methods that reduce forgetting."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fcl.conformance.averaging import register_fedavg_statement
from lightning_fcl.conformance.fixtures import (
    CLASSES,
    NotApplicableError,
    assert_same,
    make_method,
    make_rules,
    make_stream,
    make_task,
    state_distance,
    statement,
    train,
)
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation.protocols import require_federation
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.functional import GradientFn
from lightning_fcl.methods.method import Method

_SEEDS = range(4)


for _claim in ("EWC", "MAS", "SI", "LwF", "GEM", "AGEM", "ReFed", "FOT"):
    register_fedavg_statement(_claim, "in the first task there is nothing to preserve", tasks=1)


def _holds_more(claim: str, **arguments: Any) -> None:
    @statement(claim, "a second task changes the parameters less than with fine-tuning, for four seeds")
    def _(kind: type[Method]) -> None:
        for seed in _SEEDS:
            first = train([], make_stream(clients=1, seed=seed), max_epochs=2)
            finetuning_distance = state_distance(train([], make_stream(clients=1, seed=seed)), first)
            method_distance = state_distance(
                train([make_method(kind, **arguments)], make_stream(clients=1, seed=seed)), first
            )
            if not method_distance < 0.95 * finetuning_distance:
                raise AssertionError(
                    f"seed {seed}: the method changes the parameters by {method_distance:.3f}, but must stay below "
                    f"95 % of {finetuning_distance:.3f}, the change by fine-tuning"
                )


_holds_more("EWC", strength=5.0)
_holds_more("MAS", strength=5.0)
_holds_more("SI", strength=5.0)


@statement("LwF", "the probabilities of old classes change less than with fine-tuning, for four seeds")
def _(kind: type[Method]) -> None:
    for seed in _SEEDS:
        stream = make_stream(clients=1, seed=seed)
        stream.setup("fit")
        x = stream.get_samples(stream.plan.test)[0].double()
        old = torch.tensor(sorted(stream.plan.tasks["0"][0]))
        first = train([], make_stream(clients=1, seed=seed), max_epochs=2)
        distances = []
        for methods in ([make_method(kind, strength=3.0)], []):
            trained_model = train(methods, make_stream(clients=1, seed=seed))
            answers, first_answers = (model(x)[:, old].softmax(dim=1) for model in (trained_model, first))
            distances.append(float((answers - first_answers).detach().abs().sum(dim=1).mean()))
        if not distances[0] < 0.95 * distances[1]:
            raise AssertionError(
                f"seed {seed}: the probabilities change by {distances[0]:.3f}, but must stay below 95 % of "
                f"{distances[1]:.3f}, the change with fine-tuning"
            )


def _never_against_the_past(claim: str, **arguments: Any) -> None:
    """Register the statement that steps of the method ``claim`` do not increase the loss on replay samples.

    The check is of first order: the projected gradient must not point away from the gradient on replay samples. The
    replay buffer contains all samples of the first task, so the check computes the gradient without access to the
    buffer.
    """

    @statement(claim, "no step goes against the gradient on replay samples of past tasks")
    def _(kind: type[Method]) -> None:
        stream, cosines = make_stream(clients=1), []
        stream.setup("fit")
        x, y = stream.get_samples(stream.plan.train[0]["0"])

        class Watched(kind):  # type: ignore[valid-type, misc]
            def project_gradient(self, client: Client, gradient: Tensor, gradient_fn: GradientFn) -> Tensor:
                stepped: Tensor = super().project_gradient(client, gradient, gradient_fn)
                if client.client_round.experience_idx == 1:
                    reference = gradient_fn(x.double(), y)
                    cosines.append(float(stepped @ reference / (stepped.norm() * reference.norm() + 1e-30)))
                return stepped

        train([make_method(Watched, memory_size=1.0, **arguments)], make_stream(clients=1))
        if not cosines:
            raise AssertionError("no step of the second task called `project_gradient`")
        if min(cosines) < -1e-6:
            raise AssertionError(
                f"the smallest cosine of a step with the gradient on the past task is {min(cosines):.4f} instead of at "
                "least 0"
            )


_never_against_the_past("GEM", margin=0.0)
_never_against_the_past("AGEM")


@statement("ReFed", "if the buffer stores all samples, each past sample joins one batch of each epoch of the next task")
@statement(
    "Replay", "if the buffer stores all samples, each past sample joins one batch of each epoch of the next task"
)
def _(kind: type[Method]) -> None:
    recorder = SeenLabels()
    train([make_method(kind, memory_size=100_000)], make_stream(clients=1), callbacks=[recorder])
    stream = make_stream(clients=1)
    stream.setup("fit")
    for round_idx in range(stream.plan.num_rounds):
        rows = [stream.plan.train[past]["0"] for past in ({round_idx} if round_idx < 2 else {0, round_idx})]
        expected = Counter(stream.y[torch.cat([torch.from_numpy(own) for own in rows])].tolist())
        if recorder.labels[round_idx] != expected:
            raise AssertionError(
                f"in round {round_idx + 1} the number of samples by label is {dict(recorder.labels[round_idx])} "
                f"instead of {dict(expected)}"
            )


@statement("GLFC", "with equal probabilities and no old classes, the penalty is the mean binary cross-entropy")
def _(kind: type[Method]) -> None:
    draws, y, method = torch.Generator().manual_seed(0), torch.arange(12) % CLASSES, make_method(kind)
    z = torch.randn(12, CLASSES, generator=draws, dtype=torch.float64)
    z[torch.arange(12), y] = 0.5
    client = Client(client_round=ClientRound("0", 0, num_classes=CLASSES, new_classes=tuple(range(CLASSES))))
    client.method_state = method.prepare_client_state(client)
    actual_penalty = float(method.penalty(client, Step({"w": z}, {}, z, z, lambda state, x: x, y=y)))
    expected_penalty = float(F.binary_cross_entropy_with_logits(z, F.one_hot(y, CLASSES).double()))
    if (weight := method.task_weight(client)) != 0 or abs(actual_penalty - expected_penalty) > 1e-6:
        raise AssertionError(
            f"expected the penalty {expected_penalty:.6f} and the weight 0 of the task loss, but got the penalty "
            f"{actual_penalty:.6f} and the weight {weight}"
        )


@statement("GLFC", "in the first task, which has no old model, the proxy server changes nothing")
def _(kind: type[Method]) -> None:
    with_proxy, without_proxy = (
        train([make_method(kind, proxy_server=proxy)], make_stream(tasks=1)) for proxy in (True, False)
    )
    assert_same(with_proxy, without_proxy, "with a proxy server", tolerance=0)


class SeenLabels(Callback):
    """A callback that counts the labels of the batches of each round, including replay samples."""

    def __init__(self) -> None:
        self.labels: list[Counter[int]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.labels.append(Counter())

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.labels[-1].update(batch[1].tolist())


@statement("Method", "random draws depend only on the stream's seed, not on global generators")
def _(kind: type[Method]) -> None:
    outcomes = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            outcomes.append(train([make_method(kind)]))
    assert_same(outcomes[1], outcomes[0], "with different seeds of the global generators", tolerance=0)


@statement("Method", "vectorized training gives the same result as sequential training")
def _(kind: type[Method]) -> None:
    if not kind.vectorizable:
        raise NotApplicableError("the class does not support vectorized training (`vectorizable` is False)")
    sequential_task, vectorized_task = (
        train([make_method(kind)], max_vectorized_clients=size, precision="32-true") for size in (1, 3)
    )
    assert_same(vectorized_task, sequential_task, "vectorized, in single precision", tolerance=1e-4)


@statement("Method", "a fit that is interrupted and resumed gives bitwise identical results")
def _(kind: type[Method]) -> None:
    whole = train([make_method(kind)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stopped.ckpt"
        train([make_method(kind)], callbacks=[_SaveAfter(path)], max_epochs=2)
        try:
            continued = train([make_method(kind)], ckpt_path=str(path))
        except NotApplicableError as reason:
            raise AssertionError(f"a fit stopped after round 2 cannot be resumed: {reason}") from reason
    assert_same(continued, whole, "stopped after round 2 and resumed", tolerance=0)


@statement("Method", "clients that do not use the method train bitwise identically to training without it")
def _(kind: type[Method]) -> None:
    unused = make_method(kind, clients=[])
    assert_same(train([unused]), train([], reductions=make_rules(unused)), "with `clients=[]`", tolerance=0)


@statement("Method", "client states on disk give bitwise identical results")
def _(kind: type[Method]) -> None:
    assert_same(train([make_method(kind)], client_store="disk"), train([make_method(kind)]), "from disk", tolerance=0)


@statement("Method", "the states of the clients and of the server are finite")
def _(kind: type[Method]) -> None:
    train([make_method(kind)], callbacks=[_LooksForNaN()])


@statement("Method", "the module is restored: it has no hooks, and the same parameters are trainable")
def _(kind: type[Method]) -> None:
    initial_task, task = make_task(), train([make_method(kind)])
    for name, module in task.named_modules():
        hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
        if hooks:
            raise AssertionError(f"`{name or type(task).__name__}` has hooks after the fit: {len(hooks)} instead of 0")
    for (name, parameter), initial_parameter in zip(task.named_parameters(), initial_task.parameters(), strict=True):
        if parameter.requires_grad != initial_parameter.requires_grad:
            raise AssertionError(
                f"`{name}.requires_grad` is {parameter.requires_grad} after the fit, but was "
                f"{initial_parameter.requires_grad} before the fit"
            )


class _SaveAfter(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class _LooksForNaN(Callback):
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        server = require_federation(trainer, "a statement", "it has no clients").server
        sections_by_owner = {f"client {client}": server.client_store[client] for client in server.client_store} | {
            "the server": {"state": server.state}
        }
        for owner, sections in sections_by_owner.items():
            for section, memory in sections.items():
                for name, value in memory.items():
                    if not value.isfinite().all():
                        raise AssertionError(f"`{section}.{name}` of {owner} has non-finite values")
