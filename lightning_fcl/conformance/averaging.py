"""Statements about averaging: settings in which a method equals FedAvg, and readouts that equal central training."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.conformance.fixtures import (
    CLASSES,
    SmallNet,
    assert_close,
    assert_same,
    make_method,
    make_stream,
    make_task,
    statement,
    train,
)
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.method import Method
from lightning_fcl.models.lora import LoRA


def register_fedavg_statement(
    claim: str, says: str = "", tasks: int = 2, rounds: int = 2, clients: int = 3, batch_size: int = 8, **arguments: Any
) -> None:
    """Register the statement that the method ``claim`` gives the same result as FedAvg.

    Args:
        claim: Name of the method.
        says: Reason why the results are equal. By default, the statement names ``arguments``.
        tasks: Number of tasks.
        rounds: Number of rounds per task.
        clients: Number of clients.
        batch_size: Batch size.
        **arguments: Arguments of the method.
    """
    title = says or "with " + " and ".join(f"{name} = {value}" for name, value in arguments.items())

    @statement(claim, f"{title}, so the result equals FedAvg" if says else f"{title} the result equals FedAvg")
    def _(kind: type[Method]) -> None:
        stream = partial(make_stream, clients, tasks, rounds, batch_size=batch_size)
        actual, expected = (train(methods, stream()) for methods in ([make_method(kind, **arguments)], []))
        assert_same(actual, expected, title)


register_fedavg_statement("FedProx", mu=0.0)
register_fedavg_statement("FedProto", strength=0.0)
register_fedavg_statement("LogitAdjustment", tau=0.0)
register_fedavg_statement("FedNTD", beta=0.0)
register_fedavg_statement("MOON", mu=0.0)
register_fedavg_statement("FedDyn", alpha=0.0)
register_fedavg_statement("EWC", strength=0.0)
register_fedavg_statement("MAS", strength=0.0)
register_fedavg_statement("SI", strength=0.0)
register_fedavg_statement("LwF", strength=0.0)
register_fedavg_statement("TARGET", distillation_weight=0.0)
register_fedavg_statement("TARGET", num_images=0)
register_fedavg_statement(
    "MFCL",
    "with a single task and without synthetic samples the loss is the cross-entropy of all classes",
    tasks=1,
    distillation_weight=0.0,
    finetune_weight=0.0,
)


@statement("FedProx", "the penalty is mu / 2 times the squared distance to the received parameters")
def _(kind: type[Method]) -> None:
    draws = torch.Generator().manual_seed(0)
    received_state = {"w": torch.randn(5, generator=draws), "b": torch.randn(3, generator=draws)}
    params = {name: value + torch.randn(value.shape, generator=draws) for name, value in received_state.items()}
    squared_distance = sum(float((params[name] - value).square().sum()) for name, value in received_state.items())
    no_samples = torch.empty(0)
    for trial_params, expected_penalty in ((received_state, 0.0), (params, 0.3 / 2 * squared_distance)):
        client, step = (
            Client(received_state=received_state),
            Step(trial_params, received_state, no_samples, no_samples, lambda state, x: x),
        )
        actual_penalty = float(make_method(kind, mu=0.3).penalty(client, step))
        if abs(actual_penalty - expected_penalty) > 1e-5:
            raise AssertionError(f"the penalty is {actual_penalty:.6f} instead of {expected_penalty:.6f}")


register_fedavg_statement("FedProx", "in a round of one step the penalty has no gradient", batch_size=240)
register_fedavg_statement("SCAFFOLD", "in the first round no client has a control variate", tasks=1, rounds=1)
register_fedavg_statement(
    "SCAFFOLD", "in rounds of one step the corrections of all clients sum to zero", batch_size=240
)
register_fedavg_statement("SCAFFOLD", "with a single client the correction is zero", clients=1)
register_fedavg_statement("FedNova", "in rounds of one step all clients have the same weight", batch_size=240)
register_fedavg_statement("APFL", "the personal models of clients are client-local")
register_fedavg_statement("Ditto", "the personal models of clients are client-local")
register_fedavg_statement("RegMean", "with a single client the aggregated weights are the client's weights", clients=1)
register_fedavg_statement(
    "LogitAdjustment", "with the same number of samples of each class no logit is adjusted", tasks=1, clients=1
)


@statement("LoRM", "with a single client one round gives the same outputs as training only B and the head")
def _(kind: type[Method]) -> None:
    outcomes = []
    for methods, train_a in (([make_method(kind)], True), ([], False)):
        stream, task = make_stream(clients=1, tasks=1, rounds=1), make_task()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            task.model = LoRA(SmallNet(), rank=2, train_a=train_a)
        train(methods, stream, task)
        outcomes.append({"outputs": task(stream.get_samples(stream.plan.test)[0].double())})
    assert_close(outcomes[0], outcomes[1], "after a round of one client", 1e-8)


@statement("FedRep", "heads are client-local: the server's head does not change, and the server's body is trained")
def _(kind: type[Method]) -> None:
    initial_task, final_task = make_task().double(), train([make_method(kind)])
    heads, bodies = (
        [
            {name: value for name, value in task.state_dict().items() if part in name}
            for task in (initial_task, final_task)
        ]
        for part in (".head.", ".body.")
    )
    assert_close(heads[1], heads[0], "the server's head", tolerance=0)
    if all(torch.equal(*pair) for pair in zip(*(body.values() for body in bodies), strict=True)):
        raise AssertionError("the server's body has not been trained")


_BETA = 0.5


@statement("Fed3R", "the classifier does not depend on how the samples are distributed over clients")
def _(kind: type[Method]) -> None:
    heads = []
    for clients in (1, 3, 8):
        task = train([make_method(kind)], make_stream(clients, tasks=1, rounds=1), make_task(rate=0.0))
        heads.append({name: value for name, value in task.state_dict().items() if ".head." in name})
    for other in heads[1:]:
        assert_close(other, heads[0], "with a different number of clients", 1e-7)


def is_pooled_ridge(claim: str, says: str, clients: tuple[int, ...], tasks: int, **arguments: Any) -> None:
    """Register the statement that the classifier of ``claim`` equals ridge regression on all clients' samples.

    Args:
        claim: Name of the method.
        says: Setting in which the two are equal.
        clients: Numbers of clients to check.
        tasks: Number of tasks.
        **arguments: Arguments of the class.
    """

    @statement(claim, f"{says}, the classifier equals the ridge regression on the pooled samples")
    def _(kind: type[L.LightningModule]) -> None:
        for number in clients:
            stream = make_stream(number, tasks, rounds=1, batch_size=240)
            task = _solved(kind, stream, **arguments)
            expected_outputs, x = _pooled(task, stream)
            assert_close({"outputs": task(x)}, {"outputs": expected_outputs}, f"with {number} clients", 1e-8)


is_pooled_ridge("AFL", "with 1, 3 or 50 clients, whose regularization is removed", (1, 3, 50), 1, gamma=1.0)
is_pooled_ridge("AnalyticFCL", "with tasks in sequence, each with new classes", (3,), 3, gamma=1.0)
is_pooled_ridge("FedRAN", "with full rank", (3,), 2, rank=12)


@statement("AnalyticFCL", "the outputs for unseen classes are 0")
def _(kind: type[L.LightningModule]) -> None:
    stream = make_stream(tasks=3, rounds=1, batch_size=240)
    task = _solved(kind, stream, max_epochs=1, gamma=1.0)
    unseen = sorted({*range(CLASSES)} - {*stream.plan.tasks["0"][0]})
    outputs = task(_inputs(stream))[:, unseen]
    if outputs.abs().max() > 0:
        raise AssertionError(
            f"an output for the unseen classes {unseen} has the magnitude {float(outputs.abs().max()):.2g} instead of 0"
        )


@statement("RanPAC", "the classifier does not depend on how the samples are distributed over clients")
def _(kind: type[L.LightningModule]) -> None:
    streams = [make_stream(number, rounds=1, batch_size=240) for number in (1, 3, 8)]
    outputs = [_solved(kind, stream, random_features=40)(_inputs(stream)) for stream in streams]
    for other in outputs[1:]:
        assert_close({"outputs": other}, {"outputs": outputs[0]}, "with a different number of clients", 1e-7)


def _solved(kind: Any, stream: FederatedStream, max_epochs: int | None = None, **arguments: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        task = make_method(kind, model=SmallNet(), num_classes=CLASSES, beta=_BETA, min_samples=1, **arguments)
    return train([], stream, task, max_epochs=max_epochs, reductions={}).eval()


def _inputs(stream: FederatedStream) -> Tensor:
    x: Tensor = stream.get_samples(stream.plan.test)[0]
    return x.double()


def _pooled(task: Any, stream: FederatedStream) -> tuple[Tensor, Tensor]:
    """Return the test outputs of a ridge regression on all training samples, and the inputs of the test samples."""
    rows = torch.cat([torch.from_numpy(own) for current in stream.plan.train for own in current.values()])
    x, y = stream.get_samples(rows.numpy())
    with torch.no_grad():
        features, test_features = (
            task.model.embed(one.double()) for one in (x, stream.get_samples(stream.plan.test)[0])
        )
    targets = torch.eye(CLASSES, dtype=torch.float64)[y]
    gram = features.T @ features + _BETA * torch.eye(features.shape[1], dtype=torch.float64)
    return test_features @ torch.linalg.solve(gram, features.T @ targets), _inputs(stream)
