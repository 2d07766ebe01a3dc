"""Tests of atomic rounds: a stopped fit ends after a round, and an error rolls back the current round."""

from datetime import timedelta

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, Timer
from raising import raises

from lightning_fcl import FederatedStrategy
from lightning_fcl.callbacks import EWC, Replay
from lightning_fcl.errors import InvalidValueError
from lightning_fcl.federation.client_store import ClientStore
from lightning_fcl.federation.compression import TopK

STREAM = {"num_clients": 4, "rounds_per_experience": 2}
OPTIONS = {
    "plain": ({}, list),
    "state of a method": ({}, lambda: [EWC(5.0)]),
    "replay buffer": ({}, lambda: [Replay(9)]),
    "client store on disk": ({"client_store": "disk", "keep_optimizer_state": True}, lambda: [Replay(9)]),
    "optimizer states": ({"keep_optimizer_state": True}, list),
    "client-local parameters": ({"reductions": {"model.3.*": "local"}}, list),
    "residuals of compression": ({"compression": TopK(0.2)}, list),
}


def equal(left, right):
    return all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())


class Stop(Callback):
    """Calls a function once, at a batch of the second round."""

    def __init__(self, act, batch=5):
        self.act, self.batch = act, batch
        # Index of the last completed batch in the round, counted over all clients.
        self.ended = -1

    def on_train_epoch_start(self, trainer, pl_module):
        self.ended = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended += 1
        if self.act is not None and (trainer.current_epoch, self.ended) == (1, self.batch):
            act, self.act = self.act, None
            act(trainer)


def fail(trainer):
    raise RuntimeError("enough")


def interrupt(trainer):
    raise KeyboardInterrupt


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def test_should_stop_within_round_stops_after_round(fit, make_stream, make_task, tmp_path):
    stopped, two, whole, again = (make_task() for _ in range(4))
    stop = Stop(lambda trainer: setattr(trainer, "should_stop", True))
    saving, kept = ModelCheckpoint(tmp_path, save_last=True), {"enable_checkpointing": True}
    trainer = fit(stopped, make_stream(**STREAM), [stop, saving], trainer_args=kept, max_vectorized_clients=1)
    fit(two, make_stream(**STREAM), max_epochs=2, max_vectorized_clients=1)
    assert trainer.current_epoch == 2 and equal(stopped, two) and not trainer.fit_loop.min_epochs
    fit(whole, make_stream(**STREAM), max_vectorized_clients=1)
    fit(again, make_stream(**STREAM), ckpt_path=tmp_path / "last.ckpt", max_vectorized_clients=1)
    assert equal(again, whole)


@pytest.mark.argument("max_time", "Supported. The fit ends after the round in which the time limit is reached.")
@pytest.mark.callback("Timer", "Supported. The fit ends after the round in which the time limit is reached.")
def test_timer_within_round_stops_after_round(fit, make_stream, make_task):
    limited, one = make_task(), make_task()
    trainer = fit(limited, make_stream(**STREAM), [Timer({"milliseconds": 1})], local_epochs=3)
    fit(one, make_stream(**STREAM), max_epochs=1, local_epochs=3)
    assert trainer.current_epoch == 1 and equal(limited, one)


@pytest.mark.callback(
    "OnExceptionCheckpoint", "Supported. An interrupted round is rolled back. A resumed fit repeats the whole round."
)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("act", [fail, interrupt])
def test_checkpoint_after_error_contains_previous_round(fit, make_stream, make_task, quiet, tmp_path, kind, act):
    options, methods = OPTIONS[kind]
    whole, cut, again = (make_task(momentum) for _ in range(3))
    fit(whole, make_stream(**STREAM), methods(), max_vectorized_clients=1, **options)
    saving = OnExceptionCheckpoint(tmp_path, "cut")
    trainer = L.Trainer(
        strategy=FederatedStrategy(max_vectorized_clients=1, **options),
        max_epochs=4,
        callbacks=[*methods(), Stop(act), saving],
        **{**quiet, "enable_checkpointing": True},
    )
    with pytest.raises(SystemExit if act is interrupt else RuntimeError):
        trainer.fit(cut, datamodule=make_stream(**STREAM))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for name in ("after.ckpt", *(["cut.ckpt"] if act is fail else [])):
        again = make_task(momentum)
        fit(again, make_stream(**STREAM), methods(), ckpt_path=tmp_path / name, max_vectorized_clients=1, **options)
        assert equal(again, whole)
    trainer.fit(cut, datamodule=trainer.datamodule)  # The same Trainer can continue, too.
    assert equal(cut, whole)


def test_error_before_first_client_resumes_from_previous_round(fit, make_stream, make_task, quiet, tmp_path):
    class Early(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                raise RuntimeError("enough")

    whole, cut, again = (make_task() for _ in range(3))
    fit(whole, make_stream(**STREAM))
    with pytest.raises(RuntimeError, match="enough"):
        saving = OnExceptionCheckpoint(tmp_path, "cut")
        fit(cut, make_stream(**STREAM), [Early(), saving], trainer_args={"enable_checkpointing": True})
    fit(again, make_stream(**STREAM), ckpt_path=tmp_path / "cut.ckpt")
    assert equal(again, whole)


def test_on_train_batch_start_returning_minus_one_raises(fit, make_stream, make_task):
    task = make_task()
    task.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None
    with raises(InvalidValueError, "on_train_batch_start"):
        fit(task, make_stream(**STREAM), max_vectorized_clients=1)


@pytest.mark.parametrize("often", [{"every_n_train_steps": 5}, {"train_time_interval": timedelta(minutes=1)}])
def test_model_checkpoint_within_rounds_raises(fit, make_stream, make_task, tmp_path, often):
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, **often)
    with raises(InvalidValueError, next(iter(often))):
        fit(make_task(), make_stream(**STREAM), [saving], trainer_args={"enable_checkpointing": True})


def test_rejected_fit_restores_trainer_settings(make_stream, make_task, quiet):
    settings = {"accumulate_grad_batches": 2, "reload_dataloaders_every_n_epochs": 2}
    trainer = L.Trainer(strategy=FederatedStrategy(), max_epochs=99, **settings, **quiet)
    with pytest.raises(InvalidValueError, check=lambda error: error.argument == "max_epochs"):
        trainer.fit(make_task(), datamodule=make_stream(**STREAM))
    assert {name: getattr(trainer, name) for name in settings} == settings and trainer.max_epochs == 99


def test_reduce_lr_on_plateau_without_validation_samples_raises(fit, make_stream, make_task):
    task = make_task()

    def configure(monitor):
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": monitor}
        return lambda: {"optimizer": optimizer, "lr_scheduler": schedule}

    task.configure_optimizers = configure("val/loss")
    with raises(InvalidValueError, "validation"):
        fit(task, make_stream(**STREAM))
    fit(task, make_stream(validation=0.2, **STREAM))
    task.configure_optimizers = configure("train/loss")
    fit(task, make_stream(**STREAM))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_client_store_rollback_restores_client_states(tmp_path, kind):
    store, one = ClientStore(kind, tmp_path / "store"), {"m": {"x": torch.ones(1)}}
    store["a"] = one
    store.start_round()
    store["a"], store["b"] = {"m": {"x": torch.zeros(1)}}, one
    store.set_section("a", "more", {"y": torch.zeros(1)})
    store.roll_back_round()
    assert list(store) == ["a"] and store["a"]["m"]["x"] == 1 and list(store["a"]) == ["m"]
    store.start_round()
    store["a"] = {"m": {"x": torch.zeros(1)}}
    store.commit_round()
    store.roll_back_round()
    assert store["a"]["m"]["x"] == 0
    assert kind == "memory" or [path.suffix for path in (tmp_path / "store").iterdir()] == [".safetensors"]
