"""Tests that `FederatedStream` splits datasets between clients and rounds, and returns the requested samples."""

import numpy as np
import pytest
import torch
from raising import raises
from torch.utils.data import Dataset

from lightning_fcl import FederatedStream
from lightning_fcl.data.batching import BatchPlan, order_keys, plan_batches
from lightning_fcl.data.datasets import ArrayDataset
from lightning_fcl.data.partition import IID, ClassSubsets, Dirichlet, Shards
from lightning_fcl.data.samples import DatasetSpec, data_name
from lightning_fcl.data.scenarios import (
    ClassIncremental,
    DomainIncremental,
    FedViTScenario,
    FLwFScenario,
    ODFCLScenario,
    Stationary,
)
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError, UnknownNameError


def arrays(samples=120, classes=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 6)).astype(np.float32), rng.permutation(np.arange(samples) % classes)


class Pairs(Dataset):
    """A torch dataset of samples, labels and a third value."""

    def __init__(self, x, y):
        self.x, self.targets = torch.from_numpy(x), y.tolist()

    def __getitem__(self, index):
        return self.x[index], self.targets[index], -index

    def __len__(self):
        return len(self.targets)


def prepared(*args, scenario=None, **kwargs):
    own = {name: kwargs.pop(name) for name in list(kwargs) if name in ClassIncremental.__dataclass_fields__}
    scenario = scenario or ClassIncremental(**{"num_experiences": 2, **own})
    stream = FederatedStream.from_arrays(*args, **{"scenario": scenario, "seed": 0, **kwargs})
    stream.setup("fit")
    return stream


def used(stream):
    """Return the training samples of each client, concatenated over all rounds."""
    return {c: np.concatenate([r[c] for r in stream.plan.train if c in r]) for c in stream.plan.clients}


def test_from_arrays_numpy_torch_and_dataset_are_equal():
    x, y = arrays()
    streams = [prepared(x, y), prepared(torch.from_numpy(x), torch.from_numpy(y)), prepared(Pairs(x, y))]
    for stream in streams:
        for current, first in zip(stream.plan.train, streams[0].plan.train, strict=True):
            assert {c: i.tolist() for c, i in current.items()} == {c: i.tolist() for c, i in first.items()}
        indices = stream.plan.train[1]["3"]
        taken = stream.get_samples(indices)
        assert type(taken) is list and taken[1].dtype == torch.int64
        assert torch.equal(taken[0], torch.from_numpy(x[indices])) and taken[1].tolist() == y[indices].tolist()
        assert stream.classes == ("0", "1", "2", "3") and stream.num_classes == 4
    assert taken[2].tolist() == (-indices).tolist()


def test_client_ids_keep_samples_with_owners():
    x, y = arrays()
    owner = np.array(["ann", "bob", "zoë"])[np.arange(120) % 3]
    for client in (owner, owner.tolist()):
        stream = prepared(x, y, client)
        assert stream.plan.clients == ("ann", "bob", "zoë")
        for name, indices in used(stream).items():
            assert sorted(indices) == sorted(set(np.flatnonzero(owner == name)) - set(stream.plan.test))


def test_client_ids_with_other_partition_are_ignored():
    x, y = arrays()
    assert len(prepared(x, y, np.arange(120) % 3, partition=IID(5)).plan.clients) == 5


@pytest.mark.parametrize("partition", [IID(4), Dirichlet(4), Shards(4), ClassSubsets(4)])
def test_every_partition_uses_each_training_sample_once(partition):
    x, y = arrays(240)
    stream = prepared(x, y, partition=partition, split=Split(0.25, 0.2))
    everything = np.concatenate([stream.plan.test, stream.plan.validation, *used(stream).values()])
    assert sorted(everything) == list(range(240))
    assert len(stream.plan.test) == 60 and len(stream.plan.validation) == 36


NAMES = np.array(["ann", "bob", "cem", "dua", "eve"])[np.arange(120) % 5]


@pytest.mark.parametrize("partition", [None, IID(2)])
def test_split_by_owner_names(partition):
    x, y = arrays()
    stream = prepared(x, y, NAMES, partition=partition, split=Split(["eve"], ["dua", "ann"]))
    assert stream.plan.test.tolist() == np.flatnonzero(NAMES == "eve").tolist()
    assert stream.plan.validation.tolist() == np.flatnonzero(np.isin(NAMES, ["ann", "dua"])).tolist()
    left = np.flatnonzero(np.isin(NAMES, ["bob", "cem"])).tolist()
    assert sorted(np.concatenate([*used(stream).values()])) == left
    assert stream.plan.clients == (("bob", "cem") if partition is None else ("0", "1"))


def test_split_train_clients_selects_owners():
    x, y = arrays()
    stream = prepared(x, y, NAMES, split=Split(["eve"], train_clients=["cem", "ann"]))
    assert stream.plan.clients == ("ann", "cem")
    assert sorted(np.concatenate([*used(stream).values()])) == np.flatnonzero(np.isin(NAMES, ["ann", "cem"])).tolist()
    # The fractions of a split refer to the samples of all owners. Then `train_clients` selects the clients that
    # train.
    both = [prepared(x, y, NAMES, split=Split(train_clients=names)) for names in (["ann"], None)]
    assert both[0].plan.test.tolist() == both[1].plan.test.tolist()
    assert used(both[0])["ann"].tolist() == used(both[1])["ann"].tolist() and len(both[0].plan.clients) == 1


def test_split_by_owner_numbers():
    x, y = arrays()
    owner = np.arange(120) % 12
    for names in (["3", "10"], [3, 10]):
        stream = prepared(x, y, owner, split=Split(names))
        assert stream.plan.test.tolist() == np.flatnonzero(np.isin(owner, [3, 10])).tolist()


@pytest.mark.parametrize(
    ("split", "argument"),
    [
        (Split(["ann", "zoë"]), "test"),
        (Split(["eve"], ["eve"]), "validation"),
        (Split(["eve"], ["dua"], ["dua", "ann", "eve"]), "train_clients"),
    ],
)
def test_split_unknown_owner_raises(split, argument):
    with raises(InvalidValueError, argument):
        prepared(*arrays(), NAMES, split=split)


@pytest.mark.parametrize("split", [Split([*"ab"]), Split(["a"], ["b"]), Split(train_clients=[])])
def test_split_without_training_samples_raises(split):
    with raises(InvalidValueError, "test"):
        prepared(*arrays(), np.array(["a", "b"])[np.arange(120) % 2], split=split)


@pytest.mark.parametrize("option", ["test", "validation", "train_clients"])
def test_split_by_owners_without_owners_raises(option):
    split = Split(**{option: ["ann"]})
    for source in (FederatedStream("digits", split=split), FederatedStream.from_arrays(*arrays(), split=split)):
        with raises(InvalidValueError, option, value=["ann"]):
            source.setup("fit")


def test_split_official_test_set():
    x, y = arrays()
    official = np.arange(120) >= 90
    stream = FederatedStream(
        ArrayDataset(x, y, None, tuple("abcd"), official), ClassIncremental(2), split=Split("official"), seed=0
    )
    stream.setup("fit")
    assert stream.plan.test.tolist() == list(range(90, 120))
    assert sorted(np.concatenate([*used(stream).values()])) == list(range(90))


def test_loaders_contain_samples_of_plan():
    x, y = arrays()
    for data in ((x, y), (Pairs(x, y),)):
        stream = prepared(*data, split=Split(validation=0.25), batch_size=4)
        for loader, indices in (
            (stream.val_dataloader(), stream.plan.validation),
            (stream.test_dataloader(), stream.plan.test),
        ):
            loaded = [torch.cat(column) for column in list(zip(*loader, strict=True))[:2]]
            assert torch.equal(loaded[0], torch.from_numpy(x[indices])) and loaded[1].tolist() == y[indices].tolist()
    assert prepared(x, y).val_dataloader() == []


def test_pretrain_dataloader_contains_pretrain_samples():
    x, y = arrays(1200)
    stream = prepared(x, y, scenario=FLwFScenario(4, samples_per_round=12, test_per_class=5))
    xs, ys = (torch.cat(column) for column in zip(*stream.pretrain_dataloader(), strict=True))
    expected = stream.get_samples(stream.plan.pretrain)
    assert ys.bincount().tolist() == [10] * 4
    assert torch.equal(xs[xs[:, 0].argsort()], expected[0][expected[0][:, 0].argsort()])


def test_pretrain_dataloader_without_samples_raises():
    with raises(InvalidValueError, "scenario"):
        prepared(*arrays()).pretrain_dataloader()


def test_client_round_contains_data_of_round():
    x, y = arrays()
    stream = prepared(x, y, class_order=[3, 1, 0, 2], rounds_per_experience=2, partition=IID(3))
    client_rounds = [stream.client_round("1", round_idx) for round_idx in range(4)]
    assert [(t.client_id, t.round_idx, t.experience_idx, t.is_last_round) for t in client_rounds] == [
        ("1", 0, 0, False),
        ("1", 1, 0, True),
        ("1", 2, 1, False),
        ("1", 3, 1, True),
    ]
    assert [(t.new_classes, t.old_classes) for t in client_rounds] == [((1, 3), ())] * 2 + [((0, 2), (1, 3))] * 2
    for client_round in client_rounds:
        indices = stream.plan.train[client_round.round_idx]["1"]
        assert client_round.labels.tolist() == y[indices].tolist()
        assert client_round.num_samples == len(indices) and client_round.num_classes == 4
        assert client_round.num_stream_samples == len(set(used(stream)["1"])) == len(used(stream)["1"]) / 2


def test_client_round_without_samples_is_empty():
    x, y = arrays()
    # Client 0 has only the classes 0 and 1 of the first experience, so it has no samples in round 1.
    stream = prepared(x, y, y // 2, class_order=[0, 1, 2, 3])
    client_round = stream.client_round("0", 1)
    assert client_round.num_samples == 0 and client_round.labels.tolist() == [] and "0" not in stream.plan.train[1]


def test_domain_names_become_numbers():
    x, y = arrays()
    group = np.array(["watch", "phone", "glasses"])[np.arange(120) % 3]
    stream = prepared(
        x, y, group=group, scenario=DomainIncremental(domain_order=["watch", 0, "phone"]), partition=IID(2)
    )
    names = [np.unique(group[np.concatenate(list(current.values()))]).tolist() for current in stream.plan.train]
    assert names == [["watch"], ["glasses"], ["phone"]]
    assert {(t.new_classes, t.old_classes) for t in (stream.client_round("1", r) for r in range(3))} == {((), ())}


def test_stream_seed_determines_plan(monkeypatch):
    x, y = arrays()

    def tests(**kwargs):
        return prepared(x, y, **kwargs).plan.test.tolist()

    assert tests(seed=3) == tests(seed=3) != tests(seed=4)
    assert tests(seed=None) == tests(seed=0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert tests(seed=None) == tests(seed=3)


WRONG = [
    ({"batch_size": 0}, InvalidValueError, "batch_size"),
    ({"num_workers": -1}, InvalidValueError, "num_workers"),
    ({"partition": "fair"}, UnknownNameError, "partition"),
    ({"partition": "by-client-id"}, InvalidValueError, "partition"),
    ({"scenario": "class-incrementall"}, UnknownNameError, "scenario"),
    ({"scenario": ClassIncremental(class_order=[*range(10), 10])}, UnknownNameError, "class_order"),
    ({"scenario": ClassIncremental(class_order=[1.5])}, UnknownNameError, "class_order"),
    (
        {"scenario": ClassIncremental(class_order={c: range(10) for c in "012x"}), "partition": IID(3)},
        UnknownNameError,
        "class_order",
    ),
    ({"split": Split("official")}, InvalidValueError, "test"),
    ({"scenario": "FLwF", "split": Split(0.3)}, InvalidValueError, "split"),
    ({"scenario": "fedvit", "partition": "iid"}, InvalidValueError, "partition"),
    ({"scenario": DomainIncremental}, InvalidTypeError, "scenario"),
    ({"scenario": {"class_path": "FLwFScenario"}}, InvalidTypeError, "scenario"),
    ({"scenario": IID(3)}, InvalidTypeError, "scenario"),
    ({"partition": ClassIncremental()}, InvalidTypeError, "partition"),
    ({"split": 0.2}, InvalidTypeError, "split"),
    ({"data": np.zeros((3, 2))}, InvalidTypeError, "data"),
]


@pytest.mark.parametrize(("options", "kind", "argument"), WRONG)
def test_stream_invalid_argument_raises(options, kind, argument):
    with raises(kind, argument):
        FederatedStream(**options).setup("fit")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (Split, {"test": "offical"}, (InvalidValueError, "test")),
        (Split, {"validation": "0.2"}, (InvalidValueError, "validation")),
        (ClassIncremental, {"class_order": "ascending"}, (InvalidTypeError, "class_order")),
    ],
)
def test_split_and_scenario_invalid_argument_raises(kind, options, expected):
    with raises(*expected):
        kind(**options)


@pytest.mark.parametrize(("kind", "name"), [(ClassIncremental, "rounds_per_experience"), (Stationary, "num_rounds")])
def test_scenario_zero_rounds_raises(kind, name):
    with raises(InvalidValueError, name, value=0):
        kind(**{name: 0})


def test_scenario_and_partition_accept_class_names():
    kept = {"data": "digits", "scenario": "flwf", "partition": "iid", "batch_size": 4, "shuffle": False}
    kept |= {"drop_last": True, "seed": 3}
    for name, value in kept.items():
        stream = FederatedStream(**{name: value})
        assert name in ("scenario", "partition") or getattr(stream, name) == value
    for name in ("class-incremental", "domain-incremental", "flwf", "odfcl", "fedvit"):
        assert type(FederatedStream(scenario=name).scenario).__name__.lower().startswith(name.replace("-", ""))
    for name in ("iid", "by-client-id", "dirichlet", "shards", "class-subsets"):
        assert type(FederatedStream(partition=name).partition).__name__.lower() == name.replace("-", "")
    assert FederatedStream(scenario="domain-incremental").scenario.history == "round"
    with pytest.raises(TypeError, match="batchsize"):
        FederatedStream.from_arrays(*arrays(), batchsize=3)


@pytest.mark.parametrize("of", [np.asarray, torch.tensor, list])
def test_floating_targets_without_classes_raise(of):
    x = arrays(samples=8)[0]
    with raises(InvalidValueError, "y"):
        prepared(x, of([0.0, 1.0, 0.5, 1.0] * 2), partition=IID(1))
    # Floating-point targets are not classes, even if all are whole numbers.
    with raises(InvalidValueError, "y"):
        prepared(x, of([0.0, 1.0] * 4), partition=IID(1))
    assert prepared(x, of([0, 1] * 4), partition=IID(1), split=Split(0.25)).y.tolist() == [0, 1] * 4


@pytest.mark.parametrize("scenario", [FedViTScenario(), FLwFScenario(), ODFCLScenario()])
def test_client_ids_with_scenario_that_assigns_clients_raise(scenario):
    with raises(InvalidValueError, "client_ids"):
        FederatedStream.from_arrays(*arrays()[:2], np.arange(len(arrays()[1])) % 3, scenario=scenario)


def test_plain_trainer_with_several_clients_raises(make_task, fit):
    with raises(InvalidValueError, "strategy"):
        fit(make_task(), prepared(*arrays(), partition=IID(3)), strategy="auto")


def test_plain_trainer_with_more_epochs_than_rounds_raises(make_task, fit):
    with raises(InvalidValueError, "max_epochs"):
        fit(make_task(), prepared(*arrays(), partition=IID(1)), strategy="auto", max_epochs=3)


def test_plain_trainer_trains_one_client(make_task, fit):
    stream, task, by_hand = prepared(*arrays(), partition=IID(1), batch_size=8), make_task(), make_task()
    fit(task, stream, strategy="auto")
    optimizer = by_hand.configure_optimizers()
    for round_idx, current in enumerate(stream.plan.train):
        x, y = stream.get_samples(current["0"])
        for indices in plan_batches(len(y), 1, BatchPlan(8), order_keys(0, ["0"], round_idx)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(by_hand(x[indices]), y[indices]).backward()
            optimizer.step()
    torch.testing.assert_close(task.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


def faces(people=8, images=12, size=16, seed=0):
    """Return images of people in random order."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(people), images))
    x = rng.normal(size=(len(y), 1, size, size)).astype(np.float32) + y[:, None, None, None]
    return ArrayDataset(x.astype(np.float32), y, None, tuple(f"person {c}" for c in range(people)))


SMALL = {
    "num_people": 6, "num_base_people": 2, "num_sessions": 2, "num_nodes": 2, "train_per_class": 6, "test_per_class": 3,
    "validation_per_class": 2, "rounds_per_session": 2,
}  # fmt: skip


def test_odfcl_numbers_people_in_learning_order():
    arrays = faces()
    stream = FederatedStream(arrays, ODFCLScenario(**SMALL), seed=0)
    stream.setup("fit")
    assert stream.num_classes == len(stream.classes) == 6 and stream.plan.group_names(stream.classes) == list(
        stream.classes
    )
    names = [*stream.classes, *(arrays.classes[c] for c in stream.plan.class_order[6:])]
    assert sorted(names) == sorted(arrays.classes) and names != list(arrays.classes)
    x, y = stream.get_samples(np.arange(len(arrays.y)))
    assert torch.equal(x, torch.from_numpy(arrays.x))
    assert [names[label] for label in y] == [arrays.classes[label] for label in arrays.y]
    for round_idx, classes in enumerate([(2, 3), (2, 3), (4, 5), (4, 5)]):
        for node, label in zip(("node1", "node2"), classes, strict=True):
            client_round = stream.client_round(node, round_idx)
            assert client_round.labels.tolist() == [label] * 4 and client_round.num_classes == 6
            assert client_round.new_classes == classes and client_round.old_classes == tuple(range(classes[0]))
            assert client_round.experience_idx == 1 + round_idx // 2 and client_round.is_last_round == (
                round_idx % 2 == 1
            )
            assert client_round.num_samples == 4 and client_round.num_stream_samples == 8
    for loader, number in ((stream.test_dataloader(), 3), (stream.val_dataloader(), 2)):
        assert torch.cat([y for _, y in loader]).bincount().tolist() == [number] * 6
    assert set(torch.cat([y for _, y in stream.pretrain_dataloader()]).tolist()) == {6, 7}


def test_map_replaces_samples_by_function_outputs():
    x, y = arrays(samples=600)
    for data in (x, Pairs(x, y)):
        stream, sizes = prepared(data, y), []

        def double(batch, sizes=sizes):
            sizes.append(len(batch))
            assert not torch.is_grad_enabled()
            return 2 * batch[:, :3]

        stream.samples = stream.samples.map(double)
        # The function gets batches, not all samples at once.
        assert sum(sizes) == 600 and max(sizes) < 600
        assert not stream.samples.is_random
        taken = stream.get_samples(np.array([5, 599, 0]))
        assert (
            torch.equal(taken[0], torch.from_numpy(2 * x[[5, 599, 0], :3]))
            and taken[1].tolist() == y[[5, 599, 0]].tolist()
        )
        assert torch.cat([batch for batch, _ in stream.test_dataloader()]).shape[1] == 3
        stream.samples = stream.samples.map(lambda batch: batch + 1)
        assert torch.equal(stream.get_samples(np.array([7]))[0], torch.from_numpy(2 * x[[7], :3] + 1))
        for _ in range(2):
            stream.samples = stream.samples.raw_samples or stream.samples
            assert torch.equal(stream.get_samples(np.array([7]))[0], torch.from_numpy(x[[7]]))


def test_stream_str_names_data_and_scenario():
    assert str(FederatedStream("digits")) == "FederatedStream of digits, scenario ClassIncremental"
    assert str(FederatedStream(DatasetSpec("lfw"), "odfcl")) == "FederatedStream of lfw, scenario ODFCLScenario"
    assert str(prepared(*arrays())) == "FederatedStream of the data, scenario ClassIncremental"
    own = ArrayDataset(np.zeros((4, 1), np.float32), np.arange(4) % 2, None, ("a", "b"), None, None)
    assert data_name(own) == "ArrayDataset"


def test_pixels_are_normalized_per_batch():
    rng = np.random.default_rng(0)
    pixels, y = rng.integers(256, size=(600, 3, 4, 4), dtype=np.uint8), rng.permutation(np.arange(600) % 4)
    mean, std = (rng.uniform(50, 150, (3, 1, 1)).astype(np.float32) for _ in range(2))
    data = ArrayDataset(pixels, y, None, tuple("abcd"), mean=mean, std=std)
    stream = FederatedStream(data, ClassIncremental(2), seed=0)
    stream.setup("fit")
    indices = np.array([5, 599, 0])
    x, labels = stream.get_samples(indices)
    assert torch.equal(x, torch.from_numpy(data.samples(indices))) and labels.tolist() == y[indices].tolist()
    tested = torch.cat([batch for batch, _ in stream.test_dataloader()])
    assert torch.equal(tested, torch.from_numpy(data.samples(stream.plan.test)))
    stream.samples = stream.samples.map(lambda batch: batch.flatten(1))
    assert torch.equal(stream.get_samples(indices)[0], x.flatten(1))
    stream.samples = stream.samples.map(lambda batch: batch + 1)
    stream.samples = stream.samples.raw_samples or stream.samples
    assert torch.equal(stream.get_samples(indices)[0], x)
