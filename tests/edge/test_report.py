"""Tests of the device report: parameters, MACs, memory, times, and the command `edge-report`."""

import json

import pytest
import torch
import yaml
from raising import raises
from torch import nn

from lightning_fcl import Classifier, ReservoirClassifier
from lightning_fcl.cli.main import main
from lightning_fcl.edge.footprint import measure_footprint
from lightning_fcl.edge.macs import flop_counter
from lightning_fcl.edge.report import PROFILES_FILE, device_report, read_device, read_link
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.models import HARCNN, MLP, DSICNet, EchoStateNetwork
from lightning_fcl.runs.paper_rows import recipes_folder

RECIPES = recipes_folder()
IMAGE = (1, 64, 48)
FROZEN = {"model.backbone.*": "constant"}
RECIPE = {
    "trainer": {"strategy": {"class_path": "lightning_fcl.FederatedStrategy", "init_args": {"reductions": FROZEN}}},
    "model": {
        "class_path": "lightning_fcl.Classifier",
        "init_args": {
            "num_classes": 10,
            "model": {"class_path": "lightning_fcl.models.DSICNet", "init_args": {"num_classes": 10}},
        },
    },
}
# For the first layer (the stem), and for each pair of a depthwise and a pointwise layer of DSICNet: the numbers of
# output positions, input channels and output channels.
STEM = (32 * 24, 1, 16)
PAIRS = [
    (32 * 24, 16, 32),
    (16 * 12, 32, 64),
    (16 * 12, 64, 64),
    (8 * 6, 64, 64),
    (8 * 6, 64, 64),
    (4 * 3, 64, 64),
]
# MACs of the stem, of the depthwise and pointwise layer of each pair, and of the last depthwise layer.
BACKBONE_MACS = 9 * STEM[0] * 16 + sum(n * a * 9 + n * a * b for n, a, b in PAIRS) + 12 * 64 * 9
HEAD_MACS = 12 * 64 * 80 + 80 * 10


@pytest.fixture
def dsicnet():
    return Classifier(DSICNet(10), 10)


@pytest.fixture
def report(dsicnet):
    return device_report(dsicnet, IMAGE, reductions=FROZEN)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "dsicnet.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


def hand_macs(forward):
    """Return the MACs of the forward pass and of the backward pass, given the forward MACs of each layer.

    The gradients of the weights and of the inputs of a layer each take the forward MACs of the layer.
    The first layer needs no gradient of its inputs.
    """
    return sum(forward), 2 * sum(forward) - forward[0]


# Tests of the paper's numbers.


def test_device_report_local_epoch_equals_paper(dsicnet, report):
    assert report["time"]["local_epoch_s"] == pytest.approx(0.1784)
    assert report["time"]["sample_s"] == pytest.approx(6.4e-3, rel=0.01)
    assert report["energy_mj"] == pytest.approx(24.3 * 0.1784)
    assert round(report["energy_mj"], 1) == 4.3
    fast = device_report(dsicnet, IMAGE, reductions=FROZEN, profile="gap9-hpm")
    assert fast["time"]["local_epoch_s"] == pytest.approx(0.1176)
    assert round(fast["energy_mj"], 1) == 6.2


def test_device_report_federated_epoch_equals_paper(report):
    time = report["time"]
    assert report["synchronisation"]["upload_s"] == report["synchronisation"]["download_s"] == 1.7
    assert time["synchronisation_s"] == pytest.approx(6 * 1.7)
    assert time["federated_epoch_s"] == pytest.approx(6 * 1.7 + 0.1784)
    # The paper states 10.5 s.
    assert time["federated_epoch_s"] == pytest.approx(10.5, rel=0.015)
    assert time["local_epochs_in_federated_epoch"] == 58
    assert time["federated_epoch_ad_hoc_s"] == pytest.approx(4 * 1.7 + 0.1784)


def test_device_report_memory_equals_paper(report):
    # The sum counts the elements of the weights, the folded bias, the input and the output. Each element has 4 bytes.
    pointwise = 4 * (64 * 80 + 80 + 64 * 12 + 80 * 12)
    learning = report["memory"]["learning"]
    assert learning["bytes"] == pointwise == pytest.approx(29_000, rel=0.05)
    assert learning["layer"] == "model.head.pointwise.convolution"
    # `at_once` also includes the gradients of the weights, of the bias and of the output. The frozen backbone needs no
    # gradient.
    assert learning["at_once"] == pointwise + 4 * (64 * 80 + 80 + 80 * 12)
    assert report["memory"]["inference"] == {
        "bytes": 32 * 24 * (16 + 32),
        "layer": "model.backbone.pointwise1.convolution",
    }
    assert report["memory"]["kept"] == 4 * (64 * 12 + 80)
    assert all(entry["fits"] for entry in report["fits"].values())
    frozen, trained = report["bytes"]["frozen"], report["bytes"]["trained"]
    assert report["fits"]["ram"] == {
        "need": frozen + 3 * trained + 4 * (64 * 12 + 80),
        "have": 3 * 2**19,
        "fits": True,
    }
    assert report["fits"]["flash"]["need"] == frozen + trained


@pytest.mark.parametrize("name", ["gap9-lpm", "gap9-hpm"])
def test_profiles_contain_counts_of_dsicnet(report, name):
    device, macs = read_device(name), report["macs"]
    assert (device.int8_macs, device.fp32_macs) == (macs["frozen_forward"], macs["trained_forward"] + macs["learning"])
    assert read_link("uwb-loco").payload_nbytes == report["synchronisation"]["upload_bytes"]
    assert device.memory == {"tcdm": 128 * 1024, "ram": 1536 * 1024, "flash": 2048 * 1024}


# Tests of parameters and bytes.


def test_device_report_dsicnet_parameters_and_bytes(report):
    weights = 9 * 16 + sum(9 * a + a * b for _, a, b in PAIRS) + 9 * 64
    channels = 16 + sum(a + b for _, a, b in PAIRS) + 64
    trained = 64 * 80 + 80 + 80 * 10 + 10
    assert report["parameters"] == {
        "all": weights + channels + trained,
        "trained": trained,
        "frozen": weights + channels,
        "unfolded": 29_962,
        "folded_norms": 15,
    }
    assert report["bytes"]["frozen"] == weights + 8 * channels
    assert report["bytes"]["trained"] == 4 * trained == 24_040
    assert report["bytes"]["all_fp32"] == 4 * (weights + channels + trained)
    sync = report["synchronisation"]
    assert sync["upload_bytes"] == sync["download_bytes"] == 4 * trained
    # Each of the 80 channels has a weight, bias, mean and variance instead of one bias. A counter takes 8 bytes.
    assert sync["simulated_upload_bytes"] == sync["simulated_download_bytes"] == 4 * (trained + 3 * 80) + 8


def test_device_report_unfolded_bytes_equal_simulation(fit, make_stream):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    task = Classifier(model, 4)
    rules = {"model.0.*": "local", "model.3.*": "download_only"}
    # Batch normalization cannot train on one sample, so incomplete batches are dropped.
    trainer = fit(task, make_stream(drop_last=True), max_epochs=1, reductions=rules)
    log = trainer.strategy.server.record
    sync = device_report(task, (6,), reductions=rules)["synchronisation"]
    assert set(log.upload_bytes.values()) == {sync["simulated_upload_bytes"]} == {4 * 4 * 5 + 8}
    assert set(log.download_bytes.values()) == {sync["simulated_download_bytes"]} == {4 * 4 * 5 + 8 + 4 * (5 * 4 + 4)}


def test_device_report_mlp_transmits_all_parameters():
    report = device_report(Classifier(MLP([64, 32, 10]), 10), (1, 8, 8), samples=5, nodes=4, local_epochs=3)
    numbers = 64 * 32 + 32 + 32 * 10 + 10
    assert report["parameters"]["trained"] == report["parameters"]["all"] == numbers
    assert report["bytes"]["all"] == report["bytes"]["all_fp32"] == 4 * numbers
    assert report["synchronisation"]["upload_bytes"] == report["synchronisation"]["download_bytes"] == 4 * numbers
    time, device, link = report["time"], read_device("gap9-lpm"), read_link("uwb-loco")
    forward, backward = hand_macs([64 * 32, 32 * 10])
    assert time["local_epoch_s"] == pytest.approx(5 * (forward + backward) / device.fp32_rate)
    assert time["federated_epoch_s"] == pytest.approx(3 * time["local_epoch_s"] + 8 * link.transfer_time(4 * numbers))


def test_device_report_local_parameters_are_not_transmitted():
    task = Classifier(MLP([6, 5, 4]), 4)
    report = device_report(task, (6,), reductions={"model.3.*": "local", "model.1.*": "download_only"})
    assert report["parameters"]["trained"] == 5 * 4 + 4
    assert report["synchronisation"]["upload_bytes"] == 0
    assert report["synchronisation"]["download_bytes"] == 4 * (6 * 5 + 5)
    # Every device already has the frozen parameters of the published model, so these parameters are not transmitted.
    task.model[1].requires_grad_(False)
    report = device_report(task, (6,))
    assert report["parameters"]["frozen"] == 6 * 5 + 5
    assert report["synchronisation"]["upload_bytes"] == report["synchronisation"]["download_bytes"] == 4 * (5 * 4 + 4)


def test_footprint_batch_norm_folds_only_into_layer_before():
    convolution = nn.Conv2d(1, 4, 3)
    folded = measure_footprint(nn.Sequential(convolution, nn.BatchNorm2d(4)), (1, 5, 5))
    # Folding adds no parameters, because the convolution already has a bias.
    assert folded.num_elements(trained=True) == 4 * 9 + 4
    bare = measure_footprint(nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)), (1, 5, 5))
    assert bare.num_elements(trained=True) == 4 * 9 + 4
    between = measure_footprint(nn.Sequential(convolution, nn.ReLU(inplace=True), nn.BatchNorm2d(4)), (1, 5, 5))
    assert between.folded == 0
    assert [layer.name for layer in between.layers] == ["0", "2"]
    alone = measure_footprint(nn.Sequential(convolution, nn.BatchNorm2d(4)), (1, 5, 5), {"0.*": "constant"})
    assert alone.folded == 0
    assert alone.num_elements(trained=True) == 8


def test_footprint_int8_layer_is_counted_unchanged():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.zeros(5, 6, dtype=torch.int8))
            self.register_buffer("weight_scale", torch.ones(5))
            self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype)) * self.weight_scale

    footprint = measure_footprint(nn.Sequential(Quantised(), nn.Linear(5, 2)), (6,), {"0.*": "constant"})
    assert (footprint.num_elements(trained=False), footprint.nbytes(trained=False)) == (30, 30 + 4 * 5 + 4)
    assert footprint.frozen_forward == 30


# Tests of MACs.


def test_macs_of_dsicnet_equal_hand_count(dsicnet, report):
    assert report["macs"]["frozen_forward"] == BACKBONE_MACS
    assert report["macs"]["trained_forward"] == HEAD_MACS
    # The sum counts the gradients of the weights of both layers, and the gradient of the input of the classifier.
    assert report["macs"]["learning"] == HEAD_MACS + 80 * 10
    whole = measure_footprint(dsicnet, IMAGE)
    forward, backward = hand_macs([9 * STEM[0] * 16, BACKBONE_MACS + HEAD_MACS - 9 * STEM[0] * 16])
    assert (whole.frozen_forward, whole.trained_forward, whole.learning) == (0, forward, backward)


def test_macs_of_har_cnn_equal_hand_count():
    footprint = measure_footprint(Classifier(HARCNN(), 6), (6, 128))
    steps = 128 - 16 + 1
    forward, backward = hand_macs([steps * 16 * 6 * 196, 196 * (steps // 4) * 1024, 1024 * 6])
    assert (footprint.trained_forward, footprint.learning) == (forward, backward)
    assert footprint.frozen_forward == 0


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        (nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4), (8, 6, 6), 9 * 8 * 2 * 9),
        (nn.ConvTranspose1d(4, 6, 3), (4, 5), 5 * 4 * 6 * 3),
        (nn.Linear(4, 3), (7, 4), 7 * 4 * 3),
    ],
)
def test_flop_counter_layer_counts_forward_and_both_gradients(layer, shape, macs):
    x = torch.zeros(1, *shape, requires_grad=True)
    with flop_counter() as counter:
        output = layer(x)
        assert counter.get_total_flops() == 2 * macs
        output.sum().backward()
    assert counter.get_total_flops() == 2 * 3 * macs


def test_footprint_counts_operations_outside_of_layers():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 3))
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x @ self.weight)

    footprint = measure_footprint(Product(), (6,))
    assert (footprint.trained_forward, footprint.learning) == (18 + 6, 18 + 12)


def test_device_report_lists_uncounted_layers():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 5)
            self.layer = nn.Linear(5, 2)

        def forward(self, x):
            return self.layer(self.table(x.long()))

    report = device_report(Last(), (4,))
    assert report["uncounted"] == ["table"]


# Tests of memory.


def test_device_report_memory_of_small_network_equals_hand_count():
    net = nn.Sequential(
        # A frozen layer that maps 2 x 8 values to 3 x 8 values.
        nn.Conv1d(2, 3, 3, padding=1),
        nn.ReLU(),
        # A trained layer that maps 3 x 8 values to 4 x 8 values.
        nn.Conv1d(3, 4, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 2),
    )
    report = device_report(net, (2, 8), reductions={"0.*": "constant"})
    memory = report["memory"]
    assert memory["inference"] == {"bytes": 4 * (24 + 32), "layer": "2"}
    assert memory["learning"] == {
        "bytes": 4 * (66 + 32 + 2),
        "layer": "5",
        "at_once": 4 * (66 + 32 + 2) + 4 * 66 + 4 * (32 + 2),
    }
    assert memory["tcdm"]["bytes"] == 4 * 100
    assert memory["kept"] == 4 * (24 + 32)
    frozen, trained = 18 + 8 * 3, 4 * (12 + 4 + 66)
    assert (report["bytes"]["frozen"], report["bytes"]["trained"]) == (frozen, trained)
    assert memory["ram"] == frozen + 3 * trained + 4 * 56


def test_device_report_large_network_does_not_fit():
    report = device_report(Classifier(HARCNN(), 6), (6, 128))
    assert [entry["fits"] for entry in report["fits"].values()] == [False, False, False]
    need = report["fits"]["tcdm"]["need"]
    assert need == 4 * (196 * 28 * 1024 + 1024 + 196 * 28 + 1024)


def test_device_report_restores_module(dsicnet):
    dsicnet.train()
    dsicnet.model.head.eval()
    dsicnet.model.backbone.requires_grad_(False)
    dsicnet.model.head.classifier.bias.grad = torch.ones(10)
    before = {name: value.clone() for name, value in dsicnet.state_dict().items()}
    device_report(dsicnet, IMAGE, reductions={"model.head.pointwise.*": "constant"})
    assert dsicnet.training and dsicnet.model.backbone.training and not dsicnet.model.head.training
    assert {name for name, p in dsicnet.named_parameters() if p.requires_grad} == {
        name for name, _ in dsicnet.named_parameters() if "head" in name
    }
    assert torch.equal(dsicnet.model.head.classifier.bias.grad, torch.ones(10))
    assert dsicnet.model.head.classifier.weight.grad is None
    assert not any(part._forward_hooks for part in dsicnet.modules())
    assert all(torch.equal(value, before[name]) for name, value in dsicnet.state_dict().items())


# Tests of reservoirs.


@pytest.mark.parametrize("symmetric", [False, True])
def test_device_report_reservoir_uploads_statistics(symmetric):
    task = ReservoirClassifier(EchoStateNetwork(3, units=20, num_layers=2, washout=10), 4, symmetric=symmetric)
    report = device_report(task, (50, 3), samples=7)
    units, steps = 40, 40
    packed = units * (units + 1) // 2 if symmetric else units**2
    sync = report["synchronisation"]
    # The client uploads the ridge statistics A and B, and the number of samples. It downloads the ridge readout.
    assert sync["upload_bytes"] == sync["simulated_upload_bytes"] == 8 * (4 * units + packed) + 8
    assert sync["download_bytes"] == 8 * 4 * units
    assert report["macs"] == {
        "frozen_forward": 50 * (20 * 3 + 20 * 20 + 20 * 20 + 20 * 20),
        "trained_forward": steps * units * 4,
        "learning": steps * (units * (units + 1) // 2 + 4 * units),
        "learns_by": "statistics",
    }
    device = read_device("gap9-lpm")
    epoch = device.seconds(7 * report["macs"]["frozen_forward"], 7 * report["macs"]["learning"])
    assert report["time"]["local_epoch_s"] == pytest.approx(epoch)
    assert report["parameters"]["frozen"] == 20 * 3 + 3 * 20 * 20 + 3 * units
    assert report["memory"]["learning"]["bytes"] == 8 * (4 * units + packed) + 4 * (units + 4)
    assert report["fits"]["flash"]["need"] == report["bytes"]["all"] - 8 * (4 * units + packed)


def test_device_report_reservoir_upload_weights():
    task = ReservoirClassifier(EchoStateNetwork(3, units=20), 4, upload="weights")
    sync = device_report(task, (50, 3))["synchronisation"]
    assert sync["upload_bytes"] == sync["download_bytes"] == 8 * 4 * 20


def test_device_report_reservoir_bytes_equal_simulation(fit, make_reservoir_task, make_series_stream):
    task = make_reservoir_task()
    log = fit(task, make_series_stream(), max_epochs=1).strategy.server.record
    sync = device_report(task, (9, 3))["synchronisation"]
    assert set(log.upload_bytes.values()) == {sync["upload_bytes"]}
    assert set(log.download_bytes.values()) == {sync["download_bytes"]}


# Tests of the command line.


def test_edge_report_command_writes_files(recipe, tmp_path, capsys):
    main(["edge-report", recipe, "--input", "1,64,48", "--samples", "28", "--nodes", "3", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    written = (tmp_path / "device.md").read_text()
    assert written in shown and str(tmp_path / "device.json") in shown
    content = json.loads((tmp_path / "device.json").read_text())
    assert content["recipes"] == [recipe] and content["input"] == [1, 64, 48]
    assert content["synchronisation"]["upload_bytes"] == 24_040
    rows = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("|")}
    assert "178.4 ms" in rows["local epoch"] and "4.34 mJ" in rows["energy of a local epoch"]
    assert "10.4 s" in rows["federated epoch"] and "58 local epochs" in rows["federated epoch"]
    assert "27,712 B" in rows["learning: largest trained layer"]
    assert "uploads 25,008 B" in written
    assert len({len(line) for line in written.splitlines() if line.startswith(("| upload", "| local"))}) == 1


def test_edge_report_command_merges_recipes_as_fit(recipe, tmp_path, capsys):
    more = tmp_path / "more.yaml"
    more.write_text("model: {init_args: {model: {init_args: {num_classes: 4}}}}\ndata: {data: digits}\n")
    words = ["--input", "1,64,48", "--samples", "28", "--nodes", "3", "--out", str(tmp_path)]
    main(["edge-report", "--config", recipe, "--config", str(more), *words])
    first = json.loads((tmp_path / "device.json").read_text())
    main(["edge-report", recipe, str(more), *words])
    assert json.loads((tmp_path / "device.json").read_text()) == first
    assert first["parameters"]["trained"] == 64 * 80 + 80 + 80 * 4 + 4
    capsys.readouterr()


def report_recipe(folder, *words):
    main(["edge-report", *map(str, words), "--out", str(folder)])
    return json.loads((folder / "device.json").read_text())


@pytest.mark.seconds
def test_edge_report_command_reads_defaults_from_data(capsys, tmp_path):
    report = report_recipe(tmp_path, RECIPES / "quickstart.yaml")
    assert report["input"] == [1, 8, 8]
    assert report["nodes"] == 10 and report["local_epochs"] == 5
    assert report["samples"] == pytest.approx(1797 * 0.8 / 10 / 5, abs=1)
    fewer = report_recipe(tmp_path, RECIPES / "quickstart.yaml", "--nodes", "2")
    assert fewer["time"]["synchronisation_s"] == pytest.approx(4 * read_link("uwb-loco").transfer_time(4810 * 4))
    assert "# Device report" in capsys.readouterr().out


def test_edge_report_command_accepts_reservoir_recipe(capsys, tmp_path):
    files = [RECIPES / "incfed" / name for name in ("base.yaml", "hhar.yaml", "incfed-hhar.yaml")]
    more = tmp_path / "small.yaml"
    more.write_text("model: {init_args: {reservoir: {init_args: {units: 30}}}}\n")
    report = report_recipe(tmp_path, *files, more, "--input", "128,3", "--samples", "10", "--nodes", "4")
    assert report["synchronisation"]["upload_bytes"] == 8 * (6 * 30 + 30 * 30) + 8
    assert "M_T is the readout" in capsys.readouterr().out


@pytest.mark.seconds
def test_edge_report_command_without_data_requires_input(tmp_path, monkeypatch, error_of):
    monkeypatch.setenv("LIGHTNING_FCL_DATA", str(tmp_path))
    files = [str(RECIPES / "flwf" / name) for name in ("base.yaml", "flwf-2t.yaml")]
    assert "Pass the shape with `--input`, as in `--input 1,64,48`." in error_of(["edge-report", *files])
    main(["edge-report", *files, "--input", "6,128", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "device.json").read_text())
    assert (report["samples"], report["nodes"]) == (28, 3)


# Tests of custom profiles and of errors.


def own_profile(tmp_path, **changes):
    content = {**yaml.safe_load(PROFILES_FILE.read_text())["devices"]["gap9-lpm"], **changes}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def test_device_report_custom_profile_and_link(dsicnet, tmp_path):
    path = own_profile(tmp_path, latency_ms=356.8, memory={"ram": 100_000}, source=None, frequency_mhz=None)
    link = tmp_path / "link.yml"
    link.write_text("payload_nbytes: 1000\ntransfer_s: 0.5\n")
    report = device_report(dsicnet, IMAGE, reductions=FROZEN, profile=path, link=str(link))
    assert report["device"]["name"] == "mine"
    assert report["time"]["local_epoch_s"] == pytest.approx(0.3568)
    assert report["synchronisation"]["upload_s"] == pytest.approx(24.04 / 2)
    # If the device has only one memory, this memory also stores the values of the largest layer.
    need = report["memory"]["ram"] + report["memory"]["tcdm"]["bytes"]
    assert report["fits"] == {"ram": {"need": need, "have": 100_000, "fits": False}}


def test_device_profile_int8_rate_follows_ratio(tmp_path):
    device = read_device(own_profile(tmp_path, int8_per_fp32=2))
    assert device.int8_rate == pytest.approx(2 * device.fp32_rate)
    assert device.seconds(28 * device.int8_macs, 28 * device.fp32_macs) == pytest.approx(0.1784)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"power_mw": None}, "mine.yaml .* arguments are required: power_mw"),
        ({"powr_mw": 3}, "but got powr_mw. Did you mean power_mw?"),
        ({"latency_ms": -1}, r"In .*mine\.yaml: Expected `latency_ms` to be above 0 but got -1"),
        ({"samples_per_run": True}, r'mine.yaml .* "samples_per_run":\s.*True'),
        ({"fp32_macs": "many"}, r'mine.yaml .* "fp32_macs":\s.*many'),
        ({"power_mw": float("nan")}, "Expected `power_mw` to be a number, but got nan. Use a finite number"),
        ({"memory": {"flsh": 3}}, "Expected `memory` to be .* but got .*flsh"),
        ({"memory": {"ram": 0}}, "Expected `ram` to be above 0 but got 0"),
        ({"memory": 5}, r'mine.yaml .* "memory":\s.*5'),
    ],
)
def test_read_device_invalid_values_raise(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_device(own_profile(tmp_path, **changes))


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_read_link_invalid_file_raises(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Expected .*mine.yaml to (contain a mapping .*|be YAML),? but got"):
        read_link(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "gap9-lmp"], "Did you mean gap9-lpm?"),
        (["--profile", "no/such.yaml"], "Expected a YAML file at no/such.yaml but there is none"),
        (["--link", "uwb"], "Expected `link` to be one of uwb-loco, or your own YAML file, but got uwb."),
        (["--nodes", "0"], "Expected `nodes` to be at least 1 but got 0."),
        (["--input", "1,64,x"], "Expected `--input` to be positive sizes separated by commas, but got"),
        (["--input", "1,0,48"], "Expected `--input` to be positive sizes separated by commas"),
        (
            ["--input", "1,32,32"],
            "Expected a model that accepts samples of shape (1, 32, 32), but the model raised: Expected",
        ),
        (["--config", "no/such.yaml"], "Expected a recipe at no/such.yaml, but there is no such file"),
    ],
)
def test_edge_report_command_invalid_options_raise(recipe, error_of, words, message):
    # The last value of an option takes precedence.
    words = ["--input", "1,64,48", "--samples", "28", "--nodes", "3", *words]
    assert message in error_of(["edge-report", recipe, *words])


def test_edge_report_command_without_recipe_or_model_raises(error_of, tmp_path):
    assert "Expected at least one recipe, but got none." in error_of(["edge-report"])
    (tmp_path / "empty.yaml").write_text("data: {data: digits}\n")
    assert "a `model`, but got a recipe without a `model`" in error_of(["edge-report", str(tmp_path / "empty.yaml")])


def test_device_report_unmatched_reductions_raise(dsicnet):
    with raises(InvalidValueError, "reductions"):
        device_report(dsicnet, IMAGE, reductions={"backbone.*": "constant"})
