"""Tests of loading tasks from checkpoints, whose hyperparameters are plain data."""

import functools

import lightning.pytorch as L
import pytest
import torch
from raising import raises
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, HARClassifier
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.models import MLP, EchoStateNetwork
from lightning_fcl.tasks.classification import RandomClassifier, Regressor
from lightning_fcl.tasks.reservoir import ReservoirClassifier, ReservoirRegressor
from lightning_fcl.tasks.ridge import RidgeClassifier


@pytest.fixture
def saved(tmp_path, quiet):
    """Return a function that writes a task's checkpoint, changes entries of the checkpoint, and returns the path."""

    def save(task, **changes):
        trainer = L.Trainer(**quiet)
        trainer.strategy.connect(task)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        content = torch.load(tmp_path / "last.ckpt", weights_only=True)
        torch.save({**content, **changes}, tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"

    return save


class Own(nn.Module):
    """A user-defined network."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x)


TASKS = [
    lambda: Classifier(MLP([6, 5, 4]), 4, functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)),
    lambda: Classifier(MLP([6, 5, 4]), 4),
    lambda: HARClassifier("196-16C_4M_24D", init="keras"),
    lambda: RandomClassifier(4),
    lambda: Regressor(MLP([6, 5, 2]), 2, functools.partial(torch.optim.Adam, lr=0.3)),
    lambda: RidgeClassifier(MLP([6, 5, 4]), 4, beta=0.5),
    lambda: ReservoirClassifier(EchoStateNetwork(3, 10), 4, beta=[0.1, 1.0]),
    lambda: ReservoirRegressor(EchoStateNetwork(3, 10), 2, readout="mean"),
]


@pytest.mark.parametrize("make", TASKS)
def test_load_from_checkpoint_restores_task_and_weights(saved, make):
    task = make()
    again = type(task).load_from_checkpoint(saved(task))
    assert again.hparams == task.hparams != {}
    expected = task.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in again.state_dict().items())
    optimizers = [one.configure_optimizers() for one in (task, again)]
    if optimizers[0] is not None:
        assert type(optimizers[0]) is type(optimizers[1]) and optimizers[0].defaults == optimizers[1].defaults


def test_load_from_checkpoint_never_runs_code_of_the_file(saved):
    task = Classifier(MLP([6, 5, 4]), 4)
    path = saved(task)
    for weights_only in (None, True):
        again = Classifier.load_from_checkpoint(path, weights_only=weights_only)
        torch.testing.assert_close(again.state_dict(), task.state_dict(), rtol=0, atol=0)
    with raises(InvalidValueError, "weights_only", value=False):
        Classifier.load_from_checkpoint(path, weights_only=False)


def test_load_from_checkpoint_continues_identically(fit, make_stream, tmp_path):
    task = Classifier(MLP([6, 5, 4]), 4, functools.partial(torch.optim.SGD, lr=0.1))
    fit(task, make_stream()).save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    trainers = [fit(one, make_stream(), strategy=FederatedStrategy(seed=3)) for one in (task, again)]
    assert trainers[0].global_step == trainers[1].global_step > 0
    assert all(torch.equal(task.state_dict()[name], value) for name, value in again.state_dict().items())


def test_load_from_checkpoint_custom_network_is_an_argument(saved):
    task = Classifier(Own(), 4, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    path = saved(task)
    with raises(InvalidValueError, "model"):
        Classifier.load_from_checkpoint(path)
    with raises(InvalidValueError, "optimizer"):
        Classifier.load_from_checkpoint(path, model=Own())
    again = Classifier.load_from_checkpoint(path, model=Own(), optimizer=None)
    assert torch.equal(again.model.layer.weight, task.model.layer.weight) and again.optimizer is None


@pytest.mark.parametrize(
    ("hyper_parameters", "expected"),
    [
        ({"optimizer": {"class_path": "os.system", "init_args": {"command": "{}"}}}, (InvalidValueError, "optimizer")),
        ({"model": {"class_path": "os.system", "init_args": {"command": "{}"}}}, (InvalidValueError, "model")),
        ({"optimizer": "os.system"}, (InvalidValueError, "Classifier.optimizer")),
        ({"model": "os.system"}, (InvalidValueError, "Classifier.model")),
        (
            {"model": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}},
            (InvalidValueError, "Classifier.model"),
        ),
        ({"_class_path": "os.system", "command": "{}"}, (UnknownNameError, "Classifier")),
        (
            {"_instantiator": "lightning.pytorch.cli.instantiate_module", "num_classes": 4},
            (UnknownNameError, "Classifier"),
        ),
        ({"num_classes": "four"}, (InvalidValueError, "Classifier.num_classes")),
        ({"num_classes": True}, (InvalidValueError, "Classifier.num_classes")),
        ([1, 2], (InvalidValueError, "hparams")),
    ],
)
def test_load_from_checkpoint_unsafe_hyperparameters_raise(saved, tmp_path, hyper_parameters, expected):
    marker = tmp_path / "marker"
    own = Classifier(MLP([6, 5, 4]), 4)
    if isinstance(hyper_parameters, dict):
        text = repr(hyper_parameters).replace("{}", f"touch {marker}")
        hyper_parameters = {**own.hparams, **eval(text)}
    path = saved(own, hyper_parameters=hyper_parameters)
    with raises(*expected):
        Classifier.load_from_checkpoint(path)
    assert not marker.exists()


def test_load_from_checkpoint_wrong_state_raises_with_name(saved):
    task = Classifier(MLP([6, 5, 4]), 4)
    state = task.state_dict()
    name = "model.1.weight"
    for change, argument in [
        ({**state, name: state[name].clone().fill_(torch.nan)}, name),
        ({**state, name: state[name][:2]}, name),
        ({**state, name: state[name].double()}, name),
        ({**state, name: 3}, name),
        ({key: value for key, value in state.items() if key != name}, name),
        ({**state, **{f"more.{n}": torch.zeros(1) for n in range(5)}}, "more.0"),
    ]:
        with raises(InvalidValueError, argument):
            Classifier.load_from_checkpoint(saved(task, state_dict=change))
    part = Classifier.load_from_checkpoint(saved(task, state_dict={name: state[name] + 1}), strict=False)
    assert torch.equal(part.model[1].weight, state[name] + 1)


def test_load_from_checkpoint_accepts_infinite_buffer(saved):
    class Masked(Own):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((2,), -torch.inf))

    path = saved(Classifier(Masked(), 4))
    assert Classifier.load_from_checkpoint(path, model=Masked()).model.mask.isinf().all()


def test_load_from_checkpoint_custom_task(saved):
    class Mine(Classifier):
        def __init__(self, width: int = 3, title: str = "mine") -> None:
            super().__init__(MLP([6, width, 4]), 4)
            self.title = title

    again = Mine.load_from_checkpoint(saved(Mine(width=7)), title="yours")
    assert again.model.features == 7 and again.title == "yours"
