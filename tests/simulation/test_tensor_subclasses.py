"""Tests of tensor subclasses in samples and modules: training, stored states and checkpoints equal those of tensors."""

import copy
from collections import Counter, OrderedDict
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept import memory_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import MAS, Replay
from lightning_fcl.data.partition import IID
from lightning_fcl.data.plain_tensors import plain_tensor
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.deployment.messages import bytes_of
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.robust import Median, TrimmedMean
from lightning_fcl.simulation.checkpoint_content import readable


class Tagged(torch.Tensor):
    """A tensor with metadata that operations copy to their result, like MONAI's `MetaTensor`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        found = [one.meta for one in args if isinstance(one, Tagged) and hasattr(one, "meta")]
        if isinstance(result, Tagged) and found:
            result.meta = found[0]
        return result


def tagged(tensor):
    tensor = tensor.as_subclass(Tagged)
    tensor.meta = {"file": Path("scan.nii")}  # A checkpoint with a path could not be read.
    return tensor


class Scans(Dataset):
    """A dataset whose samples are pairs or dicts with tensors of a subclass."""

    def __init__(self, make=tagged, as_dicts=False):
        self.x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
        self.make, self.as_dicts, self.targets = make, as_dicts, (torch.arange(48) % 4).tolist()

    def __len__(self):
        return 48

    def __getitem__(self, index):
        x, y = self.make(self.x[index].clone()), torch.tensor(self.targets[index])
        return {"x": x, "y": self.make(y)} if self.as_dicts else (x, y)


class Net(L.LightningModule):
    """A network with buffers and a parameter. ``make`` can convert these tensors to a tensor subclass."""

    def __init__(self, make=torch.Tensor.clone):
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("scale", make(torch.linspace(0.5, 1.5, 5)))
        self.register_buffer("seen", make(torch.zeros(())))
        self.shift = nn.Parameter(make(torch.zeros(4)))
        self.classes = []

    def forward(self, x):
        return self.layer(x * self.scale) + self.shift

    def training_step(self, batch, batch_idx):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        self.classes.append(type(x))
        self.seen.add_(len(y))
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def stream(make=tagged, as_dicts=False, **options):
    return FederatedStream.from_arrays(
        Scans(make, as_dicts),
        torch.arange(48) % 4,
        scenario=ClassIncremental(2, rounds_per_experience=2),
        partition=IID(2),
        batch_size=8,
        seed=0,
        **options,
    )


def state_of(module):
    return {name: value.detach().as_subclass(torch.Tensor).clone() for name, value in module.state_dict().items()}


def assert_equal_states(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


KEEPING = {"keep_optimizer_state": True, "reductions": {"shift": "local"}}


@pytest.mark.may(
    "Parameters or buffers of a subclass of `torch.Tensor`",
    "The tensors of the module keep their class. The server, client states and checkpoints contain plain tensors.",
)
@pytest.mark.seconds
@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize(
    ("methods", "as_dicts", "strategy"),
    [
        ([], False, {}),
        ([], False, KEEPING),
        ([], False, {"reductions": {"layer.*": Median(), "shift": TrimmedMean(0.4)}}),
        ([Replay(9, update="round")], False, {}),
        ([Replay(9, "reservoir", update="round")], True, {}),
        ([MAS()], False, KEEPING),
    ],
    ids=["plain", "own", "robust", "pairs", "dicts", "MAS"],
)
def test_fit_with_subclasses_equals_plain_tensors_and_resumes(fit, tmp_path, methods, as_dicts, strategy, store):
    results = {}
    initial = Net().state_dict()
    for make in (torch.Tensor.clone, tagged):
        module = Net(make)
        module.load_state_dict(initial)
        folder = tmp_path / make.__name__
        saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        options = {
            "trainer_args": {"enable_checkpointing": True},
            "client_store": store,
            "max_vectorized_clients": 1,
            **strategy,
        }
        fit(module, stream(make, as_dicts), [saves, *copy.deepcopy(methods)], **options)
        results[make] = state_of(module)
        if make is tagged:
            assert type(module.scale) is Tagged and type(module.shift) is Tagged
            assert len([*folder.glob("*.ckpt")]) == 4
            for path in folder.glob("*.ckpt"):
                torch.load(path, weights_only=True)
            resumed = Net(make)
            options["trainer_args"] = {}
            fit(resumed, stream(make, as_dicts), copy.deepcopy(methods), ckpt_path=folder / "epoch=1.ckpt", **options)
            assert_equal_states(state_of(resumed), results[make])
    assert_equal_states(results[tagged], results[torch.Tensor.clone])


@pytest.mark.parametrize(
    ("methods", "expected"), [([], {Tagged}), ([Replay(9, update="round")], {torch.Tensor})], ids=["none", "Replay"]
)
def test_batches_have_one_class_in_all_rounds(fit, methods, expected):
    module = Net()
    fit(module, stream(), copy.deepcopy(methods), max_vectorized_clients=1)
    assert {*module.classes} == expected


def test_replay_plain_trainer_stores_plain_tensors(quiet, tmp_path):
    replay, module = Replay(9, update="round"), Net()
    trainer = L.Trainer(max_epochs=2, callbacks=[replay], **quiet)
    trainer.fit(module, DataLoader(Scans(), batch_size=8))
    assert {type(value) for value in memory_of(replay).values()} == {torch.Tensor} == {*module.classes}
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    kept = torch.load(tmp_path / "plain.ckpt", weights_only=True)["callbacks"]["MethodDriver"]["server"]
    assert {type(value) for value in kept["clients"]["local"]["Replay"].values()} == {torch.Tensor}


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("make", [tagged, nn.Parameter, lambda value: nn.Parameter(tagged(value))])
def test_client_store_subclass_returns_plain_tensor(kind, make):
    store = ClientStore(kind)
    store["a"] = {"Mine": {"x": make(torch.arange(3.0))}}
    value = store["a"]["Mine"]["x"]
    assert type(value) is torch.Tensor and not value.requires_grad and not vars(value)
    assert value.tolist() == [0.0, 1.0, 2.0]


def test_plain_tensor_keeps_plain_tensors_and_memory():
    value = torch.arange(3.0)
    assert plain_tensor(value) is value
    for other in (tagged(value), nn.Parameter(value)):
        assert plain_tensor(other).data_ptr() == value.data_ptr()


def test_encode_entry_subclass_equals_plain():
    value = torch.arange(3.0)
    assert bytes_of(tagged(value.clone())) == bytes_of(value)


# Tests of the content of checkpoints.


def nested(leaf):
    return {"callbacks": {"Mine": [{"kept": (1, leaf)}]}, "optimizer_states": [OrderedDict(a=leaf)], "loops": leaf}


def load(content, path):
    torch.save(content, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "leaf",
    [
        *(None, True, 1, 1.5, 1j, "a", b"a", torch.float16, torch.device("cpu"), torch.Size([2])),
        *({1, 2}, Counter("aab"), bytearray(b"a"), torch.ones(2), nn.Parameter(torch.ones(2))),
        torch.eye(2).to_sparse(),
    ],
    ids=repr,
)
def test_readable_values_are_kept(leaf, tmp_path):
    content = nested(leaf)
    assert readable(content) is content
    load(content, tmp_path / "a.ckpt")


@pytest.mark.parametrize("make", [tagged, lambda value: nn.Parameter(tagged(value))], ids=["tensor", "parameter"])
def test_readable_subclasses_become_plain(make, tmp_path):
    content = nested(make(torch.arange(2.0)))
    changed = load(readable(content), tmp_path / "a.ckpt")
    assert type(changed["loops"]) is torch.Tensor and type(changed["callbacks"]["Mine"][0]["kept"]) is tuple
    assert changed["callbacks"]["Mine"][0]["kept"][1].tolist() == [0.0, 1.0]
    assert type(content["loops"]) is not torch.Tensor  # The original content does not change.


OTHERS = [Path("a"), np.float64(1), np.zeros(2), object(), range(3), len]


@pytest.mark.parametrize("leaf", OTHERS, ids=[type(leaf).__name__ for leaf in OTHERS])
def test_readable_other_values_raise_with_path(leaf):
    with pytest.raises(ValueError) as caught:
        readable({"state_dict": {}, **nested(leaf)})
    assert str(caught.value) == (
        "Expected checkpoints to contain only tensors and plain values, but "
        f"`checkpoint['callbacks']['Mine'][0]['kept'][1]` is a `{type(leaf).__name__}`. A checkpoint with "
        "this value could not be read. In `state_dict` of the callback `Mine`, convert the value to numbers, text, "
        "tensors, or lists and dicts of such values."
    )


def test_readable_container_that_contains_itself_is_kept():
    content = {"callbacks": []}
    content["callbacks"].append(content["callbacks"])
    assert readable(content) is content


class Keeps(Callback):
    def __init__(self, value, first=0):
        self.value, self.first, self.ended = value, first, 0

    def state_dict(self):
        return {"value": self.value if self.ended >= self.first else 0}

    def on_train_epoch_end(self, *args):
        self.ended += 1


@pytest.mark.may(
    "A callback whose state contains an object, such as a path or a NumPy number",
    "Not supported with checkpoints. The error names the entry, at the latest when the first checkpoint is written.",
)
@pytest.mark.parametrize(("first", "rounds"), [(0, 0), (1, 1)], ids=["known before", "from the first round on"])
def test_unreadable_callback_state_raises_by_the_first_round(fit, tmp_path, first, rounds):
    keeps, saves = Keeps(Path("a"), first), ModelCheckpoint(tmp_path)
    with raises(InvalidValueError, "checkpoint['callbacks']['Keeps']['value']"):
        fit(Net(), stream(), [keeps, saves], trainer_args={"enable_checkpointing": True})
    assert keeps.ended == rounds
    fit(Net(), stream(), [Keeps(Path("a"), first)])  # No checkpoint is written.
    fit(Net(), stream(), [Keeps("a", first), saves], trainer_args={"enable_checkpointing": True})


def test_first_checkpoint_of_a_fit_is_read_back(fit, tmp_path):
    class Broken(type(fit(Net(), stream(), max_epochs=1).strategy.checkpoint_io)):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path, storage_options)
            Path(path).write_bytes(Path(path).read_bytes()[:-100])

    keeps = Keeps(0)
    options = {"trainer_args": {"enable_checkpointing": True}, "checkpoint_io": Broken()}
    with raises(InvalidValueError, "checkpoint_io", value="Broken"):
        fit(Net(), stream(), [keeps, ModelCheckpoint(tmp_path)], **options)
    assert keeps.ended == 1
    fit(Net(), stream(), [ModelCheckpoint(tmp_path)], trainer_args={"enable_checkpointing": True})
    fit(Net(), stream(), trainer_args={"enable_checkpointing": False}, checkpoint_io=Broken())
