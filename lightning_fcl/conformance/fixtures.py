"""A statement about a method, the small federation in double precision that tries it, and how outcomes are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.stream import FederatedStream
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.methods.method import Method
from lightning_fcl.models.quantization import silence_warnings
from lightning_fcl.simulation.strategy import FederatedStrategy
from lightning_fcl.tasks.classification import Classifier

Implementation = type[Method] | type[L.LightningModule]


class NotApplicableError(Exception):
    """A statement cannot be tried on a class, and why."""


@dataclass(frozen=True)
class Statement:
    """What holds of every implementation of a method.

    Args:
        target: Whose statement it is: the method's name; "Method": of every method.
        description: The statement, a sentence.
        check: Tries it on a class.
    """

    target: str
    description: str
    check: Callable[[Any], None]

    def __str__(self) -> str:
        return f"{self.target}: {self.description}"


STATEMENTS: list[Statement] = []


def statement(target: str, description: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a function that tries a class a statement, of one claim."""

    def keep(check: Callable[[Any], None]) -> Callable[[Any], None]:
        STATEMENTS.append(Statement(target, description, check))
        return check

    return keep


CLASSES, FEATURES = 6, 8
ROUNDING = 1e-9
"""Most by which two ways to the same numbers may differ, which are about 1, in double precision."""


class SmallNet(nn.Module):
    """Eight features, a body of twelve units, a head for six classes."""

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
    """An object of a class, which need not take the arguments."""
    try:
        return kind(**arguments)
    except TypeError as error:
        raise NotApplicableError(f"it cannot be made with {arguments or 'no arguments'}: {error}") from error


def make_rules(*methods: Method) -> dict[str, str]:
    """How entries come together, as methods need it: heads stay with the clients."""
    return {"model.head.*": "local"} if any(method.needs.local_head for method in methods) else {}


def samples() -> tuple[Tensor, Tensor]:
    """240 samples of six classes around centres of their own, in double precision, and their labels."""
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=draws, dtype=torch.float64)
    y = torch.arange(240) % CLASSES
    return centres[y] + 0.7 * torch.randn(len(y), FEATURES, generator=draws, dtype=torch.float64), y


def make_stream(clients: int = 3, tasks: int = 2, rounds: int = 2, seed: int = 0, **overrides: Any) -> FederatedStream:
    """The samples, with classes that come in tasks, for clients that have equally many."""
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
    """A classifier that clients have trained, one at a time unless ``max_vectorized_clients`` says otherwise."""
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
            raise NotApplicableError(f"it refuses the trial: {error}") from error
    return task


def assert_same(actual: nn.Module, expected: nn.Module, description: str, tolerance: float = ROUNDING) -> None:
    """Two modules have the same state; of a tolerance of 0 to the bit."""
    assert_close(actual.state_dict(), expected.state_dict(), description, tolerance)


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], description: str, tolerance: float = ROUNDING
) -> None:
    """Two sets of tensors by name are the same."""
    if set(actual) != set(expected):
        raise AssertionError(f"{description}: there are other entries, {sorted(set(actual) ^ set(expected))}")
    for name, value in actual.items():
        other = expected[name]
        max_difference = (
            float((value.double() - other.double()).abs().max()) if value.shape == other.shape else float("inf")
        )
        if not max_difference <= tolerance:
            raise AssertionError(
                f"{description}: `{name}` is {max_difference:.1e} apart, at most {tolerance:.0e} was expected"
            )


def state_distance(first: nn.Module, second: nn.Module) -> float:
    """Between two modules' states, Euclidean."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return float(torch.stack([(a - b).square().sum() for a, b in pairs]).sum().sqrt())
