"""Registration of statements about methods, a small double-precision federation to check them, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import SkipTest

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.methods.hook_results import INVALID_HOOK
from lightning_fcl.methods.method import Method
from lightning_fcl.models.quantization import silence_warnings
from lightning_fcl.simulation.strategy import FederatedStrategy
from lightning_fcl.tasks.classification import Classifier

Implementation = type[Method] | type[L.LightningModule]


class NotApplicableError(SkipTest):
    """An error for a statement that cannot be checked on a class. The message contains the reason.

    pytest and unittest skip a test that raises this error.
    """


@dataclass(frozen=True)
class Statement:
    """A statement that holds for every implementation of a method.

    Args:
        target: Name of the method. ``"Method"`` for a statement about every method.
        description: The statement as a sentence.
        check: Function that checks a class. It raises AssertionError if the statement does not hold.
    """

    target: str
    description: str
    check: Callable[[Any], None]

    def __str__(self) -> str:
        return f"{self.target}: {self.description}"


STATEMENTS: list[Statement] = []


def statement(target: str, description: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Return a decorator that registers a function as the check of a statement about the method ``target``."""

    def keep(check: Callable[[Any], None]) -> Callable[[Any], None]:
        STATEMENTS.append(Statement(target, description, check))
        return check

    return keep


CLASSES, FEATURES = 6, 8
ROUNDING = 1e-9
"""Largest allowed difference between two computations of the same values in double precision. Values are near 1."""


class SmallNet(nn.Module):
    """A network with 8 input features, a body with 12 units, and a head for 6 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 12
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh())
        self.head = nn.Linear(12, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


def make_method(kind: Implementation, **arguments: Any) -> Any:
    """Return an instance of ``kind``. Raise NotApplicableError if the class does not accept the arguments."""
    try:
        return kind(**arguments)
    except TypeError as error:
        raise NotApplicableError(f"the class cannot be created with {arguments or 'no arguments'}: {error}") from error


def make_rules(*methods: Method) -> dict[str, str]:
    """Return the reductions that methods need: a client-local head if a method needs one, otherwise {}."""
    return {"model.head.*": "local"} if any(method.needs.local_head for method in methods) else {}


def samples() -> tuple[Tensor, Tensor]:
    """Return 240 samples in double precision, shape (240, 8), and their labels, shape (240,).

    Each of the 6 classes has its own center.
    """
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=draws, dtype=torch.float64)
    y = torch.arange(240) % CLASSES
    return centres[y] + 0.7 * torch.randn(len(y), FEATURES, generator=draws, dtype=torch.float64), y


def make_stream(clients: int = 3, tasks: int = 2, rounds: int = 2, seed: int = 0, **overrides: Any) -> FederatedStream:
    """Return a class-incremental stream of `samples`, by default with an IID partition over the clients."""
    scenario = ClassIncremental(tasks, rounds)
    arguments: dict[str, Any] = {
        "scenario": scenario,
        "partition": IID(clients),
        "batch_size": 8,
        "seed": seed,
        **overrides,
    }
    return FederatedStream.from_arrays(*samples(), **arguments)


def make_task(rate: float = 0.1) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(SmallNet(), CLASSES, lambda parameters: torch.optim.SGD(parameters, lr=rate))


def train(
    methods: Sequence[Method] = (),
    stream: FederatedStream | None = None,
    task: L.LightningModule | None = None,
    callbacks: Sequence[Callback] = (),
    max_epochs: int | None = None,
    precision: Literal["64-true", "32-true"] = "64-true",
    ckpt_path: str | None = None,
    **strategy: Any,
) -> Any:
    """Train a task in a small federation, and return the task. Training is sequential by default.

    Further arguments, such as ``max_vectorized_clients``, are passed to `FederatedStrategy`.
    """
    stream, task = make_stream() if stream is None else stream, make_task() if task is None else task
    usual: dict[str, Any] = {
        "max_vectorized_clients": 1,
        "client_weights": "uniform",
        "reductions": make_rules(*methods),
    }
    with silence_warnings():
        trainer = L.Trainer(
            strategy=FederatedStrategy(**{**usual, **strategy}),
            callbacks=[*methods, *callbacks],
            max_epochs=-1 if max_epochs is None else max_epochs,
            accelerator="cpu",
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(task, datamodule=stream, ckpt_path=ckpt_path)
        except (InvalidValueError, InvalidTypeError) as error:
            if error.code == INVALID_HOOK:
                raise
            raise NotApplicableError(f"the fit of the check raised {type(error).__name__}: {error}") from error
    return task


def assert_same(actual: nn.Module, expected: nn.Module, description: str, tolerance: float = ROUNDING) -> None:
    """Raise AssertionError unless the states of two modules are equal within ``tolerance``. 0 requires equal values."""
    assert_close(actual.state_dict(), expected.state_dict(), description, tolerance)


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], description: str, tolerance: float = ROUNDING
) -> None:
    """Raise AssertionError unless two dicts of tensors have the same names and differ by at most ``tolerance``."""
    if set(actual) != set(expected):
        raise AssertionError(f"{description}: the names of the tensors differ: {sorted(set(actual) ^ set(expected))}")
    for name, value in actual.items():
        other = expected[name]
        if value.shape != other.shape:
            raise AssertionError(
                f"{description}: `{name}` has the shape {tuple(value.shape)} instead of {tuple(other.shape)}"
            )
        max_difference = float((value.double() - other.double()).abs().max())
        if not max_difference <= tolerance:
            raise AssertionError(
                f"{description}: `{name}` differs by {max_difference:.1e}, but at most {tolerance:g} is allowed"
            )


def state_distance(first: nn.Module, second: nn.Module) -> float:
    """Return the Euclidean distance between the states of two modules."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return float(torch.stack([(a - b).square().sum() for a, b in pairs]).sum().sqrt())
