"""Tests of batches of one sample, with modules that can train on one sample and modules that cannot."""

import logging
from dataclasses import replace

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from raising import raises
from torch import nn

from lightning_fcl import FederatedStream
from lightning_fcl.callbacks import FedProto, Replay
from lightning_fcl.data.batching import BatchPlan, plan_batches
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError, MissingValueError
from lightning_fcl.rng import make_client_keys

SIZES = {"a": 9, "b": 1, "c": 5, "d": 2, "e": 8}


class Own(L.LightningModule):
    def __init__(self, *between):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BatchNorm(Own):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(8))


class ByHand(BatchNorm):
    """A module with batch normalization and manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class SetUpByHook(BatchNorm):
    """A module whose training step needs an attribute that a hook sets. Before the fit, only `forward` can be tried."""

    def on_train_epoch_start(self):
        self.scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)


class Deviation(Own):
    """A module whose loss is NaN for a batch of one sample."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self(batch[0]).std(dim=0).mean()


class Squeezes(Own):
    """A module with a common mistake: `squeeze` removes the batch dimension if the batch has one sample."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0][:, None]).squeeze(), batch[1])


class Images(Own):
    """A module whose batch normalization can train on one sample, because the sample has several pixels."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, x):
        return self.net(self.norm(x.view(-1, 1, 2, 3)).flatten(1))


class Evaluating(BatchNorm):
    """A module whose batch normalization is in evaluation mode and does not update the running statistics."""

    def __init__(self):
        super().__init__()
        self.net[1].running_mean.normal_()
        self.net[1].eval()


class GroupNorm(Own):
    def __init__(self):
        super().__init__(nn.GroupNorm(2, 8))


class Embeds(nn.Module):
    features = 8

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def embed(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.embed(x))


def arrays(sizes):
    x = [np.random.default_rng(ord(client)).normal(size=(size, 6)) for client, size in sizes.items()]
    y = [np.arange(size) % 4 for size in sizes.values()]
    return np.concatenate(x).astype(np.float32), np.concatenate(y), np.repeat([*sizes], [*sizes.values()])


def stream_of(sizes=SIZES, scenario=None, **options):
    x, y, owner = arrays(sizes)
    given = {"split": Split(test=0.0), "batch_size": 4, "shuffle": False, "seed": 0, **options}
    return FederatedStream.from_arrays(x, y, owner, scenario=scenario or Stationary(2), **given)


def by_hand(module, sizes, batches_of, rounds=2):
    """Return the state after some rounds of FedAvg in a loop. Clients without batches do not train."""
    x, y, owner = arrays(sizes)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    server = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(rounds):
        states, weights = [], []
        for client in sizes:
            rows = np.flatnonzero(owner == client)
            module.load_state_dict(server)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for batch in batches_of(len(rows)):
                optimizer.zero_grad()
                chosen = rows[batch]
                loss = F.cross_entropy(module(x[chosen]), y[chosen])
                if isinstance(module, Deviation):
                    loss = loss + module(x[chosen]).std(dim=0).mean()
                loss.backward()
                optimizer.step()
            if batches_of(len(rows)):
                states.append({name: value.clone() for name, value in module.state_dict().items()})
                weights.append(len(rows))
        shares = torch.tensor(weights) / sum(weights)
        server = {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True)).to(value.dtype)
            for name, value in server.items()
        }
    return server


def merged(size):
    """Return the slices of batches of 4. A single last sample joins the previous batch. Size 1 gives no batch."""
    starts = [start for start in range(0, size, 4) if start == 0 or size - start > 1]
    ends = [*starts[1:], size]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)] if size > 1 else []


def plain(size):
    return [slice(start, start + 4) for start in range(0, size, 4)]


def assert_same_state(module, expected):
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)


@pytest.mark.may(
    "A layer that cannot train on a batch of one sample, such as batch normalization",
    "A last batch of one sample is merged into the batch before it. "
    "A client with one sample in a round is skipped and recorded.",
)
@pytest.mark.parametrize("kind", [BatchNorm, ByHand, SetUpByHook, Deviation, Squeezes])
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_module_needing_two_samples_equals_loop_of_merged_batches(fit, kind, max_vectorized_clients):
    module, stream = kind(), stream_of()
    copied = kind()
    trainer = fit(module, stream, max_vectorized_clients=max_vectorized_clients)
    assert trainer.strategy.server.record.no_data == ["b"]
    assert trainer.strategy.server.record.dropped == {}
    assert_same_state(module, by_hand(copied, SIZES, merged))


@pytest.mark.parametrize("kind", [Own, Images, Evaluating, GroupNorm])
def test_module_training_on_one_sample_equals_loop_of_all_batches(fit, kind):
    module, stream = kind(), stream_of()
    copied = kind()
    trainer = fit(module, stream)
    assert trainer.strategy.server.record.no_data == []
    assert_same_state(module, by_hand(copied, SIZES, plain))


def test_skipped_client_of_one_sample_does_not_change_training(fit):
    """A skipped client of one sample does not change the random numbers of the other clients."""
    states = []
    for sizes in ({"a": 8, "c": 4}, {"a": 8, "b": 1, "c": 4}):
        module = BatchNorm()
        module.net.append(nn.Dropout(0.3))
        fit(module, stream_of(sizes, shuffle=True), max_vectorized_clients=1)
        states.append(module.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_batch_norm_with_features_method_trains_on_one_sample(fit, make_task, frozen):
    net, stream = Embeds(), stream_of(scenario=ClassIncremental(1, 2))
    net.body.requires_grad_(not frozen)
    trainer = fit(make_task(model=net), stream, [FedProto()])
    assert trainer.strategy.server.record.no_data == ([] if frozen else ["b"])


def test_drop_last_skips_client_with_one_sample(fit):
    trainer = fit(BatchNorm(), stream_of(drop_last=True))
    assert trainer.strategy.server.record.no_data == ["b"]


@pytest.mark.seconds
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_skipped_last_round_of_experience_keeps_earlier_result(fit, participation):
    """Client "b" has several samples in the first round of an experience, and one sample in the last round."""
    sizes = {"a": 12, "b": 10, "c": 12}
    stream = stream_of(sizes, ClassIncremental(2, 2))
    stream.setup("fit")
    first, second, *others = stream.plan.train
    stream.plan = replace(stream.plan, train=(first, {**second, "b": second["b"][:1]}, *others))
    trainer = fit(BatchNorm(), stream, [Replay(9)], participation=participation, max_epochs=3, seed=1)
    drawn = [
        trainer.strategy.federation.participation.sample_on_time_clients(stream.plan, round_idx)[0]
        for round_idx in range(2)
    ]
    assert "b" not in drawn[1]
    for client in sizes:
        assert ("Replay" in trainer.strategy.server.client_store[client]) == (client in {*drawn[0], *drawn[1]})
    assert "b" in drawn[0] or participation < 1


def test_last_batch_of_one_sample_with_replay_samples_is_kept():
    batching, keys = BatchPlan(4, shuffle=False, min_size=2), make_client_keys(0, ["a"], 0, "batches")
    assert [len(rows) for rows in plan_batches(9, 1, batching, keys)] == [4, 5]
    assert [len(rows) for rows in plan_batches(9, 1, batching, keys, num_replay_samples=2)] == [5, 6]
    assert [len(rows) for rows in plan_batches(9, 1, batching, keys, num_replay_samples=3)] == [5, 5, 2]


def test_plan_batches_min_size_two_has_no_batch_of_one_sample():
    """Each sample is in one batch per epoch. `min_size=2` changes the batches only if a batch has one sample."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, batch_size, replayed = (int(rng.integers(low, 40)) for low in (1, 2, 0))
        epochs, shuffle = int(rng.integers(1, 3)), bool(rng.integers(2))
        keys = make_client_keys(0, ["a"], 0, "batches")
        with_one = plan_batches(size, epochs, BatchPlan(batch_size, shuffle), keys, replayed)
        found = plan_batches(size, epochs, BatchPlan(batch_size, shuffle, min_size=2), keys, replayed)
        everything = np.sort(np.concatenate(found))
        assert np.array_equal(everything, np.repeat(np.arange(size + replayed), epochs))
        lengths = [len(rows) for rows in found]
        assert min(lengths) > 1 or size + replayed == 1
        if min(map(len, with_one)) > 1:
            assert all(map(np.array_equal, found, with_one))


def test_batch_size_one_with_batch_norm_raises(fit):
    with raises(InvalidValueError, "batch_size"):
        fit(BatchNorm(), stream_of(batch_size=1))
    fit(GroupNorm(), stream_of(batch_size=1))


def test_round_with_only_single_samples_raises_before_first_round(fit):
    module, stream = BatchNorm(), stream_of({"a": 9, "c": 5})
    stream.setup("fit")
    last = {client: rows[:1] for client, rows in stream.plan.train[1].items()}
    stream.plan = replace(stream.plan, train=(stream.plan.train[0], last))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with raises(MissingValueError, "min_samples"):
        fit(module, stream)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_skipped_clients_warn_once_with_names(fit, caplog):
    with caplog.at_level(logging.WARNING):
        fit(BatchNorm(), stream_of())
    (message,) = [r.getMessage() for r in caplog.records if "cannot train on a batch of one sample" in r.getMessage()]
    assert "BatchNorm" in message and message.endswith("only one sample: b.")


@pytest.mark.seconds
def test_resumed_fit_skips_the_same_clients(fit, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole, again = BatchNorm(), BatchNorm()
    fit(whole, stream_of(shuffle=True), [Replay(3), saver], trainer_args={"enable_checkpointing": True})
    trainer = fit(again, stream_of(shuffle=True), [Replay(3)], ckpt_path=tmp_path / "epoch=0.ckpt")
    assert trainer.strategy.server.record.no_data == ["b"]
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())
