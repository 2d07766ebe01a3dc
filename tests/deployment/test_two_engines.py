"""Tests that a simulation and a deployment of one recipe on the same split are bitwise identical."""

import shutil
import sys

import pytest
import torch

from lightning_fcl import FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.deployment.node_data import write_split
from lightning_fcl.federation.client_store import ClientStore

from .recipes import REPLAY, classes, method, strategy

WAVES = """
import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Normalized(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

class Waves(L.LightningDataModule):
    def train_dataloader(self):
        y = torch.arange(240) % 4
        time = torch.arange(20.0)[None, :, None] * (y[:, None, None] + 1) / 5
        noise = torch.randn(240, 20, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(time.sin() + noise / 4, y), batch_size=16)
"""


RESERVOIR = {
    "class_path": "lightning_fcl.ReservoirClassifier",
    "init_args": {
        "num_classes": 4,
        "upload": "statistics",
        "beta": 0.1,
        "reservoir": {
            "class_path": "lightning_fcl.models.EchoStateNetwork",
            "init_args": {"in_features": 3, "units": 30},
        },
    },
}

LORA = {
    "class_path": "lightning_fcl.models.LoRA",
    "init_args": {
        "net": {"class_path": "lightning_fcl.models.MLP", "init_args": {"sizes": [64, 16, 10]}},
        "rank": 2,
        "head_pattern": "3.*",
    },
}

OF_WAVES = {
    "data": {"class_path": "waves.Waves"},
    "shuffle": True,
    "drop_last": False,
    "scenario": classes(num_experiences=2),
}

CASES = {
    "averaging": {},
    "distillation and replay": REPLAY,
    "replay with a transform": {
        "trainer": {"callbacks": [method("Replay", memory_size=30, transform={"class_path": "torch.nn.Dropout"})]}
    },
    "sampled clients, two epochs": {"trainer": {"strategy": strategy(participation=2, local_epochs=2)}},
    "client-local head": {
        "trainer": {
            "strategy": strategy(reductions={"model.3.*": "local"}, keep_optimizer_state=True),
            "callbacks": [method("FedRep", head_epochs=1, body_epochs=2, head_pattern="model.3.*")],
        }
    },
    "server optimizer": {
        "trainer": {
            "strategy": strategy(server_optimizer={"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}})
        }
    },
    "compression": {
        "trainer": {
            "strategy": strategy(
                compression={"class_path": "lightning_fcl.federation.compression.TopK", "init_args": {"fraction": 0.2}}
            )
        }
    },
    "median": {"trainer": {"strategy": strategy(reductions={"*": "median"})}},
    "prototypes": {"trainer": {"callbacks": [method("FedProto")]}},
    "control variates": {
        "trainer": {"strategy": strategy(client_weights="uniform", participation=3), "callbacks": [method("SCAFFOLD")]}
    },
    "personal models": {"trainer": {"callbacks": [method("Ditto"), method("SI"), method("MOON"), method("FedNTD")]}},
    "distillation from an earlier server model": {
        "trainer": {
            "strategy": strategy(participation=2),
            "callbacks": [method("LwF", teacher="server"), method("FedProx")],
        },
        "data": {"scenario": classes(num_experiences=2, rounds_per_experience=3)},
    },
    "control variates and FedDyn": {
        "trainer": {
            "strategy": strategy(client_weights="uniform", participation=2),
            "callbacks": [method("SCAFFOLD"), method("FedDyn")],
        },
        "data": {"scenario": classes(num_experiences=2, rounds_per_experience=2)},
    },
    "FedDyn": {"trainer": {"strategy": strategy(client_weights="uniform"), "callbacks": [method("FedDyn")]}},
    "FedNova": {"trainer": {"callbacks": [method("FedNova")]}},
    "FOT": {"trainer": {"callbacks": [method("FOT", eps=0.8)]}},
    "RegMean": {"trainer": {"callbacks": [method("RegMean", alpha=0.5)]}},
    "CCVR": {"trainer": {"callbacks": [method("CCVR", num_samples=20)]}},
    "Fed3R": {"trainer": {"callbacks": [method("Fed3R")]}},
    "LoRM": {
        "model": {"init_args": {"model": LORA}},
        "trainer": {"callbacks": [method("LoRM", alpha=0.5)]},
    },
    "projection, accumulation and clipping": {
        "trainer": {
            "callbacks": [method("GEM", memory_size=20)],
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
        }
    },
    "uneven clients": {
        "data": {"partition": {"class_path": "Dirichlet", "init_args": {"num_clients": 4, "alpha": 0.3}}},
        "trainer": {"callbacks": [method("FedProx", mu=0.1)]},
    },
    "batch normalization and single samples": {
        "model": {"init_args": {"model": {"class_path": "waves.Normalized"}}},
        "data": {
            "partition": {"class_path": "Dirichlet", "init_args": {"num_clients": 8, "alpha": 0.1}},
            "batch_size": 5,
        },
        "trainer": {"callbacks": [method("Replay", memory_size=30)]},
    },
    "new samples in each round": {
        "data": {"scenario": classes(num_experiences=2, rounds_per_experience=2, samples_per_round=60)}
    },
    "statistics of a reservoir": {"model": RESERVOIR, "data": OF_WAVES},
    "plasticity of a reservoir": {
        "model": RESERVOIR,
        "trainer": {"callbacks": [method("IntrinsicPlasticity", eta=0.05, min_gain=0.99)]},
        "data": {**OF_WAVES, "scenario": classes(num_experiences=2, rounds_per_experience=2)},
    },
    "weights of a reservoir": {
        "model": {**RESERVOIR, "init_args": {**RESERVOIR["init_args"], "upload": "weights"}},
        "data": OF_WAVES,
    },
}


@pytest.fixture(autouse=True)
def waves(tmp_path, monkeypatch):
    """Write a module with user-defined classes, which tests can import."""
    (tmp_path / "waves.py").write_text(WAVES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("waves", None)


FAST = [
    "FOT",
    "distillation and replay",
    "client-local head",
    "compression",
    "prototypes",
    "statistics of a reservoir",
    "batch normalization and single samples",
]
# CI runs these cases and the fast cases. All other cases are marked `long`.
SLOW = [
    "averaging",
    "server optimizer",
    "control variates",
    "personal models",
    "distillation from an earlier server model",
]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "case",
    [
        case if case in FAST else pytest.param(case, marks=pytest.mark.slow if case in SLOW else pytest.mark.long)
        for case in CASES
    ],
)
def test_deployment_equals_simulation(case, rehearsal, wire, same):
    one = rehearsal(CASES[case])
    simulated = one.simulate()
    deployed = one.serve(wire(one.nodes()), min_clients=len(one.clients))
    assert simulated.trainer.current_epoch == deployed.trainer.current_epoch > 1
    assert same(simulated.model, deployed.model)
    kept, also = (fit.trainer.strategy.server.extra_tensors for fit in (simulated, deployed))
    assert kept.keys() == also.keys() and all(torch.equal(value, also[name]) for name, value in kept.items())
    there, here = one.rounds("simulated"), one.rounds()
    assert [one["no_data"] for one in there] == [one["no_data"] for one in here]
    assert [one["correct"].get("server") for one in there] == [one["correct"].get("server") for one in here]
    assert [one["dropped"] for one in here] == [{}] * len(here)
    if case == "batch normalization and single samples":
        assert any(one["no_data"] for one in there)
    if case == "distillation from an earlier server model":
        assert [one["download_bytes"] for one in there] == [one["download_bytes"] for one in here]
    assert [one["upload_bytes"] for one in there] == [one["upload_bytes"] for one in here]
    for client in one.clients:
        kept = ClientStore("disk", next((one.folder / "memories").glob(f"*/{client}/now")))[client]
        received = kept.pop("received", {})
        assert all(torch.equal(value, also[name]) for name, value in received.items())
        assert bool(received) == (case == "distillation from an earlier server model")
        remembered = simulated.trainer.strategy.server.client_store[client]
        assert kept.keys() == remembered.keys()
        for section, memory in remembered.items():
            assert memory.keys() == kept[section].keys()
            assert all(torch.equal(value, kept[section][name]) for name, value in memory.items())


@pytest.mark.seconds
def test_node_that_lost_server_model_gets_it_again(rehearsal, wire):
    one = rehearsal(
        {
            "trainer": {"callbacks": [method("LwF", teacher="server")]},
            "data": {"scenario": classes(num_experiences=2, rounds_per_experience=4)},
        }
    )
    one.simulate()
    losing, *others = one.nodes()
    answer = losing.answer

    def loses(parcel):
        if parcel.header["kind"] == "train" and parcel.header["round"] == 5:
            for folder in (one.folder / "memories").glob(f"*/{losing.client}/*/"):
                store = ClientStore("disk", folder)
                for client in store:
                    store[client] = {name: kept for name, kept in store[client].items() if name != "received"}
        return answer(parcel)

    losing.answer = loses
    deployed = one.serve(wire([losing, *others]))
    dropped = [each["dropped"] for each in one.rounds()]
    assert [{*each} for each in dropped] == [{losing.client} if number == 5 else set() for number in range(8)]
    assert "got the error `lost-state`" in dropped[5][losing.client]
    size = sum(value.nbytes for value in deployed.model.state_dict().values())
    bytes_of = [each["download_bytes"][losing.client] for each in one.rounds()]
    assert bytes_of == [size, size, size, size, size, size, 2 * size, size]


@pytest.mark.seconds
def test_server_with_recipe_data_equals_simulation(rehearsal, wire, same):
    """A server needs the recipe's data for scenarios that assign single samples to rounds."""
    one = rehearsal(
        {
            "data": {
                "scenario": {
                    "class_path": "FLwFScenario",
                    "init_args": {"samples_per_round": 20, "test_per_class": 10, "pretrain_per_class": 5},
                },
                "partition": None,
            }
        }
    )
    simulated = one.simulate()
    deployed = one.serve(wire(one.nodes()), None, min_clients=3)
    assert same(simulated.model, deployed.model)


@pytest.mark.seconds
def test_node_reads_only_its_own_file(rehearsal, wire, same):
    """While a node answers, only its own data file exists.

    The files of the other clients and of the server are moved away.
    """
    one = rehearsal()
    simulated = one.simulate()
    data, away = one.folder / "data", one.folder / "away"

    class Alone(wire):
        def answers(self, messages):
            data.rename(away)
            for message in messages:
                data.mkdir()
                client = one.clients[self.sent[message][0] - 7]
                shutil.copy(away / f"{client}.npz", data)
                yield from super().answers([message])
                assert [path.name for path in data.iterdir()] == [f"{client}.npz"]
                shutil.rmtree(data)
            away.rename(data)

    deployed = one.serve(Alone(one.nodes()), min_clients=3)
    assert same(simulated.model, deployed.model)


def test_write_split_missing_loader_settings_raises(tmp_path):
    from waves import Waves

    message = r"^Expected the recipe to set `shuffle`, `drop_last`.* of Waves\. Write `shuffle: false`\.$"
    with pytest.raises(ValueError, match=message):
        write_split(FederatedStream(Waves(), ClassIncremental(2), batch_size=8), tmp_path)
