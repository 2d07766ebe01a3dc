"""Tests of publishing the networks of runs."""

import importlib
import json

import numpy as np
import pytest
import torch
import yaml
from raising import raises
from safetensors.torch import load_file

from lightning_fcl import zoo
from lightning_fcl.cli.main import main
from lightning_fcl.errors import InvalidValueError, MissingFileError
from lightning_fcl.runs.loaded_recipe import load_trained_recipe
from lightning_fcl.zoo.model_entry import CARD, CHECK, CHECKSUMS_FILE, CONFIG, CONTINUE, WEIGHTS, read_entry, read_files
from lightning_fcl.zoo.publishing import publish
from lightning_fcl.zoo.registry import REGISTRY, package_folder, read_registry
from lightning_fcl.zoo.verifying import packaged_recipe

LICENCE = {"weights": "Apache-2.0", "data": "CC BY 4.0"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, fit_small, small_recipe):
    """Return a function that fits a small run on the digits, with changes to its recipe, and returns its folder."""
    small = small_recipe(rounds=2, clients=3)
    return lambda **change: fit_small(tmp_path_factory.mktemp("run"), small, change)


@pytest.fixture(scope="module")
def plain(run):
    return run()


@pytest.fixture(scope="module")
def private(run):
    """Return the folder of a run with client-local heads."""
    return run(trainer={"strategy": {"init_args": {"reductions": {"model.3.*": "local"}}}})


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FCL_ZOO", str(tmp_path / "zoo"))
    return tmp_path / "zoo"


@pytest.mark.seconds
def test_publish_predictions_equal_run(plain, target):
    folder = publish(plain, "mlp.mine", target, "Mine.", LICENCE, half_precision=False)
    model, parts = zoo.load("mlp.mine"), load_trained_recipe(plain)
    parts.datamodule.setup("test")
    x, _ = parts.datamodule.get_samples(parts.datamodule.plan.test)
    with torch.no_grad():
        assert torch.equal(model(x), parts.model.eval()(x))
    raw = parts.datamodule.samples.x[parts.datamodule.plan.test].numpy() * 16
    wanted = [model.classes[label] for label in model(x).argmax(dim=1)]
    assert [one.label for one in model.predict(raw)] == wanted
    record = json.loads((plain / "results.json").read_text())["record"]
    told = sum(record["rounds"][-1]["correct"]["server"]) / sum(record["totals"])
    assert model.entry.metrics["test_accuracy"] == pytest.approx(told)
    assert {file.name for file in folder.iterdir()} == {CARD, CONFIG, CHECK, CONTINUE, CHECKSUMS_FILE, WEIGHTS}
    assert {file.name for file in target.iterdir()} == {"mlp.mine", REGISTRY}


@pytest.mark.seconds
def test_publish_default_stores_half_precision(plain, target):
    folder = publish(plain, "mlp.mine", target, license=LICENCE)
    state = load_file(folder / WEIGHTS)
    assert all(value.dtype == torch.float16 for value in state.values())
    assert zoo.load("mlp.mine").network[1].weight.dtype == torch.float32


@pytest.mark.seconds
def test_publish_twice_creates_second_version(plain, target):
    first, second = (publish(plain, "mlp.mine", target, license=LICENCE) for _ in range(2))
    assert (first.name, second.name) == ("mlp.mine", "mlp.mine@2")
    assert zoo.load("mlp.mine").entry.version == 2 and zoo.load("mlp.mine@1").entry.version == 1


@pytest.mark.seconds
def test_publish_client_local_heads_are_not_published(private, target, tensors_of):
    folder = publish(private, "mlp.body", target, license=LICENCE)
    model = zoo.load("mlp.body")
    assert model.classes == [] and model.entry.output_kind == "features"
    with raises(InvalidValueError, "classes"):
        model.predict(np.zeros((1, 8, 8)))
    assert model.embed(np.zeros((1, 8, 8))).shape == (1, 64)
    published = torch.cat([value.float().flatten() for value in load_file(folder / WEIGHTS).values()])
    checkpoint = next((private / "checkpoints").glob("*.ckpt"))
    kept = torch.load(checkpoint, weights_only=True)["callbacks"]
    heads = [value for value in tensors_of(kept) if value.shape in {(10, 64), (10,)}]
    # The run's checkpoint contains the client-local heads.
    assert heads
    for head in heads:
        for row in head.reshape(-1, head.shape[-1]).float():
            assert not _holds(published, row.half().float())


def _holds(numbers, row):
    """Return whether ``numbers`` contains the values of a nonzero row in consecutive order, within 1e-4."""
    windows = numbers.unfold(0, len(row), 1)
    return bool(row.any()) and bool((windows - row).abs().amax(dim=1).lt(1e-4).any())


@pytest.mark.seconds
def test_publish_numbered_classes_hides_names(plain, target):
    publish(plain, "mlp.faces", target, license=LICENCE, numbered_classes=True)
    assert zoo.load("mlp.faces").classes == [f"person {number}" for number in range(1, 11)]


@pytest.mark.seconds
def test_publish_card_has_metadata_for_hub(plain, target):
    text = (publish(plain, "mlp.mine", target, "Mine.", LICENCE, ["It knows digits alone."]) / CARD).read_text()
    _, metadata, body = text.split("---\n", 2)
    told = yaml.safe_load(metadata)
    assert told["library_name"] == "lightning-fcl" and told["license_name"] == "Apache-2.0"
    assert told["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    for part in ("# mlp.mine", "Mine.", "It knows digits alone.", "ink (0 to 16)", "data: CC BY 4.0"):
        assert part in body


@pytest.mark.seconds
def test_packaged_recipe_finds_recipe_of_reproduced_row(data_folder, tmp_path):
    main(["reproduce", "fedclip", "--rows", "WESAD 100 % FedIP", "--scale", "smoke", "--out", str(tmp_path)])
    (run,) = tmp_path.glob("*/seed-0")
    recipe = packaged_recipe(run, json.loads((run / "results.json").read_text()))
    names = ["base", "wesad", "fedip-wesad", "scale-smoke"]
    assert recipe["configs"] == [f"fedclip/{name}.yaml" for name in names]


@pytest.mark.seconds
def test_verify_custom_recipe_compares_published_outputs(plain, target):
    publish(plain, "mlp.mine", target, license=LICENCE)
    verdict = zoo.verify("mlp.mine")
    assert verdict.is_reproduced and verdict.measured_accuracy is None and "to be in this package" in verdict.reason


@pytest.mark.parametrize("name", ["../mine", "Mine", "mine/two", ""])
def test_publish_invalid_name_raises(plain, target, name):
    with raises(InvalidValueError, "name"):
        publish(plain, name, target)


@pytest.mark.parametrize("to", ["hf:models", "hf:our/models@main", "https://example.org/zoo"])
def test_publish_invalid_destination_raises(plain, to):
    with raises(InvalidValueError, "name" if to.startswith("hf:") else "destination", value=to):
        publish(plain, "mlp.mine", to)


def test_publish_folder_without_run_raises(tmp_path, target):
    with raises(MissingFileError, value=tmp_path / "results.json"):
        publish(tmp_path, "mlp.mine", target)


def test_renew_card_changes_only_card_and_checksums(small_zoo, monkeypatch):
    # `train` is a script of the repository.
    monkeypatch.syspath_prepend(package_folder())
    train = importlib.import_module("train")
    renew_card = train.renew_card
    name = "mlp.digits.flwf2t_replay"
    folder, spread = small_zoo / name, {"final_accuracy/server": (0.77, 0.01, 5), "worst/server": (0.5, 0.1, 5)}
    weights, before = (folder / WEIGHTS).read_bytes(), read_entry(folder / CONFIG)
    assert not renew_card(folder)
    monkeypatch.setattr(train, "metric_spread", lambda entry: spread)
    with monkeypatch.context() as cut:
        cut.setattr(train, "register", None)
        with pytest.raises(TypeError):
            # The error is raised after the card and the checksums are written, and before the registry is written.
            renew_card(folder)
    assert not renew_card(folder)
    (one,) = read_registry(small_zoo / REGISTRY)
    assert one.entry == before and {*read_files(folder)} == {CARD, CHECK, CONFIG, CONTINUE, WEIGHTS}
    assert (folder / WEIGHTS).read_bytes() == weights
    text = (folder / CARD).read_text()
    assert "| 0.770 ± 0.010 (5) |" in text and "| worst server |  | 0.500 ± 0.100 (5) |  |" in text
    (folder / WEIGHTS).write_bytes(weights[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged"):
        renew_card(folder)


def test_verify_wrong_accuracy_on_card_is_not_reproduced(target, small_zoo, monkeypatch):
    monkeypatch.setattr("lightning_fcl.zoo.verifying.test_accuracy", lambda model, stream: 0.5)
    verdict = zoo.verify("mlp.digits.flwf2t_replay")
    assert not verdict.is_reproduced and verdict.measured_accuracy == 0.5


@pytest.mark.seconds
def test_publish_folder_without_entry_raises_and_is_kept(plain, target):
    mine = target / "mlp.mine"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("of mine")
    with raises(MissingFileError, value=mine / CHECKSUMS_FILE):
        publish(plain, "mlp.mine", target, license=LICENCE)
    assert (mine / "thesis.txt").read_text() == "of mine" and {path.name for path in target.iterdir()} == {"mlp.mine"}
