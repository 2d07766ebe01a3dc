"""Statements that a method equals another computation in a special setting: DER++, CCVR, FedDyn, FOT and others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fcl.conformance.averaging import is_pooled_ridge, register_fedavg_statement
from lightning_fcl.conformance.fixtures import (
    CLASSES,
    FEATURES,
    assert_close,
    make_method,
    make_stream,
    make_task,
    samples,
    statement,
    train,
)
from lightning_fcl.conformance.forgetting import SeenLabels
from lightning_fcl.conformance.reference import ReferenceRule, Rounds, register_reference_statement, task_gradient
from lightning_fcl.data.partition import IID, Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental, DomainIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.method import Method
from lightning_fcl.tasks.classification import Regressor

register_fedavg_statement(
    "SCAFFOLD", "in the first round of each task no client has a control variate", tasks=3, rounds=1
)
is_pooled_ridge("STSA-E", "with one sample in each group", (3,), 1, upload="moments", groups=240)


@dataclass
class _TwiceFedProx(ReferenceRule):
    alpha: float = 0.0

    def gradient(self, memory: dict[str, Tensor], w_server: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return task_gradient(w, x, y) + self.alpha * (w - w_server)

    def aggregate(self, w_server: Tensor, uploads: list[Tensor]) -> Tensor:
        return 2 * super().aggregate(w_server, uploads) - w_server


register_reference_statement(
    "FedDyn",
    "the first round of each task gives 2 w - w_0, where w is the result of FedProx from w_0",
    _TwiceFedProx,
    rounds=1,
    participation=1.0,
    alpha=0.3,
)


class _Quadratic(Regressor):
    """A task with the loss ``(w x - y)^2 / 2`` of one parameter w."""

    def __init__(self) -> None:
        network = nn.Linear(1, 1, bias=False)
        nn.init.constant_(network.weight, 2.0)
        super().__init__(network, 1, partial(torch.optim.SGD, lr=0.1))

    def sample_loss(self, output: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = super().sample_loss(output, y) / 2
        return loss


@statement("FedDyn", "on clients with different quadratic losses, it converges to the minimum of the mean loss")
def _(kind: type[Method]) -> None:
    # Client k has the loss a_k / 2 (w - b_k)^2 with the curvature a_k and the minimum b_k.
    curvatures, minima = torch.tensor([[0.5], [1.0], [4.0]]), torch.tensor([[-3.0], [5.0], [-1.0]])
    owner = torch.arange(3).repeat_interleave(4)
    x, y = curvatures.sqrt()[owner], (curvatures.sqrt() * minima)[owner]
    finals = []
    for methods in ([make_method(kind, alpha=1.0)], []):
        stream = FederatedStream.from_arrays(
            x.numpy(), y.numpy(), owner.numpy(), 0 * owner.numpy(), batch_size=4, split=Split(test=0.0), seed=0,
            scenario=DomainIncremental(rounds_per_experience=60),
        )  # fmt: skip
        finals.append(float(train(methods, stream, _Quadratic(), local_epochs=3).model.weight.detach()))
    expected = float((curvatures * minima).sum() / curvatures.sum())
    if abs(finals[0] - expected) > 1e-4 or abs(finals[1] - expected) < 1e-2:
        raise AssertionError(
            f"the parameter is {finals[0]:.5f} instead of {expected:.5f}. FedAvg gives {finals[1]:.5f}"
        )


@statement("DERpp", "alpha weights the squared distance from stored logits, and beta the loss on other stored samples")
def _(kind: type[Method]) -> None:
    draws = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(8, size, generator=draws, dtype=torch.float64) for size in (FEATURES, CLASSES))
    y, network = torch.arange(8) % CLASSES, make_task().model.double()
    for alpha, beta in ((0.0, 0.7), (0.3, 0.0), (0.3, 0.7)):
        step = Step(
            {}, {}, x, x, lambda state, x: x, forward_fn=network, replay_weight=1.0, y=y,
            loss_fn=lambda x, y: F.cross_entropy(network(x), y), replay_samples={"x": x, "y": y, "logits": logits},
        )  # fmt: skip
        method = make_method(kind, alpha=alpha, beta=beta, batch_size=4)
        distance = (network(x[:4]) - logits[:4]).square().mean()
        expected_penalty = alpha * distance + beta * F.cross_entropy(network(x[4:]), y[4:])
        actual, expected = (
            torch.autograd.grad(penalty, [*network.parameters()])
            for penalty in (method.penalty(Client(), step), expected_penalty)
        )
        names = [name for name, _ in network.named_parameters()]
        assert_close(
            dict(zip(names, actual, strict=True)),
            dict(zip(names, expected, strict=True)),
            f"the gradient of the penalty with alpha = {alpha} and beta = {beta}",
        )


@statement("CCVR", "the calibrated head does not depend on how the samples are distributed over clients")
def _(kind: type[Method]) -> None:
    heads = []
    for partition in (IID(1), IID(8), Dirichlet(3, 0.5)):
        stream = make_stream(tasks=2, rounds=1, partition=partition)
        task = train([make_method(kind, num_samples=32)], stream, make_task(rate=0.0))
        heads.append({name: value for name, value in task.state_dict().items() if ".head." in name})
    for other in heads[1:]:
        assert_close(other, heads[0], "with other clients", 1e-6)


@statement("FOT", "with eps = 1, a second task does not change a layer's outputs for the inputs of the first task")
def _(kind: type[Method]) -> None:
    x, y = samples()
    # The inputs of the first task have components only in half of the directions.
    first_classes = torch.arange(CLASSES // 2)
    x[torch.isin(y, first_classes), FEATURES // 2 :] = 0.0
    layers = []
    for max_epochs in (2, None):
        stream = FederatedStream.from_arrays(
            x, y, scenario=ClassIncremental(2, 2, class_order=[*range(CLASSES)]),
            partition=IID(3), batch_size=8, seed=0,
        )  # fmt: skip
        task = train([make_method(kind, eps=1.0)], stream, max_epochs=max_epochs)
        layers.append(task.model.body[0])
    inputs = x[torch.isin(y, first_classes)].float().double()
    outputs = [{"outputs": layer(inputs)} for layer in layers]
    assert_close(outputs[1], outputs[0], "after the second task")
    if torch.equal(layers[0].weight, layers[1].weight):
        raise AssertionError("the second task has not changed the layer")


@statement("Replay", "a client replays the tasks in which it took part, also if it missed their last rounds")
def _(kind: type[Method]) -> None:
    counter, rounds, stream = SeenLabels(), Rounds("Replay"), make_stream(rounds=3)
    train([make_method(kind, memory_size=100_000)], stream, callbacks=[counter, rounds], participation=1)
    took_part: set[tuple[int, str]] = set()
    for round_idx, participants in enumerate(rounds.participants):
        for client in participants:
            expected = Counter(_labels(stream, round_idx, client))
            if round_idx >= 3 and (0, client) in took_part:
                expected += Counter(_labels(stream, 0, client))
            took_part.add((round_idx // 3, client))
            if counter.labels[round_idx] != expected:
                raise AssertionError(
                    f"in round {round_idx + 1} the number of samples by label is {dict(counter.labels[round_idx])} "
                    f"instead of {dict(expected)}"
                )


def _labels(stream: FederatedStream, round_idx: int, client: str) -> list[int]:
    labels: list[int] = stream.y[torch.from_numpy(stream.plan.train[round_idx][client])].tolist()
    return labels
