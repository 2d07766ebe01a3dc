"""Tests of the networks of the zoo: they match their cards, do not name persons, and are small if in the wheel."""

import copy
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import lightning_fcl
from lightning_fcl import FederatedStream, zoo
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.edge.export import export_onnx
from lightning_fcl.models.backbone import example_input
from lightning_fcl.models.ridge import unpack_upper
from lightning_fcl.zoo.model_entry import CARD, CHECK, CONTINUE, WEIGHTS, ModelEntry
from lightning_fcl.zoo.publishing import metric_spread, model_card
from lightning_fcl.zoo.registry import get_entry, list_models, package_folder, resolve_folder

NAMES = [path.name for path in sorted(package_folder().glob("*.*/"))]
ROOT = Path(lightning_fcl.__file__).parents[1]
PERSONS = [name for name in NAMES if ".lfw." in name or ".orl." in name]


def test_list_models_lists_all_folders():
    assert list_models() == NAMES and len(NAMES) >= 12


# Computing the features of all test images of lite0 takes more than one minute.
@pytest.mark.seconds
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) if name.startswith("lite0.") else name
        for name in NAMES
    ],
)
def test_entry_verifies_against_card(name):
    verdict = zoo.verify(name)
    assert verdict.is_reproduced
    if verdict.measured_accuracy is None and get_entry(name).entry.classes:
        # The test data are not available, so the accuracy was not measured.
        pytest.skip(verdict.reason)


@pytest.mark.parametrize("name", NAMES)
def test_entry_check_input_is_seeded_noise(name):
    # A frozen backbone expects pixels between 0 and 1.
    draw = torch.rand if "models.frozen_backbone" in str(get_entry(name).entry.network) else torch.randn
    sample = draw(2, *get_entry(name).entry.input_shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(load_file(resolve_folder(name) / CHECK)["input"], sample, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "output_kind", "classes", "message"),
    [
        (0, "logits", ["x"], "Expected `version` of a to be at least 1, but got 0."),
        (1, "logits", [], "Expected class names for a, whose `output_kind` is logits, but got none."),
        (1, "features", ["x", "y"], "Expected no class names for a, whose `output_kind` is features, but got x, y."),
    ],
)
def test_entry_contradicting_arguments_raises(version, output_kind, classes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ModelEntry("a", version, "A network.", {}, output_kind, classes, [2])


@pytest.mark.parametrize("name", NAMES)
def test_entry_has_licenses_and_recipe(name):
    entry = get_entry(name).entry
    assert entry.license.keys() == {"weights", "data"} and all(entry.license.values())
    assert entry.description and entry.recipe["configs"] and len(entry.recipe["sha256"]) == 64


@pytest.mark.parametrize("name", NAMES)
def test_entry_card_equals_rendered_template(name):
    entry, text = get_entry(name).entry, (resolve_folder(name) / CARD).read_text()
    state = load_file(resolve_folder(name) / WEIGHTS)
    assert text == model_card(entry, metric_spread(entry), state), "update the cards with: python zoo/train.py --cards"
    assert bool(re.search(r"\d ± \d", text)) == bool(metric_spread(entry))


@pytest.mark.parametrize("name", PERSONS)
def test_entry_classes_of_persons_are_numbered(name):
    assert all(label.startswith("person ") for label in get_entry(name).entry.classes)


def test_wheel_entries_are_smaller_than_10_mb():
    files = [path for kind in ("mlp", "esn") for path in package_folder().glob(f"{kind}.*/*") if path.name != CONTINUE]
    assert files and sum(path.stat().st_size for path in files) < 10e6


# These networks have the same architectures as other networks, with different weights.
ALIKE = (".fedclip", ".fedip", ".flwf2t_ft")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name.startswith("lite0.") else name
        for name in NAMES
        if not name.endswith(ALIKE)
    ],
)
def test_entry_exports_to_onnx(name, tmp_path):
    model = zoo.load(name)
    example = example_input(model.network, model.entry.input_shape)
    network = model.network if model.classes else zoo.create_model(name, pretrained=True, features_only=True)
    assert export_onnx(network, example, tmp_path / "model.onnx", tolerance=1e-3) <= 1e-3


@pytest.mark.slow
def test_wheel_predicts_with_published_network():
    done = subprocess.run(["bash", str(ROOT / "tests/first_prediction.sh")], capture_output=True, text=True)
    assert done.returncode == 0 and "The first prediction is correct." in done.stdout, done.stdout + done.stderr


def sums_of(task, stream, clients):
    """Return a readout with the statistics of some clients' samples, as the clients would upload them."""
    other = copy.deepcopy(task.readout)
    other.reset(int(task.readout.tag))
    for client in clients:
        x, y = stream.get_samples(stream.plan.train[0][client])
        other.n += task.accumulate_samples(other.A[None], other.B[None], x, y, [len(x)])[0]
    return other


@pytest.mark.seconds
@pytest.mark.data
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if ".wesad" in name else [pytest.mark.slow, pytest.mark.long])
        for name in NAMES
        if name.endswith(".incfed")
    ],
)
def test_published_reservoir_unlearns_a_person(data_folder, name):
    """A readout unlearns the samples of one client.

    The statistics and weights of the readout then equal those of a readout of the other clients.
    """
    later = zoo.continue_from(name)
    task, (leaving, *others) = later.module, sorted(later.stream.plan.train[0])
    before = task.readout.weight.clone()
    gone, wanted = sums_of(task, later.stream, [leaving]), sums_of(task, later.stream, others)
    here = sums_of(task, later.stream, [leaving, *others])
    wanted.solve()
    # The published sums were computed on a different machine, with different rounding of single-precision states.
    for readout, rounding in ((task.readout, 1e-6), (here, 1e-12)):
        readout.unlearn(gone)
        for found, sums in ((readout.A, wanted.A), (readout.B, wanted.B)):
            assert (found - sums).abs().max() <= rounding * sums.abs().max()
        readout.solve()
    # After unlearning, the published readout solves the regression of the other clients, within rounding of the sums.
    # Before unlearning, the readout does not.
    squares = unpack_upper(wanted.B, wanted.in_features)
    for weight, solves in ((task.readout.weight, True), (before, False)):
        residual = weight @ squares + wanted.beta * weight - wanted.A
        allowed = 2e-6 * (squares.abs().max() * weight.abs().sum(1, keepdim=True) + wanted.A.abs().max())
        assert bool((residual.abs() <= allowed).all()) is solves
    # The regularization of WESAD and HHAR is small, so rounding of the sums has a larger effect.
    tolerance = 1e-9 if "ucihar" in name else 1e-4
    assert torch.allclose(here.weight, wanted.weight, rtol=0, atol=tolerance)
    for readout in (task.readout, here):
        assert not torch.allclose(readout.weight, before, rtol=0, atol=1e-3)


@pytest.mark.seconds
def test_published_backbone_readout_learns_new_classes(fit, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_FCL_CACHE", str(tmp_path))
    later = zoo.continue_from("lite0.miniimagenet.ridge", classes=2)
    task, digits = later.module, load_digits()
    chosen = np.flatnonzero(digits.target < 2)[:60]
    x, y = digits.images[chosen, None].astype(np.float32) / 16, 100 + digits.target[chosen]
    stream = FederatedStream.from_arrays(
        x,
        y,
        client_ids=np.arange(60) % 3,
        scenario=ClassIncremental(1),
        backbone=task.model,
        classes=[*later.entry.classes, "a 0", "a 1"],
    )
    known, n = copy.deepcopy(task.readout), int(task.readout.n)
    fit(task, stream)
    rows = np.concatenate([*stream.plan.train[0].values()])
    wanted = copy.deepcopy(known)
    wanted.partial_fit(stream.get_samples(rows)[0], task.targets.encode(stream.get_samples(rows)[1]))
    wanted.solve()
    assert n == 48_000 and int(task.readout.n) == n + len(rows)
    for found, sums in ((task.readout.A, wanted.A), (task.readout.B, wanted.B), (task.readout.weight, wanted.weight)):
        assert (found - sums).abs().max() <= 1e-9 * sums.abs().max()
    tested, labels = torch.from_numpy(x[stream.plan.test]), torch.from_numpy(y[stream.plan.test])
    assert (task(tested).argmax(dim=1) == labels).double().mean() > 0.8
    photographs = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert (task(photographs)[:, :100] - zoo.load(later.entry.name)(photographs)).abs().max() < 0.2


@pytest.mark.seconds
@pytest.mark.data
def test_published_reservoir_learns_from_new_people(fit, data_folder):
    later = zoo.continue_from("esn.wesad_wrist.incfed")
    task, stream = later.module, later.stream
    known, n = copy.deepcopy(task.readout), int(task.readout.n)
    x, y = stream.get_samples(stream.plan.test)
    more = FederatedStream.from_arrays(x.numpy(), y.numpy(), np.arange(len(y)) % 2, scenario=ClassIncremental(1))
    fit(task, more)
    assert int(task.readout.n) > n
    added = copy.deepcopy(task.readout)
    added.unlearn(known)
    assert added.n == sum(len(rows) for rows in more.plan.train[0].values()) * x.shape[1]
