"""Shared functions for tests of third-party modules: a federation, a plain Trainer, and hand-written FedAvg."""

import copy
import importlib.util
import os

import lightning.pytorch as L
import pytest
import torch

from lightning_fcl import FederatedStrategy

PACKAGES = (
    "albumentations",
    "anomalib",
    "chemprop",
    "datasets",
    "lightly",
    "mlflow",
    "monai",
    "peft",
    "pytorch_forecasting",
    "torch_geometric",
    "torchgeo",
    "transformers",
)
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

# Without this variable, albumentations asks the package index for its newest version.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


def pytest_collection_modifyitems(items):
    """Mark all tests of this folder as `third_party`, and skip these tests if a package is missing."""
    for item in items:
        if "third_party" in item.path.parent.parts:
            item.add_marker(pytest.mark.third_party)
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason=f"Missing packages: {', '.join(missing)}. Run `make test-third-party`.")
                )


def trainer_of(**arguments):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(accelerator="cpu", num_sanity_val_steps=0, **dict.fromkeys(quiet, False), **arguments)


def federated(module, stream, callbacks=(), **strategy):
    """Train a module in place in a federation for all rounds of a stream, and return the Trainer."""
    stream.setup("fit")
    trainer = trainer_of(
        strategy=FederatedStrategy(**strategy), max_epochs=stream.plan.num_rounds, callbacks=list(callbacks)
    )
    trainer.fit(module, datamodule=stream)
    return trainer


def plain(module, data):
    """Train a module in place for one epoch of a loader or data module, and return the Trainer."""
    trainer = trainer_of(max_epochs=1)
    trainer.fit(module, data)
    return trainer


def by_hand(module, clients, rounds):
    """Return the state of a module after some rounds of hand-written FedAvg.

    ``clients`` has the number of samples and the loader or data module of each client.
    """
    server, total = module.state_dict(), sum(samples for samples, _ in clients)
    for _ in range(rounds):
        mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in server.items()}
        for samples, data in clients:
            client = copy.deepcopy(module)
            client.load_state_dict(server)
            plain(client, data)
            for name, value in client.state_dict().items():
                mean[name] += value.double() * samples / total
        server = {name: mean[name].to(value.dtype) for name, value in server.items()}
    return server


def assert_alike(module, state):
    """Assert that the floating-point state of a module equals ``state`` up to rounding. Counters are not compared."""
    own = module.state_dict()
    assert own.keys() == state.keys()
    for name, value in state.items():
        if value.is_floating_point():
            torch.testing.assert_close(
                own[name], value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda text, at=name: f"{at}: {text}"
            )


@pytest.fixture(name="trainer_of")
def _trainer_of():
    return trainer_of


@pytest.fixture(name="federated")
def _federated():
    return federated


@pytest.fixture(name="plain")
def _plain():
    return plain


@pytest.fixture(name="by_hand")
def _by_hand():
    return by_hand


@pytest.fixture(name="assert_alike")
def _assert_alike():
    return assert_alike
