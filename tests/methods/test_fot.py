"""Tests of FOT: layer outputs do not change for inputs in the span of the basis, and the basis is near optimal."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from raising import raises
from torch import nn

from lightning_fcl.callbacks import FOT
from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.methods.context import Client
from lightning_fcl.methods.fot import extend_basis, remove_projection
from lightning_fcl.methods.layer_inputs import averaged_layers, input_rows, layer_inputs, to_weight_state, weight_matrix
from lightning_fcl.models import MLP

pytestmark = pytest.mark.rounding


class Watch(Callback):
    """A callback that records each layer's weights and FOT's server state after each round."""

    def __init__(self):
        self.weights, self.kept = [], []

    def on_round_end(self, trainer, pl_module):
        state = pl_module.state_dict()
        self.weights.append({name: weight_matrix(state, name) for name in averaged_layers(pl_module)})
        kept = trainer.strategy.server.get_section("FOT")
        self.kept.append({name: value.clone() for name, value in kept.items()})


def small_cnn():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    )


NETWORKS = {"linear": lambda: MLP([6, 16, 4]), "convolutional": small_cnn}


def make(make_task, network="linear"):
    torch.manual_seed(0)
    return make_task(model=NETWORKS[network]())


@pytest.mark.parametrize("network", NETWORKS)
def test_fot_inputs_in_basis_keep_layer_output(fit, make_stream, make_task, network):
    watch, plain = Watch(), Watch()
    stream = {"num_experiences": 2, "rounds_per_experience": 2}
    trainer = fit(make(make_task, network), make_stream(**stream), [FOT(eps=0.9), watch])
    fit(make(make_task, network), make_stream(**stream), [plain])
    assert trainer.strategy.server.get_section("FOT").keys() == watch.kept[0].keys()
    for name, before in watch.weights[1].items():
        basis = watch.kept[1][f"basis.{name}"]
        assert 0 < basis.shape[1] < len(basis)
        for after in (watch.weights[2][name], watch.weights[3][name]):
            torch.testing.assert_close(after @ basis, before @ basis, rtol=0, atol=1e-6)
            # The weights of the layer still change in directions outside of the basis.
            assert (after - before).abs().max() > 1e-3
        assert ((plain.weights[3][name] - plain.weights[1][name]) @ basis).abs().max() > 1e-3


@pytest.mark.seconds
def test_fot_basis_is_near_optimal_for_inputs_of_all_clients(fit, make_stream, make_task):
    missing = []
    for seed in range(4):
        watch, task = Watch(), make(make_task)
        stream = make_stream(num_experiences=1, partition="dirichlet", seed=seed)
        fit(task, stream, [FOT(eps=0.9), watch])
        name, *_ = averaged_layers(task)
        every = torch.cat([stream.get_samples(stream.plan.train[0][client])[0] for client in stream.plan.clients])
        rows, basis = input_rows(task.get_submodule(name), every), watch.kept[-1][f"basis.{name}"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64))
        values = torch.linalg.svdvals(rows).square() / rows.square().sum()
        outside = float(remove_projection(rows, basis).square().sum() / rows.square().sum())
        missing.append(outside / float(values[basis.shape[1] :].sum()))
        assert 0 < basis.shape[1] < len(basis)
        # The sums start at zero again for the next experience.
        assert all(not watch.kept[-1][f"{part}.{name}"].any() for part in ("sketch", "energy"))
    assert min(missing) >= 1 and sum(missing) / len(missing) < 1.7, missing


def test_extend_basis_low_rank_inputs_finds_directions_exactly():
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        old, new = torch.linalg.qr(torch.randn(20, 5, generator=generator).double())[0].split([2, 3], dim=1)
        clients = [torch.randn(30, 5, generator=generator).double() @ torch.cat([old, new], 1).T for _ in range(3)]
        outside = [remove_projection(rows, old) for rows in clients]
        sketch = sum(
            rows.T @ (2 * torch.rand(rows.shape, generator=generator, dtype=torch.float64) - 1) for rows in outside
        )
        energy = torch.stack([sum(r.square().sum() for r in part) for part in (outside, clients)])
        basis = extend_basis(old, sketch, energy, eps=1 - 1e-9)
        assert basis.shape == (20, 5) and torch.equal(basis[:, :2], old)
        torch.testing.assert_close(
            remove_projection(new.T, basis), torch.zeros(3, 20, dtype=torch.float64), rtol=0, atol=1e-9
        )
        assert extend_basis(basis, sketch * 0, energy * torch.tensor([0.0, 1.0]), eps=0.9) is basis


def test_contribute_experience_uploads_only_part_outside_basis(make_task):
    task, generator = make(make_task), torch.Generator().manual_seed(0)
    x, name = torch.randn(40, 6, generator=generator), "model.1"
    basis = torch.linalg.qr(torch.randn(7, 3, generator=generator).double())[0]
    server = {"basis": basis, "sketch": torch.zeros(7, 7).double(), "energy": torch.zeros(2).double()}
    client = Client(
        {}, {f"FOT.{part}.{name}": v for part, v in server.items()}, ClientRound("a", 0), task, section_name="FOT"
    )
    sent = FOT().contribute_experience(client, task.state_dict(), (x, torch.zeros(40).long()))
    rows = input_rows(task.get_submodule(name), x)
    outside = rows - rows @ basis @ basis.T
    sketch = sent[f"sketch.{name}"]
    assert (basis.T @ sketch).abs().max() < 1e-10 < 1e-2 < sketch.abs().max()
    wanted = torch.stack([outside.square().sum(), rows.square().sum()])
    torch.testing.assert_close(sent[f"energy.{name}"], wanted)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(5, 3),
        nn.Linear(5, 3, bias=False),
        nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2),
        nn.Conv2d(2, 3, (1, 2), bias=False),
    ],
)
def test_input_rows_times_weight_matrix_equals_layer_output(layer):
    x = torch.randn(4, 7, 5) if isinstance(layer, nn.Linear) else torch.randn(4, 2, 9, 7)
    state = {f"layer.{name}": value.clone() for name, value in layer.state_dict().items()}
    made = input_rows(layer, x) @ weight_matrix(state, "layer").T
    output = layer(x)
    if isinstance(layer, nn.Conv2d):
        output = output.flatten(2).transpose(1, 2)
    torch.testing.assert_close(made, output.flatten(0, 1).double(), rtol=1e-5, atol=1e-5)
    twice = to_weight_state(state, "layer", 2 * weight_matrix(state, "layer"))
    assert all(torch.equal(twice[f"layer.{name}"], 2 * value) for name, value in layer.state_dict().items())


def test_layer_inputs_equal_inputs_in_evaluation_mode(make_task, fit, make_stream):
    task = make(make_task)
    fit(task, make_stream(num_experiences=1))
    x = torch.randn(70, 6)
    found = {name: [] for name in averaged_layers(task)}
    for name, rows in layer_inputs(task, averaged_layers(task), task.state_dict(), x):
        found[name].append(rows)
    first, second = (torch.cat(rows) for rows in found.values())
    torch.testing.assert_close(first[:, :-1].float(), x)
    torch.testing.assert_close(second[:, :-1].float(), task.embed(x))
    assert (second[:, -1] == 1).all()


def forgotten(fit, make_stream, task, methods):
    stream = make_stream(rounds_per_experience=3)
    losses = []

    class Losses(Callback):
        def on_round_end(self, trainer, pl_module):
            x, y = stream.get_samples(stream.plan.test)
            old = y < 2
            with torch.no_grad():
                losses.append(float(pl_module.sample_loss(pl_module(x[old]), y[old]).mean()))

    fit(task, stream, [*methods, Losses()])
    return losses[-1] - losses[2]


@pytest.mark.seconds
def test_fot_forgets_less_than_fedavg(fit, make_stream, make_task):
    ours, plain = [], []
    for seed in range(3):
        for results, methods in ((ours, [FOT(eps=0.95)]), (plain, [])):
            torch.manual_seed(seed)
            results.append(forgotten(fit, make_stream, make_task(model=MLP([6, 16, 4]), seed=seed), methods))
    assert sum(ours) < 0.5 * sum(plain)


def test_fot_without_averaged_layer_raises(fit, make_stream, make_task):
    with raises(InvalidValueError, "module"):
        fit(make_task(), make_stream(), [FOT()], reductions={"*": "median"})
