"""Tests of messages, data and settings that a server and its nodes reject. The error contains the reason."""

import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fcl import __version__
from lightning_fcl.deployment.clock import check_clock
from lightning_fcl.deployment.messages import Parcel, RejectedMessageError, to_record, unpack
from lightning_fcl.deployment.node import Node
from lightning_fcl.deployment.node_data import read_data
from lightning_fcl.deployment.node_recipe import recipe_fingerprint
from lightning_fcl.errors import ConnectionFailedError


@pytest.fixture
def deployed(rehearsal):
    """Return a simulated recipe whose clients have data files."""
    one = rehearsal({"trainer": {"max_epochs": 1}})
    one.simulate()
    return one


@pytest.fixture
def asked(deployed, wire):
    """Return a node, and the first message with model state that the server sent to this node."""
    link = wire(deployed.nodes())
    deployed.serve(link, min_clients=3)
    number, sent = next((number, parcel) for number, parcel in link.asked if parcel.state)
    return link.reached[number], sent


def test_unpack_message_above_limit_raises():
    sent = to_record(Parcel({}, {"w": torch.zeros(1000)}))
    with pytest.raises(RejectedMessageError, match="Expected at most 100 bytes of arrays from the server, but got"):
        unpack(sent, 100)


@pytest.mark.seconds
def test_other_version_or_recipe_is_rejected_by_server_and_node(deployed, wire, caplog):
    other = {**deployed.recipe, "model": {**deployed.recipe["model"], "init_args": {"num_classes": 11}}}
    nodes = [deployed.node("0"), deployed.node("1", other), deployed.node("2")]
    older = nodes[2]
    really = older.answer
    older.answer = lambda parcel: replace(really(parcel), header={**really(parcel).header, "version": "0.0.9"})
    deployed.serve(wire(nodes), min_clients=1)
    found = deployed.rounds()[0]["dropped"]
    assert (
        "Expected client 1 to have the recipe" in found["1"] and "Deploy the same recipe on all machines" in found["1"]
    )
    assert "Expected client 2 to run lightning-fcl" in found["2"] and "0.0.9" in found["2"]
    answer = nodes[0].answer(Parcel({"kind": "hello", "version": "0.0.9", "recipe": ""}))
    assert (answer.header["refused"], answer.header["argument"]) == ("other-version", "version")
    assert "Expected the server to run lightning-fcl" in caplog.text


@pytest.mark.seconds
def test_node_rejects_weights_of_another_model(asked, caplog):
    node, sent = asked
    names = list(sent.state)
    less = {name: value for name, value in sent.state.items() if name != names[0]}
    longer = {**sent.state, names[0]: torch.zeros(99, 64)}
    mad = {**sent.state, names[0]: sent.state[names[0]] * torch.inf}
    for state, code, message in (
        (less, "other-model", "Expected the server to send `model.1.weight`"),
        (longer, "other-model", "of shape"),
        (mad, "refused", "finite"),
    ):
        caplog.clear()
        assert node.answer(Parcel(sent.header, state)).header["refused"] == code and message in caplog.text
    strange = Parcel({**sent.header, "kind": "dance"}, sent.state)
    assert node.answer(strange).header["refused"] == "refused"
    assert "to be hello or train, but got 'dance'" in caplog.text


@pytest.mark.seconds
def test_server_rejects_missing_data_and_duplicate_client(deployed, wire, caplog):
    lost = Node(deployed.recipe, "1", str(deployed.folder / "nowhere.npz"), deployed.folder / "m")
    nodes = [deployed.node("0"), lost, deployed.node("2"), deployed.node("2")]
    deployed.serve(wire(nodes), min_clients=2)
    (round_idx,) = deployed.rounds()
    found, claims = round_idx["dropped"], round_idx["duplicate_claims"]
    assert claims.keys() == {"2"} and set(claims["2"]) == {"9", "10"}
    assert found.keys() == {"1"} and "got the error `unusable-data`" in found["1"]
    # The details of the error are in the log of the node only.
    assert "nowhere" not in found["1"] and "there is no file" in caplog.text


@pytest.mark.seconds
def test_node_asked_again_does_not_read_data_again(deployed):
    node, path = deployed.node("1"), deployed.folder / "data" / "1.npz"
    hello = Parcel(
        {"kind": "hello", "version": __version__, "recipe": recipe_fingerprint(deployed.recipe), "federation": "f"}
    )
    told, samples = path.stat(), len(np.load(path)["y"])
    assert node.answer(hello).header["samples"] == samples
    path.write_bytes(bytes(told.st_size))
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert (
        deployed.node("1").answer(hello).header["samples"] == samples
    )  # A new node, as after a restart, does not read the data either.
    path.write_bytes(b"")
    assert node.answer(hello).header["refused"] == "unusable-data"


def test_read_data_invalid_arrays_raise(tmp_path):
    rows = np.zeros((4, 64), np.float32)
    files = {
        "labels that are numbers": ({"x": rows, "y": np.arange(4)}, "`y` contains class numbers"),
        "no samples": ({"x": rows[:0], "y": np.array([], dtype="U1")}, "it contains 0 samples"),
        "no targets": ({"x": rows}, "not `x` and `y`"),
        "non-finite numbers": ({"x": rows * np.nan, "y": np.array(["0"] * 4)}, "non-finite"),
        "fewer targets": ({"x": rows, "y": np.array(["0"] * 3)}, r"own.npz to contain numbers or text of shape \(4,\)"),
        "a single target": ({"x": rows, "y": np.array("0")}, r"but got <U1 of shape \(\)"),
        "targets of bytes": ({"x": rows, "y": np.array([b"0"] * 4)}, r"but got \|S1"),
    }
    for columns, message in files.values():
        np.savez(tmp_path / "own.npz", **columns)
        with pytest.raises(RejectedMessageError, match=message):
            read_data(tmp_path / "own.npz")
    with pytest.raises(RejectedMessageError, match="No module named"):
        read_data("no_such_module:Data")


def test_read_data_damaged_file_raises_or_is_identical(tmp_path):
    path, rng = tmp_path / "own.npz", np.random.default_rng(0)
    columns = {"y": np.array(list("abab")), "group": np.array(list("nsns")), "rounds": np.eye(4, dtype=bool)}
    scale = {"mean": np.zeros((3, 1, 1)), "std": np.ones((3, 1, 1))}
    np.savez_compressed(path, x=rng.integers(255, size=(4, 3, 2, 2), dtype=np.uint8), **columns, **scale)
    content = path.read_bytes()

    def found(changed):
        path.write_bytes(changed)
        try:
            data = read_data(path)
        except RejectedMessageError as error:
            assert str(path) in str(error)
            return None
        samples = data.samples
        return samples.x.tolist(), samples.targets.tolist(), samples.group.tolist(), data.rounds.tolist()

    whole = found(content)
    assert whole is not None
    # A flipped bit in the directory of the zip file can hide an array.
    directory = range(8 * content.index(b"PK\x01\x02"), 8 * len(content), 5)
    for bit in [*rng.integers(8 * len(content), size=300).tolist(), *directory]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert found(bytes(flipped)) in (None, whole), f"bit {bit}"
    for length in range(0, len(content), len(content) // 50):
        assert found(content[:length]) is None


def test_read_data_damaged_image_raises_with_name(tmp_path):
    (tmp_path / "cat").mkdir()
    path = tmp_path / "cat" / "1.png"
    Image.effect_noise((16, 16), 40).save(path)
    whole = path.read_bytes()
    bomb = b"P6 60000 60000 255\n"
    assert read_data(tmp_path).samples.x.shape == (1, 3, 16, 16)
    for content in (whole[: len(whole) // 2], whole.replace(b"IDAT", b"IDAX"), bomb, b""):
        path.write_bytes(content)
        with pytest.raises(
            RejectedMessageError, match=f"Expected {re.escape(str(path))} to be a complete .* image but got: "
        ):
            read_data(tmp_path)


@pytest.mark.seconds
def test_unknown_labels_are_rejected_and_stay_on_node(deployed, wire, caplog):
    path = deployed.folder / "data" / "1.npz"
    columns = dict(np.load(path))
    y = columns.pop("y")
    columns.pop("classes")
    y = y.astype("U9")
    y[0] = "eleven"
    np.savez(path, y=y, **columns)
    deployed.serve(wire(deployed.nodes()), min_clients=2)
    found = deployed.rounds()[0]["dropped"]
    assert "got the error `unknown-name` about `y`" in found["1"] and "eleven" not in found["1"]
    said = [record.getMessage() for record in caplog.records if record.name == "lightning_fcl.deployment.node"]
    assert any("Expected the labels of client 1 to be among" in line and "eleven" in line for line in said)


@pytest.mark.seconds
def test_deploy_settings_only_for_simulation_raise(error_of, tmp_path):
    words = ["deploy", "flower", "quickstart", "--out", str(tmp_path / "app")]
    swarm = ["--trainer.strategy.swarm", "lightning_fcl.federation.swarm.Swarm"]
    assert "Expected no `swarm` in a deployment" in error_of([*words, *swarm])
    for name in ("FedViT", "FedCBDR", "Unlearning"):
        looks = ["--trainer.callbacks", f"lightning_fcl.callbacks.{name}"]
        assert "only a simulation can" in error_of([*words, *looks])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    words = ["deploy", "flower", "quickstart", "--out", str(tmp_path / "mine")]
    assert "to be an empty folder, or the output" in error_of(words)


@pytest.mark.seconds
def test_node_rejects_invalid_federation_name(deployed, asked, caplog):
    node, sent = asked
    before = sorted(deployed.folder.rglob("*"))
    for name in ("..", ".", "", "x" * 300, "../../victim" * 30, "\ufb01eld"):
        caplog.clear()
        assert node.answer(Parcel({**sent.header, "federation": name}, sent.state)).header["refused"] == "refused"
        assert "Expected the name of a federation to be 1 to 230 printable characters in Unicode" in caplog.text
    assert sorted(deployed.folder.rglob("*")) == before


def test_check_clock_missing_certificate_file_raises_with_address(tmp_path):
    with pytest.raises(ConnectionFailedError, match=r"Expected a SuperLink at 127\.0\.0\.1:1, but"):
        check_clock("127.0.0.1:1", tmp_path / "missing.pem")
