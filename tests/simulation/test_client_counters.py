"""Tests of batch and step counters: they equal the counters of a Trainer that has only the client's data."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, ProgressBar
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import Classifier, FederatedStrategy, FederatedStream
from lightning_fcl.data.scenarios import ClassIncremental
from lightning_fcl.data.split import Split
from lightning_fcl.simulation.hook_calls import TRAINING

SAMPLES = {"a": 56, "b": 40, "c": 8}  # The batch size is 8.


def stream_of(clients, rounds=1):
    """Return a stream of some clients. The samples of a client do not depend on the other clients."""
    rng = np.random.default_rng(0)
    data = {client: rng.normal(size=(number, 6)).astype(np.float32) for client, number in SAMPLES.items()}
    x = np.concatenate([data[client] for client in clients])
    y = np.concatenate([np.arange(len(data[client])) % 4 for client in clients])
    owners = np.repeat([*clients], [len(data[client]) for client in clients])
    scenario = ClassIncremental(1, rounds_per_experience=rounds)
    return FederatedStream.from_arrays(x, y, owners, scenario=scenario, split=Split(test=0.0), batch_size=8, seed=0)


COUNTERS = {
    "global_step": lambda trainer: trainer.global_step,
    "global_step of the module": lambda trainer: trainer.lightning_module.global_step,
    "num_training_batches": lambda trainer: trainer.num_training_batches,
    "is_last_batch": lambda trainer: trainer.is_last_batch,
    "estimated_stepping_batches": lambda trainer: trainer.estimated_stepping_batches,
    "total_batch_idx": lambda trainer: trainer.fit_loop.total_batch_idx,
    "batch_idx": lambda trainer: trainer.fit_loop.batch_idx,
    "batch_progress": lambda trainer: sum(
        vars(part)[name]
        for part in (
            trainer.fit_loop.epoch_loop.batch_progress.total,
            trainer.fit_loop.epoch_loop.batch_progress.current,
        )
        for name in ("ready", "started", "completed")
    ),
    "accumulate_grad_batches": lambda trainer: trainer.accumulate_grad_batches,
    "train_dataloader": lambda trainer: len(trainer.train_dataloader),
    "lr_scheduler_configs": lambda trainer: len(trainer.lr_scheduler_configs),
    "num_devices": lambda trainer: trainer.num_devices,
    "global_rank": lambda trainer: trainer.global_rank,
}
STEP_HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
CALLBACK_HOOKS = ["on_train_batch_start", "on_train_batch_end", *STEP_HOOKS]
MODULE_HOOKS = [
    *CALLBACK_HOOKS,
    *("training_step", "forward", "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "lr_scheduler_step"),
]
BY_HAND = ["on_train_batch_start", "on_train_batch_end", "on_before_backward", "training_step", "forward", "backward"]


class Base(L.LightningModule):
    """A network of two layers, whose loss is multiplied by an attribute."""

    def __init__(self, automatic=True):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.scale = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), 1.0
        self.automatic_optimization = automatic

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        loss = self.scale * F.cross_entropy(self(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.automatic_optimization:
            return optimizer
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def hooked(base, hooks, act):
    """Return a subclass of ``base`` that calls ``act(trainer, hook, batch_idx)`` before each hook in ``hooks``."""

    def before(hook, plain):
        def called(self, *args, **kwargs):
            trainer = self.trainer if isinstance(self, L.LightningModule) else args[0]
            places = {"on_train_batch_start": -1, "on_train_batch_end": -1, "training_step": 1}
            place = {**places, "optimizer_step": 1, "optimizer_zero_grad": 1}.get(hook)
            act(trainer, hook, None if place is None else args[place])
            return plain(self, *args, **kwargs)

        return called

    return type("Hooked", (base,), {hook: before(hook, getattr(base, hook)) for hook in hooks})


def plain_fit(module, client, callbacks, accumulate):
    """Fit in a plain Trainer that has as many samples as the client."""
    data = TensorDataset(torch.randn(SAMPLES[client], 6), torch.arange(SAMPLES[client]) % 4)
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, DataLoader(data, 8))


@pytest.mark.parametrize(("automatic", "accumulate"), [(True, 1), (True, 2), (True, 3), (False, 1)])
def test_hooks_see_counters_of_a_plain_trainer_with_the_clients_data(fit, automatic, accumulate):
    seen = []

    def note(trainer, hook, batch_idx):
        if not trainer.sanity_checking:
            seen.append((hook, batch_idx, *(read(trainer) for read in COUNTERS.values())))

    hooks = MODULE_HOOKS if automatic else BY_HAND
    kind, callback = hooked(Base, hooks, note), hooked(Callback, CALLBACK_HOOKS, note)
    expected = []
    for client in "abc":
        plain_fit(kind(automatic), client, [callback()], accumulate)
        expected += seen
        seen.clear()
    # The plain Trainer steps the schedule after it has counted `processed`, so the test does not compare this counter.
    options = {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0}
    trainer = fit(
        kind(automatic), stream_of("abc"), [callback()], trainer_args=options, max_vectorized_clients=1, max_epochs=1
    )
    assert len(seen) == len(expected) > 100
    assert seen == expected
    assert trainer.global_step == 7 + 5 + 1 and not TRAINING


class Uploads(Callback):
    """Stores the upload of each client in the first round, and the counters at that time."""

    def __init__(self):
        self.of, self.counters = {}, {}

    def on_client_end(self, trainer, pl_module, client_round):
        if client_round.round_idx == 0:
            state = pl_module.state_dict().items()
            self.of[client_round.client_id] = {name: value.detach().clone() for name, value in state}
            names = ("global_step", "num_training_batches", "is_last_batch", "total_batch_idx")
            self.counters[client_round.client_id] = [COUNTERS[name](trainer) for name in names]


@pytest.fixture
def uploads(fit):
    """Return a function that fits a new module on some clients, and returns each client's first-round upload."""

    def run(make, clients, callbacks=(), **kwargs):
        watch = Uploads()
        fit(
            make(),
            stream_of(clients),
            [*callbacks, watch],
            **{"seed": 0, "max_vectorized_clients": 1, "local_epochs": 2, **kwargs},
        )
        return watch.of

    return run


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def scaled_by_counters(trainer, hook, batch_idx):
    counted = sum((n + 1) * float(read(trainer)) for n, read in enumerate(COUNTERS.values()))
    trainer.lightning_module.scale = 1 + 0.001 * counted + 0.01 * (batch_idx or 0)


CASES = [
    *((Base, [hook], [], True) for hook in MODULE_HOOKS),
    *((Base, [], [hook], True) for hook in CALLBACK_HOOKS),
    *((Base, [hook], [], False) for hook in BY_HAND),
    *((Base, [], [hook], False) for hook in CALLBACK_HOOKS if hook in BY_HAND),
]


@pytest.mark.may(
    "Counters of steps and batches in any hook or callback",
    "[The counters](trainer.md#local-training) have the client's values, so its upload does not depend "
    "on other clients.",
)
@pytest.mark.parametrize(("base", "hooks", "of_callback", "automatic"), CASES)
def test_upload_hook_that_reads_counters_is_independent_of_others(uploads, base, hooks, of_callback, automatic):
    kind, callback = hooked(base, hooks, scaled_by_counters), hooked(Callback, of_callback, scaled_by_counters)
    alone, after = (uploads(lambda: kind(automatic), clients, [callback()])["b"] for clients in ("b", "ab"))
    assert same(alone, after)
    assert not same(alone, uploads(lambda: base(automatic), "b")["b"])  # The hook changes the upload.


class WarmsUp(Base):
    """Increases the learning rate with the global step, as in Lightning's guide."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 20)


class ClipsByStep(Base):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 1 / (1 + self.global_step), "norm")


class Averages(Base):
    """A module that penalizes the distance of weights from a moving average. The decay depends on the global step."""

    def __init__(self, automatic=True):
        super().__init__(automatic)
        self.register_buffer("average", torch.zeros(5, 6))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.model[0].weight - self.average).square().sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            decay = (1 + self.global_step) / (10 + self.global_step)
            self.average.lerp_(self.model[0].weight.detach(), 1 - decay)


class Scheduler:
    """A scheduler that sets learning rates by the number of updates, as timm's schedulers do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step_update(self, num_updates):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.3 / (1 + num_updates)

    def step(self, epoch=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class OfTimm(Base):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [{"scheduler": Scheduler(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step_update(num_updates=self.global_step)


class OfTimmInAHook(Base):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        Scheduler(self.trainer.optimizers[0]).step_update(self.global_step)


class Freezes(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.fit_loop.total_batch_idx < 2:
            pl_module.model[0].weight.grad.zero_()


class EndsGently(Callback):
    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad *= 0.1 if trainer.is_last_batch else 1 - trainer.global_step / trainer.num_training_batches


@pytest.mark.seconds
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (WarmsUp, []),
        (ClipsByStep, []),
        (Averages, []),
        (OfTimm, []),
        (OfTimmInAHook, []),
        (Base, [Freezes]),
        (Base, [EndsGently]),
        (Base, [lambda: LambdaCallback(on_after_backward=EndsGently().on_after_backward)]),
    ],
)
def test_upload_module_that_uses_counters_is_independent_of_others(uploads, make, callbacks, accumulate):
    options = {
        "trainer_args": {"accumulate_grad_batches": accumulate},
        "max_vectorized_clients": "auto" if callbacks else 1,
    }
    found = [uploads(make, clients, [made() for made in callbacks], **options) for clients in ("b", "ab", "cab")]
    assert same(found[0]["b"], found[1]["b"]) and same(found[0]["b"], found[2]["b"])
    assert same(found[1]["a"], found[2]["a"]) and not same(found[1]["a"], found[1]["b"])


# Tests of vectorized training.


class CountsInStep(L.LightningModule):
    """A module whose `training_step` uses the Trainer's counters, which all clients of a vectorized step share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.steps = nn.Linear(6, 4), []

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1]) / (1 + self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class CountsInLoss(Classifier):
    """A classifier whose loss per sample uses the Trainer's batch counter. Vectorized training pads the batches."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), 4, lambda params: torch.optim.SGD(params, lr=0.5))

    def sample_loss(self, output, y):
        factor = 1 + self.trainer.fit_loop.total_batch_idx if torch.is_grad_enabled() else 1
        return super().sample_loss(output, y) / factor


@pytest.mark.seconds
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [CountsInStep, CountsInLoss])
def test_vectorized_clients_see_the_counters_of_sequential_clients(fit, uploads, make, accumulate):
    options = {"trainer_args": {"accumulate_grad_batches": accumulate}}
    alone = {client: uploads(make, client, **options)[client] for client in "abc"}
    together = uploads(make, "abc", max_vectorized_clients=3, **options)
    for client in "abc":
        torch.testing.assert_close(together[client], alone[client], rtol=1e-5, atol=1e-6)
    watch = Uploads()
    trainer = fit(make(), stream_of("abc"), [watch], seed=0)
    assert trainer.strategy.num_vectorized_clients > 1
    assert watch.counters == {"a": [7, 7, True, 6], "b": [5, 5, True, 4], "c": [1, 1, True, 0]}


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["num_training_batches", "is_last_batch", "estimated_stepping_batches"])
@pytest.mark.parametrize("base", [CountsInStep, CountsInLoss])
def test_training_that_reads_number_of_batches_is_sequential(uploads, fit, base, name):
    def factor(module):
        return 1 + float(COUNTERS[name](module.trainer)) if torch.is_grad_enabled() else 1

    class InStep(CountsInStep):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.model(batch[0]), batch[1]) / factor(self)

    class InLoss(CountsInLoss):
        def sample_loss(self, output, y):
            return F.cross_entropy(output, y, reduction="none") / factor(self)

    make = InStep if base is CountsInStep else InLoss
    assert fit(make(), stream_of("abc")).strategy.num_vectorized_clients == 1
    alone, after = (uploads(make, clients, max_vectorized_clients="auto")["b"] for clients in ("b", "ab"))
    assert same(alone, after)


def test_lambda_callback_with_step_hook_makes_training_sequential(fit, uploads):
    """A `LambdaCallback` with a gradient hook makes training sequential. A hook for the end of a fit does not."""
    made = LambdaCallback(on_after_backward=EndsGently().on_after_backward)
    assert fit(CountsInStep(), stream_of("ab"), [made]).strategy.num_vectorized_clients == 1
    assert (
        fit(
            CountsInStep(), stream_of("ab"), [LambdaCallback(on_fit_end=lambda *_: None)]
        ).strategy.num_vectorized_clients
        > 1
    )


# Tests of the counters of all clients.


class Bar(ProgressBar):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((batch_idx, trainer.global_step, trainer.num_training_batches, trainer.is_last_batch))


class Saves(Callback):
    """Saves a checkpoint after each client's last batch, and stores the counters outside of the clients' batches."""

    def __init__(self, folder):
        self.folder, self.outside = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            trainer.save_checkpoint(self.folder / f"{trainer.num_training_batches}.ckpt", weights_only=True)
            assert trainer.global_step == trainer.num_training_batches

    def on_train_epoch_start(self, trainer, pl_module):
        self.outside.append((trainer.global_step, trainer.num_training_batches))

    on_train_epoch_end = on_validation_start = on_train_epoch_start


def test_lightning_counters_include_all_clients(fit, tmp_path):
    bar, saves = Bar(), Saves(tmp_path)
    arguments = {"enable_checkpointing": True, "enable_progress_bar": True}
    callbacks = [bar, saves, ModelCheckpoint(tmp_path, "{step}")]
    fit(Base(), stream_of("abc"), callbacks, trainer_args=arguments, max_vectorized_clients=1, max_epochs=1)
    assert (tmp_path / "step=13.ckpt").exists()
    assert bar.seen == [(n, n + 1, 13, n == 12) for n in range(13)]
    assert saves.outside == [(0, 13), (13, 13)]
    for name, steps in (("7", 7), ("5", 12), ("1", 13)):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        assert saved["global_step"] == steps == progress["ready"]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_train_batch_end", "on_client_end"])
def test_error_in_client_hook_restores_counters_of_previous_round(fit, quiet, hook):
    def fail(self, trainer, *_):
        if trainer.current_epoch == 1 and trainer.strategy.current_round.client_group.clients.client_ids[0] == "b":
            raise RuntimeError("enough")

    stops = type("Stops", (Callback,), {hook: fail})()
    trainer = L.Trainer(
        strategy=FederatedStrategy(max_vectorized_clients=1, seed=0),
        callbacks=[stops],
        **quiet,
        accumulate_grad_batches=2,
    )
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(Base(), datamodule=stream_of("ab", rounds=2))
    assert trainer.global_step == trainer.fit_loop.total_batch_idx + 1 == 12 and not TRAINING
    assert (trainer.max_steps, trainer.accumulate_grad_batches) == (-1, 2)
    assert not (trainer.strategy.shows_one_process or trainer.strategy.federation.counters.shown)


def test_trainer_inside_client_hook_has_separate_counters(fit):
    found = []

    class Inner(Base):
        def on_train_batch_start(self, batch, batch_idx):
            found.append((batch_idx, self.global_step))

    class Trains(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_last_batch:
                plain_fit(Inner(), "b", [], 1)
                assert trainer.global_step == batch_idx + 1

    fit(Base(), stream_of("ab"), [Trains()], max_vectorized_clients=1)
    assert found == 2 * [(n, n) for n in range(5)]


# Tests of schedulers of modules with manual optimization.


class ByHand(Base):
    """A module with manual optimization that steps a scheduler after the batches for which ``when`` returns True."""

    def __init__(self, when):
        super().__init__(automatic=False)
        self.when = when

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.when(self.trainer, batch_idx):
            self.lr_schedulers().step()


@pytest.mark.parametrize(
    ("when", "rate"),
    [
        # The schedule steps once per round.
        (lambda trainer, batch_idx: trainer.is_last_batch, 0.1 * 0.5**3),
        # If the schedule also steps in other batches, the rate restarts with each client.
        (lambda trainer, batch_idx: True, 0.1),
        (lambda trainer, batch_idx: batch_idx % 2 == 1, 0.1),
        # The schedule never steps.
        (lambda trainer, batch_idx: False, 0.1),
    ],
)
@pytest.mark.parametrize("clients", ["abc", "cba"])
def test_manual_schedule_stepped_only_in_last_batches_is_by_round(fit, when, rate, clients):
    trainer = fit(ByHand(when), stream_of(clients, rounds=3), max_vectorized_clients=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)


class SetsRates(Base):
    """Changes the learning rate after each batch and each round, and records the rate in each client's first batch."""

    def __init__(self, automatic=True):
        super().__init__(automatic)
        self.begins = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.begins.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (2 + self.global_step)

    def on_train_epoch_end(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 2


@pytest.mark.parametrize("automatic", [True, False])
def test_rate_set_after_last_batch_does_not_reach_other_clients(fit, automatic):
    task = SetsRates(automatic)
    fit(task, stream_of("abc", rounds=3), max_vectorized_clients=1)
    assert task.begins == pytest.approx([0.1] * 3 + [0.2] * 3 + [0.4] * 3)


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_manual_schedule_stepped_in_last_batch_hook_is_by_round(fit, hook):
    class InAHook(ByHand):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if hook == "on_train_batch_end" and self.trainer.is_last_batch:
                self.lr_schedulers().step()

    task = InAHook(lambda trainer, _: hook == "training_step" and trainer.is_last_batch)
    trainer = fit(task, stream_of("abc", rounds=3), max_vectorized_clients=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
