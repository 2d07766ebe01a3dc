"""Tests of batches whose samples cannot be stored. Methods that store samples reject these batches before training."""

import functools

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from raising import raises
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.callbacks import (
    AGEM,
    BCN,
    EWC,
    GEM,
    MAS,
    ContinualMetrics,
    DERpp,
    FedCBDR,
    FedProto,
    ICaRL,
    LwF,
    ReFed,
    RegMean,
    Replay,
)
from lightning_fcl.data.partition import IID
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.methods.batch_check import check_batch, check_stored
from lightning_fcl.methods.method import Method
from lightning_fcl.models import MLP

METHODS = [Replay, ReFed, DERpp, FedCBDR, GEM, AGEM, BCN, EWC, MAS, ICaRL, FedProto, RegMean]
KINDS = {
    "list": "a list of length 2 with items of type Tensor",
    "text": "a list of length 2 with items of type str",
    "packed": "a PackedSequence of length 4",
}


class Samples(Dataset):
    def __init__(self):
        self.x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
        self.reads = 0

    def __len__(self):
        return 48

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index], torch.tensor(index % 4)


@functools.cache
def collate(kind):
    def join(items):
        x, y = [x for x, _ in items], torch.stack([y for _, y in items])
        if kind == "text":
            x = [" ".join(map(str, one.tolist())) for one in x]
        if kind == "packed":
            x = pack_sequence([one[: 6 - number % 3] for number, one in enumerate(x)], enforce_sorted=False)
        return [torch.stack(x) if kind == "tensor" else x, y]

    return join


class Net(Classifier):
    """A classifier that accepts tensors, lists, text and packed sequences."""

    def __init__(self):
        super().__init__(MLP([6, 5, 4]), 4)
        self.steps = 0

    def forward(self, x):
        if isinstance(x, PackedSequence):
            x = pad_packed_sequence(x, batch_first=True, total_length=6)[0]
        if isinstance(x, list):
            x = torch.stack([torch.tensor([*map(float, one.split())]) if isinstance(one, str) else one for one in x])
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


def stream(kind):
    return FederatedStream.from_arrays(
        Samples(),
        torch.arange(48) % 4,
        scenario=ClassIncremental(2),
        partition=IID(2),
        split=Split(test=0.25),
        batch_size=8,
        seed=0,
        collate_fn=collate(kind),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", METHODS)
def test_storing_methods_unsupported_batch_raises_before_training(fit, make, kind):
    module, data = Net(), stream(kind)
    with raises(InvalidTypeError, "x"):
        fit(module, data, [make()])
    # The module has made no step, and the check has restored the dataset's count of reads.
    assert not module.steps and not data.samples.x.reads


@pytest.mark.parametrize("kind", KINDS)
def test_plain_trainer_unsupported_batch_raises_before_first_step(quiet, kind):
    module, loader = Net(), DataLoader(Samples(), batch_size=2, collate_fn=collate(kind))
    with raises(InvalidTypeError, "x"):
        L.Trainer(max_epochs=1, callbacks=[Replay()], **quiet).fit(module, loader)
    assert not module.steps


@pytest.mark.may(
    "Batches of lists, text or `PackedSequence`",
    "Accuracy is measured. Methods that need single samples raise an error before the first round.",
)
@pytest.mark.seconds
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("methods", [[], [LwF]], ids=["none", "LwF"])
def test_continual_metrics_non_tensor_batches_equal_hand_loop(fit, kind, methods):
    """The accuracy equals the accuracy of a hand-written loop."""
    metrics, module, data = ContinualMetrics(), Net(), stream(kind)
    fit(module, data, [*(make() for make in methods), metrics])
    rows = data.plan.test
    loader = DataLoader(Subset(Samples(), rows.tolist()), batch_size=8, collate_fn=collate(kind))
    with torch.no_grad():
        right = torch.cat([module.eval()(x).argmax(dim=1) == y for x, y in loader])
    correct = torch.zeros(4, dtype=torch.long).index_add(0, torch.from_numpy(data.plan.groups[rows]), right.long())
    assert metrics.record["rounds"][-1]["correct"]["server"] == correct.tolist()


class Own(Method):
    def replay_samples(self, client):
        return None


X, Y = torch.ones(2, 3), torch.zeros(2)
FINE = [[X, Y], (X, Y), [{"a": X, "b": [X, X]}, Y]]
WRONG = {
    "0.1": [[X, torch.ones(3, 3)], Y],
    "1.0": [X, [torch.zeros(3)] * 2],
    "0.text": [{"a": X, "text": "a"}, Y],
    "0.a": [{"a": torch.zeros(())}, Y],
    "0.none": [{"none": None}, Y],
}


@pytest.mark.parametrize("batch", FINE, ids=["list", "tuple", "nest"])
def test_check_stored_nested_tensors_are_accepted(batch):
    check_stored(Own(), batch)
    if isinstance(batch[0], torch.Tensor):
        check_batch(Replay(), batch)
    else:
        with raises(InvalidTypeError, "x"):
            check_batch(Replay(), batch)


@pytest.mark.parametrize("path", WRONG)
def test_check_stored_invalid_value_raises_with_path(path):
    with raises(InvalidTypeError, path):
        check_stored(Own(), WRONG[path])


def test_check_batch_dict_requires_one_row_per_sample():
    check_batch(Replay(), {"ids": X, "labels": Y})
    for other in ("a", ["a", "b"], torch.zeros(3), None, 1):
        with raises(InvalidTypeError, "other"):
            check_batch(Replay(), {"ids": X, "labels": Y, "other": other})


def test_replay_samples_of_different_lengths_raise(fit):
    """The samples of the second experience are longer than the samples of the first experience."""

    def pad(items):
        longest = 6 if items[0][1] == 1 else 5
        return [torch.stack([x[:longest] for x, _ in items]), torch.stack([y for _, y in items])]

    class Padded(Net):
        def forward(self, x):
            return super().forward(F.pad(x, (0, 6 - x.shape[1])))

    scenario = ClassIncremental(4, class_order=[0, 1, 2, 3])
    data = FederatedStream.from_arrays(
        Samples(), torch.arange(48) % 4, scenario=scenario, partition=IID(2), seed=0, collate_fn=pad
    )
    with raises(InvalidValueError, "x"):
        fit(Padded(), data, [Replay(9, update="round")])
