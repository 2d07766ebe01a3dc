"""Tests of the train loader of a round: its length, reloading, planning, and interrupted rounds."""

import copy
import math
import warnings
from functools import partial
from itertools import pairwise

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from raising import raises
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import FederatedStrategy, FederatedStream
from lightning_fcl.callbacks import EWC, Replay
from lightning_fcl.data.scenarios import ClassIncremental, Stationary
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidTypeError, InvalidValueError
from lightning_fcl.simulation import planning


class Counts(Callback):
    """Stores the number of batches of each round: the Trainer's attribute, and the count of completed batches."""

    def __init__(self):
        self.told, self.seen = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.told.append(trainer.num_training_batches)

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(trainer.fit_loop.epoch_loop.batch_progress.current.completed)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("max_vectorized_clients", [1, 2])
def test_num_training_batches_equals_batches_of_the_round(fit, make_stream, make_task, max_vectorized_clients):
    counts, stream = Counts(), make_stream(num_clients=5, partition="dirichlet", rounds_per_experience=2)
    fit(make_task(), stream, [counts], max_vectorized_clients=max_vectorized_clients, local_epochs=2, participation=3)
    assert counts.told == counts.seen and len(set(counts.told)) > 1


@pytest.mark.argument(
    "reload_dataloaders_every_n_epochs",
    "Supported for validation loaders. Raises an error if the stream wraps a LightningDataModule.",
)
@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
def test_reload_dataloaders_applies_to_validation_loaders(
    fit, make_stream, make_task, max_vectorized_clients, monkeypatch
):
    def run(epochs):
        stream, made, trained = make_stream(rounds_per_experience=2, split=Split(validation=0.2)), [], []
        for name, calls in (("val_dataloader", made), ("train_dataloader", trained)):
            own = getattr(stream, name)
            monkeypatch.setattr(stream, name, lambda own=own, calls=calls: calls.append(1) or own())
        task, options = make_task(), {"reload_dataloaders_every_n_epochs": epochs, "num_sanity_val_steps": 0}
        trainer = fit(
            task, stream, [EWC(1.0)], max_vectorized_clients=max_vectorized_clients, seed=0, trainer_args=options
        )
        assert trainer.reload_dataloaders_every_n_epochs == epochs and len(trained) == trainer.max_epochs == 4
        return task.state_dict(), len(made)

    plain, each, second = run(0), run(1), run(2)
    assert (plain[1], each[1], second[1]) == (1, 4, 2)
    assert same(plain[0], each[0]) and same(plain[0], second[0])


class DependsOnEpoch(L.LightningDataModule):
    def train_dataloader(self):
        rows = 10 * getattr(self.trainer, "current_epoch", 0)
        return DataLoader(TensorDataset(torch.randn(40, 6)[rows:], (torch.arange(40) % 4)[rows:]), batch_size=4)


@pytest.mark.parametrize("make", [DependsOnEpoch, lambda: {"a": DependsOnEpoch(), "b": DependsOnEpoch()}])
def test_reload_dataloaders_with_data_module_raises(fit, make_task, make):
    stream = FederatedStream(make(), scenario=Stationary(2), split=Split(0.2))
    with raises(InvalidValueError, "reload_dataloaders_every_n_epochs"):
        fit(make_task(), stream, trainer_args={"reload_dataloaders_every_n_epochs": 1})


@pytest.mark.parametrize("kind", [Replay, FederatedStream])
def test_class_instead_of_object_raises_with_name(make_stream, make_task, kind):
    name = "callbacks" if kind is Replay else "datamodule"
    callbacks, data = ([Replay], make_stream()) if kind is Replay else ([], FederatedStream)
    trainer = L.Trainer(strategy=FederatedStrategy(), callbacks=callbacks, logger=False, barebones=True)
    with raises(InvalidTypeError, name):
        trainer.fit(make_task(), datamodule=data)


@pytest.mark.parametrize(("lr", "server"), [(math.nan, False), (math.inf, False), (math.nan, True)])
def test_non_finite_learning_rate_raises_before_first_round(fit, make_stream, make_task, lr, server):
    counts, make = Counts(), partial(torch.optim.SGD, lr=lr)
    task = make_task()
    if not server:
        task.configure_optimizers = lambda: make(task.parameters())
    with raises(InvalidValueError, "lr"):
        fit(task, make_stream(), [counts], **({"server_optimizer": make} if server else {}))
    assert not counts.seen


def test_client_starts_after_last_hook_of_previous_client(fit, make_stream, make_task):
    seen = []

    class Watch(Callback):
        def on_client_end(self, trainer, pl_module, client_round):
            seen.append(("end", client_round.client_id))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(("start", trainer.strategy.current_client_round.client_id))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(("hook", trainer.strategy.current_client_round.client_id))

    fit(make_task(), make_stream(num_experiences=1), [Watch()], max_vectorized_clients=1, local_epochs=2)
    order = {"start": {"hook"}, "hook": {"start", "end"}, "end": {"start"}}
    assert len(seen) > 10 and all(after in order[now] for (now, _), (after, _) in pairwise(seen))
    ends = [client for what, client in seen if what == "end"]
    assert ends == list(dict.fromkeys(client for _, client in seen))


@pytest.mark.parametrize("looks", [False, True])
def test_on_client_end_vectorized_has_client_state_if_needed(fit, make_stream, make_task, looks):
    class Listens(Callback):
        def __init__(self):
            self.rounds, self.seen = [], []

        def needs_client_state(self, pl_module):
            self.rounds.append(pl_module.trainer.current_epoch)
            return looks

        def on_client_end(self, trainer, pl_module, client_round):
            self.seen.append((client_round.round_idx, torch.cat([p.flatten() for p in pl_module.parameters()]).clone()))

    listens, task = Listens(), make_task()
    before = torch.cat([p.flatten() for p in task.parameters()]).clone()
    fit(
        task,
        make_stream(num_experiences=1, num_clients=3, rounds_per_experience=2),
        [listens],
        max_vectorized_clients=3,
    )
    assert listens.rounds == [0, 1] and [round_idx for round_idx, _ in listens.seen] == [0, 0, 0, 1, 1, 1]
    states = {tuple(state.tolist()) for _, state in listens.seen}
    assert len(states) == (6 if looks else 2)
    assert all(torch.equal(state, before) is not looks for round_idx, state in listens.seen if round_idx == 0)


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_client_end", "on_before_zero_grad"])
def test_interrupted_round_restores_the_server_state(
    fit, make_stream, make_task, caplog, max_vectorized_clients, error, hook
):
    class Stop(Callback):
        """Stops in the second round, while the module contains a client's state."""

    def stop(self, trainer, *arguments):
        if trainer.current_epoch == 1:
            raise error("enough")

    setattr(Stop, hook, stop)
    task, one, stream = make_task(), make_task(), make_stream(num_experiences=1, rounds_per_experience=2)
    stopping = pytest.raises(SystemExit if error is KeyboardInterrupt else error)
    strategy = {"max_vectorized_clients": max_vectorized_clients, "seed": 0}
    with stopping:
        fit(task, stream, [Stop()], **strategy)
    fit(one, make_stream(num_experiences=1, rounds_per_experience=2), [Stop()], max_epochs=1, **strategy)
    assert same(task.state_dict(), one.state_dict())
    assert "Rolled back an interrupted round" in caplog.text


@pytest.mark.parametrize("max_vectorized_clients", [1, "auto"])
@pytest.mark.parametrize(("batches", "is_logged"), [(0, False), (1, True)])
def test_error_before_first_batch_does_not_log_rollback(
    fit, make_stream, make_task, caplog, max_vectorized_clients, batches, is_logged
):
    class Stop(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == batches:
                raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        fit(make_task(), make_stream(num_experiences=1), [Stop()], max_vectorized_clients=max_vectorized_clients)
    assert ("Rolled back an interrupted round" in caplog.text) is is_logged


def test_short_or_unequal_rounds_do_not_warn(fit, make_stream, make_task, tmp_path):
    def run(epochs, ckpt_path=None):
        stream = make_stream(num_clients=5, partition="dirichlet", rounds_per_experience=2)
        options = {"logger": CSVLogger(tmp_path), "enable_checkpointing": True}
        saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        fit(make_task(), stream, [saves], max_epochs=epochs, participation=2, trainer_args=options, ckpt_path=ckpt_path)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(1)
        run(2, tmp_path / "epoch=0.ckpt")
    told = " ".join(str(one.message) for one in caught)
    assert "number of training batches" not in told and "resuming from a checkpoint that ended" not in told


@pytest.mark.parametrize("methods", [list, lambda: [Replay(memory_size=10)]])
def test_batches_planned_together_equal_batches_planned_separately(fit, make_stream, make_task, monkeypatch, methods):
    seen = []
    for together in (1, 10**6):
        monkeypatch.setattr(planning, "_PLANNED", together)
        task, stream = make_task(), make_stream(partition="dirichlet", num_clients=6, rounds_per_experience=2)
        seen.append(Batches())
        options = {"max_vectorized_clients": 1, "local_epochs": 2, "trainer_args": {"limit_train_batches": 0.7}}
        fit(task, stream, [*methods(), seen[-1]], **options)
    assert all(map(torch.equal, seen[0].batches, seen[1].batches))
    assert len(seen[0].batches) == len(seen[1].batches) > 6


class Batches(Callback):
    """Stores the samples of each batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch[0].clone())


class Noise(Callback):
    """Adds random numbers to the gradients. Optionally advances PyTorch's generator first."""

    def __init__(self, stirs):
        self.stirs = stirs

    def on_after_backward(self, trainer, pl_module):
        torch.rand(self.stirs)
        for parameter in pl_module.parameters():
            parameter.grad += torch.rand_like(parameter.grad)


def test_hook_draws_do_not_depend_on_the_global_generator(fit, make_stream, make_task):
    found = []
    for stirs in (0, 1):
        task = make_task()
        fit(task, make_stream(), [Noise(stirs)], max_vectorized_clients=1)
        found.append(task.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Clips(L.LightningModule):
    """A module with a function that clips the weights, as critics of Wasserstein GANs do after each batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def clip(self):
        with torch.no_grad():
            self.net.weight.clamp_(-0.1, 0.1)


class ClipsItself(Clips):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.clip()


class ClipsModule(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.clip()


@pytest.mark.parametrize(
    ("kind", "callbacks", "clips"), [(ClipsItself, [], True), (Clips, [ClipsModule()], True), (Clips, [], False)]
)
def test_upload_includes_changes_by_batch_end_hooks(fit, kind, callbacks, clips):
    x, owner = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), np.arange(48) % 3
    stream = FederatedStream.from_arrays(
        x,
        torch.arange(48) % 3,
        owner,
        scenario=ClassIncremental(1, rounds_per_experience=2),
        split=Split(test=0.0),
        batch_size=16,
        seed=0,
    )
    module = kind()
    fit(module, stream, callbacks, seed=0, local_epochs=2)
    local, y = Clips(), torch.as_tensor(stream.y)
    server = copy.deepcopy(local.state_dict())
    for _ in range(2):
        uploads = []
        for client in range(3):
            local.load_state_dict(server)
            optimizer, rows = local.configure_optimizers(), owner == client
            for _ in range(2):
                optimizer.zero_grad()
                local.training_step((x[rows], y[rows]), 0).backward()
                optimizer.step()
                if clips:
                    local.clip()
            uploads.append(copy.deepcopy(local.state_dict()))
        server = {name: sum(upload[name] for upload in uploads) / 3 for name in server}
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, server[name], rtol=0, atol=1e-6)
