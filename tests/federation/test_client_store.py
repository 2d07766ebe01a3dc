"""What clients keep between rounds, in memory and on disk."""

import re

import pytest
import torch

from lightning_fcl.data.client_round import ClientRound
from lightning_fcl.federation import client_store
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.randomness import seed_of

STATE = {
    "model": {"head.weight": torch.randn(3, 2), "count": torch.tensor(7), "flags": torch.tensor([True, False])},
    "Replay": {"x": torch.randn(2, 4).half(), "y": torch.tensor([1, 2]), "none": torch.empty(0, 4)},
    "FLwF2T": {"own.head.weight": torch.randn(4, 4).T},  # not contiguous
}
IDS = ["a/b", "ü", ".", "..", "a.b", "a%2Fb", "CLIENT", "", " ", "x.safetensors"]


def same(left, right):
    return left.keys() == right.keys() and all(
        left[s].keys() == right[s].keys()
        and all(left[s][n].dtype == right[s][n].dtype and torch.equal(left[s][n], right[s][n]) for n in left[s])
        for s in left
    )


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    return ClientStore(request.param, tmp_path / "clients")


def test_gives_back_what_it_got(store):
    store["client1"] = STATE
    assert same(store["client1"], STATE)
    store["client1"] = {"model": STATE["model"]}
    assert same(store["client1"], {"model": STATE["model"]})
    assert store["client2"] == {} and list(store) == ["client1"]


def test_odd_ids_stay_apart(store):
    for number, client in enumerate(IDS):
        store[client] = {"model": {"number": torch.tensor(number)}}
    assert sorted(store) == sorted(IDS)
    assert [store[client]["model"]["number"].item() for client in IDS] == list(range(len(IDS)))
    store.clear()
    assert list(store) == [] and store["a/b"] == {}


def test_files_stay_in_the_folder(tmp_path):
    store = ClientStore("disk", tmp_path / "clients")
    for client in ("../escape", "/etc/escape"):
        store[client] = STATE
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    assert len(list((tmp_path / "clients").iterdir())) == 2


def test_another_store_on_the_folder_goes_on(tmp_path):
    ClientStore("disk", tmp_path)["ü"] = STATE
    again = ClientStore("disk", tmp_path)
    assert list(again) == ["ü"] and same(again["ü"], STATE)


def test_without_a_folder_a_temporary_one_is_used_and_removed():
    store = ClientStore("disk")
    store["client1"] = STATE
    folder = store._folder
    assert same(store["client1"], STATE) and folder.exists()
    store._temporary.cleanup()
    assert not folder.exists()


def test_a_failing_save_leaves_the_earlier_state(tmp_path, monkeypatch):
    store = ClientStore("disk", tmp_path)
    store["client1"] = STATE

    def fail(tensors, path):
        path.write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(client_store, "save_file", fail)
    with pytest.raises(OSError, match=r"^no space left on device$"):
        store["client1"] = {"model": {"head.weight": torch.zeros(1)}}
    assert same(store["client1"], STATE) and list(store) == ["client1"]


def test_unknown_kind():
    message = 'Expected `client_store` to be "memory" or "disk" but got `tape`.'
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ClientStore("tape")


def test_seeds_depend_on_every_part_and_nothing_else():
    parts = [(seed, client, round) for seed in range(3) for client in ("a", "b", "1") for round in range(20)]
    seeds = [seed_of(*part) for part in parts]
    torch.manual_seed(99)
    assert seeds == [seed_of(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert seed_of(0, "a", "b") != seed_of(0, "ab") != seed_of(0, "a", "b", "")
    assert seed_of(0, "client1", 3) == 56026877480392164  # SHA-256 by hand: the same on every machine


@pytest.mark.parametrize(
    ("labels", "num_classes", "balanced"),
    [
        ([0, 1, 2], 3, True),
        ([0, 0, 1, 2, 2], 3, True),
        ([0, 0, 0, 1, 2, 2], 3, False),
        ([0, 0, 1, 1], 3, False),
        ([], 3, False),
        ([0, 1], 0, False),
    ],
)
def test_balanced(labels, num_classes, balanced):
    client_round = ClientRound("a", 0, labels=torch.tensor(labels, dtype=torch.long), num_classes=num_classes)
    assert client_round.balanced is balanced
