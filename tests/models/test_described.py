"""Tests that networks are described by plain data and are created from these data. Other objects are not created."""

import copy
import json
from functools import partial
from typing import get_type_hints

import pytest
import torch
from jsonargparse import ArgumentParser
from raising import raises
from torch import nn

import lightning_fcl.models
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.models import MLP, DSICNet, DyTox, EchoStateNetwork, SplitViT, T2TBody, create_vit, fedweit_vit
from lightning_fcl.models.serialization import Serializable, build_from_config, to_plain_config, validate_arguments

NETWORKS = lightning_fcl.models.__all__
NEEDED = {
    "CvTBody": {"image_size": 64},
    "FedWEITNet": {"net": MLP([4, 3, 2]), "layers": "1.*", "num_tasks": 2},
    "EchoStateNetwork": {"in_features": 3, "units": 7},
    "FeatureReadout": {"network": MLP([4, 3, 2]), "num_outputs": 5},
    "Generator": {"size": (3, 8, 8)},
    "LVTBody": {
        "image_size": 32,
        "channels": 3,
        "patch_size": 4,
        "width": 12,
        "depth": 1,
        "num_heads": 2,
        "mlp_ratio": 2.0,
    },
    "LoRA": {"net": MLP([4, 3, 2]), "rank": 2, "head": "3.*"},
    "MLP": {"sizes": [4, 3, 2]},
    "RandomFeatures": {"in_features": 3, "out_features": 5},
    "ReservoirReadout": {"reservoir": EchoStateNetwork(3, units=7), "num_outputs": 2},
    "RidgeReadout": {"in_features": 3, "out_features": 2},
    "SplitViT": {"body": MLP([12, 3]), "features": 3, "image_size": 2},
    "T2TBody": {"image_size": 32, "splits": ((3, 2), (3, 2)), "token_width": 8},
    "with_frozen_backbone": {"network": DSICNet(), "backbone": "float"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_created_from_its_description(name):
    make = getattr(lightning_fcl.models, name)
    network = make(**NEEDED.get(name, {}))
    # The description is plain data, so JSON can encode it.
    told = json.loads(json.dumps(network.init_config))
    again = build_from_config(told, "model")
    assert type(again) is type(network) and again.init_config == network.init_config
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    assert {key: value.shape for key, value in again.state_dict().items()} == shapes
    assert copy.deepcopy(network).init_config == network.init_config
    # The type hints of all arguments can be resolved, so the arguments can be checked.
    assert get_type_hints(make.__init__ if isinstance(make, type) else make)


def test_init_config_names_the_function_that_created_the_network():
    assert create_vit("deit", depth=1).init_config["init_args"] == {
        "name": "deit",
        "image_size": 32,
        "num_classes": 100,
        "channels": 3,
        "depth": 1,
    }
    assert fedweit_vit(2, depth=1).init_config["class_path"] == "lightning_fcl.models.fedweit_vit"


def test_jsonargparse_reads_the_signature_of_init():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model")
    told = {"class_path": "lightning_fcl.models.EchoStateNetwork", "init_args": {"in_features": 3}}
    made = parser.instantiate(parser.parse_object({"model": told})).model
    assert isinstance(made, EchoStateNetwork) and made.init_config["init_args"]["units"] == 100
    with pytest.raises(TypeError, match="sizes"):
        MLP()


@pytest.mark.parametrize("make", [torch.optim.Adam, partial(torch.optim.Adam, lr=0.5, betas=(0.8, 0.9))])
def test_torch_optimizers_are_created_from_their_description(make):
    again = build_from_config(to_plain_config(make), "optimizer")([torch.zeros(1, requires_grad=True)])
    expected = make([torch.zeros(1, requires_grad=True)])
    assert type(again) is torch.optim.Adam
    assert again.defaults == {**expected.defaults, "betas": type(again.defaults["betas"])(expected.defaults["betas"])}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"class_path": "os.system", "init_args": {"command": "touch marker"}}, (InvalidValueError, "model")),
        ({"class_path": "lightning_fcl.models.os.system", "init_args": {}}, (InvalidValueError, "model")),
        (
            {"class_path": "lightning_fcl.models.serialization.import_module", "init_args": {}},
            (InvalidValueError, "model"),
        ),
        ({"class_path": "torch.optim.os", "init_args": {}}, (InvalidValueError, "model")),
        ({"class_path": "torch.optim.Adafactor.load", "init_args": {}}, (InvalidValueError, "model")),
        ({"class_path": ["lightning_fcl.models.MLP"], "init_args": {}}, (InvalidValueError, "model")),
        ({"class_path": "lightning_fcl.models.MLP", "init_args": [3]}, (InvalidValueError, "model")),
        ({"class_path": "lightning_fcl.models.MLP"}, (InvalidValueError, "model")),
        (
            {"class_path": "lightning_fcl.models.MLP", "init_args": {}},
            (UnknownNameError, "model"),
        ),
        ({"class_path": "lightning_fcl.models.MLP", "init_args": {"size": [2, 3]}}, (UnknownNameError, "model")),
        ({"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": "23"}}, (InvalidValueError, "model.sizes")),
        (
            {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": [2, "3"]}},
            (InvalidValueError, "model.sizes"),
        ),
        (
            {"class_path": "lightning_fcl.models.HARCNN", "init_args": {"init": "evil"}},
            (InvalidValueError, "model.init"),
        ),
        (
            {"class_path": "lightning_fcl.models.FedWEITNet", "init_args": {"net": "os.system", "num_tasks": 2}},
            (InvalidValueError, "model.net"),
        ),
        (
            {
                "class_path": "lightning_fcl.models.SplitViT",
                "init_args": {"body": {"class_path": "timm.x"}, "features": 2},
            },
            (InvalidValueError, "model"),
        ),
    ],
)
def test_build_from_config_invalid_description_raises(described, expected):
    with raises(*expected):
        build_from_config(described, "model")


def test_to_plain_config_describes_other_objects_by_class_path():
    class Own(nn.Module):
        pass

    assert to_plain_config(Own())["class_path"].endswith("Own") and "init_args" not in to_plain_config(Own())
    assert "init_args" not in to_plain_config(lambda parameters: None)
    body = SplitViT(Own(), features=3, image_size=2).init_config
    with raises(InvalidValueError, "model"):
        build_from_config(body, "model")


def test_init_config_of_a_user_subclass_names_the_user_class():
    class MLP(lightning_fcl.models.MLP):
        pass

    assert "lightning_fcl" not in MLP([2, 3]).init_config["class_path"]
    assert issubclass(MLP, Serializable) and DSICNet().init_config != DyTox([[0, 1]], 2, depth=1).init_config
    assert T2TBody.__signature__.parameters["width"].default == 256
    assert validate_arguments(DSICNet, {"image_size": [32, 32]}, "model") == {"image_size": (32, 32)}
