"""Tests of hooks and requirements of methods, of several methods in one fit, and of the method driver."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl import methods as library
from lightning_fcl.callbacks import AGEM, EWC, GEM, FedProto, FedRep, FedViT, FLwF, FLwF2T, ICaRL, Replay
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidStateError, InvalidTypeError, InvalidValueError
from lightning_fcl.federation.obstacles import Reason
from lightning_fcl.methods.base import MethodBase, changes_loss, keeps_client_state, matches, overrides_hook
from lightning_fcl.methods.compose import check_compatible, compose, get_methods
from lightning_fcl.methods.context import Client, Step
from lightning_fcl.methods.driver import Freezer
from lightning_fcl.methods.method import Method
from lightning_fcl.methods.needs import Needs
from lightning_fcl.methods.replay_samples import DrawnSamples
from lightning_fcl.rng import make_client_keys, random_uint64
from lightning_fcl.validation import at_least, validated


class Penalised(Method):
    def penalty(self, client, step):
        return client.method_state["strength"] * step.output.sum()


class Halved(Method):
    def task_weight(self, client):
        return 0.5


class Both(Halved, Penalised):
    pass


class Projecting(Method):
    def project_gradient(self, client, gradient, gradient_fn):
        return 2 * gradient


class Uploading(Method):
    def transform_upload(self, client, trained_state):
        return trained_state


class Staging(Method):
    vectorizable = True

    def trainable_patterns(self, client):
        return "*.head.*"


class Replacing(Method):
    def begin_step(self, client):
        client.batch[0].zero_()


class Joining(Method):
    def replay_samples(self, client):
        return None


class Drawing(Method):
    replay_batch_size = 3

    def replay_samples(self, client):
        return client.method_state


class Further(Projecting):
    pass


def test_overrides_hook_includes_parent_classes():
    assert (
        overrides_hook(Penalised, "penalty")
        and overrides_hook(Penalised(), "penalty")
        and overrides_hook(Both, "penalty")
    )
    assert overrides_hook(Further(), "project_gradient") and not overrides_hook(Further, "penalty")
    functions = [name for name, own in vars(MethodBase).items() if callable(own) and not name.startswith("_")]
    assert not any(overrides_hook(kind, name) for kind in (Method, MethodBase) for name in functions)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (MethodBase, (True, False, False, False)),
        (Method, (True, False, False, False)),
        (Penalised, (True, False, False, False)),
        (Projecting, (False, True, True, True)),
        (Further, (False, True, True, True)),
        (Uploading, (False, False, False, False)),
        (Staging, (False, False, False, False)),
        (Replacing, (False, False, False, False)),
        (Joining, (True, False, True, True)),
        (Drawing, (True, False, True, True)),
        (type("Alone", (Method,), {"vectorizable": False}), (False, False, False, False)),
        (type("Labels", (Method,), {"needs": Needs(labels=True)}), (True, False, False, True)),
        (type("Samples", (Penalised,), {"needs": Needs(round_samples=True)}), (True, False, True, True)),
    ],
)
def test_overridden_hooks_set_needs_and_vectorizable(kind, flags):
    assert (kind.vectorizable, kind.needs.sample_loss, kind.needs.round_samples, kind.needs.labels) == flags


def step_of(output):
    return Step({}, {}, None, output, lambda state, x: x)


def test_compose_multiplies_factors_and_adds_penalties():
    methods, zero = [Penalised(), Halved(), Both()], torch.zeros(())
    clients = [Client({"strength": torch.tensor(value)}) for value in (1.0, 7.0, 10.0)]
    steps = [step_of(torch.tensor([1.0, 2.0]))] * 3
    scale, extra = compose(methods, clients, steps, zero)
    assert (scale, float(extra)) == (0.25, 33.0)
    assert compose([], [], [], zero) == (1.0, zero)


@pytest.mark.parametrize("uses", [(1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 0, 0)])
def test_compose_with_applies_equals_compose_of_applied_methods(uses):
    methods, zero = [Penalised(), Halved(), Both()], torch.zeros(())
    clients = [Client({"strength": torch.tensor(value)}) for value in (1.0, 7.0, 10.0)]
    steps = [step_of(torch.tensor([1.0, 2.0]))] * 3
    scale, extra = compose(methods, clients, steps, zero, [torch.tensor(float(on)) for on in uses])
    used = [[part for part, on in zip(parts, uses, strict=True) if on] for parts in (methods, clients, steps)]
    alone_scale, alone = compose(*used, zero)
    assert float(scale) == alone_scale and torch.equal(extra, alone)


def test_changes_loss_with_penalty_or_task_weight_is_true():
    assert changes_loss(Penalised(), Client()) and changes_loss(Halved(), Client())
    assert not changes_loss(Projecting(), Client()) and not changes_loss(Method(), Client())


def test_matches_supports_negated_and_several_patterns():
    for name in ("model.head.weight", "model.body.weight", "head"):
        assert matches(name, "*.head.*") != matches(name, "!*.head.*")
    assert matches("model.head.weight", "*.head.*") and matches("model.body.weight", "!*.head.*")
    several = ("!model.*", "model.head.*")
    names = ("other.weight", "model.head.weight", "model.body.weight")
    assert [matches(name, several) for name in names] == [True, True, False]


def test_applies_to_depends_on_clients_argument():
    balanced = ClientRound("a", 0, labels=torch.tensor([0, 1]), num_classes=2)
    one_class = ClientRound("b", 0, labels=torch.tensor([0, 0]), num_classes=2)
    for clients, uses, keeps in (
        ("all", (True, True), (True, True)),
        ("unbalanced", (False, True), (True, True)),
        (["a"], (True, False), (True, False)),
    ):
        method = Method(clients)
        assert (method.applies_to(balanced), method.applies_to(one_class)) == uses
        assert (keeps_client_state(method, balanced), keeps_client_state(method, one_class)) == keeps


def test_client_and_module_outside_of_trainer_raise():
    with raises(InvalidStateError, "client"):
        _ = Penalised().client
    with raises(InvalidStateError, "module"):
        _ = Client().module


def test_client_round_in_vectorized_step_raises(fit, make_stream, make_task):
    class Looks(Method):
        def penalty(self, client, step):
            return 0.0 * client.client_round.round_idx

    with raises(InvalidValueError, "max_vectorized_clients"):
        fit(make_task(), make_stream(), [Looks()], max_vectorized_clients=3)
    strategy = fit(make_task(), make_stream(), [Looks()]).strategy
    assert strategy.sequential_reason.reason is Reason.METHOD_FAILS


@pytest.mark.parametrize(
    ("methods", "value"),
    [
        ([FLwF(0.3), EWC(), Halved()], ["FLwF", "Halved"]),
        ([GEM(3), AGEM(3)], ["GEM", "AGEM"]),
        ([FedProto(), ICaRL(3)], ["FedProto", "ICaRL"]),
        ([FedViT(), FedRep()], ["FedViT", "FedRep"]),
    ],
)
def test_fit_with_incompatible_methods_raises(fit, make_stream, make_task, methods, value):
    with raises(InvalidValueError, "callbacks", value=value):
        fit(make_task(), make_stream(), methods)


def test_check_compatible_repeated_method_raises():
    with raises(InvalidValueError, "callbacks", value="EWC"):
        check_compatible([EWC(1.0), Halved(), EWC(2.0)])


def test_check_compatible_accepts_other_combinations():
    check_compatible([])
    check_compatible([FLwF2T(0.3, 0.3), EWC(1.0), GEM(3), Replay(3), FedProto()])


def test_get_methods_keeps_callback_order():
    methods = [Halved(), Penalised()]
    assert get_methods(SimpleNamespace(callbacks=[methods[0], Callback(), methods[1]])) == methods


# Tests of the method driver.


def pool(number):
    return {"x": torch.arange(number)[:, None].float(), "y": torch.arange(number)}


def keys(section, clients=("a", "b")):
    return make_client_keys(3, list(clients), section)


def test_drawn_samples_keep_inputs_and_targets_together():
    samples = DrawnSamples([Drawing()], [[Client(pool(5))], [Client(pool(4))]], keys)
    rows = random_uint64(keys("Drawing"), 12)
    for step in range(4):
        drawn = samples.draw("Drawing")
        for client, size in enumerate((5, 4)):
            expected = rows[client, 3 * step : 3 * step + 3] % np.uint64(size)
            assert drawn[client]["y"].tolist() == expected.tolist()
            assert torch.equal(drawn[client]["x"][:, 0].long(), drawn[client]["y"])


def test_drawn_samples_do_not_depend_on_other_clients():
    together = DrawnSamples([Drawing()], [[Client()], [Client(pool(4))]], keys)
    alone = DrawnSamples([Drawing()], [[Client(pool(4))]], partial(keys, clients=["b"]))
    for _ in range(3):
        nothing, drawn = together.draw("Drawing")
        assert nothing == {} and torch.equal(drawn["y"], alone.draw("Drawing")[0]["y"])


def test_drawn_samples_without_replay_samples_are_empty():
    samples = DrawnSamples([Drawing(), Penalised()], [[Client(), Client(pool(4))]], partial(keys, clients=["a"]))
    step = step_of(torch.zeros(1))
    drawn = samples.step(Drawing(), step)
    assert drawn.replay_samples == {} and drawn.replay_weight == 0
    assert samples.step(Penalised(), step) is step and samples.pools.keys() == {"Drawing"}
    # The keys are not computed if no method draws samples.
    assert DrawnSamples([Penalised()], [[Client(pool(4))]], lambda section: 1 / 0).pools == {}


def test_step_contains_drawn_samples_of_method():
    samples = DrawnSamples([Drawing()], [[Client(pool(5))]], partial(keys, clients=["a"]))
    step = samples.step(Drawing(), step_of(torch.zeros(1)))
    assert step.replay_weight == 1 and len(step.replay_samples["y"]) == 3


def network():
    torch.manual_seed(0)
    layers = {"body": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), "head": nn.Linear(5, 4)}
    module = nn.Sequential()
    for name, layer in layers.items():
        module.add_module(name, layer)
    module.body[0].bias.requires_grad_(False)
    return module.train()


def learn(module):
    """Train three steps with momentum and weight decay, and return the names of the tensors that changed."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


BODY = {f"body.{name}" for name in ("0.weight", "1.weight", "1.bias")}
STATISTICS = {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
HEAD = {"head.weight", "head.bias"}


def test_freezer_keeps_frozen_parts_bitwise_unchanged():
    module, freezer = network(), Freezer()
    assert learn(module) == BODY | STATISTICS | HEAD
    freezer.train_only(module, "head.*")
    assert learn(module) == HEAD
    freezer.train_only(module, "!head.*")
    assert learn(module) == BODY | STATISTICS
    freezer.train_only(module, None)
    assert learn(module) == BODY | STATISTICS | HEAD
    assert not module.body[0].bias.requires_grad and all(layer.training for layer in module.modules())


class Stages(Method):
    """Trains the head in the first local epoch, and all parameters afterwards."""

    def trainable_patterns(self, client):
        return "model.head.*" if client.local_epoch == 0 else None


@pytest.mark.parametrize("local_epochs", [1, 2])
def test_trainable_patterns_depend_on_local_epoch(fit, make_stream, make_task, local_epochs):
    task = make_task(model=network())
    before = {name: value.clone() for name, value in task.state_dict().items()}
    fit(
        task, make_stream(batch_size=100), [Stages()], max_vectorized_clients=1, max_epochs=1, local_epochs=local_epochs
    )
    changed = {name for name, value in task.state_dict().items() if not torch.equal(value, before[name])}
    learnt = HEAD if local_epochs == 1 else HEAD | BODY | STATISTICS
    assert changed == {f"model.{name}" for name in learnt}


class Bare(L.LightningModule):
    """A module that defines no loss per sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS = [kind for kind in (getattr(library, name) for name in library.__all__) if isinstance(kind, type)]
KINDS = {kind.__name__: kind for kind in KINDS if issubclass(kind, Method) and kind is not Method}


@pytest.mark.parametrize(
    "name",
    [
        *("APFL", "CCVR", "Ditto", "Fed3R", "FedCBDR", "FedDyn", "FedNova", "FedRep", "FedViT", "FedWEIT", "FOT"),
        *("LoRM", "MFCL", "RegMean", "SCAFFOLD", "TARGET", "Unlearning"),
    ],
)
def test_federation_method_in_plain_trainer_raises(make_task, samples, train, name):
    with raises(InvalidValueError, "strategy"):
        train(make_task(), [KINDS[name]()], samples())


def test_vectorizable_is_false_for_listed_methods_only():
    alone = {"AGEM", "APFL", "BCN", "Ditto", "DyToxMethod", "FedKNOW", "FedRep", "FedViT", "FedWEIT", "GEM"}
    alone |= {"LVTMethod", "LoRM", "SI"}
    assert {name for name, kind in KINDS.items() if not kind.vectorizable} == alone


@pytest.mark.parametrize("name", ["AGEM", "APFL", "BCN", "DERpp", "EWC", "GEM", "LVTMethod"])
def test_method_with_module_without_sample_loss_raises(samples, train, name):
    with raises(InvalidValueError, "sample_loss"):
        train(Bare(), [KINDS[name]()], samples())


@dataclass(eq=False)
class Declared(Method):
    strength: float = validated(1.0, at_least, 0)
    size: int | None = validated(None, at_least, 1)


class Constructed(Method):
    def __init__(self, strength, clients="all"):
        super().__init__(clients)
        self.strength = strength


def test_method_arguments_from_fields_or_constructor_are_equal():
    declared, constructed = Declared(2.0, clients=[3, 4]), Constructed(2.0, [3, 4])
    assert declared.fingerprint() == constructed.fingerprint() == {"strength": 2.0, "clients": ["3", "4"]}
    assert declared.local is constructed.local is None and declared != Declared(2.0, clients=[3, 4])
    assert repr(Declared(size=2)) == "Declared(clients='all', strength=1.0, size=2)"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"strength": None}, (InvalidTypeError, "strength")),
        (
            {"clients": "some"},
            (InvalidValueError, "clients"),
        ),
    ],
)
def test_method_field_with_invalid_value_raises(arguments, expected):
    with raises(*expected):
        Declared(**arguments)
