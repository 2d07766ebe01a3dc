"""Tests of `create_model` and `pretrained_reservoir`."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from raising import raises

import lightning_fcl
from lightning_fcl import Classifier, create_model, zoo
from lightning_fcl.cli.main import main
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.runs.loaded_recipe import load_recipe
from lightning_fcl.runs.recipe import Recipe
from lightning_fcl.zoo import list_models

NAME = "mlp.digits.flwf2t_replay"


def test_create_model_pretrained_is_trainable():
    network = create_model(NAME, pretrained=True)
    assert all(value.requires_grad for value in network.parameters()) and network.training
    assert torch.equal(network[1].weight, zoo.load(NAME).network[1].weight)


def test_create_model_other_num_classes_has_new_head():
    network, published = create_model(NAME, pretrained=True, num_classes=3), zoo.load(NAME).network
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert torch.equal(network[1].weight, published[1].weight)
    same = create_model(NAME, pretrained=True, num_classes=10)
    assert torch.equal(same[3].weight, published[3].weight)
    readout, reservoir = (
        create_model("esn.wesad_wrist.fedip", pretrained=True, num_classes=3),
        zoo.load("esn.wesad_wrist.fedip").network,
    )
    assert readout.weight.shape == (3, reservoir.weight.shape[1])
    assert torch.equal(readout.reservoir.input_weight_0, reservoir.reservoir.input_weight_0)


def test_create_model_features_only_returns_features():
    x = torch.rand(2, 1, 8, 8)
    features = create_model(NAME, pretrained=True, features_only=True)(x)
    assert torch.allclose(features, zoo.load(NAME).network.embed(x))


def test_create_model_without_pretrained_has_random_weights():
    torch.manual_seed(0)
    network = create_model(NAME)
    assert not torch.equal(network[1].weight, zoo.load(NAME).network[1].weight)
    assert create_model("DSICNet", num_classes=4)(torch.zeros(1, 1, 64, 48)).shape == (1, 4)
    assert create_model("MLP", sizes=[4, 2])(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"name": "DSICNet", "pretrained": True}, (UnknownNameError, "name")),
        ({"name": "mlp.digit"}, (UnknownNameError, "name")),
        ({"name": NAME, "sizes": [1, 2]}, (InvalidValueError, "sizes")),
        ({"name": NAME, "num_classes": 0}, (InvalidValueError, "num_classes")),
        ({"name": "DSICNet", "colours": 3}, (UnknownNameError, "model")),
    ],
)
def test_create_model_invalid_arguments_raise(words, expected):
    with raises(*expected):
        create_model(**words)


def test_list_models_filters_by_pattern():
    assert NAME in list_models("*digits*") and list_models("nothing*") == []
    assert "DSICNet" in list_models("dsic*", pretrained=False)


@pytest.mark.seconds
def test_fit_option_pretrained_starts_from_published_weights(fit_small, small_recipe, tmp_path):
    frozen = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 1e-12}}}}}
    run = fit_small(tmp_path, small_recipe(rounds=1, clients=3), frozen, words=["--model.pretrained", NAME])
    told = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["model"]
    assert told["class_path"] == "lightning_fcl.create_model" and told["init_args"]["name"] == f"{NAME}@1"
    (file,) = (run / "checkpoints").glob("*.ckpt")
    found = Classifier.load_from_checkpoint(file).model[1].weight
    assert torch.allclose(found, zoo.load(NAME).network[1].weight)


def test_pretrained_reservoir_returns_published_reservoir():
    reservoir = zoo.pretrained_reservoir("esn.wesad_wrist.fedip")
    assert torch.equal(reservoir.gain, zoo.load("esn.wesad_wrist.fedip").network.reservoir.gain)
    with raises(InvalidValueError, "name"):
        zoo.pretrained_reservoir(NAME)


@pytest.mark.parametrize(
    ("task", "name"),
    [("HARClassifier", "har_cnn.ucihar.flwf2t_ft"), ("ReservoirClassifier", "esn.wesad_wrist.fedip")],
)
def test_option_pretrained_other_tasks_load_published_weights(task, name, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "lightning_fcl.runs.fit.run_cli",
        lambda command, recipe, kind: seen.update(recipe=recipe) or SimpleNamespace(should_write_results=False),
    )
    monkeypatch.chdir(tmp_path)
    main(["fit", "--model", f"lightning_fcl.{task}", f"--model.pretrained={name}"])
    (tmp_path / "recipe.yaml").write_text("model: {}")
    classes = {"model.num_classes": 4} if task == "ReservoirClassifier" else {}
    recipe = Recipe((tmp_path / "recipe.yaml",)).with_layers(*seen["recipe"].layers).with_values(classes)
    model = load_recipe(recipe).model
    published = zoo.load(name).network
    network = model.reservoir if task == "ReservoirClassifier" else model.model
    wanted = getattr(published, "reservoir", published).state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in network.state_dict().items())


@pytest.mark.seconds
def test_torch_hub_loads_from_checkout():
    root = Path(lightning_fcl.__file__).parents[1]
    code = (
        f"import torch; model = torch.hub.load({str(root)!r}, {NAME.replace('.', '_')!r}, source='local');"
        "print(model.predict([[[8.0] * 8] * 8])[0].label)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == zoo.load(NAME).predict([[[8.0] * 8] * 8])[0].label, done.stderr
