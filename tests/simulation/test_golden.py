"""Tests of golden results: a default run must keep its numbers.

`golden.json` contains a few numbers of every tensor after small runs. The tests compare these numbers with a tolerance
of 1e-5, because results differ slightly between kinds of CPUs. Two runs on one machine must be bitwise identical.
Regenerate the file (`python tests/simulation/test_golden.py`) only after an intended change of results, and note the
change in the changelog.
"""

import json
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream, HARClassifier, ReservoirClassifier
from lightning_fcl.callbacks import GEM, DERpp, FedProx, FLwF2T, IntrinsicPlasticity, Replay
from lightning_fcl.data.partition import Dirichlet
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.models import MLP, EchoStateNetwork

pytestmark = pytest.mark.rounding

FILE = Path(__file__).with_name("golden.json")


def digits():
    scenario = ClassIncremental(num_experiences=2, rounds_per_experience=2)
    return FederatedStream("digits", scenario, Dirichlet(num_clients=6), batch_size=16, seed=0)


def stream_of(x, y, owner):
    return FederatedStream.from_arrays(x, y, owner, scenario=ClassIncremental(1, 2), batch_size=8, seed=0)


def sequences():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 20, 4, generator=generator) + y[:, None, None]
    return stream_of(x, y, torch.arange(60) % 5)


def windows():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 6, 128, generator=generator), torch.arange(48) % 6
    return stream_of(x, y, torch.arange(48) % 3)


def mlp():
    return Classifier(MLP([64, 16, 10]), 10, sgd)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 10))


RUNS = {
    "FedAvg": (mlp, digits, [], {}),
    "FedAvg, half of the clients, two local epochs": (
        mlp, digits, [], {"participation": 0.5, "local_epochs": 2}
    ),
    "dropout side by side": (lambda: Classifier(dropping(), 10, sgd), digits, [FedProx(0.1)], {}),
    "FLwF-2T and replay": (
        mlp, digits, [FLwF2T(0.3, 0.3), Replay(20, "class-balanced", "round")], {}
    ),
    "DER++": (mlp, digits, [DERpp(30, batch_size=8)], {}),
    "GEM with a head of one's own": (
        mlp, digits, [GEM(5)], {"reductions": {"model.3.*": "local"}}
    ),
    "a median": (mlp, digits, [], {"reductions": {"*": "median"}}),
    "HAR-CNN": (lambda: HARClassifier("4-8C_2M_16D"), windows, [], {}),
    "FedIP and IncFed": (
        lambda: ReservoirClassifier(EchoStateNetwork(4, 20, washout=2), 3, min_samples=1),
        sequences, [IntrinsicPlasticity()], {},
    ),
}  # fmt: skip


def run(name):
    make, stream, methods, options = RUNS[name]
    torch.manual_seed(0)
    task = make()
    trainer = L.Trainer(
        strategy=FederatedStrategy(seed=0, **options), callbacks=methods, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, datamodule=stream())
    # The tag of a reservoir is a hash of its bits, so it is not comparable with a tolerance.
    return {name: value for name, value in task.state_dict().items() if name != "readout.tag"}


def summary(state):
    """Return a list for each tensor name: the mean and at most five elements of the tensor."""
    flat = {name: value.double().flatten() for name, value in state.items()}
    return {n: [float(v.mean()), *v[:: max(1, len(v) // 4)][:5].tolist()] for n, v in flat.items()}


@pytest.mark.seconds
@pytest.mark.parametrize("name", RUNS)
def test_run_equals_golden_numbers(name):
    golden, states = json.loads(FILE.read_text())[name], [run(name), run(name)]
    assert all(torch.equal(states[0][entry], states[1][entry]) for entry in states[0])
    found = summary(states[0])
    assert found.keys() == golden.keys()
    for entry, values in golden.items():
        assert found[entry] == pytest.approx(values, rel=1e-5, abs=1e-5), entry


@pytest.mark.parametrize("name", ["FedAvg", "HAR-CNN", "FedIP and IncFed"])
def test_run_with_two_threads_is_equal_up_to_rounding(name):
    threads = torch.get_num_threads()
    try:
        states = []
        for number in (1, 2):
            torch.set_num_threads(number)
            states.append(run(name))
    finally:
        torch.set_num_threads(threads)
    for entry, value in states[0].items():
        torch.testing.assert_close(value, states[1][entry], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: summary(run(name)) for name in RUNS}, indent=1) + "\n")
