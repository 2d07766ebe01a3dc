"""What holds of every method, and of those against forgetting: nothing to keep in the first task, and then."""

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
    register_fedavg_statement(_claim, "in the first task there is nothing to keep", tasks=1)


def _holds_more(claim: str, **arguments: Any) -> None:
    @statement(claim, "a second task moves the model less than fine-tuning does, on four seeds")
    def _(kind: type[Method]) -> None:
        for seed in _SEEDS:
            first = train([], make_stream(clients=1, seed=seed), max_epochs=2)
            finetuning_distance = state_distance(train([], make_stream(clients=1, seed=seed)), first)
            method_distance = state_distance(
                train([make_method(kind, **arguments)], make_stream(clients=1, seed=seed)), first
            )
            if not method_distance < 0.95 * finetuning_distance:
                raise AssertionError(
                    f"seed {seed}: it moves by {method_distance:.3f}, fine-tuning by {finetuning_distance:.3f}"
                )


_holds_more("EWC", strength=5.0)
_holds_more("MAS", strength=5.0)
_holds_more("SI", strength=5.0)


@statement("LwF", "the old model's answers stay nearer than with fine-tuning, on four seeds")
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
                f"seed {seed}: answers are {distances[0]:.3f} apart, with fine-tuning {distances[1]:.3f}"
            )


def _never_against_the_past(claim: str, **arguments: Any) -> None:
    """With all that a client has had in memory, past tasks' gradients are known without a look into it."""

    @statement(claim, "no step goes against the gradient of what is remembered of past tasks")
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
            raise AssertionError("no step of the second task was projected")
        if min(cosines) < -1e-6:
            raise AssertionError(f"a step has cosine {min(cosines):.4f} with the gradient of the past task")


_never_against_the_past("GEM", margin=0.0)
_never_against_the_past("AGEM")


@statement("ReFed", "with room for all, every sample of the past joins one batch of every epoch of the next task")
@statement("Replay", "with room for all, every sample of the past joins one batch of every epoch of the next task")
def _(kind: type[Method]) -> None:
    recorder = _Seen()
    train([make_method(kind, memory_size=100_000)], make_stream(clients=1), callbacks=[recorder])
    stream = make_stream(clients=1)
    stream.setup("fit")
    for round_idx in range(stream.plan.num_rounds):
        rows = [stream.plan.train[past]["0"] for past in ({round_idx} if round_idx < 2 else {0, round_idx})]
        expected = Counter(stream.y[torch.cat([torch.from_numpy(own) for own in rows])].tolist())
        if recorder.labels[round_idx] != expected:
            raise AssertionError(
                f"in round {round_idx + 1} the labels trained on are {recorder.labels[round_idx]}, not {expected}"
            )


@statement("GLFC", "where all samples learn at one pace and no class is old, it is the mean binary cross-entropy")
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
            f"beside {weight} of the task loss it is {actual_penalty:.6f} and not {expected_penalty:.6f}"
        )


@statement("GLFC", "in the first task, which has no old model, a proxy server that chooses one changes nothing")
def _(kind: type[Method]) -> None:
    with_proxy, without_proxy = (
        train([make_method(kind, proxy_server=proxy)], make_stream(tasks=1)) for proxy in (True, False)
    )
    assert_same(with_proxy, without_proxy, "with a proxy server", tolerance=0)


class _Seen(Callback):
    """The labels of each round's batches, with what has joined them."""

    def __init__(self) -> None:
        self.labels: list[Counter[int]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.labels.append(Counter())

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.labels[-1].update(batch[1].tolist())


@statement("Method", "its draws come from the stream's seed alone, not from global generators")
def _(kind: type[Method]) -> None:
    outcomes = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            outcomes.append(train([make_method(kind)]))
    assert_same(outcomes[1], outcomes[0], "after global generators of another seed", tolerance=0)


@statement("Method", "clients that train side by side come to what they come to one at a time")
def _(kind: type[Method]) -> None:
    if not kind.vectorizable:
        raise NotApplicableError("it says that clients who use it do not train side by side")
    sequential_task, vectorized_task = (
        train([make_method(kind)], max_vectorized_clients=size, precision="32-true") for size in (1, 3)
    )
    assert_same(vectorized_task, sequential_task, "side by side, in single precision", tolerance=1e-4)


@statement("Method", "a fit that is stopped and goes on comes to the bits of one that is not")
def _(kind: type[Method]) -> None:
    whole = train([make_method(kind)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stopped.ckpt"
        train([make_method(kind)], callbacks=[_SaveAfter(path)], max_epochs=2)
        try:
            continued = train([make_method(kind)], ckpt_path=str(path))
        except NotApplicableError as reason:
            raise AssertionError(f"stopped after round 2 it cannot go on: {reason}") from reason
    assert_same(continued, whole, "stopped after round 2 and continued", tolerance=0)


@statement("Method", "who does not use it trains as without it, to the bit")
def _(kind: type[Method]) -> None:
    unused = make_method(kind, clients=[])
    assert_same(train([unused]), train([], reductions=make_rules(unused)), "with `clients=[]`", tolerance=0)


@statement("Method", "what clients keep on disk comes back to the bit")
def _(kind: type[Method]) -> None:
    assert_same(train([make_method(kind)], client_store="disk"), train([make_method(kind)]), "from disk", tolerance=0)


@statement("Method", "what clients and the server keep is finite")
def _(kind: type[Method]) -> None:
    train([make_method(kind)], callbacks=[_LooksForNaN()])


@statement("Method", "it leaves the module as it was: no hooks, and the same parameters may learn")
def _(kind: type[Method]) -> None:
    initial_task, task = make_task(), train([make_method(kind)])
    for name, module in task.named_modules():
        hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
        if hooks:
            raise AssertionError(f"{len(hooks)} hooks are left on `{name}`")
    for (name, parameter), initial_parameter in zip(task.named_parameters(), initial_task.parameters(), strict=True):
        if parameter.requires_grad != initial_parameter.requires_grad:
            raise AssertionError(f"`{name}.requires_grad` is {parameter.requires_grad} afterwards")


class _SaveAfter(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class _LooksForNaN(Callback):
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        server = require_federation(trainer, "a statement", "it has no clients").server
        sections_by_owner = {client: server.client_store[client] for client in server.client_store} | {
            "the server": {"state": server.state}
        }
        for owner, sections in sections_by_owner.items():
            for section, memory in sections.items():
                for name, value in memory.items():
                    if not value.isfinite().all():
                        raise AssertionError(f"`{section}.{name}` of {owner} is not finite")
