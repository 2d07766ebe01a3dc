"""Tests that number arguments of public classes and functions reject strings, NaN and booleans.

Integer arguments also reject floats. `EXCEPTIONS` lists the classes that are not tested.
"""

import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from types import UnionType

import numpy as np
import pytest
import torch
from torch import nn

import lightning_fcl
from lightning_fcl import FederatedStrategy, FederatedStream, callbacks, models
from lightning_fcl.data import partition, scenarios, split
from lightning_fcl.deployment import deployment_server
from lightning_fcl.edge import report
from lightning_fcl.errors import InvalidTypeError
from lightning_fcl.federation import client_speeds, compression, fedbuff, robust, swarm, synchronization
from lightning_fcl.validation import check_arguments

MODULES = (
    partition,
    scenarios,
    split,
    deployment_server,
    report,
    fedbuff,
    robust,
    synchronization,
    client_speeds,
    swarm,
    compression,
)

# Public classes whose number arguments are not checked when an object is created, and the reason.
EXCEPTIONS = {
    "RoundRecord": "a result that users only read",
    "TimingContext": "made by a schedule",
    "RoundTiming": "made by a schedule",
    "Flight": "made by a schedule",
    "Clock": "made by a schedule",
    "BufferedServer": "made by a schedule",
    "Plan": "made by a scenario",
    "Participation": "made by the strategy, which checks `participation`",
    "Pool": "made by a stream",
    "Step": "made by the local training",
    "Server": "made by the federation",
    "Client": "made by the federation",
    "ClientRound": "made by the federation",
}


def public() -> dict[str, typing.Any]:
    """Return public classes and functions by name, except those in `EXCEPTIONS`.

    These are the objects that three packages export, and the classes of `MODULES` that are not exceptions.
    """
    found = {name: getattr(package, name) for package in (lightning_fcl, callbacks, models) for name in package.__all__}
    for module in MODULES:
        names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        own = {name: getattr(module, name) for name in names}
        package = module.__name__
        found |= {
            name: one
            for name, one in own.items()
            if inspect.isclass(one) and one.__module__.startswith(package) and not issubclass(one, Exception)
        }
    return {name: one for name, one in found.items() if name not in EXCEPTIONS and callable(one)}


def number_hints(make, every: bool = False) -> dict[str, typing.Any]:
    """Return the annotations of the number arguments of a class or function. With `every`, return all annotations."""
    owner = make.__init__ if inspect.isclass(make) else make
    hints = {}
    for base in reversed(make.__mro__) if inspect.isclass(make) else ():
        names = {**vars(inspect.getmodule(base)), **vars(typing)}
        for name, hint in vars(base).get("__annotations__", {}).items():
            hints[name] = _evaluated(hint, names)
    own = inspect.unwrap(owner)
    names = {**getattr(own, "__globals__", {}), **vars(typing)}
    hints |= {name: _evaluated(hint, names) for name, hint in getattr(own, "__annotations__", {}).items()}
    names = [name for name in inspect.signature(make).parameters if name in hints]
    return {name: hints[name] for name in names if every or _members(hints[name]) & {int, float}}


def _evaluated(hint, names):
    try:
        return eval(hint, names) if isinstance(hint, str) else hint
    except NameError:
        return typing.Any


def _members(hint) -> set:
    return {*typing.get_args(hint)} if typing.get_origin(hint) in (typing.Union, UnionType) else {hint}


def wrong_values(hint) -> list:
    members = _members(hint)
    values = ["3", "many", True, math.nan, int, np.bool_(True)]
    return values if float in members else [*values, 2.0, 2.5, np.float32(2)]


CASES = [(name, argument) for name, one in public().items() for argument in number_hints(one)]


def test_cases_cover_methods_models_and_settings():
    named = {f"{name}.{argument}" for name, argument in CASES}
    assert {
        "FederatedStream.batch_size", "FederatedStrategy.local_epochs", "EWC.strength",
        "Dirichlet.alpha", "ClassIncremental.num_experiences",
        "HARCNN.dropout", "Classifier.num_classes", "TopK.fraction",
        "Deadline.timeout", "Krum.num_malicious_clients",
        "DeviceProfile.power_mw", "DeploymentConfig.round_timeout", "Split.test",
    } <= named  # fmt: skip
    assert len(CASES) > 200


OBJECTS = {
    nn.Module: nn.Linear(4, 3),
    models.EchoStateNetwork: models.EchoStateNetwork(4, 8),
    client_speeds.ClientSpeeds: client_speeds.ClientSpeeds(0.01),
    typing.Any: [0, 1],
    int: 4,
    float: 0.5,
    str: "MLP",
    tuple[str, ...]: ("a",),
    dict[str, int]: {"tcdm": 4},
    typing.Literal["client", "sample"]: "client",
}


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_number_arguments_of_public_classes_reject_other_values(name):
    make = public()[name]
    hints, parameters = number_hints(make, every=True), inspect.signature(make).parameters.values()
    needed = {
        one.name: OBJECTS.get(hints[one.name], [4, 4])
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }
    for argument, hint in number_hints(make).items():
        for value in wrong_values(hint):
            with pytest.raises((TypeError, ValueError), match=rf"^Expected `{argument}` to be .*but got .*\w"):
                make(**{**needed, argument: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FederatedStream("digits", batch_size="16"),
            'a whole number or None, but got "16". Use `batch_size=16`.',
        ),
        (
            lambda: FederatedStream("digits", batch_size=16.0),
            "a whole number or None, but got 16.0. Use `batch_size=16`.",
        ),
        (
            lambda: FederatedStrategy(participation="0.5"),
            'a number or a `Poisson`, but got "0.5". Use `participation=0.5`.',
        ),
        (lambda: FederatedStrategy(local_epochs="2"), 'a whole number, but got "2". Use `local_epochs=2`.'),
        (lambda: FederatedStream("digits", shuffle="no"), 'True, False or None, but got "no". Use `shuffle=False`.'),
        (
            lambda: FederatedStream("digits", partition=partition.IID),
            "an object, but got the class `IID`. Use `partition=IID()`.",
        ),
        (
            lambda: lightning_fcl.Classifier(nn.Linear, 2),
            "an object, but got the class `Linear`. Use `model=Linear(...)`.",
        ),
        (
            lambda: callbacks.Replay(transform=nn.Flatten),
            "an object, but got the class `Flatten`. Use `transform=Flatten()`.",
        ),
        (
            lambda: FederatedStrategy(swarm=swarm.Swarm),
            "an object, but got the class `Swarm`. Use `swarm=Swarm()`.",
        ),
        (
            lambda: callbacks.EWC(strength=math.nan),
            "a number, but got nan. Use a finite number, such as `strength=1.0`.",
        ),
    ],
)
def test_invalid_argument_message_has_a_fix(make, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert str(raised.value).partition(" to be ")[2] == message


def test_numpy_numbers_are_converted_to_python_numbers():
    strategy = FederatedStrategy(local_epochs=np.int64(2), participation=np.float32(0.5))
    assert type(strategy.settings.local_epochs) is int and type(strategy.participation) is float
    assert type(callbacks.EWC(strength=np.float64(2)).strength) is float
    task = lightning_fcl.Classifier(nn.Linear(4, 3), num_classes=np.int64(3))
    assert task.hparams["num_classes"] == 3 and type(task.hparams["num_classes"]) is int


def test_check_arguments_keeps_signature_and_error_of_a_wrong_call():
    @check_arguments
    def train(x: Sequence[float], *, epochs: int = 1, options: Mapping[str, int] | None = None) -> int:
        return epochs

    assert list(inspect.signature(train).parameters) == ["x", "epochs", "options"]
    assert train([0.5], epochs=3, options={"a": 1}) == 3
    assert train(torch.ones(2)) == train(np.ones(2)) == train((1, 2)) == 1
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'epoch'"):
        train([0.5], epoch=3)
    with pytest.raises(InvalidTypeError, check=lambda error: error.argument == "x"):
        train(["a"])
    with pytest.raises(InvalidTypeError, check=lambda error: error.argument == "options"):
        train([0.5], options={"a": 0.5})


def test_annotations_of_users_classes_check_only_numbers():
    class Mine(callbacks.FedProx):
        # The annotation requires an instance, but the default is a class.
        kind: nn.Module = nn.Linear  # type: ignore[assignment]

    assert Mine(mu=0.5).kind is nn.Linear
    with pytest.raises(InvalidTypeError, check=lambda error: error.argument == "mu"):
        Mine(mu="0.5x")


def test_unresolvable_annotation_accepts_any_value():
    class Mine(callbacks.FedProx):
        kind: "np.no_such_type | no_such_module.Name" = "anything"  # noqa: F821

    assert Mine(mu=0.5).kind == "anything"
