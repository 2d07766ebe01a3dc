"""What holds of classifiers that are solved for, not trained: they are those of all samples in one place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fcl.conformance.trial import CLASSES, Net, assert_close, make, states, task_of, train, trial_stream
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.methods.method import Method

_BETA = 0.5


@states("Fed3R", "however the samples are spread over clients, the classifier is the same")
def _(kind: type[Method]) -> None:
    heads = []
    for clients in (1, 3, 8):
        task = train([make(kind)], trial_stream(clients, tasks=1, rounds=1), task_of(rate=0.0))
        heads.append({name: value for name, value in task.state_dict().items() if ".head." in name})
    for other in heads[1:]:
        assert_close(other, heads[0], "of other clients", 1e-7)


def _is_pooled_ridge(claim: str, says: str, clients: tuple[int, ...], tasks: int, **arguments: Any) -> None:
    @states(claim, f"{says}, it is the ridge regression of all samples in one place")
    def _(kind: type[L.LightningModule]) -> None:
        for number in clients:
            stream = trial_stream(number, tasks, rounds=1, batch_size=240)
            task = _solved(kind, stream, **arguments)
            wanted, x = _pooled(task, stream)
            assert_close({"outputs": task(x)}, {"outputs": wanted}, f"of {number} clients", 1e-8)


_is_pooled_ridge("AFL", "of one, three or fifty clients, their regularisers cleaned away", (1, 3, 50), 1, gamma=1.0)
_is_pooled_ridge("AnalyticFCL", "of tasks in sequence, whose classes come one after the other", (3,), 3, gamma=1.0)
_is_pooled_ridge("FedRAN", "of full rank", (3,), 2, rank=12)


@states("AnalyticFCL", "what it says of classes that nobody has seen is 0")
def _(kind: type[L.LightningModule]) -> None:
    stream = trial_stream(tasks=3, rounds=1, batch_size=240)
    task = _solved(kind, stream, max_epochs=1, gamma=1.0)
    unseen = sorted({*range(CLASSES)} - {*stream.plan.tasks["0"][0]})
    said = task(_inputs(stream))[:, unseen]
    if said.abs().max() > 0:
        raise AssertionError(f"of classes {unseen} it says up to {float(said.abs().max()):.2g} before they have come")


@states("RanPAC", "random features are common to all: however the samples are spread, the classifier is the same")
def _(kind: type[L.LightningModule]) -> None:
    streams = [trial_stream(number, rounds=1, batch_size=240) for number in (1, 3, 8)]
    found = [_solved(kind, stream, random_features=40)(_inputs(stream)) for stream in streams]
    for other in found[1:]:
        assert_close({"outputs": other}, {"outputs": found[0]}, "of other clients", 1e-7)


def _solved(kind: Any, stream: FederatedStream, max_epochs: int | None = None, **arguments: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        task = make(kind, model=Net(), num_classes=CLASSES, beta=_BETA, min_samples=1, **arguments)
    return train([], stream, task, max_epochs=max_epochs, reductions={}).eval()


def _inputs(stream: FederatedStream) -> Tensor:
    x: Tensor = stream.take(stream.plan.test)[0]
    return x.double()


def _pooled(task: Any, stream: FederatedStream) -> tuple[Tensor, Tensor]:
    """What the ridge regression of all training samples says of the test samples; and these."""
    rows = torch.cat([torch.from_numpy(own) for current in stream.plan.train for own in current.values()])
    x, y = stream.take(rows.numpy())
    with torch.no_grad():
        features, asked = (task.model.embed(one.double()) for one in (x, stream.take(stream.plan.test)[0]))
    targets = torch.eye(CLASSES, dtype=torch.float64)[y]
    gram = features.T @ features + _BETA * torch.eye(features.shape[1], dtype=torch.float64)
    return asked @ torch.linalg.solve(gram, features.T @ targets), _inputs(stream)
