"""Tests of the hyperparameters in a recipe: nested objects, paths, unset values and arguments that are left out."""

from pathlib import Path

import pytest

from lightning_fcl.errors import InvalidValueError
from lightning_fcl.evaluation.appendix import AppendixRow, make_bibliography
from lightning_fcl.evaluation.appendix_sentences import describe_runs
from lightning_fcl.evaluation.bibliography import find_entries
from lightning_fcl.evaluation.hyperparameters import list_hyperparameters
from lightning_fcl.evaluation.markup import LATEX
from lightning_fcl.evaluation.recorded_run import RecordedRun
from lightning_fcl.evaluation.run_data import Run
from lightning_fcl.evaluation.run_sources import Sources
from lightning_fcl.runs.run_citations import find_sources


def node(class_path, **init_args):
    return {"class_path": class_path, "init_args": init_args}


SGD = node("torch.optim.SGD", lr=0.1, momentum=0.0, foreach=None, fused=False)
CONFIG = {
    "trainer": {
        "max_epochs": 3,
        "max_steps": -1,
        "accumulate_grad_batches": 1,
        "enable_checkpointing": True,
        "strategy": node(
            "lightning_fcl.FederatedStrategy",
            client_store="memory",
            local_epochs=2,
            reductions={"model.head.*": "local", "b": "krum"},
            server_optimizer=node("torch.optim.SGD", lr=1.0),
            synchronization=node("lightning_fcl.Deadline", seconds=2.0),
            upload_transforms=[],
        ),
        "callbacks": [
            node("lightning_fcl.callbacks.FederatedProgressBar"),
            node("lightning_fcl.callbacks.Replay", memory_size=5, transform=None),
            node("lightning_fcl.callbacks.Replay", memory_size=7),
            node("lightning_fcl.callbacks.BaseSession", epochs=1),
        ],
    },
    "model": node(
        "lightning_fcl.Classifier",
        model=node("lightning_fcl.models.LoRA", network=node("lightning_fcl.models.ViT", dim=8), rank=2),
        optimizer=SGD,
        weights={"a": 1, "b": {"c": None, "d": [1, 2]}},
    ),
    "data": {
        "data": node("torchvision.datasets.ImageFolder", root="/home/me/photos"),
        "scenario": node("lightning_fcl.data.scenarios.Blurry", seed=None),
        "partition": None,
        "num_workers": 2,
    },
}


def test_list_hyperparameters_follows_objects_and_drops_unset_values():
    found = {one.path: (one.owner, one.name, one.value) for one in list_hyperparameters(CONFIG)}
    assert found == {
        "trainer.max_epochs": ("Trainer", "max_epochs", "3"),
        "strategy.FederatedStrategy.local_epochs": ("FederatedStrategy", "local_epochs", "2"),
        "strategy.FederatedStrategy.reductions.model.head.*": ("FederatedStrategy", "reductions.model.head.*", "local"),
        "strategy.FederatedStrategy.reductions.b": ("FederatedStrategy", "reductions.b", "krum"),
        "strategy.FederatedStrategy.server_optimizer": ("FederatedStrategy", "server_optimizer", "SGD"),
        "strategy.FederatedStrategy.server_optimizer.SGD.lr": ("SGD (server_optimizer)", "lr", "1.0"),
        "strategy.FederatedStrategy.synchronization": ("FederatedStrategy", "synchronization", "Deadline"),
        "strategy.FederatedStrategy.synchronization.Deadline.seconds": ("Deadline (synchronization)", "seconds", "2.0"),
        "callbacks.Replay.memory_size": ("Replay", "memory_size", "5"),
        "callbacks.Replay.2.memory_size": ("Replay", "memory_size", "7"),
        "callbacks.BaseSession.epochs": ("BaseSession", "epochs", "1"),
        "model.Classifier.model": ("Classifier", "model", "LoRA"),
        "model.Classifier.optimizer": ("Classifier", "optimizer", "SGD"),
        "model.Classifier.weights.a": ("Classifier", "weights.a", "1"),
        "model.Classifier.weights.b.d": ("Classifier", "weights.b.d", "[1, 2]"),
        "model.Classifier.model.LoRA.network": ("LoRA (model)", "network", "ViT"),
        "model.Classifier.model.LoRA.rank": ("LoRA (model)", "rank", "2"),
        "model.Classifier.model.LoRA.network.ViT.dim": ("ViT (network)", "dim", "8"),
        "model.Classifier.optimizer.SGD.lr": ("SGD (optimizer)", "lr", "0.1"),
        "model.Classifier.optimizer.SGD.momentum": ("SGD (optimizer)", "momentum", "0.0"),
        "data.data": ("data", "data", "ImageFolder"),
        "data.scenario": ("data", "scenario", "Blurry"),
        "data.data.ImageFolder.root": ("ImageFolder (data)", "root", "photos"),
    }
    assert len(list_hyperparameters(CONFIG)) == len(found)
    assert list_hyperparameters({}) == [] == list_hyperparameters({"trainer": None, "model": None, "data": None})


def make_run(config, **record):
    rounds = [{"round": 0, "experience": {"server": 0}, "download_bytes": {"a": 8}, "upload_bytes": {}, "seconds": 1.0}]
    record = {"groups": ["x"], "totals": [1], "tasks": {"a": [[0]], "server": [[0]]}, "rounds": rounds, **record}
    return RecordedRun(Run(Path("run"), "", 4, True, {}, {}, record, config), {}, {})


def test_describe_runs_cites_every_entry_of_the_bibliography():
    run = make_run(CONFIG)
    sources = find_sources(run)
    row = AppendixRow("x", [run], sources)
    text = " ".join(describe_runs([run], sources, [], LATEX))
    keys = {entry.key for entry in sources.entries}
    assert {"blanchard2017krum", "reddi2021fedopt", "bonawitz2019scale", "hu2022lora", "zuo2024fedvit"} <= keys
    assert {"moon2023siblurry", "chaudhry2019replay", "kroeger2025odfcl"} <= keys
    # The uploads are not all averaged.
    assert "mcmahan2017fedavg" not in keys and "FedAvg" not in text
    assert all(f"{key}" in text for key in keys)
    assert {
        line.partition("{")[2].rstrip(",") for line in make_bibliography([row]).splitlines() if line[:1] == "@"
    } == (keys | {"lightning_fcl"})
    assert "1 round, in 1 of 1 experiences" in text and "1 client downloaded" in text
    assert sources.not_imported == []


def test_describe_runs_without_config_states_only_recorded_facts():
    run = make_run({})
    text = " ".join(describe_runs([run], Sources(), [], LATEX))
    assert "The recipe of the run is missing" in text and "The random seed is 4." in text
    for word in ("optimizer", "method", "epochs", "Hardware", "partition", "data are"):
        assert word not in text


def test_make_bibliography_rejects_two_entries_with_one_key():
    run = make_run({})
    rows = [
        AppendixRow(note, [run], Sources({"a.B": find_entries(f"@misc{{mine, note = {{{note}}}}}", "B")}))
        for note in "xy"
    ]
    with pytest.raises(InvalidValueError, match="mine") as error:
        make_bibliography(rows)
    assert "Use another key" in str(error.value)
    other = AppendixRow("y", [run], Sources({"a.B": find_entries("@misc{other, note = {y}}", "B")}))
    assert make_bibliography([rows[0], other]).count("@misc{") == 3
    assert make_bibliography([rows[0], rows[0]]).count("@misc{mine") == 1


@pytest.mark.parametrize(
    ("module", "settings", "expected"),
    [
        ("lightning_fcl.Classifier", {}, True),
        ("lightning_fcl.Classifier", {"reductions": {"*": "median"}}, False),
        ("lightning_fcl.Classifier", {"synchronization": node("lightning_fcl.FedBuff")}, False),
        ("lightning_fcl.RidgeClassifier", {}, False),
        ("missing_module.Net", {}, False),
    ],
)
def test_find_sources_cites_fedavg_only_if_all_uploads_are_averaged(module, settings, expected):
    strategy = node("lightning_fcl.FederatedStrategy", local_epochs=1, **settings)
    sources = find_sources(make_run({"trainer": {"strategy": strategy}, "model": node(module)}))
    assert [entry.key for entry in sources.averaging] == ["mcmahan2017fedavg"] * expected
    assert ("mcmahan2017fedavg" in {entry.key for entry in sources.entries}) == expected
