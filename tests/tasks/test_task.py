"""Tasks are made again from their checkpoints, whose hyperparameters are data."""

import functools

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, HARClassifier
from lightning_fcl.models import MLP, EchoStateNetwork
from lightning_fcl.tasks.classification import RandomClassifier, Regressor
from lightning_fcl.tasks.reservoir import ReservoirClassifier, ReservoirRegressor
from lightning_fcl.tasks.ridge import RidgeClassifier


@pytest.fixture
def saved(tmp_path, quiet):
    """Writes a task's checkpoint, changed or not, and gives its path."""

    def save(task, **changes):
        trainer = L.Trainer(**quiet)
        trainer.strategy.connect(task)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        content = torch.load(tmp_path / "last.ckpt", weights_only=True)
        torch.save({**content, **changes}, tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"

    return save


class Own(nn.Module):
    """A network of a user's."""

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
def test_a_task_is_made_again_with_its_weights(saved, make):
    task = make()
    again = type(task).load_from_checkpoint(saved(task))
    assert again.hparams == task.hparams != {}
    expected = task.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in again.state_dict().items())
    optimizers = [one.configure_optimizers() for one in (task, again)]
    if optimizers[0] is not None:
        assert type(optimizers[0]) is type(optimizers[1]) and optimizers[0].defaults == optimizers[1].defaults


def test_what_a_federation_trained_goes_on_where_it_stopped(fit, make_stream, tmp_path):
    task = Classifier(MLP([6, 5, 4]), 4, functools.partial(torch.optim.SGD, lr=0.1))
    fit(task, make_stream()).save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    trainers = [fit(one, make_stream(), strategy=FederatedStrategy(seed=3)) for one in (task, again)]
    assert trainers[0].global_step == trainers[1].global_step > 0
    assert all(torch.equal(task.state_dict()[name], value) for name, value in again.state_dict().items())


def test_a_network_of_the_users_own_is_handed_in(saved):
    task = Classifier(Own(), 4, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    path = saved(task)
    with pytest.raises(ValueError, match=r"Expected `model` to be handed in .*Own.* Hand in model=\.\.\. ."):
        Classifier.load_from_checkpoint(path)
    with pytest.raises(ValueError, match=r"Expected `optimizer` to be handed in .*lambda"):
        Classifier.load_from_checkpoint(path, model=Own())
    again = Classifier.load_from_checkpoint(path, model=Own(), optimizer=None)
    assert torch.equal(again.model.layer.weight, task.model.layer.weight) and again.optimizer is None


@pytest.mark.parametrize(
    "hyper_parameters, message",
    [
        ({"optimizer": {"class_path": "os.system", "init_args": {"command": "{}"}}}, "`optimizer` to be handed in"),
        ({"model": {"class_path": "os.system", "init_args": {"command": "{}"}}}, "`model` to be handed in"),
        ({"optimizer": "os.system"}, "`Classifier.optimizer` to be of type"),
        ({"model": "os.system"}, "`Classifier.model` to be of type Module but got 'os.system'"),
        ({"model": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}}, "`Classifier.model` to be of type"),
        ({"_class_path": "os.system", "command": "{}"}, "unexpected keyword argument '_class_path'"),
        (
            {"_instantiator": "lightning.pytorch.cli.instantiate_module", "num_classes": 4},
            "unexpected keyword argument '_instantiator'",
        ),
        ({"num_classes": "four"}, "`Classifier.num_classes` to be of type int but got 'four'"),
        ({"num_classes": True}, "`Classifier.num_classes` to be of type int but got True"),
        ([1, 2], "hyperparameters of .* to be a mapping"),
    ],
)
def test_nothing_that_a_checkpoint_names_is_called(saved, tmp_path, hyper_parameters, message):
    marker = tmp_path / "marker"
    own = Classifier(MLP([6, 5, 4]), 4)
    if isinstance(hyper_parameters, dict):
        text = repr(hyper_parameters).replace("{}", f"touch {marker}")
        hyper_parameters = {**own.hparams, **eval(text)}
    path = saved(own, hyper_parameters=hyper_parameters)
    with pytest.raises(ValueError, match=message):
        Classifier.load_from_checkpoint(path)
    assert not marker.exists()


def test_another_state_is_refused_by_name(saved):
    task = Classifier(MLP([6, 5, 4]), 4)
    state = task.state_dict()
    name = "model.1.weight"
    for change, message in [
        ({**state, name: state[name].clone().fill_(torch.nan)}, f"`{name}` has 30 of 30 that are not"),
        ({**state, name: state[name][:2]}, f"`{name}` to be torch.float32 of shape .5, 6. but got .* of shape .2, 6."),
        ({**state, name: state[name].double()}, f"`{name}` to be torch.float32 .* but got torch.float64"),
        ({**state, name: 3}, f"`{name}` to be a tensor but got int"),
        ({key: value for key, value in state.items() if key != name}, f"there is no `{name}`"),
        ({**state, **{f"more.{n}": torch.zeros(1) for n in range(5)}}, "`more.0`, `more.1`, `more.2` and 2 more"),
    ]:
        with pytest.raises(ValueError, match=message):
            Classifier.load_from_checkpoint(saved(task, state_dict=change))
    part = Classifier.load_from_checkpoint(saved(task, state_dict={name: state[name] + 1}), strict=False)
    assert torch.equal(part.model[1].weight, state[name] + 1)


def test_a_mask_of_infinities_may_stay(saved):
    class Masked(Own):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((2,), -torch.inf))

    path = saved(Classifier(Masked(), 4))
    assert Classifier.load_from_checkpoint(path, model=Masked()).model.mask.isinf().all()


def test_a_users_own_task_is_described_as_well(saved):
    class Mine(Classifier):
        def __init__(self, width: int = 3, title: str = "mine") -> None:
            super().__init__(MLP([6, width, 4]), 4)
            self.title = title

    again = Mine.load_from_checkpoint(saved(Mine(width=7)), title="yours")
    assert again.model.features == 7 and again.title == "yours"
