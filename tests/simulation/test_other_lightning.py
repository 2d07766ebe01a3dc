"""Tests of errors for classes of the package `pytorch_lightning`, with a hint about the import."""

import sys
from types import ModuleType

import lightning.pytorch as L
import pytest
from raising import raises
from torch import nn

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.errors import InvalidTypeError

REMEDY = "Write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"
HOOKS = {name: value for name, value in vars(L.Callback).items() if name not in ("__dict__", "__weakref__")}
# Base class and attributes of each class of the package.
KINDS = {
    "LightningModule": (nn.Module, {}),
    "LightningDataModule": (object, {"on_exception": lambda *_: None}),
    "Callback": (object, HOOKS),
}


@pytest.fixture
def pl(monkeypatch):
    """Return a replacement for the package `pytorch_lightning`, with base classes for a user's classes."""
    package = ModuleType("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    for name, (base, content) in KINDS.items():
        setattr(package, name, type(name, (base,), {**content, "__module__": f"pytorch_lightning.{name.lower()}"}))
    package.Demo = type("Demo", (package.LightningModule,), {"__module__": "pytorch_lightning.demos"})
    return package


@pytest.fixture
def own(pl, monkeypatch):
    """Return a user's Python module with classes that derive from the package's classes."""
    own = ModuleType("own_lightning")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    for name in KINDS:
        setattr(own, f"Own{name}", type(f"Own{name}", (getattr(pl, name),), {"__module__": own.__name__}))
    return own


@pytest.mark.may("Classes of the package `pytorch_lightning`", "Not supported. Import `lightning.pytorch` instead.")
def test_pytorch_lightning_module_warns_before_trainer_raises(own, make_stream, quiet, caplog):
    trainer = L.Trainer(strategy=FederatedStrategy(), **quiet)
    (said,) = [record.message for record in caplog.records if record.name.startswith("lightning_fcl")]
    assert said.startswith("Expected a class of `lightning.pytorch`, but OwnLightningModule is") and REMEDY in said
    with pytest.raises(TypeError, match="got `OwnLightningModule`"):
        trainer.fit(own.OwnLightningModule(), datamodule=make_stream())


def test_pytorch_lightning_unused_does_not_warn(pl, caplog):
    FederatedStrategy()
    assert not caplog.records


def test_pytorch_lightning_data_and_callbacks_raise(own, fit, make_stream, make_task):
    with raises(InvalidTypeError, value=own.OwnLightningDataModule):
        FederatedStream(own.OwnLightningDataModule()).setup("fit")
    with raises(InvalidTypeError, value=own.OwnCallback):
        fit(make_task(), make_stream(), [own.OwnCallback()])


def test_pytorch_lightning_data_module_instead_of_stream_raises(own, make_task, quiet):
    with raises(InvalidTypeError, value=own.OwnLightningDataModule):
        L.Trainer(strategy="federated", **quiet).fit(make_task(), datamodule=own.OwnLightningDataModule())


RECIPES = {
    "OwnLightningModule": "model: {class_path: own_lightning.OwnLightningModule}",
    "OwnLightningDataModule": "data: {data: {class_path: own_lightning.OwnLightningDataModule}}",
    "OwnCallback": "trainer: {callbacks: [{class_path: own_lightning.OwnCallback}]}",
}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_pytorch_lightning_class_in_recipe_raises_with_hint(error_of, tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(RECIPES[name])
    said = error_of([command, "quickstart", "own.yaml"])
    assert f"but {name} is a class of the package `pytorch_lightning`" in said and REMEDY in said
