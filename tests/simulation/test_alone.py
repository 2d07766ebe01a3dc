"""Tests that the state that one client leaves in the module or optimizer does not reach the next client."""

import collections
import copy
import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from raising import raises
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl import Classifier, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.errors import InvalidValueError

OWNERS = np.array(["a", "b", "c"])[np.arange(96) % 3]


def stream_of(clients, rounds=1, validation=0.0):
    """Return a stream with four batches of eight samples per client. The samples do not depend on other clients."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 6)).astype(np.float32), np.arange(96) // 3 % 4
    chosen = np.isin(OWNERS, list(clients))
    words = {
        "scenario": ClassIncremental(1, rounds_per_experience=rounds),
        "split": Split(test=0.0, validation=validation),
        "batch_size": 8,
        "seed": 0,
    }
    return FederatedStream.from_arrays(x[chosen], y[chosen], OWNERS[chosen], **words)


class Uploads(Callback):
    """Stores the state that each client uploads in the first round."""

    def __init__(self):
        self.of = {}

    def on_client_end(self, trainer, pl_module, client_round):
        if client_round.round_idx == 0:
            state = pl_module.state_dict().items()
            self.of[client_round.client_id] = {name: value.detach().clone() for name, value in state}


@pytest.fixture
def uploads(fit):
    """Return a function that fits a new module and returns the first-round upload of each client."""

    def run(make, clients, **kwargs):
        torch.manual_seed(0)
        watch = Uploads()
        fit(make(), stream_of(clients), [watch], seed=0, **{"local_epochs": 2, "max_vectorized_clients": 1, **kwargs})
        return watch.of

    return run


class Base(L.LightningModule):
    """A network of two layers. Subclasses add state that a step changes."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.prepare()

    def prepare(self):
        """Create state that training steps change. Subclasses override this hook."""

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AccumulatesByHand(Base):
    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(*batch))
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


class SkipsBatches(Base):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 2 else self.loss(*batch)


class SchedulesByHand(Base):
    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.8)]


class WarmsUp(Base):
    """A module that multiplies the learning rate by 1.2 in each training step."""

    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 1.2
        return self.loss(*batch)


class CountsInGroups(torch.optim.SGD):
    """An optimizer that stores numbers in parameter groups, as Adan and Prodigy do, and in an attribute."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0
        for group in self.param_groups:
            group["estimate"] = torch.tensor(1.0)

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["estimate"] *= 1.1
            group["lr"] = 0.1 * float(group["estimate"]) / group["step"] / self.calls
        return super().step(closure)


class KeepsInGroups(Base):
    def configure_optimizers(self):
        return CountsInGroups(self.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that calls an inner optimizer, which has separate state."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


class Wraps(Base):
    def configure_optimizers(self):
        return Wrapper(self.parameters())


class MemoryBank(Base):
    """A module with two non-persistent buffers. A step changes one buffer in place and replaces the other buffer."""

    def prepare(self):
        self.register_buffer("bank", torch.zeros(16, 8), persistent=False)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def loss(self, x, y):
        hidden = self.model[:2](x)
        loss = (
            super().loss(x, y) + (hidden @ self.bank.T.clone()).square().mean() + (hidden - self.mean).square().mean()
        )
        self.bank.copy_(torch.cat([self.bank, hidden.detach()])[-16:])
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(dim=0)
        return loss


class Attributes(Base):
    """A module with numbers, lists and arrays as attributes. Some are nested, or are created in the first step."""

    def prepare(self):
        self.average, self.losses, self.kinds = 0.0, [], {"seen": set(), "nested": [[1.0]]}
        self.recent, self.array = collections.deque(maxlen=3), np.zeros(2)
        self.plain = torch.zeros(2)
        self.model[1].scale = 1.0

    def loss(self, x, y):
        if not hasattr(self, "first"):
            self.first = float(x.mean())
        loss = super().loss(x, y)
        number = float(loss.detach())
        self.average = 0.5 * self.average + 0.5 * number
        self.losses.append(number)
        self.kinds["seen"].add(round(number, 3))
        self.kinds["nested"][0][0] += number
        self.recent.append(number)
        self.array += number
        self.plain += number
        self.model[1].scale *= 1.1
        kept = [self.average, *self.losses, len(self.kinds["seen"]), self.kinds["nested"][0][0], *self.recent]
        kept += [*self.array, *self.plain, self.model[1].scale, self.first]
        return loss * (1 + 0.01 * sum(kept))


class Holder:
    def __init__(self):
        self.values, self.count = [torch.zeros(())], 0


class Objects(Base):
    """A module with user-defined objects, generators, and an optimizer of a teacher that is not a submodule."""

    def prepare(self):
        self.holder = Holder()
        self.drawn = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)
        self.teacher = [copy.deepcopy(self.model)]
        self.teaching = torch.optim.SGD(self.teacher[0].parameters(), lr=0.1, momentum=0.9)
        self.bias = torch.zeros(4, requires_grad=True)

    def loss(self, x, y):
        torches, numpys, pythons = self.drawn
        F.cross_entropy(self.teacher[0](x), y).backward()
        self.teaching.step()
        self.teaching.zero_grad()
        loss = super().loss(x, y)
        self.holder.count += 1
        self.holder.values[0] += loss.detach()
        kept = self.holder.count + float(self.holder.values[0])
        kept += float(torch.rand((), generator=torches)) + numpys.random() + pythons.random()
        kept += 0.0 if self.bias.grad is None else float(self.bias.grad.abs().sum())
        return loss * (1 + 0.01 * kept) + 0.1 * F.mse_loss(self(x) + self.bias, self.teacher[0](x).detach())


class Freezes(Base):
    """A module that freezes a layer and sets another layer to evaluation mode during training."""

    def prepare(self):
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.model(self.drop(x))

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.drop.eval()
            self.model[0].requires_grad_(False)
        return self.loss(*batch)


MODULES = [
    AccumulatesByHand,
    SkipsBatches,
    SchedulesByHand,
    WarmsUp,
    KeepsInGroups,
    Wraps,
    MemoryBank,
    Attributes,
    Objects,
    Freezes,
]


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.may(
    "Non-persistent buffers, attributes, gradients kept between steps, and numbers in optimizer groups",
    "[Reset for each client](trainer.md#state-that-is-reset-for-each-client).",
)
@pytest.mark.parametrize("make", MODULES)
def test_upload_alone_and_after_other_clients_is_equal(uploads, make):
    alone, after, last = (uploads(make, clients)["b"] for clients in ("b", "ab", "abc"))
    assert same(alone, after) and same(alone, last)
    assert not same(alone, uploads(make, "b", local_epochs=1)["b"])


def test_upload_with_lbfgs_alone_and_after_others_is_equal(uploads):
    class Lbfgs(Base):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    assert same(uploads(Lbfgs, "b")["b"], uploads(Lbfgs, "ab")["b"])
    with raises(InvalidValueError, "keep_optimizer_state"):
        uploads(Lbfgs, "b", keep_optimizer_state=True)


# Tests of the parameter groups of the optimizer.


@pytest.mark.may(
    "`keep_optimizer_state=True`", "Each client keeps its optimizer state and parameter groups, except learning rates."
)
def test_keep_optimizer_state_saves_values_in_parameter_groups(fit):
    def kept(keep):
        stream = stream_of("ab", rounds=2)
        trainer = fit(KeepsInGroups(), stream, keep_optimizer_state=keep, max_vectorized_clients=1, seed=0)
        return {client: dict(trainer.strategy.server.client_store[client]).get("optimizer", {}) for client in "ab"}

    for memory in kept(True).values():
        # Each client trains on four batches in each of two rounds.
        assert memory["0.number.0.step"].item() == 8
        assert memory["0.group.0.estimate"].item() == pytest.approx(1.1**8)
        # Learning rates are not stored, because schedulers may set the learning rates.
        assert not [name for name in memory if name.endswith(".lr")]
    assert kept(False) == {"a": {}, "b": {}}


@pytest.mark.may(
    "`keep_optimizer_state=True` with an optimizer that stores lists, such as LBFGS",
    "Not supported. Only tensors and numbers can be kept.",
)
def test_keep_optimizer_state_list_in_state_raises(fit):
    class Lists(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["history"] = [1.0]
            return loss

    class Listing(Base):
        def configure_optimizers(self):
            return Lists(self.parameters(), lr=0.1)

    with raises(InvalidValueError, "keep_optimizer_state"):
        fit(Listing(), stream_of("ab"), keep_optimizer_state=True, max_vectorized_clients=1)


@pytest.mark.may(
    "Learning rates or attributes changed in `on_train_epoch_start`",
    "The change applies to all clients of the round. Schedules by round continue.",
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_schedules_by_round_continue_between_rounds(fit, by_hand):
    class Scheduled(SchedulesByHand):
        def prepare(self):
            self.automatic_optimization = not by_hand

        def training_step(self, batch, batch_idx):
            if not by_hand:
                return self.loss(*batch)
            self.manual_backward(self.loss(*batch))
            self.optimizers().step()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

    task = Scheduled()
    trainer = fit(task, stream_of("abc", rounds=3), max_vectorized_clients=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3 * 0.8**3)
    assert task.optimizers().param_groups[0]["lr"] == pytest.approx(0.3 * 0.8**3)


# Tests of attributes between rounds.


class Gathers(Base):
    """A module that logs values which steps have stored, as in Lightning's guide, and changes a scale in each round."""

    def prepare(self):
        self.outputs, self.history, self.ends, self.seen = [], [], [], []
        self.total, self.number, self.ended, self.teacher = torch.zeros(()), 0, 0, [torch.zeros(8, 6)]
        self.scale, self.validated, self.rounds = 1.0, None, 0
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.accuracy = MulticlassAccuracy(4)

    def on_train_epoch_start(self):
        self.scale *= 0.5

    def training_step(self, batch, batch_idx):
        assert len(self.outputs) == len(self.history) == len(self.ends) == self.number == batch_idx
        assert self.scale == 0.5 ** (self.trainer.current_epoch + 1)
        loss = self.loss(*batch)
        self.accuracy(self(batch[0]), batch[1])
        self.outputs.append(loss.detach())
        self.history.append(batch_idx)
        self.total, self.number = self.total + loss.detach(), self.number + 1
        self.mean += loss.detach()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended, self.teacher = self.ended + 1, [0.5 * self.teacher[0] + 0.5 * self.model[0].weight.detach()]
        self.ends.append(batch_idx)
        assert self.ended == self.number

    def validation_step(self, batch, batch_idx):
        assert (
            self.number == self.ended == 0 and self.mean == 0 and not self.teacher[0].any()
        )  # Validation uses the server's values.
        self.validated = self.trainer.current_epoch

    def on_train_epoch_end(self):
        # Number of steps of the last client.
        number = self.history[-1] + 1
        assert self.number == self.ended == number and torch.isclose(
            self.total, torch.stack(self.outputs)[-number:].sum()
        )
        assert self.mean == 0 and self.validated == self.trainer.current_epoch
        self.seen.append((len(self.outputs), int(self.accuracy.tp.sum() + self.accuracy.fn.sum())))
        self.outputs.clear()
        self.accuracy.reset()


@pytest.mark.may(
    "Lists that steps append to",
    "A client does not see items of other clients. After the round the list contains the items of all clients.",
)
def test_epoch_end_hooks_see_last_client_and_all_appended_items(fit):
    class Counts(Callback):
        def on_round_end(self, trainer, pl_module):
            assert pl_module.number == 0 and not pl_module.teacher[0].any()
            assert len(pl_module.history) == len(pl_module.ends)
            pl_module.rounds += 1

    task, stream = Gathers(), stream_of("abc", rounds=2, validation=["c"])
    fit(task, stream, [Counts()], max_vectorized_clients=1, trainer_args={"num_sanity_val_steps": 0})
    samples = [sum(map(len, current.values())) for current in stream.plan.train]
    batches = [sum(-(-len(rows) // 8) for rows in current.values()) for current in stream.plan.train]
    assert task.seen == list(zip(batches, samples, strict=True)) and task.rounds == 2
    assert len(task.history) == sum(batches) and task.ends == task.history
    assert (task.outputs, task.number, float(task.total), float(task.mean)) == ([], 0, 0.0, 0.0)
    assert not task.teacher[0].any() and task.scale == 0.25 and all(p.grad is None for p in task.parameters())


class EndsRounds(Base):
    """A module whose hook at the end of a round changes the attributes that training steps also change."""

    def prepare(self):
        self.rate, self.counts, self.total = 1.0, {"steps": 0}, torch.zeros(())
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.begins = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.begins.append((self.rate, self.counts["steps"], float(self.total), float(self.mean)))
        loss = self.loss(*batch)
        self.rate += 1
        self.counts["steps"] += 1
        self.total += loss.detach()
        self.mean += loss.detach()
        return loss

    def on_train_epoch_end(self):
        number = self.trainer.current_epoch + 1
        self.rate, self.counts["steps"] = 0.5**number, -number
        self.total.fill_(10.0 * number)
        self.mean.fill_(100.0 * number)


@pytest.mark.may(
    "Attributes changed in `on_train_epoch_end`", "The clients of the next round start with the changed values."
)
def test_attributes_changed_at_epoch_end_start_the_next_round(fit):
    task = EndsRounds()
    fit(
        task,
        stream_of("abc", rounds=3, validation=["c"]),
        max_vectorized_clients=1,
        trainer_args={"num_sanity_val_steps": 0},
    )
    assert task.begins == [
        *2 * [(1.0, 0, 0.0, 0.0)],
        *2 * [(0.5, -1, 10.0, 100.0)],
        *2 * [(0.25, -2, 20.0, 200.0)],
    ]
    assert (task.rate, task.counts, float(task.total), float(task.mean)) == (0.125, {"steps": -3}, 30.0, 300.0)


def test_checkpoints_within_and_after_rounds_do_not_change_training(fit, tmp_path):
    def trained(*callbacks):
        torch.manual_seed(0)
        task, by_hand = Gathers(), AccumulatesByHand()
        options = {"trainer_args": {"enable_checkpointing": bool(callbacks), "num_sanity_val_steps": 0}, "seed": 0}
        fit(task, stream_of("abc", rounds=2, validation=["c"]), callbacks, max_vectorized_clients=1, **options)
        fit(by_hand, stream_of("ab"), callbacks, max_vectorized_clients=1, **options)
        return task.state_dict(), by_hand.state_dict()

    class Each(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    plain, saving = trained(), trained(Each(), ModelCheckpoint(tmp_path / "others", "{epoch}", save_top_k=-1))
    assert same(plain[0], saving[0]) and same(plain[1], saving[1])


def test_interrupted_round_restores_attributes(fit):
    class Stop(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if (trainer.strategy.current_client_round.client_id, batch_idx) == ("b", 2):
                raise ValueError("enough")

    task = Attributes()
    with pytest.raises(ValueError, match="enough"):
        fit(task, stream_of("abc"), [Stop()], max_vectorized_clients=1)
    assert task.average == 0.0 and not hasattr(task, "first") and not task.kinds["seen"] and not task.recent
    assert len(task.losses) == 6  # Lists keep the items of all clients.


def test_resumed_fit_starts_clients_with_equal_attributes(fit, tmp_path):
    def tasks():
        torch.manual_seed(0)
        return Attributes()

    whole, cut, rest = tasks(), tasks(), tasks()
    options = {"max_vectorized_clients": 1, "seed": 0}
    fit(whole, stream_of("abc", rounds=2), **options)
    saving = {**options, "trainer_args": {"enable_checkpointing": True}}
    fit(cut, stream_of("abc", rounds=2), [ModelCheckpoint(tmp_path, "last")], max_epochs=1, **saving)
    fit(rest, stream_of("abc", rounds=2), ckpt_path=tmp_path / "last.ckpt", **options)
    assert same(whole.state_dict(), rest.state_dict())


@pytest.mark.may(
    "Attributes that cannot be copied, such as an iterator",
    "Changes by one client are visible to the next client. A warning names the attribute once.",
)
def test_attribute_that_cannot_be_restored_warns_once(fit, caplog):
    class Iterates(Base):
        def prepare(self):
            self.values = iter([1.0] * 100)

        def loss(self, x, y):
            return super().loss(x, y) * next(self.values)

    fit(Iterates(), stream_of("ab", rounds=2), max_vectorized_clients=1)
    message = "Cannot restore `values` of `Iterates` for each client. If training changes these attributes"
    assert caplog.text.count(message) == 1


# Tests of training steps.


@pytest.mark.may(
    "`batch_idx` or `self.global_step` in the step or in hooks",
    "[The counters](trainer.md#local-training) count the client's batches and steps in the round.",
)
def test_batch_idx_and_global_step_count_the_clients_batches(fit):
    steps, hooks = [], []

    class Counts(Base):
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            return self.loss(*batch)

        def on_train_batch_start(self, batch, batch_idx):
            hooks.append((batch_idx, self.global_step))

    fit(Counts(), stream_of("ab"), max_vectorized_clients=1, local_epochs=2)
    assert steps == [*range(8), *range(8)] and hooks == [(n, n) for n in steps]


class Checkpoints(Base):
    """A module with dropout. Unless `reentrant` is None, the backward pass recomputes activations of two layers."""

    reentrant = None

    def prepare(self):
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        x = self.model[0](x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.model[2](F.dropout(x, 0.2))


@pytest.mark.parametrize("by_hand", [False, True])
def test_recomputed_activations_draw_the_same_dropout(uploads, by_hand):
    def make(way):
        class Task(Checkpoints):
            reentrant = way

            def training_step(self, batch, batch_idx):
                if not by_hand:
                    return self.loss(*batch)
                self.optimizers().zero_grad()
                self.manual_backward(self.loss(*batch))
                self.optimizers().step()

        task = Task()
        task.automatic_optimization = not by_hand
        return task

    plain, one, other = (uploads(lambda way=way: make(way), "ab") for way in (None, False, True))
    assert all(same(plain[client], one[client]) and same(plain[client], other[client]) for client in "ab")
    # `KeyedRandomness` temporarily replaces this function. After the fit, PyTorch's function is active again.
    assert torch.get_rng_state.__module__ == "torch.random"


# Tests of vectorized training.


class Averages(nn.Linear):
    """A layer that stores an average in an attribute or a non-persistent buffer. The output depends on the average."""

    def __init__(self, buffer):
        super().__init__(6, 4)
        if buffer:
            self.register_buffer("average", torch.zeros(6), persistent=False)
        else:
            self.average = torch.zeros(6)

    def forward(self, x):
        self.average = 0.5 * self.average + 0.5 * x.detach().mean(dim=0)
        return super().forward(x - self.average)


class Recomputes(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Positions(nn.Linear):
    """A layer with a non-persistent buffer that never changes."""

    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("positions", torch.arange(6.0), persistent=False)
        self.calls = ["constant"]

    def forward(self, x):
        return super().forward(x + self.positions)


@pytest.mark.may(
    "A `forward` that changes the module, or gradient checkpointing",
    "Clients train sequentially. Each upload is the same as if the client trained alone.",
)
@pytest.mark.parametrize(
    ("model", "side_by_side"),
    [(lambda: Averages(True), False), (lambda: Averages(False), False), (Recomputes, False), (Positions, True)],
)
def test_vectorized_upload_equals_upload_alone(fit, model, side_by_side):
    def uploads(clients, max_vectorized_clients):
        torch.manual_seed(0)
        watch, task = Uploads(), Classifier(model(), 4, lambda params: torch.optim.SGD(params, lr=0.1))
        trainer = fit(
            task, stream_of(clients), [watch], seed=0, local_epochs=2, max_vectorized_clients=max_vectorized_clients
        )
        return watch.of, trainer.strategy.federation.local_trainer.num_vectorized_clients

    (alone, _), (among, number) = uploads("b", 1), uploads("abc", "auto")
    torch.testing.assert_close(alone["b"], among["b"], rtol=0, atol=1e-5)
    assert (number > 1) == side_by_side
