"""Tests of loading published networks from folders."""

import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

from lightning_fcl import zoo
from lightning_fcl.errors import InvalidValueError, UnknownNameError
from lightning_fcl.zoo.model_entry import CARD, CHECK, CHECKSUMS_FILE, CONFIG, WEIGHTS, write_entry_checksums
from lightning_fcl.zoo.registry import REGISTRY, register

NAME = "mlp.digits.flwf2t_replay"
DIGITS = load_digits()


def relisted(folder, **changes):
    """Change the configuration of a folder and update its checksums, as an attacker would. Return the folder."""
    config = folder / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    write_entry_checksums(folder)
    return folder


@pytest.fixture
def folder(small_zoo):
    return small_zoo / NAME


def test_load_predicts_class_names(small_zoo):
    model = zoo.load(NAME)
    found = model.predict(DIGITS.images[:, None])
    assert sum(one.label == str(y) for one, y in zip(found, DIGITS.target, strict=True)) / len(found) > 0.75
    assert sum(found[0].probabilities.values()) == pytest.approx(1)
    assert found[0].probability == max(found[0].probabilities.values())
    assert not model.training and not any(value.requires_grad for value in model.parameters())


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_predict_accepts_lists_and_tensors(small_zoo, kind):
    one = DIGITS.images[0][None]
    assert zoo.load(NAME).predict(kind(one.tolist()))[0].label == "0"


@pytest.mark.parametrize(
    ("x", "told", "argument"),
    [
        (DIGITS.images[0], {}, "x"),
        (DIGITS.images[:1, None] * 16, {}, "x"),
        (DIGITS.images[:1, None] * float("nan"), {}, "x"),
        (DIGITS.images[:1, None], {"units": "of 255"}, "units"),
        ([["a"]], {}, "x"),
    ],
)
def test_predict_mismatched_samples_raise(small_zoo, x, told, argument):
    with raises(InvalidValueError, argument):
        zoo.load(NAME).predict(x, **told)


@pytest.mark.seconds
def test_load_any_changed_byte_raises(small_zoo, folder, monkeypatch):
    # Replace the zoo of the package by a folder without a registry.
    monkeypatch.setattr("lightning_fcl.zoo.registry.package_folder", lambda: folder)
    draw = random.Random(17)
    files = [folder / name for name in (CONFIG, WEIGHTS, CHECK, CARD, CHECKSUMS_FILE, CHECKSUMS_FILE)] + [
        small_zoo / REGISTRY
    ]
    for _ in range(500):
        file = draw.choice(files)
        before = file.read_bytes()
        changed = bytearray(before)
        place = draw.randrange(len(changed))
        changed[place] ^= draw.randrange(1, 256)
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"^(In .*: )?Expected "):
            zoo.load(NAME)
        if file.parent == folder:
            with pytest.raises(ValueError, match=r"^(In .*: )?Expected "):
                zoo.load(folder)
        file.write_bytes(before)
    assert zoo.load(NAME).predict(DIGITS.images[:1, None])[0].label == "0"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, CHECK, CARD, CHECKSUMS_FILE])
def test_load_missing_file_raises(small_zoo, folder, name):
    (folder / name).unlink()
    for where in (NAME, folder):
        with pytest.raises(FileNotFoundError, match=r"^(In .*: )?Expected "):
            zoo.load(where)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda state: {k: v for k, v in state.items() if k != "1.bias"}, "1.bias"),
        (lambda state: state | {"more": torch.zeros(1)}, "more"),
        (
            lambda state: state | {"1.bias": torch.zeros(3)},
            "1.bias",
        ),
        (lambda state: state | {"1.bias": torch.zeros(64, dtype=torch.long)}, "1.bias"),
        (lambda state: state | {"1.bias": torch.full((64,), torch.nan)}, "1.bias"),
        (lambda state: state | {"1.bias": state["1.bias"] + 1}, "check"),
    ],
)
def test_load_mismatched_weights_raise(folder, change, argument):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    relisted(folder)
    with raises(InvalidValueError, argument):
        zoo.load(folder)


@pytest.mark.parametrize(
    "network",
    [
        {"class_path": "os.system", "init_args": {"command": "touch owned"}},
        {"class_path": "torch.nn.Linear", "init_args": {"in_features": 64, "out_features": 10}},
        {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": "a text"}},
        {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}},
        {},
    ],
)
def test_load_other_class_is_not_called(folder, network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^(In .*: )?Expected "):
        zoo.load(relisted(folder, network=network))
    assert not (tmp_path / "owned").exists()


def test_load_custom_class_with_model_argument(folder):
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def forward(self, x):
            return self.inner(x)

    state = load_file(folder / WEIGHTS)
    save_file({f"inner.{name}": value for name, value in state.items()}, folder / WEIGHTS)
    relisted(folder, network={"class_path": "mine.Mine"})
    with raises(InvalidValueError, "model"):
        zoo.load(folder)
    assert zoo.load(folder, model=Mine()).predict(DIGITS.images[:1, None])[0].label == "0"


@pytest.mark.parametrize(
    "change",
    [
        {"format": 9},
        {"version": "one"},
        {"network": "os.system"},
        {"measurement": "os.system"},
        {"classes": []},
        {"input_shape": [64]},
        {"colour": "red"},
    ],
)
def test_load_invalid_configuration_raises(folder, change):
    with pytest.raises(ValueError, match=r"^(In .*: )?Expected "):
        zoo.load(relisted(folder, **change))


def test_load_newest_or_given_version(small_zoo, folder):
    newer = small_zoo / f"{NAME}@2"
    shutil.copytree(folder, newer)
    register(relisted(newer, version=2, description="newer"))
    assert zoo.load(NAME).entry.version == zoo.load(f"{NAME}@2").entry.version == 2
    assert zoo.load(f"{NAME}@1").entry.version == 1
    with pytest.raises(ValueError, match=r"Did you mean mlp\.digits.flwf2t_replay"):
        zoo.load("mlp.digit.flwf2t_replay")
    with raises(UnknownNameError, "name"):
        zoo.load(f"{NAME}@3")


def test_load_does_not_change_random_state(small_zoo):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    zoo.load(NAME)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.seconds
def test_load_does_not_import_lightning_or_avalanche(small_zoo):
    code = (
        f"import sys; from lightning_fcl import zoo; zoo.load({NAME!r}).predict([[[8.0] * 8] * 8]);"
        "print([name for name in ('lightning', 'avalanche', 'torchvision', 'timm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
