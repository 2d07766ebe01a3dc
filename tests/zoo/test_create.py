import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_fcl
from lightning_fcl import create_model, zoo
from lightning_fcl.zoo import list_models

NAME = "mlp.digits.flwf2t_replay"


def test_published_weights_to_train_on():
    network = create_model(NAME, pretrained=True)
    assert all(value.requires_grad for value in network.parameters()) and network.training
    assert torch.equal(network[1].weight, zoo.load(NAME).network[1].weight)


def test_a_new_head_where_classes_differ():
    network, published = create_model(NAME, pretrained=True, num_classes=3), zoo.load(NAME).network
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert torch.equal(network[1].weight, published[1].weight)
    same = create_model(NAME, pretrained=True, num_classes=10)
    assert torch.equal(same[3].weight, published[3].weight)


def test_features_only():
    x = torch.rand(2, 1, 8, 8)
    features = create_model(NAME, pretrained=True, features_only=True)(x)
    assert torch.allclose(features, zoo.load(NAME).network.embed(x))


def test_without_published_weights():
    torch.manual_seed(0)
    network = create_model(NAME)
    assert not torch.equal(network[1].weight, zoo.load(NAME).network[1].weight)
    assert create_model("DSICNet", num_classes=4)(torch.zeros(1, 1, 64, 48)).shape == (1, 4)
    assert create_model("MLP", sizes=[4, 2])(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"name": "DSICNet", "pretrained": True}, "DSICNet is a class of networks"),
        ({"name": "mlp.digit"}, "Expected the name of a published model"),
        ({"name": NAME, "sizes": [1, 2]}, "Expected no further arguments"),
        ({"name": NAME, "num_classes": 0}, "`num_classes` to be at least 1"),
        ({"name": "DSICNet", "colours": 3}, "but got `colours`"),
    ],
)
def test_what_cannot_be_made_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        create_model(**words)


def test_names_by_pattern():
    assert NAME in list_models("*digits*") and list_models("nothing*") == []
    assert "DSICNet" in list_models("dsic*", pretrained=False)


def test_torch_hub_loads_from_the_checkout():
    root = Path(lightning_fcl.__file__).parents[1]
    code = (
        f"import torch; model = torch.hub.load({str(root)!r}, {NAME.replace('.', '_')!r}, source='local');"
        "print(model.predict([[[8.0] * 8] * 8])[0].label)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == zoo.load(NAME).predict([[[8.0] * 8] * 8])[0].label, done.stderr
